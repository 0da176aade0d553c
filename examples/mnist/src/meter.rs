//! Loss and costs, averaged over the ranks while training goes on.

use std::collections::VecDeque;
use std::time::Duration;

use burn::tensor::Tensor;
use burn_ddp::{ProcessGroup, ReduceOp, Result, Work};

/// Steps between two exchanges. Losses are read from the device, and averages
/// travel, only then.
pub(crate) const WINDOW: usize = 20;

/// Averages over the ranks and over the steps of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Averages {
    /// Training loss.
    pub(crate) loss: f64,
    /// Part of the step time in which a rank waited for communication.
    pub(crate) wait_share: f64,
}

/// What this rank has done since the program started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Optimizer steps.
    pub(crate) steps: u64,
    /// Images, of this rank.
    pub(crate) images: u64,
    /// Time of the steps.
    pub(crate) time: Duration,
    /// The part of it spent waiting for communication.
    pub(crate) wait: Duration,
}

/// Meters the steps of a rank. Every rank has to record equally many steps.
pub(crate) struct Meter {
    group: ProcessGroup,
    losses: Vec<Tensor<1>>,
    time: Duration,
    wait: Duration,
    /// The sums of the window before, under way.
    exchange: Option<Work<Vec<f64>>>,
    averages: Option<Averages>,
    recent: VecDeque<f64>,
    totals: Totals,
}

impl Meter {
    pub(crate) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            losses: Vec::with_capacity(WINDOW),
            time: Duration::ZERO,
            wait: Duration::ZERO,
            exchange: None,
            averages: None,
            recent: VecDeque::with_capacity(WINDOW),
            totals: Totals::default(),
        }
    }

    /// Records a step: its loss, which stays on the device for now, how many
    /// images it took, its time, and how long it waited.
    pub(crate) fn record(
        &mut self,
        loss: Tensor<1>,
        images: usize,
        time: Duration,
        wait: Duration,
    ) -> Result<()> {
        self.losses.push(loss);
        self.time += time;
        self.wait += wait;
        self.totals.steps += 1;
        self.totals.images += images as u64;
        self.totals.time += time;
        self.totals.wait += wait;
        if self.losses.len() == WINDOW {
            self.start_exchange()?;
        }
        Ok(())
    }

    /// The newest averages there are without waiting for the ones that are under
    /// way.
    pub(crate) fn averages(&mut self) -> Result<Option<Averages>> {
        if self.exchange.as_ref().is_some_and(Work::is_done) {
            self.finish_exchange()?;
        }
        Ok(self.averages)
    }

    /// The averages of the last steps. Collective.
    pub(crate) fn flush(&mut self) -> Result<Option<Averages>> {
        if !self.losses.is_empty() {
            self.start_exchange()?;
        }
        self.finish_exchange()?;
        Ok(self.averages)
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// This rank's mean loss over the last [`WINDOW`] steps.
    pub(crate) fn recent_loss(&self) -> Option<f64> {
        let count = self.recent.len();
        (count > 0).then(|| self.recent.iter().sum::<f64>() / count as f64)
    }

    fn start_exchange(&mut self) -> Result<()> {
        self.finish_exchange()?;
        let mut sums = [0.0; 4];
        for loss in self.losses.drain(..) {
            let loss: f64 = loss.into_scalar();
            if self.recent.len() == WINDOW {
                self.recent.pop_front();
            }
            self.recent.push_back(loss);
            sums[0] += loss;
            sums[1] += 1.0;
        }
        sums[2] = self.wait.as_secs_f64();
        sums[3] = self.time.as_secs_f64();
        (self.wait, self.time) = (Duration::ZERO, Duration::ZERO);
        let work = self.group.all_reduce_async(sums.to_vec(), ReduceOp::Sum);
        self.exchange = Some(work);
        Ok(())
    }

    fn finish_exchange(&mut self) -> Result<()> {
        if let Some(work) = self.exchange.take() {
            let sums = work.wait()?;
            self.averages = Some(Averages {
                loss: sums[0] / sums[1],
                wait_share: sums[2] / sums[3].max(f64::MIN_POSITIVE),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn averages_are_of_a_window_and_come_when_they_are_there() {
        let mut meter = Meter::new(&ProcessGroup::single());
        let second = Duration::from_secs(1);
        let first = (WINDOW as f64 - 1.0) / 2.0;
        for step in 0..2 * WINDOW {
            let loss = Tensor::from_floats([step as f32], &Device::flex());
            meter.record(loss, 8, 4 * second, second).unwrap();
            if step + 1 == WINDOW {
                let averages = meter.averages().unwrap().expect("an exchange ended");
                assert_eq!((averages.loss, averages.wait_share), (first, 0.25));
            }
        }
        let averages = meter.flush().unwrap().expect("both have ended");
        assert_eq!(averages.loss, first + WINDOW as f64);
        assert_eq!(meter.recent_loss(), Some(first + WINDOW as f64));
        let totals = meter.totals();
        assert_eq!((totals.steps, totals.images), (40, 320));
        assert_eq!((totals.time, totals.wait), (160 * second, 40 * second));
    }

    #[test]
    fn without_steps_there_are_no_averages() {
        let mut meter = Meter::new(&ProcessGroup::single());
        assert_eq!(meter.flush().unwrap(), None);
        assert_eq!(meter.recent_loss(), None);
    }
}
