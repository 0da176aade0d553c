//! Tells the rest of the job about a panic in this process, before it unwinds
//! or aborts.

use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, MutexGuard, Once, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Most characters of a panic's message.
const MAX_CHARACTERS: usize = 4000;

/// How long a panic is worth mentioning when another follows it, as when a
/// thread's panic makes the thread that joins it panic.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(10);

/// What wants to hear of panics.
pub(crate) trait PanicListener: Send + Sync {
    /// A thread of this process has panicked; `text` continues "rank 1 ...".
    /// Runs in that thread, whatever locks it holds, and must neither panic nor
    /// wait for more than a moment.
    fn panicked(&self, text: &str);
}

static LISTENERS: Mutex<Vec<Weak<dyn PanicListener>>> = Mutex::new(Vec::new());

/// The panic before the current one.
static PREVIOUS: Mutex<Option<(Instant, String)>> = Mutex::new(None);

/// Calls `listener` at every panic in this process until it is dropped. The
/// panic hook that was there before goes on to run.
pub(crate) fn listen(listener: Weak<dyn PanicListener>) {
    static HOOK: Once = Once::new();
    // A hook can't be set while panicking; there is nothing left to hear then.
    if !thread::panicking() {
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                tell(info);
                before(info);
            }));
        });
    }
    let mut listeners = lock(&LISTENERS);
    listeners.retain(|listener| listener.strong_count() > 0);
    listeners.push(listener);
}

fn tell(info: &PanicHookInfo<'_>) {
    // Taken out, so that no lock is held while they are called.
    let listeners: Vec<_> = lock(&LISTENERS).iter().filter_map(Weak::upgrade).collect();
    if listeners.is_empty() {
        return;
    }
    let text = describe(info);
    let now = Instant::now();
    let previous = lock(&PREVIOUS).replace((now, text.clone()));
    let text = match previous {
        Some((at, previous)) if now.duration_since(at) < FOLLOWS_WITHIN => {
            format!("{text}; before that, it {previous}")
        }
        _ => text,
    };
    for listener in listeners {
        listener.panicked(&text);
    }
}

/// `panicked at src/main.rs:12:5: index out of bounds`.
fn describe(info: &PanicHookInfo<'_>) -> String {
    let message = info.payload_as_str().unwrap_or("(no message)");
    let message: String = message.chars().take(MAX_CHARACTERS).collect();
    let thread = match thread::current().name() {
        None => " in a thread".to_owned(),
        Some("main") => String::new(),
        Some(name) => format!(" in thread '{name}'"),
    };
    match info.location() {
        Some(location) => format!("panicked{thread} at {location}: {message}"),
        None => format!("panicked{thread}: {message}"),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl PanicListener for Heard {
        fn panicked(&self, text: &str) {
            lock(&self.0).push(text.to_owned());
        }
    }

    #[test]
    fn a_panic_is_told_with_its_place_message_and_thread() {
        let heard = Arc::new(Heard::default());
        let as_listener: Arc<dyn PanicListener> = Arc::clone(&heard) as _;
        listen(Arc::downgrade(&as_listener));
        let panicking = |message: &'static str| {
            thread::Builder::new()
                .name("worker 7".to_owned())
                .spawn(move || panic!("the disk said {message}"))
                .unwrap()
                .join()
        };
        panicking("no").unwrap_err();
        panicking("no again").unwrap_err();

        // Other tests of this process may panic meanwhile.
        let heard = lock(&heard.0);
        let own: Vec<&String> = heard
            .iter()
            .filter(|text| text.starts_with("panicked in thread 'worker 7' at "))
            .collect();
        assert!(own[0].contains("src/panic_message.rs:"), "{own:?}");
        assert!(own[0].contains(": the disk said no"), "{own:?}");
        assert!(own[1].contains(": the disk said no again; before that, it panicked"));
    }
}
