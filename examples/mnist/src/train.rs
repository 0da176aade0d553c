//! The training loop.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::data::dataset::Dataset;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use burn_ddp::{Checkpointer, Ddp, ErrorKind, ProcessGroup};
use burn_ddp_data::{Remainder, ShardedDataLoader};

use crate::batch::{Batch, ImageBatcher};
use crate::dataset::{self, Item};
use crate::evaluate::{Evaluator, Score};
use crate::meter::Meter;
use crate::model::{Cnn, trainable_parameters};
use crate::options::{DeviceKind, Options};
use crate::progress::Progress;
use crate::run_state::RunState;
use crate::schedule::learning_rate;
use crate::summary::{RankReport, Run, Summary};
use crate::{augment, checkpoints, memory};

/// Trains and evaluates; every rank of `group` does its part. Returns the
/// summary, the same on every rank but for the checkpoint, which rank 0 knows.
pub(crate) fn train(options: &Options, group: &ProcessGroup) -> Result<Summary> {
    let started = Instant::now();
    let (images, test_images) = dataset::load(&options.data_dir())?;
    let images = images.truncate(options.limit.unwrap_or(usize::MAX));
    let fresh = RunState::new(options, &images);

    let plain = match options.device {
        DeviceKind::Cpu => burn_ddp::cpu()?,
        DeviceKind::Gpu => burn_ddp::cuda_device(group)?,
    };
    let device = plain.clone().autodiff();
    device.seed(options.seed);
    let mut model = Ddp::new(Cnn::new(&device), group)?;
    let mut optim = AdamWConfig::new().init();

    let mut checkpoints = checkpoints::open(options, group)?;
    let mut state = fresh.clone();
    if options.resume {
        (model, optim, state) = resume(&mut checkpoints, model, optim, &fresh, group)?;
    }

    let images = Arc::new(images);
    let evaluator = Evaluator::new(Arc::new(test_images), &plain, group)?;
    let loader = ShardedDataLoader::builder(Arc::clone(&images), ImageBatcher)
        .batch_size(options.batch_size)
        .shuffle(options.seed)
        .shard(group.rank(), group.world_size())
        .remainder(Remainder::Pad)
        .device(&device)
        .build()
        .context("can't load the training images")?;
    let mut trainer = Trainer {
        options,
        group,
        device,
        loader,
        images: images.len(),
        optim,
        meter: Meter::new(group),
    };
    trainer.describe(&model);

    let mut score = None;
    while state.epoch < options.epochs {
        model = trainer.epoch(model, &mut state, &mut checkpoints)?;
        state.end_epoch();
        checkpoints.save(state.step, &model, &trainer.optim, &state)?;
        score = Some(trainer.evaluate(&evaluator, &model)?);
    }
    let score = match score {
        Some(score) => score,
        None => trainer.evaluate(&evaluator, &model)?,
    };
    let checkpoint = checkpoints.finish()?;
    let run = Run {
        device: options.device,
        parameters: trainable_parameters(&model),
        correct: score.correct,
        test_images: score.images,
        epochs: state.epoch,
        batch_size: options.batch_size,
        checkpoint,
        seconds: started.elapsed().as_secs_f64(),
    };
    let reports = group.all_gather_object(&trainer.report(&model)?)?;
    Ok(Summary::new(run, &reports))
}

/// Goes on from the newest checkpoint that is whole.
fn resume(
    checkpoints: &mut Checkpointer,
    model: Ddp<Cnn>,
    optim: ModuleOptimizer,
    fresh: &RunState,
    group: &ProcessGroup,
) -> Result<(Ddp<Cnn>, ModuleOptimizer, RunState)> {
    let restored = checkpoints.load::<RunState>()?;
    let (state, mut differences) = restored.state.clone().resume(fresh, &restored.path)?;
    if restored.world_size != group.world_size() {
        differences.push(format!(
            "the world size was {} and is {}",
            restored.world_size,
            group.world_size()
        ));
    }
    let (model, optim) = restored.apply(model, optim)?;
    if group.is_main() {
        let path = restored.path.display();
        eprintln!(
            "resuming {path}: epoch {}, step {}",
            state.epoch + 1,
            state.step
        );
        if !differences.is_empty() {
            eprintln!(
                "the run goes on, but won't end exactly where the one before would have: {}",
                differences.join(", ")
            );
        }
    }
    Ok((model, optim, state))
}

/// Takes training steps.
struct Trainer<'a> {
    options: &'a Options,
    group: &'a ProcessGroup,
    device: Device,
    loader: ShardedDataLoader<Item, Batch>,
    images: usize,
    optim: ModuleOptimizer,
    meter: Meter,
}

impl Trainer<'_> {
    /// Trains to the end of the epoch that `state` is in.
    fn epoch(
        &mut self,
        mut model: Ddp<Cnn>,
        state: &mut RunState,
        checkpoints: &mut Checkpointer,
    ) -> Result<Ddp<Cnn>> {
        let options = self.options;
        let global_batch = options.batch_size * self.group.world_size();
        let shown = self.group.is_main();
        let mut progress = Progress::new(
            state.epoch,
            options.epochs,
            self.images,
            state.position,
            shown,
        );
        let mut started = Instant::now();
        for batch in self.loader.epoch_from(state.epoch, state.position) {
            let mut batch = batch?;
            let seed = state.step_seed(self.group.rank());
            self.device.seed(seed);
            batch.images = augment::shift(batch.images, seed);
            let rate = learning_rate(options.lr, state.progress(global_batch));

            let loss = model.forward(|m| m.loss(batch));
            let value = loss.clone().inner();
            let grads = model.backward(loss)?;
            model = self.optim.step(rate, model, grads);

            state.advance(global_batch);
            let now = Instant::now();
            let wait = model.sync_stats().wait;
            self.meter
                .record(value, options.batch_size, now - started, wait)?;
            started = now;
            progress.update(state.position, self.meter.averages()?);
            let due = options
                .checkpoint_every
                .is_some_and(|n| state.step.is_multiple_of(n as u64));
            if due && state.position < self.images {
                checkpoints.save(state.step, &model, &self.optim, state)?;
            }
        }
        progress.finish(self.meter.flush()?);
        Ok(model)
    }

    fn evaluate(&self, evaluator: &Evaluator, model: &Ddp<Cnn>) -> Result<Score> {
        let score = evaluator.score(model)?;
        if self.group.is_main() {
            eprintln!(
                "test accuracy {:.2} % ({} of {} images)",
                100.0 * score.accuracy(),
                score.correct,
                score.images
            );
        }
        Ok(score)
    }

    /// Says what is about to be trained.
    fn describe(&self, model: &Ddp<Cnn>) {
        if self.group.is_main() {
            eprintln!(
                "training {} parameters on {} images: world size {}, batches of {} per rank",
                trainable_parameters(model),
                self.images,
                self.group.world_size(),
                self.options.batch_size
            );
        }
    }

    /// What this rank has to say in the summary. Collective.
    fn report(&self, model: &Ddp<Cnn>) -> Result<RankReport> {
        let replica = match model.verify_replicas() {
            Ok(fingerprint) => Ok(fingerprint.to_string()),
            Err(error) if error.kind() == ErrorKind::Usage => Err(error.to_string()),
            Err(error) => bail!(error),
        };
        let totals = self.meter.totals();
        Ok(RankReport {
            final_loss: self.meter.recent_loss(),
            peak_memory_bytes: memory::peak_bytes(),
            bucket_bytes: model.bucket_bytes(),
            training_seconds: totals.time.as_secs_f64(),
            wait_seconds: totals.wait.as_secs_f64(),
            steps: totals.steps,
            images: totals.images,
            replica,
        })
    }
}
