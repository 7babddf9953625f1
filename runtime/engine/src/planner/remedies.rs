//! What would fit, for whoever asked for something that does not: plans near the one that was refused, each tried in full.
//!
//! Estimates would be quicker, but a remedy that fails in its turn is worse than none.

use super::{OpenDevice, PlanOptions, Planner};
use crate::memory::plan::Plan;
use crate::memory::units::format_size;
use crate::runtime::Runtime;
use crate::{Error, Result};
use tegula_arch::{Model, ProgramOptions, Results};
use tegula_gguf::Gguf;
use tegula_program::DType;

/// Steps by which a proposed context is lowered to a round number.
const CONTEXT_STEP: u32 = 256;
/// Times that a context is lowered until a plan agrees with the budget.
const ATTEMPTS: usize = 4;

/// A model and its wishes, as often as needed.
pub(crate) struct Attempt<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) gguf: &'a Gguf,
    pub(crate) arch: &'a Model,
    pub(crate) devices: Vec<OpenDevice>,
    pub(crate) selector: Option<&'a str>,
    pub(crate) n_threads: u32,
}

impl Attempt<'_> {
    /// A refusal with what would fit; every other error as it is.
    pub(crate) fn explain(&self, error: Error, options: &PlanOptions) -> Error {
        match error {
            Error::ContextDoesNotFit { asked, bytes, per_token, budget, fits, .. } => {
                let remedies = self.for_context(options, fits);
                Error::ContextDoesNotFit { asked, bytes, per_token, budget, fits, remedies }
            }
            Error::ModelDoesNotFit { device, needed, free, .. } => {
                let remedies = self.for_model(options, needed, free);
                Error::ModelDoesNotFit { device, needed, free, remedies }
            }
            other => other,
        }
    }

    fn for_context(&self, options: &PlanOptions, fits: u64) -> Vec<String> {
        let mut out = Vec::new();
        let mut add = |flags: String, plan: &Plan| out.push(line(&flags, plan));
        if let Some(plan) = self.longest(options, fits) {
            add(format!("-c {}{}", plan.context.n_ctx, kv_flag(options)), &plan);
        }
        let smaller = smaller_kv(options);
        let mut whole = None;
        for (flag, dtype) in smaller.iter().copied() {
            let wish = PlanOptions { dtype_k: dtype, dtype_v: dtype, ..options.clone() };
            if let Some(plan) = self.plan(&wish) {
                whole = Some(plan.context.n_ctx);
                add(format!("{}--kv-type {flag}", context_flag(options)), &plan);
            }
        }
        // Where no type is small enough for all of it, the smallest one gives the most of it.
        if let (None, Some((flag, dtype))) = (whole, smaller.last().copied()) {
            let wish = PlanOptions { dtype_k: dtype, dtype_v: dtype, ..options.clone() };
            if let Err(Error::ContextDoesNotFit { fits, .. }) = self.try_plan(&wish)
                && let Some(plan) = self.longest(&wish, fits)
            {
                add(format!("-c {} --kv-type {flag}", plan.context.n_ctx), &plan);
            }
        }
        self.other_wishes(options, &mut add);
        out
    }

    fn for_model(&self, options: &PlanOptions, needed: u64, free: u64) -> Vec<String> {
        let mut out = Vec::new();
        self.other_wishes(options, &mut |flags, plan| out.push(line(&flags, plan)));
        let info = self.arch.info();
        let weights: u64 = self
            .arch
            .tensors()
            .iter()
            .filter_map(|spec| self.gguf.tensor(&spec.name))
            .map(tegula_gguf::TensorInfo::n_bytes)
            .fold(0, u64::saturating_add);
        let over = needed.saturating_sub(free - free / 32);
        let bits = |bytes: u64| bytes as f64 * 8.0 / info.n_params.max(1) as f64;
        // Below one bit there is nothing to look for.
        if let Some(most) = weights.checked_sub(over).filter(|most| bits(*most) >= 1.0) {
            out.push(format!(
                "a file of at most {} of tensors, less what the context takes: {:.1} bits a parameter, where this one has {:.1}",
                format_size(most),
                bits(most),
                bits(weights)
            ));
        }
        out
    }

    /// Fewer tokens at once, and devices that were not selected.
    fn other_wishes(&self, options: &PlanOptions, add: &mut dyn FnMut(String, &Plan)) {
        if options.n_ubatch > 32 {
            let wish = PlanOptions { n_ubatch: 32, ..options.clone() };
            if let Some(plan) = self.plan(&wish) {
                add(format!("{}--ubatch 32{}", context_flag(options), kv_flag(options)), &plan);
            }
        }
        let mut ids: Vec<String> = self.devices.iter().map(|d| d.entry.id()).collect();
        let mut devices = self.devices.clone();
        for entry in self.runtime.select(Some("auto")).unwrap_or_default() {
            if ids.contains(&entry.id()) {
                continue;
            }
            // A device that cannot be opened is no remedy.
            let Ok(device) = self.runtime.open_device(&entry, self.n_threads) else { continue };
            ids.push(entry.id());
            devices.push(OpenDevice { entry, device });
        }
        if devices.len() == self.devices.len() {
            return;
        }
        let wider = Attempt { devices, ..*self };
        if let Some(plan) = wider.plan(options) {
            let selector = match self.selector {
                Some(selector) => format!("{selector},auto"),
                None => ids.join(","),
            };
            let flags = format!("{}--device {selector}{}", context_flag(options), kv_flag(options));
            add(flags, &plan);
        }
    }

    /// The plan of the longest context up to `fits`, at a round number.
    fn longest(&self, options: &PlanOptions, fits: u64) -> Option<Plan> {
        let mut n_ctx = u32::try_from(fits).unwrap_or(u32::MAX);
        for _ in 0..ATTEMPTS {
            if n_ctx >= 4 * CONTEXT_STEP {
                n_ctx -= n_ctx % CONTEXT_STEP;
            }
            if n_ctx == 0 {
                return None;
            }
            match self.try_plan(&PlanOptions { n_ctx: Some(n_ctx), ..options.clone() }) {
                Ok(plan) => return Some(plan),
                Err(Error::ContextDoesNotFit { fits, .. }) => {
                    n_ctx = n_ctx.saturating_sub(1).min(u32::try_from(fits).unwrap_or(u32::MAX));
                }
                Err(_) => return None,
            }
        }
        None
    }

    fn plan(&self, options: &PlanOptions) -> Option<Plan> {
        self.try_plan(options).ok()
    }

    fn try_plan(&self, options: &PlanOptions) -> Result<Plan> {
        let program = self.arch.program(&ProgramOptions {
            dtype_k: options.dtype_k,
            dtype_v: options.dtype_v,
            results: Results::Logits,
            n_ctx: options.n_ctx,
        })?;
        let planner = Planner {
            runtime: self.runtime,
            gguf: self.gguf,
            arch: self.arch,
            program: &program,
            devices: self.devices.clone(),
            options,
            n_threads: self.n_threads,
        };
        Ok(planner.plan()?.plan)
    }
}

fn line(flags: &str, plan: &Plan) -> String {
    let report = &plan.report;
    let planned = report.devices.iter().flat_map(|device| &device.heaps).map(|h| h.planned_bytes);
    format!(
        "{flags}  (context {}, KV cache {}, {} in all)",
        report.context.n_ctx,
        format_size(report.context.kv_bytes),
        format_size(planned.sum())
    )
}

fn context_flag(options: &PlanOptions) -> String {
    options.n_ctx.map(|n_ctx| format!("-c {n_ctx} ")).unwrap_or_default()
}

fn kv_flag(options: &PlanOptions) -> String {
    match (options.dtype_k, options.dtype_v) {
        (DType::F16, DType::F16) => String::new(),
        (k, v) if k == v => format!(" --kv-type {}", k.name().to_ascii_lowercase()),
        (k, v) => {
            let [k, v] = [k, v].map(|dtype| dtype.name().to_ascii_lowercase());
            format!(" --kv-type-k {k} --kv-type-v {v}")
        }
    }
}

/// KV types that take less than those asked for, the nearest first.
fn smaller_kv(options: &PlanOptions) -> Vec<(&'static str, DType)> {
    let bits = |dtype: DType| dtype.block_bytes() * 256 / dtype.block_len().max(1);
    let now = bits(options.dtype_k) + bits(options.dtype_v);
    [("q8_0", DType::Q8_0), ("q4_0", DType::Q4_0)]
        .into_iter()
        .filter(|(_, dtype)| 2 * bits(*dtype) < now)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A remedy must be smaller than what was refused, and its flags must mean the plan that was tried.
    #[test]
    fn kv_types_become_smaller() {
        let options = |dtype_k, dtype_v| PlanOptions { dtype_k, dtype_v, ..Default::default() };
        let table: [(DType, DType, &[&str], &str); 5] = [
            (DType::F16, DType::F16, &["q8_0", "q4_0"], ""),
            (DType::F32, DType::F32, &["q8_0", "q4_0"], " --kv-type f32"),
            (DType::Q8_0, DType::Q8_0, &["q4_0"], " --kv-type q8_0"),
            (DType::Q4_0, DType::Q4_0, &[], " --kv-type q4_0"),
            (DType::Q8_0, DType::Q4_0, &["q4_0"], " --kv-type-k q8_0 --kv-type-v q4_0"),
        ];
        for (k, v, smaller, flag) in table {
            let names: Vec<&str> =
                smaller_kv(&options(k, v)).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, smaller, "{k:?} {v:?}");
            assert_eq!(kv_flag(&options(k, v)), flag);
        }
    }
}
