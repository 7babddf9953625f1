//! Where the time of runs goes, by kernel: `TEGULA_VULKAN_PROFILE=1` puts a timestamp after every dispatch and logs the sums when the
//! executable is freed. Dispatches that overlap are counted to the one that ends last.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::gpu::Gpu;
use crate::pipelines::Kernel;
use crate::shaders::Shader;
use ash::vk;
use std::collections::HashMap;
use tegula_sdk::Result;

/// More than the dispatches of any model.
const MARKS_MAX: u32 = 8192;

/// Whether profiles are wanted.
pub(crate) fn is_wanted() -> bool {
    std::env::var("TEGULA_VULKAN_PROFILE").is_ok_and(|v| v == "1")
}

/// Timestamps of one recorded command buffer.
pub(crate) struct Profile {
    pool: vk::QueryPool,
    marks: Vec<String>,
    n: u32,
}

impl Profile {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let info = vk::QueryPoolCreateInfo::default()
            .query_type(vk::QueryType::TIMESTAMP)
            .query_count(MARKS_MAX);
        // SAFETY: the struct lives for the call.
        let pool = unsafe { gpu.device.create_query_pool(&info, None) };
        Ok(Self { pool: gpu.check("vkCreateQueryPool", pool)?, marks: Vec::new(), n: 0 })
    }

    /// At the start of the commands.
    pub(crate) fn begin(&mut self, gpu: &Gpu, commands: vk::CommandBuffer) {
        self.marks.clear();
        self.n = 1;
        // SAFETY: the command buffer is being recorded; the pool has room for the first mark.
        unsafe {
            gpu.device.cmd_reset_query_pool(commands, self.pool, 0, MARKS_MAX);
            let stage = vk::PipelineStageFlags::COMPUTE_SHADER;
            gpu.device.cmd_write_timestamp(commands, stage, self.pool, 0);
        }
    }

    /// After a dispatch.
    pub(crate) fn mark(&mut self, gpu: &Gpu, commands: vk::CommandBuffer, kernel: &Kernel) {
        if self.n >= MARKS_MAX {
            return;
        }
        let stage = vk::PipelineStageFlags::COMPUTE_SHADER;
        // SAFETY: as above.
        unsafe { gpu.device.cmd_write_timestamp(commands, stage, self.pool, self.n) };
        self.n += 1;
        self.marks.push(name(kernel));
    }

    /// Adds the times of the last run, which is done, to `sums`: nanoseconds and dispatches.
    pub(crate) fn collect(&self, gpu: &Gpu, sums: &mut HashMap<String, (f64, u64)>) {
        let mut stamps = vec![0u64; self.n as usize];
        // SAFETY: the run is done, so that the stamps are there.
        let result = unsafe {
            gpu.device.get_query_pool_results(
                self.pool,
                0,
                &mut stamps,
                vk::QueryResultFlags::TYPE_64,
            )
        };
        if result.is_err() {
            return;
        }
        for (mark, pair) in self.marks.iter().zip(stamps.windows(2)) {
            let [from, to] = pair else { continue };
            let ns = to.saturating_sub(*from) as f64 * f64::from(gpu.physical.timestamp_period);
            let sum = sums.entry(mark.clone()).or_default();
            *sum = (sum.0 + ns, sum.1 + 1);
        }
    }

    /// Frees the pool; no run is in flight.
    pub(crate) fn free(self, gpu: &Gpu) {
        // SAFETY: by the caller's word.
        unsafe { gpu.device.destroy_query_pool(self.pool, None) };
    }
}

/// The kernel with the constants that tell variants apart.
fn name(kernel: &Kernel) -> String {
    let constants: Vec<_> = kernel
        .constants
        .iter()
        .filter(|(id, _)| *id < 10)
        .map(|(_, value)| value.to_string())
        .collect();
    match kernel.shader {
        Shader::ToHalf => "to_half".into(),
        shader => format!("{} {}", shader.name(), constants.join(",")),
    }
}

/// Logs sums, the greatest first.
pub(crate) fn report(name: &str, n_runs: u64, sums: &HashMap<String, (f64, u64)>) {
    let mut rows: Vec<_> = sums.iter().collect();
    rows.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
    let total: f64 = rows.iter().map(|(_, (ns, _))| ns).sum();
    log::info!("profile of `{name}`: {n_runs} runs, {:.3} ms on the device", total / 1e6);
    for (kernel, (ns, n)) in rows {
        let share = 100.0 * ns / total.max(1.0);
        let each = ns / 1e3 / (*n).max(1) as f64;
        log::info!("  {:10.3} ms {share:5.1} %  {n:8} x {each:9.2} us  {kernel}", ns / 1e6);
    }
}
