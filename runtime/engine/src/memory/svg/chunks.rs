//! Chunks as courses of tiles, or as a grid where there are too many.

use super::bytes_by_kind;
use super::palette::{INK, Kind, MUTED, kind, pieces};
use super::write::{Canvas, Text, fitting, text_width};
use crate::memory::plan::{ChunkReport, HeapReport};
use crate::memory::units::format_size;

/// Courses that the chunks of the fullest heap take if they fill them, and the fewest that those of another do.
const COURSES: u64 = 26;
const COURSES_MIN: u64 = 2;
const COURSE_HEIGHT: f64 = 20.0;
const COURSE_STEP: f64 = 24.0;
/// Between chunks of a course.
const CHUNK_GAP: f64 = 3.0;
/// Chunks narrower than this on average are a grid.
const CHUNK_MIN: f64 = 14.0;
/// Tiles narrower than this are merged with their neighbours of the same kind.
const TILE_MIN: f64 = 2.0;
const LABEL: f64 = 9.5;
const LABEL_PAD: f64 = 5.0;
const NUMBER: f64 = 8.5;

const CELL: f64 = 11.0;
const CELL_STEP: f64 = 14.0;
/// Squares of a grid at most.
const CELLS_MAX: usize = 1600;

/// Bytes of a heap that are drawn as chunks.
pub(super) fn drawn_bytes(heap: &HeapReport) -> u64 {
    let loading = heap.loading.iter().map(|chunk| chunk.size);
    loading.fold(heap.planned_bytes, u64::saturating_add)
}

/// Bytes of a full course.
pub(super) struct Scale {
    course: u64,
    width: f64,
}

impl Scale {
    /// The scale at which the chunks of a heap fill a page, or as much of one as they are of `fullest`, the bytes of the fullest heap; a round number
    /// of bytes.
    pub(super) fn of(heap: &HeapReport, fullest: u64, width: f64) -> Self {
        let bytes = drawn_bytes(heap);
        let share = bytes as f64 / fullest.max(1) as f64;
        let courses = ((share * COURSES as f64) as u64).clamp(COURSES_MIN, COURSES);
        let wanted = (bytes / courses).max(1);
        let unit = 1u64 << (63 - wanted.leading_zeros().min(63)).min(62);
        // 1, 1.25, 1.5 or 1.75 times a power of two, not below what is wanted.
        let quarter = (unit / 4).max(1);
        let course = unit.saturating_add(wanted.saturating_sub(unit).div_ceil(quarter) * quarter);
        Self { course: course.max(1), width }
    }

    fn px(&self, bytes: u64) -> f64 {
        bytes as f64 / self.course as f64 * self.width
    }

    /// A ruler of a tenth of a course or so.
    pub(super) fn draw(&self, canvas: &mut Canvas, x: f64) {
        let tenth = (self.course / 8).max(1);
        let step = 1u64 << (63 - tenth.leading_zeros().min(63));
        canvas.y += 14.0;
        let (y, end) = (canvas.y - 4.0, x + self.px(step));
        canvas.line(x, y, end, y, INK, 1.0);
        canvas.line(x, y - 3.0, x, y + 3.0, INK, 1.0);
        canvas.line(end, y - 3.0, end, y + 3.0, INK, 1.0);
        let text = format!(
            "{}; a full course is {}. Numbers at the left count chunks; a line above tiles is one chunk. Norms may be too small to be seen.",
            format_size(step),
            format_size(self.course)
        );
        canvas.text(&Text::new(end + 8.0, &text).size(11.0).color(MUTED));
    }
}

/// Draws chunks from `left` to `right`, and moves down.
pub(super) fn draw_group(
    canvas: &mut Canvas,
    chunks: &[&ChunkReport],
    scale: &Scale,
    left: f64,
    right: f64,
) {
    let bytes: u64 = chunks.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.size));
    let average = scale.px(bytes) / chunks.len().max(1) as f64;
    if chunks.len() > 12 && average < CHUNK_MIN {
        return grid(canvas, chunks, left, right);
    }
    let form = first_form(chunks, scale);
    let mut courses = Courses { canvas, scale, left, right, x: left, form };
    for (number, chunk) in chunks.iter().enumerate() {
        courses.chunk(number, chunk);
    }
    courses.canvas.y += COURSE_STEP;
}

struct Courses<'a> {
    canvas: &'a mut Canvas,
    scale: &'a Scale,
    left: f64,
    right: f64,
    x: f64,
    /// The longest form of labels for tiles of layers.
    form: usize,
}

/// Neighbouring tiles that are drawn as one.
struct Run {
    kind: Kind,
    first: usize,
    n_tiles: usize,
    bytes: u64,
}

impl Courses<'_> {
    fn next_course(&mut self) {
        self.canvas.y += COURSE_STEP;
        self.x = self.left;
    }

    fn chunk(&mut self, number: usize, chunk: &ChunkReport) {
        let width = self.scale.px(chunk.size);
        let small = width + CHUNK_GAP <= self.right - self.left;
        if self.x > self.left && self.x + width > self.right && small {
            self.next_course();
        } else if self.x > self.left && !small {
            // A chunk over several courses begins where it can be found.
            self.next_course();
        }
        if self.x <= self.left {
            let text = number.to_string();
            let x = self.left - 4.0 - text_width(&text, NUMBER);
            self.canvas.number(x, self.canvas.y + COURSE_HEIGHT * 0.62, NUMBER, &text);
        }
        for run in self.runs(chunk) {
            self.run(number, chunk, &run);
        }
        self.x += CHUNK_GAP;
        if self.x >= self.right {
            self.next_course();
        }
    }

    /// Tiles, with those that are too narrow merged.
    fn runs(&self, chunk: &ChunkReport) -> Vec<Run> {
        let mut out: Vec<Run> = Vec::new();
        let mut end = 0;
        for (index, (kind, bytes)) in pieces(chunk).enumerate() {
            // Padding before a tile is drawn as part of it.
            let tile_end =
                chunk.tiles.get(index).map_or(bytes, |t| t.offset.saturating_add(t.size));
            let bytes = tile_end.saturating_sub(end).max(bytes.min(tile_end));
            end = tile_end;
            match out.last_mut() {
                Some(last)
                    if self.scale.px(bytes) < TILE_MIN
                        && (last.kind == kind || self.scale.px(bytes) < TILE_MIN / 4.0) =>
                {
                    last.bytes += bytes;
                    last.n_tiles += 1;
                }
                _ => out.push(Run { kind, first: index, n_tiles: 1, bytes }),
            }
        }
        out
    }

    /// One or more tiles, over as many courses as it takes; the label goes on the widest piece.
    fn run(&mut self, number: usize, chunk: &ChunkReport, run: &Run) {
        let tip = tip(number, chunk, run);
        let mut left = self.scale.px(run.bytes).max(1.0);
        let mut spans: Vec<(f64, f64, f64)> = Vec::new();
        while left > 0.05 {
            let room = self.right - self.x;
            if room < 0.5 {
                self.next_course();
                continue;
            }
            let width = left.min(room);
            spans.push((self.x, self.canvas.y, width));
            self.canvas.tile(self.x, self.canvas.y, width, COURSE_HEIGHT, run.kind.color(), &tip);
            // The batten that the tiles of a chunk hang on: where it ends, the chunk ends.
            let y = self.canvas.y;
            self.canvas.line(self.x, y, self.x + width, y, INK, 1.6);
            self.x += width;
            left -= width;
        }
        let Some((x, y, width)) = spans.into_iter().max_by(|a, b| a.2.total_cmp(&b.2)) else {
            return;
        };
        let layered = chunk.tiles.get(run.first).is_some_and(|t| is_layered(&t.tensor));
        let mut labels = labels(chunk, run).into_iter().skip(if layered { self.form } else { 0 });
        if let Some(label) = labels.find(|l| text_width(l, LABEL) + LABEL_PAD <= width) {
            self.canvas.label(x + width / 2.0, y + COURSE_HEIGHT * 0.62, LABEL, &label);
        }
    }
}

fn tip(number: usize, chunk: &ChunkReport, run: &Run) -> String {
    let place = format!("chunk {number} of {}: {}", chunk.usage, format_size(chunk.size));
    match chunk.tiles.get(run.first) {
        None => place,
        Some(tile) if run.n_tiles == 1 => format!(
            "{}, rows {} to {}, {}\n{place}",
            tile.tensor,
            tile.first_row,
            tile.first_row.saturating_add(tile.n_rows).saturating_sub(1),
            format_size(tile.size)
        ),
        Some(tile) => {
            format!("{} and {} tiles more\n{place}", tile.tensor, run.n_tiles - 1)
        }
    }
}

/// What may be written on a tile, the longest first.
fn labels(chunk: &ChunkReport, run: &Run) -> Vec<String> {
    let Some(tile) = chunk.tiles.get(run.first) else {
        let name = kind(chunk.usage, "").name();
        return vec![format!("{name} {}", format_size(chunk.size)), name.to_owned()];
    };
    // A name may stand for tiles that are too small to be seen beside it, not for others.
    if tile.size < run.bytes - run.bytes / 16 {
        return Vec::new();
    }
    if let Some(layer) = tile.tensor.strip_prefix("kv.") {
        let (layer, side) = layer.split_once('.').unwrap_or((layer, ""));
        let whole = if side == "k" { "keys" } else { "values" };
        return vec![format!("{layer} {whole}"), format!("{layer} {side}")];
    }
    let name = tile.tensor.strip_suffix(".weight").unwrap_or(&tile.tensor);
    let short = name.strip_prefix("blk.").unwrap_or(name);
    let part = short.split_once('.').map_or(short, |(_, part)| part);
    let part = part.strip_prefix("ffn_").or(part.strip_prefix("attn_")).unwrap_or(part);
    let part = if part == "output" && short != name { "o" } else { part };
    let sized = format!("{name} {}", format_size(tile.size));
    match short.split_once('.') {
        Some((layer, _)) if short != name => {
            vec![
                sized,
                name.to_owned(),
                short.to_owned(),
                format!("{layer} {part}"),
                part.to_owned(),
            ]
        }
        _ => vec![sized, name.to_owned()],
    }
}

/// Whether a tile is one of many alike, whose labels should look alike.
fn is_layered(tensor: &str) -> bool {
    tensor.starts_with("blk.") || tensor.starts_with("kv.")
}

/// The first of the forms of labels that most tiles of layers have room for, by their widths.
fn first_form(chunks: &[&ChunkReport], scale: &Scale) -> usize {
    let mut fits = [0f64; 8];
    let mut total = 0.0;
    for chunk in chunks.iter().take(CELLS_MAX) {
        for (first, tile) in chunk.tiles.iter().enumerate().filter(|(_, t)| is_layered(&t.tensor)) {
            let run = Run { kind: Kind::Other, first, n_tiles: 1, bytes: tile.size };
            let forms = labels(chunk, &run);
            let width = scale.px(tile.size);
            let has_room = |form: &String| text_width(form, LABEL) + LABEL_PAD <= width;
            if forms.last().is_some_and(has_room) {
                total += width;
                for (_, fits) in forms.iter().zip(&mut fits).filter(|(form, _)| has_room(form)) {
                    *fits += width;
                }
            }
        }
    }
    fits.iter().position(|fits| *fits >= 0.8 * total).unwrap_or(0)
}

/// One square for each chunk, or for several in a row, coloured by what is in them from the top down.
fn grid(canvas: &mut Canvas, chunks: &[&ChunkReport], left: f64, right: f64) {
    // A power of two, so that chunks that alternate look alike in all squares.
    let per_cell = chunks.len().div_ceil(CELLS_MAX).max(1).next_power_of_two();
    let mut x = left;
    for (index, cell) in chunks.chunks(per_cell).enumerate() {
        if x + CELL > right {
            x = left;
            canvas.y += CELL_STEP;
        }
        let bytes = bytes_by_kind(cell.iter().copied());
        let whole = bytes.iter().fold(0u64, |sum, n| sum.saturating_add(*n)).max(1);
        let first = index * per_cell;
        let tip = grid_tip(first, cell);
        let mut y = canvas.y;
        for (kind, bytes) in Kind::ALL.into_iter().zip(bytes) {
            let height = bytes as f64 / whole as f64 * CELL;
            if height > 0.95 * CELL {
                canvas.tile(x, canvas.y, CELL, CELL, kind.color(), &tip);
                break;
            }
            // Less than half a pixel cannot be seen.
            if height >= 0.5 {
                canvas.rect(x, y, CELL, height, kind.color(), None, &tip);
                y += height;
            }
        }
        x += CELL_STEP;
    }
    canvas.y += CELL_STEP + 12.0;
    let text = caption(chunks, per_cell);
    canvas.text(&Text::new(left, &fitting(&text, 11.0, right - left)).size(11.0).color(MUTED));
    canvas.y += 6.0;
}

fn grid_tip(first: usize, cell: &[&ChunkReport]) -> String {
    let bytes: u64 = cell.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.size));
    let mut tiles = cell.iter().flat_map(|chunk| &chunk.tiles).map(|tile| tile.tensor.as_str());
    let what = match (tiles.next(), tiles.next_back()) {
        (Some(from), Some(to)) if from != to => format!("\n{from} to {to}"),
        (Some(one), _) => format!("\n{one}"),
        _ => String::new(),
    };
    match cell.len() {
        1 => format!("chunk {first}: {}{what}", format_size(bytes)),
        n => format!("chunks {first} to {}: {}{what}", first + n - 1, format_size(bytes)),
    }
}

/// How many chunks of which size: `5,120 × 1.00 MiB, 64 × 512.00 KiB, 12 smaller`.
fn caption(chunks: &[&ChunkReport], per_cell: usize) -> String {
    let mut counts: std::collections::BTreeMap<u64, usize> = std::collections::BTreeMap::new();
    for chunk in chunks {
        *counts.entry(chunk.size).or_default() += 1;
    }
    let mut sizes: Vec<(usize, u64)> = counts.into_iter().map(|(size, n)| (n, size)).collect();
    sizes.sort_unstable_by_key(|(n, size)| std::cmp::Reverse((*n, *size)));
    let shown = sizes.iter().take(4).map(|(n, size)| format!("{n} × {}", format_size(*size)));
    let mut out: Vec<String> = shown.collect();
    let others: usize = sizes.iter().skip(4).map(|(n, _)| n).sum();
    if others > 0 {
        out.push(format!("{others} of other sizes"));
    }
    let square = match per_cell {
        1 => "One square is one chunk, not to scale".to_owned(),
        n => format!("One square is {n} chunks, not to scale"),
    };
    format!("{square}: {}", out.join(", "))
}
