//! Ops that keep state between runs: each sequence's record is changed where it lies.

use super::failed;
use crate::executable::{Frame, Lists};
use crate::kernels::{ConvState, GatedDelta, HeadPairs, StateSeq};
use tegula_sdk::program::{HeadOrder, Op, OpKind};
use tegula_sdk::{Error, Result};

/// Fills `out` with the sequences and their records of a layer.
fn records(frame: &Frame<'_>, layer: u32, out: &mut Vec<StateSeq>) -> Result<()> {
    let state = frame.executable.program.state_layers.get(layer as usize);
    let state = state.ok_or_else(|| Error::invalid(format!("no state layer {layer}")))?;
    let (pool, bytes) = (frame.run.state()?, state.bytes());
    out.clear();
    for i in 0..frame.run.n_seqs() {
        let seq = frame.run.seq(i)?;
        let range = pool.record(seq.state_slot, layer)?;
        if range.size < bytes {
            let (slot, size) = (seq.state_slot, range.size);
            let why = format!("record {layer} of slot {slot} has {size} bytes of {bytes}");
            return Err(Error::invalid(why));
        }
        let record = range.buffer.ptr_mut(range.offset, bytes)?;
        if !record.addr().is_multiple_of(align_of::<f32>()) {
            let slot = seq.state_slot;
            let why = format!("record {layer} of slot {slot} is not aligned to 4 bytes");
            return Err(Error::invalid(why));
        }
        out.push(StateSeq {
            record: record.cast(),
            is_new: seq.first_pos == 0,
            first_row: seq.first_token as usize,
            n_rows: seq.n_tokens as usize,
        });
    }
    Ok(())
}

pub(super) fn conv(frame: &Frame<'_>, op: &Op, lists: &mut Lists) -> Result<()> {
    let (OpKind::ConvState { state_layer }, [x, weight, bias @ ..], [out]) =
        (&op.kind, op.inputs.as_slice(), op.outputs.as_slice())
    else {
        return Err(Error::invalid("conv_state without its values"));
    };
    records(frame, *state_layer, &mut lists.states)?;
    let matrix = frame.matrix(*weight)?;
    let mut args = ConvState {
        m: matrix.n_rows,
        kernel: matrix.n_in,
        dtype: matrix.dtype,
        tiles: &matrix.tiles,
        bias: bias.first().map(|id| frame.f32s(*id)).transpose()?,
        seqs: &lists.states,
        x: frame.f32s(*x)?,
        y: frame.f32s_mut(*out)?,
    };
    let workers = &frame.executable.workers;
    // SAFETY: tiles hold their rows (Matrix::new); records are as long as the layer says, and no two sequences have one slot
    // (checked when the run began). The host lets nobody else touch them during the run.
    unsafe { workers.kernels.conv_state(&workers.pool, &mut args, frame.work()?) }
        .map_err(|e| failed(&e))
}

pub(super) fn gated_delta(frame: &Frame<'_>, op: &Op, lists: &mut Lists) -> Result<()> {
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
        return Err(Error::invalid("no gated delta rule"));
    };
    let ([q, k, v, g, beta], [out]) = (op.inputs.as_slice(), op.outputs.as_slice()) else {
        return Err(Error::invalid("gated_delta without its values"));
    };
    records(frame, state_layer, &mut lists.states)?;
    let mut args = GatedDelta {
        n_head_k: n_head_k as usize,
        n_head_v: n_head_v as usize,
        head_dim_k: head_dim_k as usize,
        head_dim_v: head_dim_v as usize,
        pairs: match order {
            HeadOrder::Grouped => HeadPairs::Grouped,
            HeadOrder::Tiled => HeadPairs::Tiled,
        },
        scale,
        seqs: &lists.states,
        q: frame.f32s(*q)?,
        k: frame.f32s(*k)?,
        v: frame.f32s(*v)?,
        g: frame.f32s(*g)?,
        beta: frame.f32s(*beta)?,
        y: frame.f32s_mut(*out)?,
    };
    let workers = &frame.executable.workers;
    // SAFETY: as for the convolution.
    unsafe { workers.kernels.gated_delta(&workers.pool, &mut args) }.map_err(|e| failed(&e))
}
