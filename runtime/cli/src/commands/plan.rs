//! `tegula plan`: what loading would put where.

use crate::args::PlanArgs;
use crate::output;
use anyhow::Result;
use std::collections::BTreeMap;
use tegula::Model;
use tegula::memory::plan::{ChunkReport, FigureReport, HeapReport, PlanReport};
use tegula::memory::units::format_size;

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let plan = Model::plan_only(&output::runtime()?, &args.load.model, &args.load.options(1))?;
    if args.json { output::print_json(&plan.report) } else { output::print(&text(&plan.report)) }
}

fn text(plan: &PlanReport) -> String {
    let (model, context) = (&plan.model, &plan.context);
    let mut lines = vec![
        format!(
            "model    {} ({}, {:.1} M parameters, {} of tensors)",
            model.name.as_deref().unwrap_or(&model.path),
            model.arch,
            model.n_params as f64 / 1e6,
            format_size(model.tensor_bytes)
        ),
        format!("context  {} tokens: {}", context.n_ctx, context.reason),
        format!(
            "kv       {}/{}, {} bytes a token, {} in all, grown {} tokens at a time",
            context.kv_type_k,
            context.kv_type_v,
            context.kv_bytes_per_token,
            format_size(context.kv_bytes),
            context.segment_tokens
        ),
        match &plan.ubatch.reason {
            None => format!("ubatch   {} tokens", plan.ubatch.n_tokens),
            Some(reason) => format!("ubatch   {} tokens: {reason}", plan.ubatch.n_tokens),
        },
    ];
    for device in &plan.devices {
        lines.push(format!("\n{}  {}", device.id, device.name));
        for heap in &device.heaps {
            lines.push(heap_text(heap));
        }
    }
    lines.join("\n")
}

fn heap_text(heap: &HeapReport) -> String {
    let mut out = format!(
        "heap {} ({}, pool {}): {} planned ({} of it read from the mapped file) of {} free, {} in all",
        heap.index,
        heap.kind,
        heap.pool,
        format_size(heap.planned_bytes),
        format_size(heap.mapped_bytes),
        figure(&heap.free),
        figure(&heap.total),
    );
    // Chunks alike are one row: a plan of a thousand KV chunks is read at a glance.
    let mut groups: BTreeMap<(usize, &str, &str), Vec<&ChunkReport>> = BTreeMap::new();
    for chunk in &heap.chunks {
        let order = ["weights", "kv", "scratch", "logits", "compile"];
        let place = order.iter().position(|usage| *usage == chunk.usage).unwrap_or(order.len());
        groups.entry((place, chunk.usage, chunk.source)).or_default().push(chunk);
    }
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|((_, usage, source), chunks)| {
            let total: u64 = chunks.iter().map(|chunk| chunk.size).sum();
            let largest = chunks.iter().map(|chunk| chunk.size).max().unwrap_or(0);
            let limit = chunks.first().and_then(|chunk| chunk.max_size.as_ref());
            vec![
                usage.to_string(),
                chunks.first().map(|chunk| chunk.buffer_type.clone()).unwrap_or_default(),
                source.to_string(),
                chunks.len().to_string(),
                format_size(total),
                format_size(largest),
                limit.map(figure).unwrap_or_default(),
                bar(total, heap.planned_bytes),
            ]
        })
        .collect();
    let header = ["usage", "type", "source", "chunks", "bytes", "largest", "max_size", ""];
    let table = output::table(&header, &rows, &[3, 4, 5]);
    for line in table.lines() {
        out.push_str("\n  ");
        out.push_str(line);
    }
    out
}

/// A figure with its source where that is not the driver.
pub(crate) fn figure(figure: &FigureReport) -> String {
    match (figure.value, figure.source.as_str()) {
        (Some(value), "driver") => format_size(value),
        (Some(value), source) => format!("{} ({source})", format_size(value)),
        (None, _) => figure.state.clone(),
    }
}

fn bar(part: u64, whole: u64) -> String {
    let eighths = (part as f64 / whole.max(1) as f64 * 24.0 * 8.0).round() as usize;
    let full = "█".repeat(eighths / 8);
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    full + rest.get(eighths % 8).unwrap_or(&"")
}
