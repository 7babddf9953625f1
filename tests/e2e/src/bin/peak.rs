//! Loads a model, fills its whole KV cache, and says what of that was resident beside what was planned.
//!
//! `peak MODEL DEVICE N_CTX KV_TYPE N_TOKENS_OF_A_SEQUENCE [PLUGIN]`, as a process of its own, because a peak is a process's. The base is the peak once the plan
//! is made: by then the plugins are loaded, the device's threads have run, and the file's header and vocabulary have been read.

use serde_json::json;
use std::error::Error;
use std::sync::atomic::AtomicBool;
use tegula::{
    DType, Model, ModelOptions, Outputs, PlanOptions, RegistryOptions, Runtime, RuntimeOptions,
};
use tegula_e2e::{resident, resident_peak, runtime};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, device, n_ctx, dtype, n_tokens, plugin @ ..] = args.as_slice() else {
        return Err("peak MODEL DEVICE N_CTX KV_TYPE N_TOKENS_OF_A_SEQUENCE [PLUGIN]".into());
    };
    let dtype = DType::from_name(dtype).ok_or("a type")?;
    let (n_ctx, n_tokens): (u32, u32) = (n_ctx.parse()?, n_tokens.parse()?);
    let n_sequences = n_ctx / n_tokens;
    let plan = PlanOptions {
        n_ctx: Some(n_ctx),
        n_parallel: n_sequences,
        dtype_k: dtype,
        dtype_v: dtype,
        ..Default::default()
    };
    let options = ModelOptions { device: Some(device.clone()), plan, ..Default::default() };
    let runtime = if plugin.is_empty() {
        runtime()
    } else {
        let explicit = plugin.iter().map(Into::into).collect();
        let registry = RegistryOptions { explicit, standard: false };
        Runtime::new(&RuntimeOptions { registry, ..Default::default() })
    };
    Model::plan_only(&runtime, path, &options)?;
    let (base, base_now) = (resident_peak(), resident());
    let model = Model::open(&runtime, path, &options, &mut |_| {})?;
    let loaded = resident().saturating_sub(base_now);
    let tokens: Vec<u32> = (0..n_tokens).map(|i| 3 + i * 37 % 200).collect();
    let mut sequences = Vec::new();
    for _ in 0..n_sequences {
        let mut sequence = model.sequence();
        sequence.eval(&tokens, Outputs::Last, &AtomicBool::new(false), |_, _| Ok(()))?;
        sequences.push(sequence);
    }
    let peak = resident_peak();
    let heaps = || model.plan().report.devices.iter().flat_map(|device| &device.heaps);
    let by_usage = |usage: &str| -> u64 {
        let chunks = heaps().flat_map(|heap| &heap.chunks).filter(|chunk| chunk.usage == usage);
        chunks.map(|chunk| chunk.size).sum()
    };
    let usages = ["weights", "kv", "scratch", "logits", "activations", "compile", "staging"];
    let out = json!({
        "base": base,
        "peak": peak,
        "loaded": loaded,
        "planned_peak": heaps().map(|heap| heap.peak_bytes).sum::<u64>(),
        "planned": usages.map(|usage| (usage, by_usage(usage))).into_iter()
            .collect::<std::collections::BTreeMap<_, _>>(),
    });
    println!("{out}");
    Ok(())
}
