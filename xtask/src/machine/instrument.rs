//! The instrument that lets OpenVINO's GPU plugin run where no GPU is: `tests/ovgpu`.

use crate::models::cache;
use crate::process;
use anyhow::Result;

/// Makes it; a second's work, so that what is there is never old.
pub(super) fn provide() -> Result<()> {
    let cache = cache()?;
    let mut setup = process::clean("bash");
    setup.arg(process::root().join("tests/ovgpu/setup.sh"));
    setup.arg(cache.join("ovgpu")).arg(cache.join("intel-opencl/lib"));
    process::run(&mut setup)?;
    Ok(())
}
