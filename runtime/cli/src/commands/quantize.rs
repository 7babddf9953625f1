//! `tegula quantize`: a model file in smaller types.

use crate::args::QuantizeArgs;
use crate::output;
use anyhow::{Context, Result};
use serde::Serialize;
use tegula::memory::units::format_size;
use tegula::requantize::{Importance, QuantizeOptions, Quantized, quantize_file};
use tegula::{Gguf, Quant};

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    output: String,
    quant: String,
    tensors: Vec<Tensor>,
    bytes_before: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    from: &'static str,
    to: &'static str,
    bytes: u64,
    has_importance: bool,
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<()> {
    let path = crate::models::find(&args.model)?;
    let quant: Quant = args.quant;
    let importance = args.importance.as_deref().map(Importance::open).transpose()?;
    let n_threads = match args.threads {
        Some(n) => n as usize,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let mut options = QuantizeOptions::new(quant);
    (options.importance, options.n_threads) = (importance.as_ref(), n_threads);
    options.replace = args.force;
    let n = Gguf::open(&path)?.tensors().len();
    let bar = output::bar(n as u64, "{wide_bar} {pos} of {len} tensors, {msg}, {eta} left");
    let mut tensors: Vec<Quantized> = Vec::new();
    let done = quantize_file(&path, &args.output, &options, &mut |tensor| {
        bar.set_message(tensor.name.clone());
        bar.inc(1);
        tensors.push(tensor.clone());
    });
    bar.finish_and_clear();
    done.with_context(|| format!("quantising {}", path.display()))?;
    if importance.is_some() {
        tell_unknown(&tensors);
    }
    let report = Report {
        model: path.display().to_string(),
        output: args.output.display().to_string(),
        quant: quant.name(),
        bytes_before: tensors.iter().map(|tensor| tensor.bytes_before).sum(),
        bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
        tensors: tensors.into_iter().map(Tensor::from).collect(),
    };
    if args.json {
        return output::print_json(&report);
    }
    let mut by_type: Vec<(&str, usize)> = Vec::new();
    for tensor in &report.tensors {
        match by_type.iter_mut().find(|(to, _)| *to == tensor.to) {
            Some((_, n)) => *n += 1,
            None => by_type.push((tensor.to, 1)),
        }
    }
    let types: Vec<String> = by_type.iter().map(|(to, n)| format!("{n} {to}")).collect();
    output::print(&format!(
        "{}: {} instead of {} ({})",
        report.output,
        format_size(report.bytes),
        format_size(report.bytes_before),
        types.join(", ")
    ))
}

/// Says how many matrices were encoded with nothing known of them.
fn tell_unknown(tensors: &[Quantized]) {
    let encoded = tensors.iter().filter(|tensor| tensor.from != tensor.to);
    let unknown: Vec<&str> = encoded
        .filter(|tensor| !tensor.has_importance)
        .map(|tensor| tensor.name.as_str())
        .collect();
    if let Some(first) = unknown.first() {
        eprintln!(
            "note: the importance file has nothing about {} of the matrices, such as {first}",
            unknown.len()
        );
    }
}

impl From<Quantized> for Tensor {
    fn from(tensor: Quantized) -> Self {
        Self {
            name: tensor.name,
            from: tensor.from.name(),
            to: tensor.to.name(),
            bytes: tensor.bytes,
            has_importance: tensor.has_importance,
        }
    }
}
