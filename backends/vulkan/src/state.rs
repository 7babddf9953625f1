//! Ops that keep state: their workgroups, what the record of a run says of sequences, and their dispatches.
//!
//! A sequence's records are named by their addresses, which lie in the run's record (`shaders/state.glsl`): recorded commands serve every
//! division of a run's tokens among sequences. The number of workgroups is read from there too.

use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::pipelines::Kernel;
use crate::push::Push;
use crate::record::{Groups, Recorder, state_span};
use crate::shaders::Shader;
use crate::steps::Context;
use crate::weight::is_vector_type;
use tegula_sdk::program::{HeadOrder, Op, OpKind, Program, ValueId};
use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Result, Run};

/// Columns of a workgroup of the convolution, as its kernel has them.
const CONV_COLUMNS: u32 = 64;
/// Rows of a sequence that an invocation of it takes one after the other.
const CONV_STRETCH: u32 = 32;
/// Longest kernel: its weights and rows are kept in registers.
const CONV_KERNEL_MAX: u32 = 64;
/// Most invocations of a workgroup of the gated delta rule.
const DELTA_THREADS: u32 = 128;
/// Invocations that share a row of its state, where a subgroup has as many.
const DELTA_LANES: u32 = 8;
/// Elements that an invocation of it has in registers: wanted, and at most.
const DELTA_EACH: u32 = 32;
const DELTA_EACH_MAX: u32 = 128;
/// Tokens that it takes at once, and the shared memory for them.
const DELTA_TOKENS: u32 = 16;
const DELTA_SHARED: u32 = 30 << 10;

/// The workgroups of an op for each sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Grid {
    x: u32,
    /// Tokens of a stretch, where a sequence is divided.
    stretch: Option<u32>,
    /// Of the gated delta rule.
    delta: Delta,
}

/// How the gated delta rule is divided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Delta {
    threads: u32,
    lanes: u32,
    tokens: u32,
}

impl Grid {
    /// The workgroups of a run.
    pub(crate) fn groups(&self, run: &Run<'_, Buffer>, n_seqs: u32) -> Result<[u32; 3]> {
        let Some(stretch) = self.stretch else { return Ok([self.x, n_seqs, 1]) };
        let mut most = 0;
        for i in 0..run.n_seqs() {
            most = most.max(run.seq(i)?.n_tokens);
        }
        Ok([self.x, n_seqs, most.div_ceil(stretch)])
    }
}

impl Delta {
    fn new(subgroup_min: u32, dim_k: u32, dim_v: u32) -> Option<Self> {
        let widest = 1 << subgroup_min.clamp(1, 32).ilog2();
        let mut lanes = DELTA_LANES.min(widest);
        while dim_k.div_ceil(lanes) > DELTA_EACH && lanes < widest {
            lanes *= 2;
        }
        let rows = (DELTA_THREADS / lanes).min(dim_v.checked_next_power_of_two()?);
        // Whole subgroups of every size up to 32.
        let threads = (rows * lanes).max(32);
        let floats = dim_k.checked_mul(2)?.checked_add(threads / lanes + 3)?;
        let tokens = DELTA_TOKENS.min(DELTA_SHARED / 4 / floats);
        let fits = dim_k.div_ceil(lanes) <= DELTA_EACH_MAX && tokens > 0;
        fits.then_some(Self { threads, lanes, tokens })
    }
}

/// The workgroups of an op that keeps state; `None` where no kernel takes its shape.
pub(crate) fn grid(gpu: &Gpu, program: &Program, op: &Op) -> Option<Grid> {
    match op.kind {
        OpKind::ConvState { .. } => {
            let (x, w) = (program.value(*op.inputs.first()?).ok()?, op.inputs.get(1)?);
            let w = program.value(*w).ok()?;
            let kernel = u32::try_from(w.row_len()).ok().filter(|n| *n <= CONV_KERNEL_MAX)?;
            let x = u32::try_from(x.row_len()).ok()?.div_ceil(CONV_COLUMNS);
            let stretch = Some(CONV_STRETCH.max(kernel));
            is_vector_type(w.dtype).then_some(Grid { x, stretch, delta: Delta::default() })
        }
        OpKind::GatedDelta { n_head_v, head_dim_k, head_dim_v, .. } => {
            let delta = Delta::new(gpu.physical.subgroup_min, head_dim_k, head_dim_v)?;
            let x = n_head_v.checked_mul(head_dim_v.div_ceil(delta.threads / delta.lanes))?;
            (x <= 65_535).then_some(Grid { x, stretch: None, delta })
        }
        _ => None,
    }
}

/// The workgroups of all state layers.
pub(crate) fn grids(gpu: &Gpu, program: &Program) -> Result<Vec<Grid>> {
    let mut grids = vec![Grid::default(); program.state_layers.len()];
    for op in &program.ops {
        let (OpKind::ConvState { state_layer: layer }
        | OpKind::GatedDelta { state_layer: layer, .. }) = op.kind
        else {
            continue;
        };
        let grid = grid(gpu, program, op)
            .ok_or_else(|| Error::unsupported(format!("{} of this size", op.kind.name())))?;
        let slot = grids.get_mut(layer as usize);
        *slot.ok_or_else(|| Error::invalid("a state layer that is not there"))? = grid;
    }
    Ok(grids)
}

/// Appends what a run says of its sequences; gives how many have tokens.
pub(crate) fn spans(
    program: &Program,
    run: &Run<'_, Buffer>,
    tables: &mut Vec<u32>,
) -> Result<u32> {
    let (pool, n_layers) = (run.state()?, program.state_layers.len());
    if pool.n_layers as usize != n_layers {
        let n = pool.n_layers;
        return Err(Error::invalid(format!("a state of {n} layers, the program has {n_layers}")));
    }
    let (mut seqs, mut slots, mut next) = (Vec::new(), Vec::new(), 0u64);
    for i in 0..run.n_seqs() {
        let seq = run.seq(i)?;
        if u64::from(seq.first_token) != next {
            return Err(Error::invalid(format!("sequence {i} begins at row {}", seq.first_token)));
        }
        next += u64::from(seq.n_tokens);
        slots.push(seq.state_slot);
        if seq.n_tokens > 0 {
            seqs.push(seq);
        }
    }
    if next != u64::from(run.n_tokens()) {
        let n = run.n_tokens();
        return Err(Error::invalid(format!("sequences of {next} tokens in a run of {n}")));
    }
    slots.sort_unstable();
    if slots.windows(2).any(|pair| pair.first() == pair.last()) {
        return Err(Error::invalid("two sequences have one state slot"));
    }
    let n_seqs = u32::try_from(seqs.len()).map_err(|_| Error::invalid("2^32 sequences"))?;
    for seq in &seqs {
        tables.extend([seq.first_token, seq.n_tokens, seq.first_pos, n_seqs]);
    }
    for seq in &seqs {
        for (i, layer) in (0u32..).zip(&program.state_layers) {
            let record = pool.record(seq.state_slot, i)?;
            let needed = layer.n_elements.checked_mul(4).filter(|n| *n <= record.size);
            let needed = needed.ok_or_else(|| {
                let size = record.size;
                Error::invalid(format!("a record of {size} bytes for state layer {i}"))
            })?;
            let address = record.buffer.address(record.offset, needed)?;
            if !address.is_multiple_of(4) {
                return Err(Error::invalid("a state record that is not aligned to 4 bytes"));
            }
            tables.extend([address as u32, (address >> 32) as u32]);
        }
    }
    Ok(n_seqs)
}

impl Context<'_> {
    /// The indirect workgroups of a state layer.
    fn state_groups(&self, layer: u32) -> Groups {
        let words = self.exe.frame.layout.states + 4 * layer;
        Groups::At(self.places.record_buffer, 4 * u64::from(words))
    }

    fn n_state_layers(&self) -> u32 {
        u32::try_from(self.exe.program.state_layers.len()).unwrap_or(0)
    }

    pub(crate) fn conv_state(
        &self,
        recorder: &mut Recorder<'_>,
        op: &Op,
        layer: u32,
        y: ValueId,
    ) -> Result<()> {
        let (x, w) = (op.inputs[0], self.exe.matrix(op.inputs[1])?);
        let grid = self.exe.frame.states.get(layer as usize).copied().unwrap_or_default();
        let stretch = grid.stretch.ok_or_else(|| Error::invalid("a state layer of another op"))?;
        let bias = op.inputs.get(2).map_or(0, |id| self.at(*id));
        let number = match w.dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            _ => 2,
        };
        let kernel = Kernel::new(Shader::ConvState, &[(1, w.n_in), (2, number), (3, stretch)]);
        let state = state_span(layer);
        recorder.order(&[self.whole(x)?, state], &[self.whole(y)?, state]);
        for tile in &w.tiles {
            let push = Push::new()
                .u64(self.at(x))
                .u64(tile.address)
                .u64(bias)
                .u64(self.at(y))
                .u64(self.places.record)
                .u32(self.exe.frame.layout.states)
                .u32(layer)
                .u32(self.n_state_layers())
                .u32(w.n_rows)
                .u32(tile.first)
                .u32(tile.n);
            recorder.run(&kernel, &push, self.state_groups(layer), &[], &[])?;
        }
        Ok(())
    }

    pub(crate) fn gated_delta(
        &self,
        recorder: &mut Recorder<'_>,
        op: &Op,
        y: ValueId,
    ) -> Result<()> {
        let OpKind::GatedDelta {
            state_layer,
            n_head_k,
            n_head_v,
            head_dim_k,
            head_dim_v,
            order,
            scale,
        } = op.kind
        else {
            return Err(Error::invalid("a gated delta rule that is none"));
        };
        let grid = self.exe.frame.states.get(state_layer as usize).copied().unwrap_or_default();
        let kernel = Kernel::new(
            Shader::GatedDelta,
            &[
                (1, head_dim_k),
                (2, head_dim_v),
                (3, grid.delta.lanes),
                (4, grid.delta.tokens),
                (5, u32::from(order == HeadOrder::Tiled)),
                (20, grid.delta.threads),
            ],
        );
        let mut push = Push::new();
        let state = state_span(state_layer);
        let mut reads = vec![state];
        for id in &op.inputs {
            push = push.u64(self.at(*id));
            reads.push(self.whole(*id)?);
        }
        let push = push
            .u64(self.at(y))
            .u64(self.places.record)
            .u32(self.exe.frame.layout.states)
            .u32(state_layer)
            .u32(self.n_state_layers())
            .u32(n_head_k)
            .u32(n_head_v)
            .f32(scale);
        let groups = self.state_groups(state_layer);
        recorder.run(&kernel, &push, groups, &reads, &[self.whole(y)?, state])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Heads that a model may have and that no device could run would be refused at the first token, not when the model is planned.
    #[test]
    fn states_are_divided_within_limits() {
        for subgroup in [1, 4, 8, 16, 32, 64] {
            for (dim_k, dim_v) in [(1, 1), (128, 128), (33, 5), (64, 96), (256, 256), (512, 64)] {
                let delta = Delta::new(subgroup, dim_k, dim_v);
                if subgroup == 1 && dim_k > DELTA_EACH_MAX {
                    assert_eq!(delta, None);
                    continue;
                }
                let Delta { threads, lanes, tokens } = delta.unwrap();
                assert!(lanes <= subgroup && lanes.is_power_of_two() && tokens > 0);
                assert!(threads <= DELTA_THREADS.max(32) && threads.is_multiple_of(32));
                let floats = tokens * (2 * dim_k + threads / lanes + 3);
                assert!(4 * floats <= DELTA_SHARED, "{dim_k} {dim_v}");
            }
        }
        assert_eq!(Delta::new(32, u32::MAX, 1), None);
    }
}
