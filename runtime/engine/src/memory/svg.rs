//! A plan as a picture: each device a panel, each heap a bar to scale, each chunk a course of roof tiles.
//!
//! Decisions:
//! * All chunks of a heap are drawn to one scale, stated beside them, so that areas can be compared. A chunk that is longer than a
//!   course goes on in the next one.
//! * Chunks too narrow to be told apart are drawn as a grid, one square for each or for a stated number of them.
//! * Every mark has a tooltip with its exact numbers; labels are drawn only where they fit.
//! * Text comes from model files: it is escaped, and control characters, which XML cannot hold, are replaced.

mod chunks;
mod palette;
mod write;

use super::plan::{ChunkReport, DeviceReport, FigureReport, HeapReport, PlanReport};
use super::units::format_size;
use chunks::{Scale, draw_group, drawn_bytes};
use palette::{Kind, MUTED, RULE};
use write::{Canvas, Text};

/// Pixels.
const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 28.0;
const PAD: f64 = 20.0;
/// Where the contents of a panel begin and end.
const LEFT: f64 = MARGIN + PAD;
const RIGHT: f64 = WIDTH - MARGIN - PAD;
const INNER: f64 = RIGHT - LEFT;
/// Width of the gauge that holds a group's largest chunk against `max_size`.
const GAUGE: f64 = 190.0;

impl PlanReport {
    /// The plan as an SVG document: about 1200 pixels wide, as long as it needs to be.
    pub fn to_svg(&self) -> String {
        let mut canvas = Canvas::default();
        title(&mut canvas, self);
        legend(&mut canvas, self);
        let heaps = self.devices.iter().flat_map(|device| &device.heaps);
        let fullest = heaps.map(drawn_bytes).max().unwrap_or(0);
        for device in &self.devices {
            panel(&mut canvas, device, fullest);
        }
        canvas.finish(WIDTH, MARGIN)
    }
}

fn title(canvas: &mut Canvas, plan: &PlanReport) {
    let (model, context) = (&plan.model, &plan.context);
    canvas.y += MARGIN + 20.0;
    let name = model.name.as_deref().unwrap_or(&model.path);
    canvas.text(&Text::new(MARGIN, name).size(24.0).bold());
    canvas.y += 24.0;
    let line = format!(
        "{}, {:.1} M parameters, {} of tensors",
        model.arch,
        model.n_params as f64 / 1e6,
        format_size(model.tensor_bytes)
    );
    canvas.text(&Text::new(MARGIN, &line).size(14.0).color(MUTED));
    if name != model.path {
        canvas.y += 18.0;
        canvas.text(&Text::new(MARGIN, &model.path).size(12.0).color(MUTED));
    }
    canvas.y += 26.0;
    let line = format!("Context of {} tokens: {}", context.n_ctx, context.reason);
    canvas.text(&Text::new(MARGIN, &line).size(14.0).bold());
    canvas.y += 20.0;
    let kv_types = if context.kv_type_k == context.kv_type_v {
        context.kv_type_k.clone()
    } else {
        format!("{}/{}", context.kv_type_k, context.kv_type_v)
    };
    let line = format!(
        "KV cache {} in {kv_types}, {} bytes a token, grown {} tokens at a time",
        format_size(context.kv_bytes),
        context.kv_bytes_per_token,
        context.segment_tokens
    );
    canvas.text(&Text::new(MARGIN, &line).size(14.0));
    canvas.y += 20.0;
    let reason = plan.ubatch.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let sequences = match plan.parallel.n_seqs {
        1 => "One sequence at a time".to_owned(),
        n => format!("{n} sequences at a time, which share the context"),
    };
    let line = format!("{sequences}; up to {} tokens at once{reason}", plan.ubatch.n_tokens);
    canvas.text(&Text::new(MARGIN, &line).size(14.0));
    stages(canvas, plan);
    for note in &plan.notes {
        for line in wrapped(&format!("Note: {note}"), 13.0, WIDTH - 2.0 * MARGIN) {
            canvas.y += 18.0;
            canvas.text(&Text::new(MARGIN, &line).size(13.0).color(MUTED));
        }
    }
}

/// Words in lines of at most `room` pixels, but for a word that alone is longer.
fn wrapped(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if write::text_width(&format!("{line} {word}"), size) <= room => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn stages(canvas: &mut Canvas, plan: &PlanReport) {
    for (i, stage) in plan.stages.iter().enumerate() {
        canvas.y += 20.0;
        let layers = match stage.layers {
            Some((first, last)) if first == last => format!("layer {first}"),
            Some((first, last)) => format!("layers {first} to {last}"),
            None => "no whole layer".to_owned(),
        };
        let comes_in = match stage.bytes_in_per_token {
            0 => String::new(),
            bytes => format!(", {bytes} bytes a token come in through {}", stage.path),
        };
        let line = format!("Stage {}: {} on {}{comes_in}", i + 1, layers, stage.device);
        canvas.text(&Text::new(MARGIN, &line).size(14.0));
    }
}

/// Each kind that occurs, with its bytes over all devices.
fn legend(canvas: &mut Canvas, plan: &PlanReport) {
    let heaps = plan.devices.iter().flat_map(|device| &device.heaps);
    let bytes = bytes_by_kind(heaps.flat_map(|heap| &heap.chunks));
    canvas.y += 32.0;
    let mut x = MARGIN;
    for (kind, bytes) in Kind::ALL.into_iter().zip(bytes).filter(|(_, bytes)| *bytes > 0) {
        let label = format!("{} {}", kind.name(), format_size(bytes));
        let width = 20.0 + write::text_width(&label, 12.0) + 18.0;
        if x + width > WIDTH - MARGIN {
            x = MARGIN;
            canvas.y += 22.0;
        }
        canvas.tile(x, canvas.y - 11.0, 14.0, 14.0, kind.color(), &label);
        canvas.text(&Text::new(x + 20.0, &label).size(12.0));
        x += width;
    }
    canvas.y += 14.0;
}

fn panel(canvas: &mut Canvas, device: &DeviceReport, fullest: u64) {
    canvas.y += 8.0;
    let top = canvas.y;
    let place = canvas.mark();
    canvas.y += 32.0;
    canvas.text(&Text::new(LEFT, &device.id).size(18.0).bold());
    let x = LEFT + write::text_width(&device.id, 18.0) * 1.08 + 12.0;
    canvas.text(&Text::new(x, &device.name).size(14.0).color(MUTED).within(RIGHT - x));
    for heap in &device.heaps {
        draw_heap(canvas, heap, fullest);
    }
    canvas.y += PAD;
    canvas.panel(place, MARGIN, top, WIDTH - 2.0 * MARGIN, canvas.y - top);
}

fn draw_heap(canvas: &mut Canvas, heap: &HeapReport, fullest: u64) {
    canvas.y += 32.0;
    let mapped = match heap.mapped_bytes {
        0 => String::new(),
        bytes => format!(", {} of it read in place from the file", format_size(bytes)),
    };
    let head = format!("Heap {} ({})", heap.index, heap.kind);
    canvas.text(&Text::new(LEFT, &head).size(14.0).bold());
    let x = LEFT + write::text_width(&head, 14.0) * 1.08 + 12.0;
    let peak = match heap.peak_bytes {
        peak if peak > heap.planned_bytes => format!(", {} while loading", format_size(peak)),
        _ => String::new(),
    };
    let counted = heap.assumed_free.map(|bytes| format!(" ({} counted on)", format_size(bytes)));
    let line = format!(
        "{} planned{mapped}{peak}; {} free{} of {}",
        format_size(heap.planned_bytes),
        figure(&heap.free),
        counted.unwrap_or_default(),
        figure(&heap.total)
    );
    canvas.text(&Text::new(x, &line).size(13.0).within(RIGHT - x));
    bar(canvas, heap);
    let scale = Scale::of(heap, fullest, INNER);
    let mut groups = groups(heap);
    groups.retain(|(_, chunks)| !chunks.is_empty());
    for (name, chunks) in groups {
        group(canvas, name, &chunks, &scale);
    }
    if !heap.chunks.is_empty() || !heap.loading.is_empty() {
        canvas.y += 8.0;
        scale.draw(canvas, LEFT);
    }
}

/// The heap to scale: what others use, what the plan takes by kind, what stays free.
fn bar(canvas: &mut Canvas, heap: &HeapReport) {
    const HEIGHT: f64 = 22.0;
    let total = heap.total.value.or(heap.free.value).unwrap_or(0).max(heap.planned_bytes);
    if total == 0 {
        return;
    }
    canvas.y += 12.0;
    let y = canvas.y;
    let px = |bytes: u64| bytes as f64 / total as f64 * INNER;
    canvas.rect(LEFT, y, INNER, HEIGHT, "#ffffff", Some(RULE), "");
    let used = total.saturating_sub(heap.free.value.unwrap_or(total));
    let mut x = LEFT;
    // Mapped weights may already be in memory, so the two can be more than the whole together.
    let used_px = px(used).min(INNER - px(heap.planned_bytes)).max(0.0);
    if used > 0 {
        let tip = format!("{} in use by others, or kept back", format_size(used));
        canvas.rect(x, y, used_px, HEIGHT, "url(#others)", None, &tip);
        x += used_px;
    }
    let kinds = bytes_by_kind(heap.chunks.iter());
    for (kind, bytes) in Kind::ALL.into_iter().zip(kinds).filter(|(_, bytes)| *bytes > 0) {
        let tip = format!("{} {}", kind.name(), format_size(bytes));
        canvas.rect(x, y, px(bytes), HEIGHT, kind.color(), None, &tip);
        x += px(bytes);
    }
    canvas.rect(LEFT, y, INNER, HEIGHT, "none", Some(RULE), "");
    canvas.y += HEIGHT + 14.0;
    let left = total.saturating_sub(used).saturating_sub(heap.planned_bytes);
    bar_labels(canvas, [(used, used_px), (heap.planned_bytes, px(heap.planned_bytes))], left);
}

/// Labels below the parts of a bar, each at its part or behind the one before it.
fn bar_labels(canvas: &mut Canvas, parts: [(u64, f64); 2], left: u64) {
    const SIZE: f64 = 11.0;
    let (mut begin, mut text_end) = (LEFT, LEFT);
    for (name, (bytes, width)) in ["in use", "this plan"].into_iter().zip(parts) {
        let text = format!("{name} {}", format_size(bytes));
        if bytes > 0 {
            let x = begin.max(text_end);
            canvas.text(&Text::new(x, &text).size(SIZE).color(MUTED));
            text_end = x + write::text_width(&text, SIZE) + 8.0;
        }
        begin += width;
    }
    let text = format!("left {}", format_size(left));
    let x = RIGHT - write::text_width(&text, SIZE);
    if left > 0 && x > text_end {
        canvas.text(&Text::new(x, &text).size(SIZE).color(MUTED));
    }
}

/// Bytes of each kind, by its number.
fn bytes_by_kind<'a>(chunks: impl Iterator<Item = &'a ChunkReport>) -> [u64; Kind::ALL.len()] {
    let mut out = [0u64; Kind::ALL.len()];
    for (kind, size) in chunks.flat_map(palette::pieces) {
        if let Some(sum) = out.get_mut(kind as usize) {
            *sum = sum.saturating_add(size);
        }
    }
    out
}

type Group<'a> = (&'static str, Vec<&'a ChunkReport>);

/// Weights, KV cache, and the small rest, which shares courses.
fn groups(heap: &HeapReport) -> Vec<Group<'_>> {
    let keeps = |c: &ChunkReport| c.usage == "kv" || c.usage == "state";
    let of = |test: &dyn Fn(&ChunkReport) -> bool| heap.chunks.iter().filter(|c| test(c)).collect();
    vec![
        ("Weights, in place", of(&|c| c.usage == "weights" && c.source == "mapped")),
        ("Weights", of(&|c| c.usage == "weights" && c.source != "mapped")),
        ("KV cache and recurrent state", of(&|c| keeps(c))),
        ("Scratch and the rest", of(&|c| c.usage != "weights" && !keeps(c))),
        ("While loading", heap.loading.iter().collect()),
    ]
}

fn group(canvas: &mut Canvas, name: &str, chunks: &[&ChunkReport], scale: &Scale) {
    let bytes: u64 = chunks.iter().map(|chunk| chunk.size).sum();
    let largest = chunks.iter().map(|chunk| chunk.size).max().unwrap_or(0);
    let count =
        if chunks.len() == 1 { "1 chunk".into() } else { format!("{} chunks", chunks.len()) };
    let kind = chunks.first().map(|chunk| chunk.buffer_type.as_str()).unwrap_or_default();
    canvas.y += 30.0;
    canvas.text(&Text::new(LEFT, name).size(13.0).bold());
    let x = LEFT + write::text_width(name, 13.0) * 1.08 + 10.0;
    let mut line = format!("{} in {count}, type {kind}", format_size(bytes));
    // The small rest is told in words too: beside gigabytes it can hardly be seen.
    if chunks.iter().any(|chunk| chunk.tiles.is_empty()) {
        let of = |usage: &str| -> u64 {
            chunks.iter().filter(|c| c.usage == usage).map(|c| c.size).fold(0, u64::saturating_add)
        };
        let usages = ["scratch", "logits", "activations", "compile", "staging"]
            .map(|usage| (usage, of(usage)));
        let told: Vec<String> = usages
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(usage, bytes)| {
                format!("{} {}", palette::kind(usage, "").name(), format_size(bytes))
            })
            .collect();
        line = format!("{} in {count}: {}", format_size(bytes), told.join(", "));
    }
    let limit = chunks.iter().find_map(|chunk| chunk.max_size.as_ref());
    let end = limit.map_or(RIGHT, |limit| gauge(canvas, largest, limit));
    canvas.text(&Text::new(x, &line).size(12.0).color(MUTED).within(end - 12.0 - x));
    canvas.y += 10.0;
    draw_group(canvas, chunks, scale, LEFT, RIGHT);
}

/// The largest chunk against the limit, which is a line; and where that begins.
fn gauge(canvas: &mut Canvas, largest: u64, limit: &FigureReport) -> f64 {
    let (x, y) = (RIGHT - GAUGE, canvas.y - 10.0);
    let text = format!("largest {} of max_size {}", format_size(largest), figure(limit));
    let end = x - 10.0 - write::text_width(&text, 11.0);
    canvas.text(&Text::new(end, &text).size(11.0).color(MUTED));
    let share = limit.value.map_or(0.0, |limit| largest as f64 / limit.max(1) as f64).min(1.0);
    canvas.rect(x, y, GAUGE, 10.0, "#f3efe8", None, &text);
    canvas.rect(x, y, (GAUGE * share).max(1.0), 10.0, "#8d8377", None, &text);
    if limit.value.is_some() {
        canvas.line(RIGHT, y - 4.0, RIGHT, y + 14.0, "#c0392b", 2.0);
    }
    end
}

/// A figure with its source where that is not the driver.
fn figure(figure: &FigureReport) -> String {
    match (figure.value, figure.source.as_str()) {
        (Some(value), "driver") => format_size(value),
        (Some(value), source) => format!("{} ({source})", format_size(value)),
        (None, _) => figure.state.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::plan::{
        ContextReport, ModelReport, ParallelReport, TileReport, UbatchReport,
    };

    fn chunk(usage: &'static str, size: u64, tensors: &[&str]) -> ChunkReport {
        let n = tensors.len().max(1) as u64;
        ChunkReport {
            usage,
            buffer_type: "host & <more>".into(),
            max_size: Some(FigureReport {
                value: Some(1 << 20),
                state: "known".into(),
                source: "override".into(),
            }),
            size,
            taken: size,
            source: "allocated",
            tiles: (0..)
                .zip(tensors)
                .map(|(i, tensor)| TileReport {
                    tensor: tensor.to_string(),
                    first_row: 0,
                    n_rows: 1,
                    offset: i * (size / n),
                    size: size / n,
                })
                .collect(),
        }
    }

    fn report(chunks: Vec<ChunkReport>) -> PlanReport {
        let figure = |value| FigureReport { value, state: "known".into(), source: "driver".into() };
        PlanReport {
            model: ModelReport {
                path: "m.gguf".into(),
                arch: "llama".into(),
                name: Some("a < b & \"c\"\u{1b}[2J".into()),
                tensor_bytes: 1,
                n_params: 1,
            },
            context: ContextReport {
                n_ctx: 64,
                reason: "asked for".into(),
                n_ctx_train: 64,
                kv_type_k: "F16".into(),
                kv_type_v: "F16".into(),
                kv_bytes_per_token: 4,
                kv_bytes: 256,
                state_bytes_per_sequence: 0,
                block_len: 32,
                segment_tokens: 64,
            },
            ubatch: UbatchReport { n_tokens: 64, reason: None },
            parallel: ParallelReport { n_seqs: 1, n_outputs: 1, logits_bytes: 4 },
            notes: Vec::new(),
            stages: Vec::new(),
            devices: vec![DeviceReport {
                id: "cpu:0".into(),
                name: "a processor".into(),
                heaps: vec![HeapReport {
                    index: 0,
                    kind: "host".into(),
                    pool: "host".into(),
                    total: figure(Some(1 << 34)),
                    free: figure(Some(1 << 33)),
                    assumed_free: None,
                    planned_bytes: chunks.iter().map(|chunk| chunk.size).sum(),
                    mapped_bytes: 0,
                    peak_bytes: 0,
                    chunks,
                    loading: Vec::new(),
                }],
            }],
        }
    }

    /// Names in files must not end in the markup, and what no XML reader takes must not be in it.
    #[test]
    fn text_is_escaped() {
        let svg = report(vec![chunk("weights", 1 << 20, &["x<script>&'\""])]).to_svg();
        assert!(!svg.contains("<script>") && svg.contains("x&lt;script&gt;&amp;"), "{svg}");
        assert!(svg.contains("a &lt; b &amp; ") && svg.contains("host &amp; &lt;more&gt;"));
        assert!(!svg.chars().any(|c| c.is_control() && c != '\n'));
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
        assert_eq!(svg.matches("<g").count(), svg.matches("</g>").count());
    }

    /// A plan of many chunks must neither be left out in part nor fill a disk; and an empty one is no failure.
    #[test]
    fn pictures_stay_small_and_whole() {
        for n in [0, 1, 12, 500, 7000, 100_000] {
            let chunks = (0..n).map(|_| chunk("kv", 1 << 20, &["kv.0.k", "kv.0.v"])).collect();
            let svg = report(chunks).to_svg();
            assert!(svg.len() < 2 << 20, "{} bytes for {n}", svg.len());
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{n}");
            if n > 0 {
                let count = if n == 1 { "1 chunk,".into() } else { format!("{n} chunks,") };
                assert!(svg.contains(&count), "{n}");
            }
        }
        let sizes = [0, 1, 4096, u64::MAX / 4, u64::MAX / 4];
        let odd = sizes.into_iter().map(|size| chunk("scratch", size, &[])).collect();
        let svg = report(odd).to_svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    /// Every byte has a colour, and a tensor's colour is its part of the model.
    #[test]
    fn kinds_follow_names() {
        for (usage, tensor, expected) in [
            ("weights", "token_embd.weight", Kind::Embedding),
            ("weights", "blk.3.attn_q.weight", Kind::Attention),
            ("weights", "blk.3.attn_v.bias", Kind::Attention),
            ("weights", "blk.3.attn_norm.weight", Kind::Norm),
            ("weights", "blk.3.attn_q_norm.weight", Kind::Norm),
            ("weights", "blk.3.ffn_down_exps.weight", Kind::Ffn),
            ("weights", "blk.3.post_ffw_norm.weight", Kind::Norm),
            ("weights", "output_norm.weight", Kind::Norm),
            ("weights", "output.weight", Kind::Output),
            ("weights", "rope_freqs.weight", Kind::Other),
            ("kv", "kv.3.k", Kind::Keys),
            ("kv", "kv.3.v", Kind::Values),
        ] {
            assert_eq!(palette::kind(usage, tensor), expected, "{tensor}");
        }
        for (usage, expected) in
            [("scratch", Kind::Scratch), ("logits", Kind::Logits), ("compile", Kind::Compile)]
        {
            let of: Vec<_> = palette::pieces(&chunk(usage, 7, &[])).collect();
            assert_eq!(of, [(expected, 7)]);
        }
    }
}
