//! A rank that behaves as its arguments say, for the tests of the launcher.
//!
//! `fixture_rank [RANK:]ACTION[=VALUE] ...` does the actions in their order,
//! those with a rank only as that rank.

use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use burn_ddp_comm::{ProcessGroup, ReduceOp};

type AnyResult<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn main() -> AnyResult {
    let rank = std::env::var("RANK")?;
    let mut group = None;
    for argument in std::env::args().skip(1) {
        let action = match argument.split_once(':') {
            Some((only, action)) if only == rank => action,
            Some(_) => continue,
            None => &argument,
        };
        let (name, value) = action.split_once('=').unwrap_or((action, ""));
        if !act_in_group(&mut group, name, value)? {
            act(&rank, name, value)?;
        }
    }
    Ok(())
}

/// Does the actions that have to do with the process group.
fn act_in_group(group: &mut Option<ProcessGroup>, name: &str, value: &str) -> AnyResult<bool> {
    let joined = || Err::<&ProcessGroup, _>("there is no group");
    match name {
        "join" => *group = Some(ProcessGroup::from_env()?),
        "leave" => *group = None,
        "barrier" => group.as_ref().map_or_else(joined, Ok)?.barrier()?,
        "reduce" => loop {
            let sum = group.as_ref().map_or_else(joined, Ok)?;
            sum.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum)?;
        },
        "check" => match group.as_ref().map_or_else(joined, Ok)?.error() {
            Some(error) => return Err(error.into()),
            None => println!("the group works"),
        },
        "panic-slowly" => {
            // The group is dropped first, as it is declared last.
            let _slow = SlowToUnwind;
            let _group = group.take();
            panic!("{value}");
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Takes long to be dropped, as a large model may.
struct SlowToUnwind;

impl Drop for SlowToUnwind {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(120));
    }
}

fn act(rank: &str, name: &str, value: &str) -> AnyResult {
    match name {
        "lines" => lines(rank, value.parse()?)?,
        "long" => long(value.parse()?)?,
        "partial" => {
            print!("{value}");
            std::io::stdout().flush()?;
        }
        "bytes" => bytes(value)?,
        "say" => println!("{value}"),
        "complain" => eprintln!("{value}"),
        "env" => println!("{value}={}", std::env::var(value).unwrap_or_default()),
        "exit" => std::process::exit(value.parse()?),
        "panic" => panic!("{value}"),
        "kill" => kill(std::process::id(), value.parse()?)?,
        "ignore" => handle(value.parse()?, None)?,
        "on" => {
            let (signal, code) = value.split_once(',').ok_or("on=SIGNAL,CODE")?;
            handle(signal.parse()?, Some(code.parse()?))?;
        }
        "sleep" => std::thread::sleep(Duration::from_millis(value.parse()?)),
        "hang" => loop {
            std::thread::park();
        },
        "record" => record(value, rank, std::process::id())?,
        "child" => child(value, rank)?,
        "await" => await_file(value),
        "gone" => await_end(&format!("{value}/1"))?,
        "connect" => connect()?,
        "terminal" => terminal()?,
        "read" => println!("read {}", std::io::read_to_string(std::io::stdin())?.len()),
        _ => return Err(format!("no such action: {name}").into()),
    }
    Ok(())
}

/// Prints numbered lines to both outputs, in odd pieces.
fn lines(rank: &str, count: usize) -> AnyResult {
    let mut stdout = std::io::stdout().lock();
    let mut stderr = std::io::stderr().lock();
    for number in 0..count {
        let text = format!("line {number} of rank {rank} ends here\n");
        let (front, back) = text.split_at(number % text.len());
        for part in [front, back] {
            stdout.write_all(part.as_bytes())?;
            stderr.write_all(part.as_bytes())?;
            // Two writes per line as the launcher sees them.
            stdout.flush()?;
        }
    }
    Ok(())
}

/// Says whether stderr is a terminal, in one write.
fn terminal() -> AnyResult {
    let mut stderr = std::io::stderr();
    let line = format!("stderr is a terminal: {}\n", stderr.is_terminal());
    Ok(stderr.write_all(line.as_bytes())?)
}

/// Prints one line of this many bytes.
fn long(length: usize) -> AnyResult {
    let text: String = ('a'..='z').cycle().take(length).collect();
    println!("{text}");
    Ok(())
}

/// Prints bytes given in hexadecimal.
fn bytes(value: &str) -> AnyResult {
    let byte = |pair: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    let bytes: Result<Vec<u8>, Box<dyn std::error::Error>> =
        value.as_bytes().chunks(2).map(byte).collect();
    let mut stdout = std::io::stdout();
    stdout.write_all(&bytes?)?;
    Ok(stdout.flush()?)
}

fn kill(pid: u32, signal: i32) -> AnyResult {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let signal = rustix::process::Signal::from_named_raw(signal);
    let (pid, signal) = (pid.ok_or("no pid")?, signal.ok_or("no signal")?);
    // Rust's handler of SIGSEGV takes the first one for a fault that will come
    // again, and only makes the next one fatal.
    loop {
        rustix::process::kill_process(pid, signal)?;
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ignores a signal, or prints `got SIGNAL` and exits at it.
fn handle(signal: i32, code: Option<i32>) -> AnyResult {
    let mut signals = signal_hook::iterator::Signals::new([signal])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            println!("got {signal}");
            if let Some(code) = code {
                std::process::exit(code);
            }
        }
    });
    Ok(())
}

/// Writes a process id to a file `DIRECTORY/NAME`, complete or absent.
fn record(directory: &str, name: &str, pid: u32) -> AnyResult {
    let part = format!("{directory}/.{name}");
    std::fs::write(&part, pid.to_string())?;
    Ok(std::fs::rename(part, format!("{directory}/{name}"))?)
}

/// Starts a child that ignores SIGTERM, keeps the outputs open and never ends,
/// and records it as `RANK-child` in this directory.
fn child(directory: &str, rank: &str) -> AnyResult {
    // It stays in its parent's process group, as children do.
    let child = Command::new(std::env::current_exe()?)
        .args([
            "ignore=15",
            "ignore=2",
            "ignore=1",
            &format!("record={directory}"),
            "hang",
        ])
        .env("RANK", format!("{rank}-child"))
        .stdin(Stdio::null())
        .spawn()?;
    await_file(&format!("{directory}/{rank}-child"));
    drop(child);
    Ok(())
}

fn await_file(path: &str) {
    while !std::path::Path::new(path).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the process recorded in this file has ended.
fn await_end(path: &str) -> AnyResult {
    await_file(path);
    let pid = std::fs::read_to_string(path)?;
    let is_running = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        !matches!(state, None | Some('Z' | 'X'))
    };
    while is_running() {
        std::thread::yield_now();
    }
    Ok(())
}

/// Connects to the address that the launcher promises.
fn connect() -> AnyResult {
    let address = format!(
        "{}:{}",
        std::env::var("MASTER_ADDR")?,
        std::env::var("MASTER_PORT")?
    );
    std::net::TcpStream::connect(&address)?;
    println!("connected");
    Ok(())
}
