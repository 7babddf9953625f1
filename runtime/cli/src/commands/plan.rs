//! `tegula plan`: what loading would put where.

use crate::args::PlanArgs;
use crate::table::{printable, table, terminal_width, wrap};
use crate::{models, output};
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use tegula::memory::plan::{
    ChunkReport, FigureReport, HeapReport, ParallelReport, PlanReport, StageReport,
};
use tegula::memory::units::format_size;
use tegula::{Model, Shape};

/// Columns of a bar at most, and the fewest that say anything.
const BAR_MAX: usize = 24;
const BAR_MIN: usize = 5;

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let runtime = output::runtime(&args.load.caps())?;
    let options = args.load.options(1);
    let plan = match (&args.shapes, &args.model) {
        (Some(name), _) => Model::plan_shape(&runtime, &Shape::find(name)?, args.quant, &options)?,
        (None, Some(model)) => Model::plan_only(&runtime, models::find(model)?, &options)?,
        (None, None) => bail!("no model: give a MODEL or --shapes NAME"),
    };
    if let Some(path) = &args.svg {
        let svg = plan.report.to_svg();
        if path.as_os_str() == "-" {
            return output::print(svg.trim_end());
        }
        return std::fs::write(path, svg).with_context(|| format!("--svg: {}", path.display()));
    }
    if args.json {
        output::print_json(&plan.report)
    } else {
        output::print(&text(&plan.report, terminal_width()))
    }
}

/// The plan for people, in lines of `width`, if that is given.
fn text(plan: &PlanReport, width: Option<usize>) -> String {
    let (model, context) = (&plan.model, &plan.context);
    let kv_types = if context.kv_type_k == context.kv_type_v {
        context.kv_type_k.clone()
    } else {
        format!("{} keys, {} values", context.kv_type_k, context.kv_type_v)
    };
    let ubatch = match &plan.ubatch.reason {
        None => format!("{} tokens of a prompt at once", plan.ubatch.n_tokens),
        Some(reason) => format!("{} tokens of a prompt at once: {reason}", plan.ubatch.n_tokens),
    };
    let mut lines = vec![
        (
            "model",
            format!(
                "{} ({}, {:.1} M parameters, {} of tensors)",
                printable(model.name.as_deref().unwrap_or(&model.path)),
                model.arch,
                model.n_params as f64 / 1e6,
                format_size(model.tensor_bytes)
            ),
        ),
        ("context", format!("{} tokens: {}", context.n_ctx, context.reason)),
        (
            "kv",
            format!(
                "{kv_types}, {} bytes a token, {} in all, grown {} tokens at a time",
                context.kv_bytes_per_token,
                format_size(context.kv_bytes),
                context.segment_tokens
            ),
        ),
        ("parallel", parallel(&plan.parallel)),
        ("ubatch", ubatch),
    ];
    if context.state_bytes_per_sequence > 0 {
        let bytes = format_size(context.state_bytes_per_sequence);
        lines.push(("state", format!("{bytes} for each sequence, whatever its length")));
    }
    lines.extend(plan.stages.iter().enumerate().map(|(index, s)| ("stage", stage(index, s))));
    lines.extend(plan.notes.iter().map(|note| ("note", note.clone())));
    let mut lines: Vec<String> = lines
        .into_iter()
        .map(|(head, text)| wrap(&format!("{head:<9} {text}"), width, 10))
        .collect();
    for device in &plan.devices {
        lines.push(format!("\n{}  {}", device.id, device.name));
        for heap in &device.heaps {
            lines.push(heap_text(heap, width));
        }
    }
    lines.join("\n")
}

fn parallel(parallel: &ParallelReport) -> String {
    let logits = format!(
        "{} {} of logits a run, {}",
        parallel.n_outputs,
        if parallel.n_outputs == 1 { "row" } else { "rows" },
        format_size(parallel.logits_bytes)
    );
    match parallel.n_seqs {
        1 => format!("1 sequence at a time; {logits}"),
        n => format!("{n} sequences at a time, which share the context; {logits}"),
    }
}

fn stage(index: usize, stage: &StageReport) -> String {
    let layers = match stage.layers {
        Some((first, last)) if first == last => format!("layer {first}"),
        Some((first, last)) => format!("layers {first} to {last}"),
        None => "no layer".to_owned(),
    };
    let comes_in = match stage.bytes_in_per_token {
        0 => String::new(),
        bytes => format!(", {bytes} bytes a token come in through {}", stage.path),
    };
    format!("{}  {}: {layers}, {} ops{comes_in}", index + 1, stage.device, stage.n_ops)
}

/// What of a heap is free, as the plan counts it.
fn free(heap: &HeapReport) -> String {
    match heap.assumed_free {
        Some(bytes) => format!("{} free ({} counted on)", figure(&heap.free), format_size(bytes)),
        None => format!("{} free", figure(&heap.free)),
    }
}

fn heap_text(heap: &HeapReport, width: Option<usize>) -> String {
    let mapped = match heap.mapped_bytes {
        0 => String::new(),
        bytes => format!(" ({} of it read from the mapped file)", format_size(bytes)),
    };
    let peak = match heap.peak_bytes {
        peak if peak > heap.planned_bytes => format!(", {} while loading", format_size(peak)),
        _ => String::new(),
    };
    let head = format!(
        "heap {} ({}, pool {}): {} planned{mapped}{peak} of {}, {} in all",
        heap.index,
        heap.kind,
        heap.pool,
        format_size(heap.planned_bytes),
        free(heap),
        figure(&heap.total),
    );
    let mut out = wrap(&head, width, 2);
    // Chunks alike are one row: a plan of a thousand KV chunks is read at a glance.
    let mut groups: BTreeMap<(usize, &str, &str, &str), Vec<&ChunkReport>> = BTreeMap::new();
    for chunk in heap.chunks.iter().chain(&heap.loading) {
        let order =
            ["weights", "kv", "state", "scratch", "logits", "activations", "compile", "staging"];
        let place = order.iter().position(|usage| *usage == chunk.usage).unwrap_or(order.len());
        let key = (place, chunk.usage, chunk.buffer_type.as_str(), chunk.source);
        groups.entry(key).or_default().push(chunk);
    }
    if groups.is_empty() {
        return out;
    }
    let mut rows = Vec::new();
    let mut totals = Vec::new();
    for ((_, usage, kind, source), chunks) in &groups {
        let total: u64 = chunks.iter().map(|chunk| chunk.taken).sum();
        let largest = chunks.iter().map(|chunk| chunk.size).max().unwrap_or(0);
        let first = chunks.first();
        totals.push(total);
        rows.push(vec![
            usage.to_string(),
            kind.to_string(),
            if *usage == "staging" { "while loading".into() } else { source.to_string() },
            chunks.len().to_string(),
            format_size(total),
            format_size(largest),
            first.and_then(|chunk| chunk.max_size.as_ref()).map(limit).unwrap_or_default(),
        ]);
    }
    let width = width.map(|width| width.saturating_sub(2));
    let header = ["usage", "type", "source", "chunks", "bytes", "largest", "max_size"];
    let text = table(&header, &rows, &[3, 4, 5, 6], width);
    // Bars take the room that is left: shares of the plan, and at last the plan as a share of what is free.
    let used = text.lines().map(|line| line.chars().count()).max().unwrap_or(0) + 2;
    let room = width.map_or(BAR_MAX, |width| width.saturating_sub(used).min(BAR_MAX));
    let room = if room < BAR_MIN { 0 } else { room };
    // No bar for the header.
    let bars = std::iter::once(None).chain(totals.into_iter().map(Some));
    for (line, total) in text.lines().zip(bars) {
        let bar = total.map(|total| bar(total, heap.planned_bytes, room)).unwrap_or_default();
        let line = format!("{line:<used$}{bar}");
        out.push_str(&format!("\n  {}", line.trim_end()));
    }
    let whole = heap.assumed_free.or(heap.free.value).filter(|free| *free > 0);
    if let Some(whole) = whole.filter(|_| room > 0) {
        let percent = heap.planned_bytes as f64 / whole as f64 * 100.0;
        let text = format!("{percent:.0} % of what is free");
        let filled = bar(heap.planned_bytes, whole, room);
        let empty = "·".repeat(room.saturating_sub(filled.chars().count()));
        let line = format!("{text:<used$}{filled}{empty}");
        out.push_str(&format!("\n  {}", line.trim_end()));
    }
    out
}

/// A limit with its source only where an operator set it: the others are `tegula devices`' business.
fn limit(value: &FigureReport) -> String {
    match value.value {
        Some(bytes) if value.source != "override" => format_size(bytes),
        _ => figure(value),
    }
}

/// A figure with its source where that is not the driver.
pub(crate) fn figure(figure: &FigureReport) -> String {
    match (figure.value, figure.source.as_str()) {
        (Some(value), "driver") => format_size(value),
        (Some(value), source) => format!("{} ({source})", format_size(value)),
        (None, _) => figure.state.clone(),
    }
}

fn bar(part: u64, whole: u64, columns: usize) -> String {
    let share = (part as f64 / whole.max(1) as f64).min(1.0);
    let eighths = (share * columns as f64 * 8.0).round() as usize;
    let full = "█".repeat(eighths / 8);
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    full + rest.get(eighths % 8).unwrap_or(&"")
}

#[cfg(test)]
mod tests {
    use super::bar;

    /// A bar longer than its room would wrap; one of nothing would look like something.
    #[test]
    fn bars_keep_to_their_room() {
        for ((part, whole, columns), expected) in [
            ((10, 10, 4), "████"),
            ((5, 10, 4), "██"),
            ((1, 16, 4), "▎"),
            ((0, 10, 4), ""),
            ((0, 0, 4), ""),
            ((20, 10, 2), "██"),
            ((10, 10, 0), ""),
        ] {
            assert_eq!(bar(part, whole, columns), expected, "{part} of {whole} in {columns}");
        }
    }
}
