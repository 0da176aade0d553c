//! One forward pass and the backward pass that follows it, as its hooks see it.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::TensorData;

use crate::reducer::Reducer;

/// No `backward` of the wrapper is running.
const FORWARD: u8 = 0;
/// The wrapper's `backward` is running.
const BACKWARD: u8 = 1;
/// The wrapper's `backward` has been.
const DONE: u8 = 2;

/// What the hooks of one hooked module share.
pub(crate) struct Pass {
    reducer: Arc<Mutex<Reducer>>,
    eager: bool,
    phase: AtomicU8,
}

impl Pass {
    /// A pass whose hooks deliver to `reducer`: the gradient itself where `eager`,
    /// else only the fact that it is ready.
    pub(crate) fn new(reducer: Arc<Mutex<Reducer>>, eager: bool) -> Self {
        Self {
            reducer,
            eager,
            phase: AtomicU8::new(FORWARD),
        }
    }

    /// Whether a gradient's values exist when its hook runs, so that they can be
    /// read without waiting for a device.
    pub(crate) fn gradients_are_eager(&self) -> bool {
        self.eager
    }

    /// Lets gradients in until the returned guard is dropped.
    pub(crate) fn open(&self) -> OpenPass<'_> {
        self.phase.store(BACKWARD, Ordering::SeqCst);
        OpenPass { pass: self }
    }

    /// A gradient is ready, to be read after the backward pass.
    pub(crate) fn seen(&self, parameter: usize) {
        self.check_open();
        lock(&self.reducer).record_ready(parameter);
    }

    /// A gradient is ready, and here it is.
    pub(crate) fn ready(&self, parameter: usize, data: TensorData) {
        self.check_open();
        let mut reducer = lock(&self.reducer);
        reducer.record_ready(parameter);
        // The reducer keeps its first error, and the wrapper's `backward`
        // returns it: a hook has nobody to return it to.
        let _ = reducer.deliver(parameter, data);
    }

    /// The reader of a gradient failed; see [`ready`](Self::ready).
    pub(crate) fn failed(&self, error: crate::Error) {
        lock(&self.reducer).fail(error);
    }

    /// Refuses gradients that would go past the group.
    ///
    /// # Panics
    ///
    /// When no `backward` of the wrapper is running. There is no `Result` to
    /// return on this path, and silence would let the replicas drift apart.
    fn check_open(&self) {
        match self.phase.load(Ordering::SeqCst) {
            BACKWARD => {}
            FORWARD => panic!(
                "`backward()` was called on the loss of a `Ddp` module, which would leave its \
                 gradients unsynchronised: call `model.backward(loss)` instead"
            ),
            _ => panic!(
                "the gradients of this `Ddp` forward pass were already taken: a forward pass \
                 serves one `backward`; add the losses up, or run `forward` again"
            ),
        }
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").finish_non_exhaustive()
    }
}

/// Closes the pass when dropped, also by a panic in the backward pass.
pub(crate) struct OpenPass<'a> {
    pass: &'a Pass,
}

impl Drop for OpenPass<'_> {
    fn drop(&mut self) {
        self.pass.phase.store(DONE, Ordering::SeqCst);
    }
}

/// Locks the reducer; a panic elsewhere leaves it usable, since it fails as a
/// whole at the next call.
pub(crate) fn lock(reducer: &Mutex<Reducer>) -> MutexGuard<'_, Reducer> {
    reducer.lock().unwrap_or_else(PoisonError::into_inner)
}
