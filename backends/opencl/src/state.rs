//! Ops that keep state: which kernel for which shape, where the records of a run's sequences lie, and a call for each eight buffers that hold them.
//!
//! Every sequence has records of its own, mostly in buffers of its own. What a run says of its sequences goes up with the run's tables: for each layer spans,
//! in the order of calls.

use crate::bound::is_vector_type;
use crate::buffer::{ClBuffer, device_place};
use crate::build::{Builder, input, output};
use crate::facts::Facts;
use crate::kv::{BUFFERS, Pass, RunTables, at};
use crate::launch::{Arg, Call, Frame, Memory, Setting, Sink, memory, settle, u32_of};
use crate::programs::{Source, file};
use ocl_core::ffi::cl_mem;
use tegula_sdk::program::{HeadOrder, Op, OpKind, Program};
use tegula_sdk::{Error, Result, Run};

const STATE: &[&str] = &[file::COMMON, file::STATE];
/// Bytes of a sequence's span; `kernels/state.cl` has its fields.
pub(crate) const SPAN_BYTES: u64 = 32;
/// Work-items of a group of the convolution, and the tokens that one of them takes.
const CONV_WG: u64 = 64;
const CONV_STRETCH: u64 = 32;
/// Longest kernel: its weights and rows are kept in registers.
const CONV_KERNEL_MAX: u64 = 64;
/// Work-items of a group of the gated delta rule: for processors, and for others.
const DELTA_CPU_WG: u64 = 16;
const DELTA_WG: u64 = 128;
/// Elements of a row of its state that a work-item has in registers.
const DELTA_EACH: u64 = 32;
/// Greatest row for processors, which keep it in memory.
const DELTA_CPU_MAX: u64 = 4096;
/// Tokens that it takes at once, and the local memory for them.
const DELTA_TOKENS: u64 = 16;
const DELTA_LOCAL: u64 = 30 << 10;

/// The state layer that an op names.
pub(crate) fn layer_of(op: &Op) -> Option<usize> {
    match op.kind {
        OpKind::ConvState { state_layer } | OpKind::GatedDelta { state_layer, .. } => {
            Some(state_layer as usize)
        }
        _ => None,
    }
}

/// A sequence's record: buffer and first byte, and of its span first row, rows, and whether it starts.
type Record = (cl_mem, u64, [u32; 3]);

/// The sequences whose records lie in the same few buffers.
#[derive(Debug, Clone)]
pub(crate) struct StateCall {
    buffers: Pass,
    /// First byte of their spans in the run's tables.
    spans: u64,
    n: usize,
}

#[expect(
    unsafe_code,
    reason = "handles of buffers are used by several threads, one after the other"
)]
// SAFETY: handles that any thread may use, in runs that the core orders.
unsafe impl Send for StateCall {}

/// Lists the records of all sequences that have tokens.
pub(crate) fn list(
    program: &Program,
    run: &Run<'_, ClBuffer>,
    tables: &mut RunTables,
) -> Result<()> {
    if program.state_layers.is_empty() {
        return Ok(());
    }
    let (pool, n_layers) = (run.state()?, program.state_layers.len());
    if pool.n_layers as usize != n_layers {
        let n = pool.n_layers;
        return Err(Error::invalid(format!("a state of {n} layers, the program has {n_layers}")));
    }
    let seqs: Vec<_> = (0..run.n_seqs()).map(|i| run.seq(i)).collect::<Result<_>>()?;
    let n: u64 = seqs.iter().map(|seq| u64::from(seq.n_tokens)).sum();
    if n != u64::from(run.n_tokens()) {
        let n_tokens = run.n_tokens();
        return Err(Error::invalid(format!("sequences of {n} tokens in a run of {n_tokens}")));
    }
    let mut slots: Vec<_> = seqs.iter().map(|seq| seq.state_slot).collect();
    slots.sort_unstable();
    if slots.windows(2).any(|pair| pair.first() == pair.last()) {
        return Err(Error::invalid("two sequences have one state slot"));
    }
    for (i, layer) in (0u32..).zip(&program.state_layers) {
        let mut places: Vec<Record> = Vec::with_capacity(seqs.len());
        for seq in seqs.iter().filter(|seq| seq.n_tokens > 0) {
            let record = pool.record(seq.state_slot, i)?;
            if layer.n_elements.checked_mul(4).is_none_or(|needed| needed > record.size) {
                let size = record.size;
                return Err(Error::invalid(format!("a record of {size} bytes, state layer {i}")));
            }
            let (mem, offset) = device_place(&record, "a state record")?;
            if !offset.is_multiple_of(4) {
                return Err(Error::invalid("a state record that is not aligned to 4 bytes"));
            }
            let span = [seq.first_token, seq.n_tokens, u32::from(seq.first_pos == 0)];
            places.push((mem, offset, span));
        }
        // Sequences of one buffer beside each other.
        places.sort_by_key(|(mem, ..)| mem.addr());
        let mut calls = Vec::new();
        let mut rest = places.as_slice();
        while !rest.is_empty() {
            let (call, after) = call(rest, tables);
            calls.push(call);
            rest = after;
        }
        tables.states.push(calls);
    }
    Ok(())
}

/// A call for as many sequences as its buffers reach; gives the others too.
fn call<'a>(places: &'a [Record], tables: &mut RunTables) -> (StateCall, &'a [Record]) {
    let mut buffers: Vec<cl_mem> = Vec::with_capacity(BUFFERS);
    let mut bytes = Vec::new();
    let mut n = 0;
    for (mem, offset, [first, n_tokens, starts]) in places {
        if buffers.last() != Some(mem) {
            if buffers.len() == BUFFERS {
                break;
            }
            buffers.push(*mem);
        }
        for word in [*first, *n_tokens, *starts, buffers.len() as u32 - 1] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(offset.to_le_bytes());
        bytes.extend([0; 8]);
        n += 1;
    }
    let first = buffers.first().copied().unwrap_or(std::ptr::null_mut());
    let buffers = std::array::from_fn(|i| buffers.get(i).copied().unwrap_or(first));
    let spans = tables.append(&bytes);
    (StateCall { buffers, spans, n }, places.get(n..).unwrap_or_default())
}

/// How an op is divided among work-items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Conv { kernel: u64, columns: u64, stretch: u64 },
    Delta { wg: u64, lanes: u64, tokens: u64, groups: u64 },
}

impl Form {
    /// `None` where no kernel takes the op's shape.
    pub(crate) fn new(facts: &Facts, program: &Program, op: &Op) -> Option<Self> {
        match op.kind {
            OpKind::ConvState { .. } => {
                let x = program.value(*op.inputs.first()?).ok()?;
                let w = program.value(*op.inputs.get(1)?).ok()?;
                let kernel = Some(w.row_len()).filter(|n| *n <= CONV_KERNEL_MAX)?;
                let stretch = CONV_STRETCH.max(kernel);
                let columns = x.row_len().div_ceil(CONV_WG);
                is_vector_type(w.dtype).then_some(Self::Conv { kernel, columns, stretch })
            }
            OpKind::GatedDelta { n_head_v, head_dim_k, head_dim_v, .. } => {
                let (dim_k, dim_v) = (u64::from(head_dim_k), u64::from(head_dim_v));
                let (wg, lanes, tokens) = if facts.cpu_kernels {
                    (DELTA_CPU_WG.min(dim_v), 1, 1)
                } else {
                    delta(facts.local_bytes, dim_k)?
                };
                let groups = u64::from(n_head_v) * dim_v.div_ceil((wg / lanes).max(1));
                let is_small = !facts.cpu_kernels || dim_k <= DELTA_CPU_MAX;
                let fits = wg > 0 && is_small && wg <= facts.work_group_max as u64;
                fits.then_some(Self::Delta { wg, lanes, tokens, groups })
            }
            _ => None,
        }
    }
}

/// Work-items of a group, those that share a row, and tokens at once.
fn delta(local_bytes: u64, dim_k: u64) -> Option<(u64, u64, u64)> {
    let lanes = [8, 16, 32].into_iter().find(|lanes| dim_k.div_ceil(*lanes) <= DELTA_EACH)?;
    let floats = 2 * dim_k + DELTA_WG / lanes + 3;
    // Partial sums of each work-item, twice.
    let beside = 16 * DELTA_WG + 512;
    let room = local_bytes.min(DELTA_LOCAL).checked_sub(beside)?;
    let tokens = DELTA_TOKENS.min(room / 4 / floats);
    (tokens > 0).then_some((DELTA_WG, lanes, tokens))
}

/// One kernel of an op.
#[derive(Debug)]
struct Part {
    call: Call,
    /// Arguments before the spans, and after.
    before: Vec<Arg>,
    after: Vec<Arg>,
}

/// An op that keeps state.
#[derive(Debug)]
pub(crate) struct StateOp {
    what: &'static str,
    layer: usize,
    form: Form,
    parts: Vec<Part>,
}

impl StateOp {
    pub(crate) fn new(builder: &Builder<'_>, op: &Op) -> Result<Self> {
        let facts = &builder.shared.facts;
        let none = || Error::unsupported(format!("{} of this size", op.kind.name()));
        let form = Form::new(facts, builder.program, op).ok_or_else(none)?;
        let layer = layer_of(op).ok_or_else(none)?;
        let parts = match form {
            Form::Conv { kernel, columns, stretch } => {
                conv(builder, op, (kernel, columns, stretch))?
            }
            Form::Delta { wg, lanes, tokens, .. } => {
                vec![gated_delta(builder, op, (wg, lanes, tokens))?]
            }
        };
        Ok(Self { what: op.kind.name(), layer, form, parts })
    }

    /// Enqueues the op for all sequences.
    pub(crate) fn run(
        &mut self,
        sink: &mut Sink<'_>,
        frame: &Frame,
        tables: &RunTables,
        run_at: Memory,
        settings: &mut Vec<Setting>,
    ) -> Result<()> {
        let calls = tables.states.get(self.layer);
        let calls = calls.ok_or_else(|| Error::invalid("a state layer that is not there"))?;
        let (groups, local) = match self.form {
            Form::Conv { columns, stretch, .. } => {
                (columns * u64::from(tables.longest).div_ceil(stretch), CONV_WG)
            }
            Form::Delta { groups, wg, .. } => (groups, wg),
        };
        let groups = usize::try_from(groups).unwrap_or(usize::MAX);
        for part in &mut self.parts {
            for call in calls {
                settings.clear();
                settle(&part.before, frame, settings)?;
                memory(settings, at(run_at, call.spans));
                settle(&part.after, frame, settings)?;
                settings.extend(call.buffers.iter().map(|mem| Setting::Mem(*mem)));
                part.call.set(settings)?;
                part.call.enqueue(sink, self.what, [groups, call.n], local as usize)?;
            }
        }
        Ok(())
    }
}

/// A kernel for each tile of the weight.
fn conv(
    builder: &Builder<'_>,
    op: &Op,
    (kernel, columns, stretch): (u64, u64, u64),
) -> Result<Vec<Part>> {
    let (x, w, y) = (input(op, 0)?, input(op, 1)?, output(op, 0)?);
    let bias = op.inputs.get(2).map(|id| builder.operand(*id)).transpose()?;
    let dtype = builder.program.value(w)?.dtype;
    let defines = [("KERNEL", kernel), ("STRETCH", stretch), ("WT", u64::from(dtype.id()))];
    let source = Source::new(STATE, &defines);
    let part = |tile: &crate::bound::TileAt| {
        Ok(Part {
            call: builder.call(&source, "conv_state")?,
            before: vec![
                builder.operand(x)?,
                Arg::Fixed(tile.at),
                bias.unwrap_or(builder.operand(x)?),
                Arg::Value(y),
            ],
            after: vec![
                Arg::U32(u32_of(builder.row_len(x)?)?),
                Arg::U32(u32_of(columns)?),
                Arg::U32(u32_of(tile.first_row)?),
                Arg::U32(u32_of(tile.n_rows)?),
                Arg::U32(bias.is_some().into()),
            ],
        })
    };
    builder.bound(w)?.tiles.iter().map(part).collect()
}

fn gated_delta(
    builder: &Builder<'_>,
    op: &Op,
    (wg, lanes, tokens): (u64, u64, u64),
) -> Result<Part> {
    let OpKind::GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale, .. } =
        op.kind
    else {
        return Err(Error::invalid("no gated delta rule"));
    };
    let source = Source::new(
        STATE,
        &[
            ("DK", head_dim_k.into()),
            ("DV", head_dim_v.into()),
            ("WG", wg),
            ("LANES", lanes),
            ("TOKENS", tokens),
        ],
    );
    let mut before =
        (0..5).map(|i| builder.operand(input(op, i)?)).collect::<Result<Vec<Arg>>>()?;
    before.push(Arg::Value(output(op, 0)?));
    let after = vec![
        Arg::U32(n_head_k),
        Arg::U32(n_head_v),
        Arg::U32((order == HeadOrder::Tiled).into()),
        Arg::F32(scale),
    ];
    Ok(Part { call: builder.call(&source, "gated_delta")?, before, after })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// Spans that name a buffer of another call would send one user's state into another's.
    #[test]
    fn calls_reach_every_record() {
        let places: Vec<_> = (0..21usize)
            .map(|i| (std::ptr::without_provenance_mut(1 + i / 2), i as u64, [i as u32, 1, 0]))
            .collect();
        let mut tables = RunTables::default();
        let (mut rest, mut seen) = (places.as_slice(), 0u32);
        while !rest.is_empty() {
            let (call, after) = call(rest, &mut tables);
            let spans = &tables.bytes[call.spans as usize..];
            for span in spans.as_chunks::<{ SPAN_BYTES as usize }>().0.iter().take(call.n) {
                let words = span.as_chunks::<4>().0;
                let word = |i: usize| u32::from_le_bytes(words[i]);
                assert_eq!((word(0), word(4)), (seen, seen));
                assert_eq!(call.buffers[word(3) as usize], places[seen as usize].0);
                seen += 1;
            }
            rest = after;
        }
        assert_eq!(seen, 21);
    }

    /// Heads that a model may have and that a device refuses would be missed when the model is planned.
    #[test]
    fn the_delta_rule_fits_local_memory() {
        for dim_k in [1, 33, 64, 128, 256, 512, 1024] {
            let (wg, lanes, tokens) = delta(32 << 10, dim_k).unwrap();
            let bytes = 4 * tokens * (2 * dim_k + wg / lanes + 3) + 16 * wg;
            assert!(bytes <= 32 << 10 && wg.is_multiple_of(lanes), "{dim_k}: {bytes}");
        }
        assert_eq!(delta(32 << 10, 2048), None);
    }
}
