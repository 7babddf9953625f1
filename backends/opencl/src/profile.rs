//! Times of kernels by op, for `TEGULA_OPENCL_PROFILE=1`.

use crate::cl::Event;
use std::collections::BTreeMap;

/// Sums by op: kernels, and nanoseconds between their starts and ends.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    sums: BTreeMap<&'static str, (u64, u64)>,
}

impl Profile {
    pub(crate) fn add(&mut self, kernels: &[(&'static str, Event)]) {
        for (what, event) in kernels {
            match event.nanoseconds() {
                Ok(ns) => {
                    let sum = self.sums.entry(what).or_default();
                    *sum = (sum.0 + 1, sum.1.saturating_add(ns));
                }
                Err(error) => log::debug!("a kernel without times: {error}"),
            }
        }
    }

    /// Logs the sums, the longest first.
    pub(crate) fn log(&self, device: &str) {
        let mut sums: Vec<_> = self.sums.iter().collect();
        sums.sort_by_key(|(_, (_, ns))| std::cmp::Reverse(*ns));
        let total: u64 = sums.iter().map(|(_, (_, ns))| ns).sum();
        for (what, (n, ns)) in sums {
            let (ms, part) = (*ns as f64 / 1e6, *ns as f64 / total.max(1) as f64 * 100.0);
            let each = *ns as f64 / 1e3 / (*n).max(1) as f64;
            log::info!("{device}: {what}: {n} kernels, {ms:.3} ms, {part:.1} %, {each:.2} us each");
        }
    }
}
