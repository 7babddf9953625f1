//! The kernels that a program will want, so that they are made together when it is compiled and no first run waits for them.

use crate::executable::Executable;
use crate::pipelines::Kernel;
use crate::record::Recorder;
use crate::steps::{self, Places};
use ash::vk;
use tegula_sdk::abi::CompileOptions;

/// Programs of fewer ops than a model's make their kernels as they go.
pub(crate) const OPS_MIN: usize = 32;

/// The kernels of all paths: one token, few, and many.
pub(crate) fn kernels(exe: &Executable, options: &CompileOptions) -> Vec<Kernel> {
    let mut out: Vec<Kernel> = Vec::new();
    for n in [1, 2, 4, 8, 32, 64, 512] {
        let tokens = n.min(options.n_tokens_max);
        let outputs = n.min(options.n_outputs_max);
        for outputs in [outputs, 1] {
            let mut lister = Recorder::lister(&exe.gpu);
            // Addresses are looked at by nobody; only shapes count.
            let places = Places {
                values: vec![256; exe.program.values.len()],
                record: 256,
                record_buffer: vk::Buffer::null(),
                parts: (256, u64::MAX >> 1),
                experts: (256, u64::MAX >> 1),
                half: if exe.frame.half_region.is_some() { (256, u64::MAX >> 1) } else { (0, 0) },
            };
            if let Err(error) = steps::record(exe, &mut lister, places, tokens, outputs) {
                log::debug!("kernels are made when they are needed: {error}");
            }
            out.extend(lister.into_list());
        }
    }
    let mut known = std::collections::HashSet::new();
    out.retain(|kernel| known.insert(kernel.clone()));
    out
}
