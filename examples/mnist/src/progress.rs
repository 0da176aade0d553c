//! Shows how far an epoch is: a bar on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::meter::Averages;

/// Lines follow each other no faster than this.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// Nor for less than this part of an epoch.
const LINES_PER_EPOCH: usize = 10;
/// Redraws of a bar per second.
const BAR_RATE: u8 = 10;

/// Shows one epoch, on standard error.
pub(crate) struct Progress {
    title: String,
    images: usize,
    first: usize,
    started: Instant,
    view: View,
}

enum View {
    /// On ranks other than 0.
    Hidden,
    Bar(ProgressBar),
    Lines {
        tenth: usize,
        last: Instant,
    },
}

impl Progress {
    /// Shows `epoch`, from 0, of `epochs`: one of `images` images that begins
    /// after `first`. Shows nothing unless `shown`.
    pub(crate) fn new(
        epoch: usize,
        epochs: usize,
        images: usize,
        first: usize,
        shown: bool,
    ) -> Self {
        let title = format!("epoch {}/{epochs}", epoch + 1);
        let started = Instant::now();
        let view = if !shown {
            View::Hidden
        } else if std::io::stderr().is_terminal() {
            View::Bar(bar(&title, images, first))
        } else {
            View::Lines {
                tenth: first * LINES_PER_EPOCH / images.max(1),
                last: started,
            }
        };
        Self {
            title,
            images,
            first,
            started,
            view,
        }
    }

    /// Shows that `done` images of the epoch are done, by all ranks together.
    pub(crate) fn update(&mut self, done: usize, averages: Option<Averages>) {
        let done = done.min(self.images);
        match &mut self.view {
            View::Hidden => {}
            View::Bar(bar) => {
                bar.set_position(done as u64);
                let rate = rate(done - self.first, self.started.elapsed());
                bar.set_message(describe(rate, averages));
            }
            View::Lines { tenth, last } => {
                let now = done * LINES_PER_EPOCH / self.images.max(1);
                if now > *tenth && done < self.images && last.elapsed() >= LINE_INTERVAL {
                    (*tenth, *last) = (now, Instant::now());
                    self.print_line(done, averages);
                }
            }
        }
    }

    /// Shows the end of the epoch.
    pub(crate) fn finish(self, averages: Option<Averages>) {
        match &self.view {
            View::Hidden => {}
            View::Bar(bar) => {
                bar.set_position(self.images as u64);
                let rate = rate(self.images - self.first, self.started.elapsed());
                bar.finish_with_message(describe(rate, averages));
            }
            View::Lines { .. } => self.print_line(self.images, averages),
        }
    }

    fn print_line(&self, done: usize, averages: Option<Averages>) {
        let rate = rate(done - self.first, self.started.elapsed());
        let percent = done * 100 / self.images.max(1);
        let line = format!(
            "{}  {percent:3} %  {}",
            self.title,
            describe(rate, averages)
        );
        // A reader that went away is no reason to stop training.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

fn bar(title: &str, images: usize, first: usize) -> ProgressBar {
    let target = ProgressDrawTarget::stderr_with_hz(BAR_RATE);
    let bar = ProgressBar::with_draw_target(Some(images as u64), target)
        .with_prefix(title.to_owned())
        .with_position(first as u64);
    let template = "{prefix}  {bar:24} {percent:>3} %  {msg}  {eta} left";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        // The template is valid; if it were not, the default would do.
        Err(_) => bar,
    }
}

/// Images per second.
fn rate(images: usize, time: Duration) -> f64 {
    images as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

fn describe(rate: f64, averages: Option<Averages>) -> String {
    match averages {
        None => format!("{rate:.0} samples/s"),
        Some(Averages { loss, wait_share }) => format!(
            "loss {loss:.4}  {rate:.0} samples/s  waiting {:.1} %",
            100.0 * wait_share
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_loss_rate_and_share_of_waiting() {
        let averages = Averages {
            loss: 0.12345,
            wait_share: 0.0312,
        };
        let text = describe(rate(5000, Duration::from_secs(2)), Some(averages));
        assert_eq!(text, "loss 0.1235  2500 samples/s  waiting 3.1 %");
        assert_eq!(describe(7.0, None), "7 samples/s");
    }

    #[test]
    fn an_epoch_may_end_beyond_its_images() {
        // A padded last batch.
        let mut progress = Progress::new(0, 1, 10, 0, false);
        progress.update(16, None);
        progress.finish(None);
    }
}
