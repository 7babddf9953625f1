//! Launches of the KV cache's two ops: which kernel for which heads, how a context is split, and a call for each pass.

use crate::build::{input, output};
use crate::context::Shared;
use crate::facts::Facts;
use crate::kv::{GroupTables, LayerTable, RunTables, at};
use crate::launch::{Arg, Call, Frame, Memory, Setting, Sink, memory, u32_of};
use crate::programs::{Source, file};
use tegula_sdk::program::{KvLayer, Op, OpKind, Program, ValueId};
use tegula_sdk::{Error, Result};

const KV_STORE: &[&str] = &[file::COMMON, file::KV, file::KV_STORE];
const ATTENTION: &[&str] = &[file::COMMON, file::KV, file::ATTENTION];
const ATTENTION_CPU: &[&str] = &[file::COMMON, file::KV, file::ATTENTION_CPU];
const COMBINE: &[&str] = &[file::COMMON, file::COMBINE];

/// Splits of a context, at most.
const SPLITS_MAX: u64 = 64;
/// Query rows of a group with many tokens.
const ROWS_MANY: u64 = 16;

/// The shape of an attention kernel for one kind of layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Work-items of a group.
    wg: u64,
    /// Query heads of a group; those of a head of keys are so many groups of them.
    heads: u64,
    /// Tokens of a group.
    pub(crate) height: u32,
    /// Keys taken at once.
    tile: u64,
}

impl Shape {
    /// For one token of a sequence, or many; `None` where local memory is too small.
    pub(crate) fn new(facts: &Facts, layer: &KvLayer, n_head: u32, many: bool) -> Option<Self> {
        if facts.cpu_kernels {
            return Some(Self { wg: 1, heads: 1, height: 1, tile: 1 });
        }
        let per_kv = u64::from(n_head / layer.n_head_kv.max(1)).max(1);
        // A power of two divides the work-items among rows.
        let heads = per_kv.next_power_of_two().min(8);
        let height = if many { ROWS_MANY / heads } else { 1 };
        let wg = 128u64.max(heads * height).min(u64::try_from(facts.work_group_max).ok()?);
        let wg = if wg.is_power_of_two() { wg } else { wg.next_power_of_two() / 2 };
        let rows = heads * height;
        if wg < rows {
            return None;
        }
        let d4 = u64::from(layer.head_dim_k.max(layer.head_dim_v)).div_ceil(4);
        let k4 = u64::from(layer.head_dim_k).div_ceil(4);
        // A margin for what the compiler keeps there itself.
        let bytes = |tile: u64| {
            16 * rows * k4 + 16 * tile * (d4 + 1) + 8 * rows * tile + 4 * wg + 16 * tile + 512
        };
        let tile =
            [32, 16, 8, 4].into_iter().find(|tile| bytes(*tile) <= facts.local_bytes.min(48 << 10));
        Some(Self { wg, heads, height: u32::try_from(height).ok()?, tile: tile? })
    }
}

/// Rows of running state that the splits of a decode step may take.
pub(crate) fn state_rows(facts: &Facts, n_head: u64, n_head_kv: u64, n_tokens_max: u64) -> u64 {
    splits_wanted(facts, n_head_kv) * n_head * n_tokens_max.min(4)
}

/// Splits that fill the device with one token.
fn splits_wanted(facts: &Facts, n_head_kv: u64) -> u64 {
    (u64::from(facts.compute_units) * 4 / n_head_kv.max(1)).clamp(1, SPLITS_MAX)
}

/// The two ops of a layer in the cache.
#[derive(Debug)]
pub(crate) struct KvOp {
    /// Index of its layer in the program.
    pub(crate) kv_layer: usize,
    pub(crate) layer: KvLayer,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Store { call: Call, k: ValueId, v: ValueId },
    Attend(Box<Attend>),
}

#[derive(Debug)]
struct Attend {
    few: Call,
    many: Call,
    combine: Call,
    shapes: [Shape; 2],
    q: ValueId,
    y: ValueId,
    sinks: Option<Memory>,
    n_head: u32,
    scale: f32,
    softcap: f32,
    window: u32,
    /// Region of scratch for running state, and rows that fit it.
    state: (usize, u64),
}

/// What a run gives to the ops of the cache.
pub(crate) struct KvRun<'a> {
    pub(crate) tables: &'a RunTables,
    /// Query heights, as listed in the tables.
    pub(crate) heights: &'a [u32],
    /// Where the run's tables lie on the device.
    pub(crate) run_at: Memory,
    /// By layer of the program: its table, and where that lies on the device.
    pub(crate) layers: &'a [(LayerTable, u64)],
    pub(crate) layers_at: Memory,
    pub(crate) facts: &'a Facts,
}

/// The layer that an op of the cache names.
pub(crate) fn layer_of(program: &Program, op: &Op) -> Option<(usize, KvLayer)> {
    let (OpKind::KvStore { kv_layer } | OpKind::Attention { kv_layer, .. }) = op.kind else {
        return None;
    };
    Some((kv_layer as usize, *program.kv_layers.get(kv_layer as usize)?))
}

impl KvOp {
    /// Builds an op; `state` is the region for running state and the rows that fit it.
    pub(crate) fn new(
        shared: &Shared,
        program: &Program,
        op: &Op,
        sinks: Option<Arg>,
        state: (usize, u64),
    ) -> Result<Self> {
        let found = layer_of(program, op);
        let (kv_layer, layer) =
            found.ok_or_else(|| Error::invalid("a KV layer that is not there"))?;
        let dims = [
            ("DK", u64::from(layer.head_dim_k)),
            ("DV", u64::from(layer.head_dim_v)),
            ("KT", u64::from(layer.dtype_k.id())),
            ("VT", u64::from(layer.dtype_v.id())),
        ];
        let call = |source: &Source, name: &str| -> Result<Call> {
            Ok(Call::new(shared.programs.kernel(shared, source, name)?))
        };
        let OpKind::Attention { n_head, scale, softcap, window, .. } = op.kind else {
            let call = call(&Source::new(KV_STORE, &dims), "kv_store")?;
            let kind = Kind::Store { call, k: input(op, 0)?, v: input(op, 1)? };
            return Ok(Self { kv_layer, layer, kind });
        };
        let shape = |many| {
            Shape::new(&shared.facts, &layer, n_head, many)
                .ok_or_else(|| Error::unsupported("heads too large for local memory"))
        };
        let shapes = [shape(false)?, shape(true)?];
        let source = |shape: &Shape| {
            if shared.facts.cpu_kernels {
                return Source::new(ATTENTION_CPU, &dims);
            }
            let mut defines = dims.to_vec();
            defines.extend([
                ("WG", shape.wg),
                ("HPG", shape.heads),
                ("QT", shape.height.into()),
                ("TILE", shape.tile),
            ]);
            Source::new(ATTENTION, &defines)
        };
        let sinks = match sinks {
            None => None,
            Some(Arg::Fixed(place)) => Some(place),
            Some(_) => return Err(Error::invalid("sinks that are no weight")),
        };
        let attend = Attend {
            few: call(&source(&shapes[0]), "attention")?,
            many: call(&source(&shapes[1]), "attention")?,
            combine: call(&Source::new(COMBINE, &dims[1..2]), "combine")?,
            shapes,
            q: input(op, 0)?,
            y: output(op, 0)?,
            sinks,
            n_head,
            scale,
            softcap,
            window,
            state,
        };
        Ok(Self { kv_layer, layer, kind: Kind::Attend(Box::new(attend)) })
    }

    /// Enqueues the op, pass by pass.
    pub(crate) fn run(
        &mut self,
        sink: &mut Sink<'_>,
        frame: &Frame,
        run: &KvRun<'_>,
        settings: &mut Vec<Setting>,
    ) -> Result<()> {
        if frame.n_tokens == 0 {
            return Ok(());
        }
        let (table, offset) = run
            .layers
            .get(self.kv_layer)
            .ok_or_else(|| Error::invalid("a KV layer that is not there"))?;
        let group = run.tables.groups.get(self.layer.group as usize);
        let group = group.ok_or_else(|| Error::invalid("a KV group that is not there"))?;
        let segments = at(run.layers_at, *offset);
        let place = Place { table, group, segments, run };
        match &mut self.kind {
            Kind::Store { call, k, v } => {
                store(&self.layer, (call, *k, *v), sink, frame, &place, settings)
            }
            Kind::Attend(attend) => attend.run(&self.layer, sink, frame, &place, settings),
        }
    }
}

/// Where a layer's tables lie in a run.
struct Place<'a> {
    table: &'a LayerTable,
    group: &'a GroupTables,
    segments: Memory,
    run: &'a KvRun<'a>,
}

fn store(
    layer: &KvLayer,
    (call, k, v): (&mut Call, ValueId, ValueId),
    sink: &mut Sink<'_>,
    frame: &Frame,
    place: &Place<'_>,
    settings: &mut Vec<Setting>,
) -> Result<()> {
    const LOCAL: u64 = 32;
    let units = u64::from(layer.head_dim_k.max(layer.head_dim_v)).div_ceil(32);
    let items = frame.n_tokens * u64::from(layer.n_head_kv) * units;
    let groups = usize::try_from(items.div_ceil(LOCAL)).unwrap_or(usize::MAX);
    let passes = place.table.passes_of(&mut place.group.new_blocks.iter().copied());
    for pass in passes {
        settings.clear();
        memory(settings, frame.value(k)?);
        memory(settings, frame.value(v)?);
        memory(settings, at(place.run.run_at, place.group.slots));
        memory(settings, place.segments);
        for n in [
            place.table.n_segments,
            pass,
            u32_of(frame.n_tokens)?,
            layer.n_head_kv,
            place.group.block_len,
            u32_of(units)?,
        ] {
            settings.push(Setting::U32(n));
        }
        buffers(place.table, pass, settings)?;
        call.set(settings)?;
        call.enqueue(sink, "kv_store", [groups, 2], LOCAL as usize)?;
    }
    Ok(())
}

fn buffers(table: &LayerTable, pass: u32, settings: &mut Vec<Setting>) -> Result<()> {
    let buffers = table.passes.get(pass as usize);
    let buffers = buffers.ok_or_else(|| Error::invalid("a pass that is not there"))?;
    settings.extend(buffers.iter().map(|mem| Setting::Mem(*mem)));
    Ok(())
}

impl Attend {
    fn run(
        &mut self,
        layer: &KvLayer,
        sink: &mut Sink<'_>,
        frame: &Frame,
        place: &Place<'_>,
        settings: &mut Vec<Setting>,
    ) -> Result<()> {
        let run = place.run;
        let many = run.tables.longest > 1;
        let shape = self.shapes[usize::from(many)];
        let index = run.heights.iter().position(|height| *height == shape.height);
        let list = index.and_then(|index| run.tables.queries.get(index)).copied();
        let (queries, n_queries) = list.ok_or_else(|| Error::invalid("no list of queries"))?;
        let per_kv = u64::from(self.n_head / layer.n_head_kv.max(1));
        let groups = n_queries * u64::from(layer.n_head_kv) * per_kv.div_ceil(shape.heads);
        let (splits, split_len) = self.splits(frame, place, groups, &shape);
        let state = frame.regions.get(self.state.0).copied();
        let state = state.ok_or_else(|| Error::invalid("a region too few"))?;
        let y = frame.value(self.y)?;
        let q = frame.value(self.q)?;
        let sinks = self.sinks.unwrap_or(q);
        let n_tokens = u32_of(frame.n_tokens)?;
        let n_passes = u32_of(place.table.passes.len() as u64)?;
        let call = if many { &mut self.many } else { &mut self.few };
        for pass in 0..n_passes {
            settings.clear();
            memory(settings, q);
            memory(settings, y);
            memory(settings, state);
            memory(settings, at(run.run_at, queries));
            memory(settings, at(run.run_at, place.group.seqs));
            memory(settings, at(run.run_at, place.group.blocks));
            memory(settings, place.segments);
            memory(settings, sinks);
            for n in [
                place.table.n_segments,
                pass,
                u32::from(pass + 1 == n_passes),
                self.sinks.is_some().into(),
                n_tokens,
                self.n_head,
                layer.n_head_kv,
                place.group.block_len,
            ] {
                settings.push(Setting::U32(n));
            }
            settings.extend([Setting::F32(self.scale), Setting::F32(self.softcap)]);
            settings.extend([Setting::U32(self.window), Setting::U32(u32_of(split_len)?)]);
            buffers(place.table, pass, settings)?;
            call.set(settings)?;
            let groups = usize::try_from(groups).unwrap_or(usize::MAX);
            call.enqueue(sink, "attention", [groups, splits as usize], shape.wg as usize)?;
        }
        if splits > 1 {
            settings.clear();
            memory(settings, state);
            memory(settings, y);
            memory(settings, sinks);
            for n in [self.sinks.is_some().into(), u32_of(splits)?, n_tokens, self.n_head] {
                settings.push(Setting::U32(n));
            }
            self.combine.set(settings)?;
            let n = frame.n_tokens * u64::from(self.n_head) * u64::from(layer.head_dim_v);
            let groups = usize::try_from(n.div_ceil(64)).unwrap_or(usize::MAX);
            self.combine.enqueue(sink, "attention combine", [groups, 1], 64)?;
        }
        Ok(())
    }

    /// How many splits, and positions of each: enough groups to fill the device, and state that fits its region.
    fn splits(&self, frame: &Frame, place: &Place<'_>, groups: u64, shape: &Shape) -> (u64, u64) {
        let depth = u64::from(place.run.tables.depth);
        // Of a window, a query sees that much, and its group the tokens before it too.
        let seen = match self.window {
            0 => depth,
            window => depth.min(u64::from(window) + u64::from(shape.height)),
        };
        let seen = seen.max(1);
        let rows = (frame.n_tokens * u64::from(self.n_head)).max(1);
        let units = u64::from(place.run.facts.compute_units);
        let wanted = (units * 4).div_ceil(groups.max(1)).min(SPLITS_MAX);
        let wanted = if place.run.facts.cpu_kernels { 1 } else { wanted };
        // A split below a few tiles costs more in putting together than it wins.
        let useful = seen.div_ceil(shape.tile * 2);
        let splits = wanted.min(useful).min(self.state.1 / rows).max(1);
        let len = seen.div_ceil(splits).next_multiple_of(shape.tile);
        (seen.div_ceil(len), len)
    }
}
