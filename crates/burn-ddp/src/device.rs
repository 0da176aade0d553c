//! Which device a rank computes on.

use burn::backend::DispatchDevice;
use burn::tensor::Device;

use crate::{ProcessGroup, Result};

/// The device of this rank: the GPU of its local rank, else the CPU.
///
/// Choose it before a module is made, so that nothing is ever allocated on
/// another device.
///
/// # Errors
///
/// An environment error when this program was built without a backend that this
/// rank can use, or when there are fewer GPUs than ranks on this host.
#[cfg(feature = "flex")]
pub fn device(_group: &ProcessGroup) -> Result<Device> {
    Ok(Device::flex())
}

/// The device of this rank.
///
/// # Errors
///
/// Always: this program was built without a backend that a rank can use.
#[cfg(not(feature = "flex"))]
pub fn device(_group: &ProcessGroup) -> Result<Device> {
    Err(crate::Error::environment(
        "burn-ddp was built without a backend: enable its feature `flex` (CPU), or choose a \
         device with `burn::tensor::Device`",
    ))
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
