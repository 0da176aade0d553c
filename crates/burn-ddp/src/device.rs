//! Which device a rank computes on.

#[allow(unused_imports)] // Without an eager device.
use burn::backend::DispatchDevice;
use burn::tensor::Device;

use crate::{Error, ProcessGroup, Result};

/// The device of this rank: the CUDA GPU of its local rank where this program
/// was built with the feature `cuda` and a GPU is visible, else the CPU.
///
/// Choose it before a module is made, so that nothing is ever allocated on
/// another device.
///
/// # Errors
///
/// An environment error when some GPU is visible, but none is left for this
/// rank; one when this program was built without a device.
pub fn device(group: &ProcessGroup) -> Result<Device> {
    match visible_gpus() {
        0 => cpu(),
        gpus => gpu(group.local_rank(), gpus),
    }
}

/// The CUDA GPU of this rank.
///
/// # Errors
///
/// An environment error when this program was built without the feature `cuda`,
/// or fewer GPUs are visible than there are ranks on this host.
pub fn cuda_device(group: &ProcessGroup) -> Result<Device> {
    if !cfg!(feature = "cuda") {
        return Err(Error::environment(
            "this program was built without CUDA: build it with the feature `cuda` of burn-ddp, \
             or train on the CPU",
        ));
    }
    gpu(group.local_rank(), visible_gpus())
}

/// The CPU.
///
/// # Errors
///
/// An environment error when this program was built without the feature `flex`.
pub fn cpu() -> Result<Device> {
    #[cfg(feature = "flex")]
    return Ok(Device::flex());
    #[cfg(not(feature = "flex"))]
    Err(Error::environment(
        "burn-ddp was built without a device for the CPU: enable its feature `flex`, or make a \
         `burn::tensor::Device` yourself",
    ))
}

/// How many GPUs a rank of this program may choose from, found without a call to
/// CUDA, which would claim memory on one of them.
fn visible_gpus() -> usize {
    if !cfg!(feature = "cuda") {
        return 0;
    }
    let files = (0..)
        .take_while(|n| std::path::Path::new(&format!("/dev/nvidia{n}")).exists())
        .count();
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        // As CUDA does, it counts up to the first that does not exist.
        Ok(list) => list
            .split(',')
            .map(str::trim)
            .take_while(|name| !name.is_empty() && *name != "-1")
            .count()
            .min(files),
        Err(_) => files,
    }
}

#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn gpu(local_rank: usize, gpus: usize) -> Result<Device> {
    if local_rank >= gpus {
        return Err(Error::environment(format!(
            "local rank {local_rank} has no GPU: {gpus} visible on this host, and every rank \
             needs one of its own; start at most that many ranks per host, or check \
             CUDA_VISIBLE_DEVICES and /dev/nvidia*",
        )));
    }
    #[cfg(feature = "cuda")]
    return Ok(Device::cuda(local_rank));
    #[cfg(not(feature = "cuda"))]
    Err(Error::environment("this program was built without CUDA"))
}

/// Whether the device computes an operation when it is called, on the calling
/// thread, so that a gradient's values exist when its hook runs.
pub(crate) fn is_eager(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        DispatchDevice::NdArray(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}
