//! Each op of a program, handed to its kernel.
//!
//! Small ops are cut into pieces over the threads once they are long enough to be worth a wake-up; products, attention and ops with
//! state divide their own work.

#![expect(unsafe_code, reason = "kernels read weights and KvBlocks through addresses")]

mod columns;
mod experts;
mod state;

use crate::executable::{Frame, Lists};
use crate::kernels::{
    Attention, AttnSeq, EXPERT_PRODUCTS_MAX, Glu, KernelError, Kernels, KvStore, MatMul,
    RopeStyle as KernelStyle, Unary,
};
use crate::kv;
use crate::pool::Pool;
use std::sync::Mutex;
use tegula_sdk::abi::Status;
use tegula_sdk::program::{Activation, Op, OpKind, RopeStyle, ValueId, ValueKind};
use tegula_sdk::quant::dequantize_row_fn;
use tegula_sdk::{Error, Result};

/// Elements of a piece of a small op: tens of microseconds of work, several times a wake-up.
const PIECE: usize = 32 * 1024;

fn failed(error: &KernelError) -> Error {
    let status = match error {
        KernelError::Pool(_) => Status::PANIC,
        _ => Status::INVALID_ARGUMENT,
    };
    Error::new(status, error.to_string())
}

/// Runs the first of the ops, and those after it that share its work; gives how many.
pub(crate) fn run_first(frame: &Frame<'_>, ops: &[Op], lists: &mut Lists) -> Result<usize> {
    let Some(op) = ops.first() else { return Ok(0) };
    let most = match op.kind {
        OpKind::Matmul => 3,
        OpKind::MatmulExperts { .. } => EXPERT_PRODUCTS_MAX,
        _ => return run(frame, op, lists).map(|()| 1),
    };
    let mut n = 1;
    while n < most && ops.get(n).is_some_and(|next| may_join(frame, &ops[..n], next)) {
        n += 1;
    }
    match ops {
        _ if !matches!(op.kind, OpKind::Matmul) => experts::products(frame, &ops[..n]),
        [a, b, c, ..] if n == 3 => {
            matmuls(frame, &mut [args(frame, a)?, args(frame, b)?, args(frame, c)?])
        }
        [a, b, ..] if n == 2 => matmuls(frame, &mut [args(frame, a)?, args(frame, b)?]),
        _ => matmuls(frame, &mut [args(frame, op)?]),
    }?;
    Ok(n)
}

/// Whether `next` is a product of the same activations, and the same choices of experts, as `ops`, and writes where none of them
/// does: the plan only keeps values apart that are alive at the same op.
fn may_join(frame: &Frame<'_>, ops: &[Op], next: &Op) -> bool {
    let (Some(first), Some(out)) = (ops.first(), next.outputs.first()) else { return false };
    let is_weight = |id: &ValueId| {
        let value = frame.executable.program.value(*id);
        value.is_ok_and(|value| value.kind == ValueKind::Weight)
    };
    let apart = |op: &Op| {
        let other = op.outputs.first().and_then(|id| frame.span(*id).ok());
        let (Some(a), Ok(b)) = (other, frame.span(*out)) else { return false };
        a.end <= b.start || b.end <= a.start
    };
    let is_alike = match (&first.kind, &next.kind) {
        (OpKind::Matmul, OpKind::Matmul) => next.inputs.iter().skip(1).all(is_weight),
        (OpKind::MatmulExperts { n_expert: a }, OpKind::MatmulExperts { n_expert: b }) => {
            let n_in = |op: &Op| Some(frame.matrix(*op.inputs.get(1)?).ok()?.n_in);
            a == b && first.inputs.get(2) == next.inputs.get(2) && n_in(first) == n_in(next)
        }
        _ => false,
    };
    is_alike && next.inputs.first() == first.inputs.first() && ops.iter().all(apart)
}

/// Runs one op.
fn run(frame: &Frame<'_>, op: &Op, lists: &mut Lists) -> Result<()> {
    let input = |i: usize| {
        op.inputs.get(i).copied().ok_or_else(|| Error::invalid(format!("input {i} is missing")))
    };
    let out = op.outputs.first().copied();
    let out = || out.ok_or_else(|| Error::invalid("no output"));
    let kernels = frame.executable.workers.kernels;
    let pool = &*frame.executable.workers.pool;
    match op.kind {
        OpKind::Embed => embed(frame, pool, input(0)?, input(1)?, out()?),
        OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } | OpKind::L2Norm { .. } => {
            norm(frame, op, out()?)
        }
        OpKind::Matmul => matmuls(frame, &mut [args(frame, op)?]),
        OpKind::Rope { .. } => rope(frame, op, out()?),
        OpKind::KvStore { kv_layer } => kv_store(frame, kv_layer, input(0)?, input(1)?, lists),
        OpKind::Attention { .. } => attention(frame, op, out()?, lists),
        OpKind::Glu { activation } => {
            let (gate, up) = (frame.f32s(input(0)?)?, frame.f32s(input(1)?)?);
            let kernel = |at: std::ops::Range<usize>, y: &mut [f32]| match glu(activation) {
                Some(f) => kernels.glu(f, &gate[at.clone()], &up[at], y),
                None => {
                    activate(kernels, activation, &gate[at.clone()], y)?;
                    y.iter_mut().zip(&up[at]).for_each(|(y, up)| *y *= up);
                    Ok(())
                }
            };
            pieces(pool, frame.f32s_mut(out()?)?, 1, kernel)
        }
        OpKind::Unary { activation } => {
            map(frame, input(0)?, out()?, |k, x, y| activate(k, activation, x, y))
        }
        OpKind::Scale { factor } => map(frame, input(0)?, out()?, |k, x, y| k.scale(factor, x, y)),
        OpKind::Softcap { cap } => map(frame, input(0)?, out()?, |k, x, y| k.softcap(cap, x, y)),
        OpKind::Add => zip(frame, input(0)?, input(1)?, out()?, Kernels::add),
        OpKind::Mul => match frame.f32s(input(1)?)? {
            [number] => map(frame, input(0)?, out()?, |k, x, y| k.scale(*number, x, y)),
            _ => zip(frame, input(0)?, input(1)?, out()?, Kernels::mul),
        },
        OpKind::Slice { begin, len } => {
            columns::slice(frame, input(0)?, out()?, (frame.row_len(input(0)?)?, begin, len))
        }
        OpKind::SliceGroups { group, begin, len } => {
            columns::slice(frame, input(0)?, out()?, (group as usize, begin, len))
        }
        OpKind::Concat => {
            let (a, b, y) =
                (frame.f32s(input(0)?)?, frame.f32s(input(1)?)?, frame.f32s_mut(out()?)?);
            let (p, q) = (frame.row_len(input(0)?)?, frame.row_len(input(1)?)?);
            let rows = a.chunks_exact(p).zip(b.chunks_exact(q));
            for (y, (a, b)) in y.chunks_exact_mut(p + q).zip(rows) {
                y[..p].copy_from_slice(a);
                y[p..].copy_from_slice(b);
            }
            Ok(())
        }
        OpKind::ConcatGroups { group_a, group_b } => {
            columns::concat_groups(frame, op, out()?, [group_a as usize, group_b as usize])
        }
        OpKind::GatherRows => {
            let (x, rows, y) =
                (frame.f32s(input(0)?)?, frame.i32s(input(1)?)?, frame.f32s_mut(out()?)?);
            let n = frame.row_len(input(0)?)?;
            for (y, row) in y.chunks_exact_mut(n).zip(rows) {
                let from = usize::try_from(*row).ok().and_then(|row| x.chunks_exact(n).nth(row));
                y.copy_from_slice(from.ok_or_else(|| Error::invalid(format!("no row {row}")))?);
            }
            Ok(())
        }
        OpKind::Argmax => {
            let (x, y) = (frame.f32s(input(0)?)?, frame.i32s_mut(out()?)?);
            for (y, x) in y.iter_mut().zip(x.chunks_exact(frame.row_len(input(0)?)?)) {
                let index = kernels.argmax(x).and_then(|i| i32::try_from(i).ok());
                *y = index.ok_or_else(|| Error::invalid("a row without a number"))?;
            }
            Ok(())
        }
        OpKind::TopK { k } => top_k(frame, op, k as usize),
        OpKind::MatmulExperts { .. } => experts::products(frame, std::slice::from_ref(op)),
        OpKind::RouterTopk { .. } | OpKind::RouterTopkGrouped { .. } => experts::router(frame, op),
        OpKind::CombineExperts => experts::combine(frame, op),
        OpKind::ConvState { .. } => state::conv(frame, op, lists),
        OpKind::GatedDelta { .. } => state::gated_delta(frame, op, lists),
        OpKind::GluClamped { alpha, limit } => {
            let (gate, up) = (frame.f32s(input(0)?)?, frame.f32s(input(1)?)?);
            pieces(pool, frame.f32s_mut(out()?)?, 1, |at, y| {
                kernels.glu_clamped(alpha, limit, &gate[at.clone()], &up[at], y)
            })
        }
    }
}

/// Calls `kernel(range, piece)` for pieces of `y`, whose lengths are multiples of `unit` but for the last.
fn pieces(
    pool: &Pool,
    y: &mut [f32],
    unit: usize,
    kernel: impl Fn(std::ops::Range<usize>, &mut [f32]) -> Result<(), KernelError> + Sync,
) -> Result<()> {
    let n = y.len();
    let most = pool.n_threads() * 4;
    let count = (n / PIECE).clamp(1, most);
    if count == 1 {
        return kernel(0..n, y).map_err(|error| failed(&error));
    }
    let size = n.div_ceil(count).next_multiple_of(unit.max(1));
    let base = Pieces(y.as_mut_ptr());
    let fault: Mutex<Option<KernelError>> = Mutex::new(None);
    let ran = pool.run(n.div_ceil(size), |_, index| {
        let begin = index * size;
        let range = begin..(begin + size).min(n);
        // SAFETY: pieces of different indices do not overlap and lie inside `y`, which is borrowed for the call.
        let piece = unsafe { std::slice::from_raw_parts_mut(base.at(begin), range.len()) };
        if let Err(error) = kernel(range, piece) {
            *fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
        }
    });
    ran.map_err(|error| failed(&error.into()))?;
    match fault.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(failed(&error)),
        None => Ok(()),
    }
}

struct Pieces(*mut f32);

impl Pieces {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

// SAFETY: only used to make slices that do not overlap.
unsafe impl Sync for Pieces {}

fn map(
    frame: &Frame<'_>,
    x: ValueId,
    out: ValueId,
    kernel: impl Fn(Kernels, &[f32], &mut [f32]) -> Result<(), KernelError> + Sync,
) -> Result<()> {
    let workers = &frame.executable.workers;
    let x = frame.f32s(x)?;
    let kernel = |at: std::ops::Range<usize>, y: &mut [f32]| kernel(workers.kernels, &x[at], y);
    pieces(&workers.pool, frame.f32s_mut(out)?, 1, kernel)
}

/// Makes a row, or many, of two.
type Zip = fn(Kernels, &[f32], &[f32], &mut [f32]) -> Result<(), KernelError>;

fn zip(frame: &Frame<'_>, a: ValueId, b: ValueId, out: ValueId, kernel: Zip) -> Result<()> {
    let workers = &frame.executable.workers;
    let (a, b, y) = (frame.f32s(a)?, frame.f32s(b)?, frame.f32s_mut(out)?);
    let n = b.len();
    if n == a.len() {
        return pieces(&workers.pool, y, 1, |at, y| {
            kernel(workers.kernels, &a[at.clone()], &b[at], y)
        });
    }
    pieces(&workers.pool, y, n, |at, y| {
        for (y, a) in y.chunks_exact_mut(n).zip(a[at].chunks_exact(n)) {
            kernel(workers.kernels, a, b, y)?;
        }
        Ok(())
    })
}

fn activate(
    kernels: Kernels,
    activation: Activation,
    x: &[f32],
    y: &mut [f32],
) -> Result<(), KernelError> {
    let function = match activation {
        Activation::Silu => Unary::Silu,
        Activation::GeluTanh => Unary::GeluTanh,
        Activation::GeluErf => Unary::GeluErf,
        Activation::Relu => Unary::Relu,
        Activation::Sigmoid => Unary::Sigmoid,
        Activation::Tanh => Unary::Tanh,
        // Models use it on a number for each head, so no vector form is worth its lines.
        Activation::Softplus => {
            let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
            y.iter_mut().zip(x).for_each(|(y, x)| *y = softplus(*x));
            return Ok(());
        }
    };
    kernels.unary(function, x, y)
}

/// The fused kernel of a gated unit. No model gates by tanh, which is done in two passes.
fn glu(activation: Activation) -> Option<Glu> {
    Some(match activation {
        Activation::Silu => Glu::Silu,
        Activation::GeluTanh => Glu::GeluTanh,
        Activation::GeluErf => Glu::GeluErf,
        Activation::Relu => Glu::Relu,
        Activation::Sigmoid => Glu::Sigmoid,
        Activation::Tanh | Activation::Softplus => return None,
    })
}

fn embed(frame: &Frame<'_>, pool: &Pool, ids: ValueId, table: ValueId, out: ValueId) -> Result<()> {
    let (ids, matrix, y) = (frame.i32s(ids)?, frame.matrix(table)?, frame.f32s_mut(out)?);
    let n = matrix.n_in;
    let row = |id: i32| usize::try_from(id).ok().and_then(|id| matrix.row(id));
    if let Some(id) = ids.iter().find(|id| row(**id).is_none()) {
        return Err(Error::invalid(format!("token {id} of {} rows", matrix.n_rows)));
    }
    let decode = dequantize_row_fn(matrix.dtype);
    pieces(pool, y, n, |at, y| {
        for (y, id) in y.chunks_exact_mut(n).zip(&ids[at.start / n..]) {
            if let Some(row) = row(*id) {
                // SAFETY: the row lies inside its tile, which holds `row_bytes` for each of its rows.
                decode(unsafe { std::slice::from_raw_parts(row, matrix.row_bytes) }, y);
            }
        }
        Ok(())
    })
}

fn norm(frame: &Frame<'_>, op: &Op, out: ValueId) -> Result<()> {
    let workers = &frame.executable.workers;
    let kernels = workers.kernels;
    let vector = |i: usize| op.inputs.get(i).map(|id| frame.f32s(*id)).transpose();
    let (x, weight, bias) = (vector(0)?.unwrap_or(&[]), vector(1)?, vector(2)?);
    let y = frame.f32s_mut(out)?;
    match op.kind {
        OpKind::RmsNorm { eps, n } => pieces(&workers.pool, y, n as usize, |at, y| {
            kernels.rms_norm(n as usize, eps, &x[at], weight, y)
        }),
        OpKind::LayerNorm { eps, n } => pieces(&workers.pool, y, n as usize, |at, y| {
            kernels.layer_norm(n as usize, eps, &x[at], weight, bias, y)
        }),
        OpKind::L2Norm { eps, n } => pieces(&workers.pool, y, n as usize, |at, y| {
            kernels.l2_norm(n as usize, eps, &x[at], y)
        }),
        _ => Err(Error::invalid("no norm")),
    }
}

/// The arguments of a matmul.
fn args<'a>(frame: &Frame<'a>, op: &Op) -> Result<MatMul<'a>> {
    let ([x, weight, ..], [out, ..]) = (op.inputs.as_slice(), op.outputs.as_slice()) else {
        return Err(Error::invalid("matmul without its values"));
    };
    let matrix = frame.matrix(*weight)?;
    let bias = op.inputs.get(2).map(|id| frame.f32s(*id)).transpose()?;
    let (x, y) = (frame.f32s(*x)?, frame.f32s_mut(*out)?);
    Ok(MatMul {
        dtype: matrix.dtype,
        n_in: matrix.n_in,
        n_out: matrix.n_rows,
        tiles: &matrix.tiles,
        n_tokens: x.len() / matrix.n_in.max(1),
        x,
        bias,
        y,
    })
}

fn matmuls(frame: &Frame<'_>, products: &mut [MatMul<'_>]) -> Result<()> {
    let workers = &frame.executable.workers;
    // SAFETY: every tile was checked to hold its rows (Matrix::new) and is only read while the executable lives.
    unsafe { workers.kernels.matmuls(&workers.pool, products, frame.work()?) }
        .map_err(|e| failed(&e))
}

fn rope(frame: &Frame<'_>, op: &Op, out: ValueId) -> Result<()> {
    let OpKind::Rope { style, head_dim, n_rot, .. } = op.kind else {
        return Err(Error::invalid("no rope"));
    };
    let workers = &frame.executable.workers;
    let x = *op.inputs.first().ok_or_else(|| Error::invalid("rope without its input"))?;
    let (row, x, y) = (frame.row_len(x)?, frame.f32s(x)?, frame.f32s_mut(out)?);
    let table = frame.rope_table(&op.kind, &op.inputs)?;
    let style = match style {
        RopeStyle::Adjacent => KernelStyle::Interleaved,
        RopeStyle::Neox => KernelStyle::Halves,
    };
    let (n_rot, head_dim) = (n_rot as usize, head_dim as usize);
    pieces(&workers.pool, y, row, |at, y| {
        y.copy_from_slice(&x[at.clone()]);
        let table = &table[at.start / row * n_rot..at.end / row * n_rot];
        workers.kernels.rope(style, n_rot, row / head_dim, head_dim, table, y)
    })
}

fn kv_store(
    frame: &Frame<'_>,
    kv_layer: u32,
    k: ValueId,
    v: ValueId,
    lists: &mut Lists,
) -> Result<()> {
    let layer = frame.executable.program.kv_layers.get(kv_layer as usize);
    let layer = layer.ok_or_else(|| Error::invalid(format!("no KV layer {kv_layer}")))?;
    let group = frame.run.kv_group(layer.group)?;
    let bytes = layer.block_bytes(group.block_len);
    let (k_bytes, v_bytes) = bytes.ok_or_else(|| Error::invalid("a KvBlock over 2^64 bytes"))?;
    for (side, rows, dtype, head_dim, block_bytes) in [
        (0, frame.f32s(k)?, layer.dtype_k, layer.head_dim_k, k_bytes),
        (1, frame.f32s(v)?, layer.dtype_v, layer.head_dim_v, v_bytes),
    ] {
        lists.slots.clear();
        for (i, blocks) in lists.blocks.iter().enumerate() {
            let seq = frame.run.seq(i)?;
            let blocks = &blocks[layer.group as usize];
            lists.k_blocks.clear();
            blocks.addresses(&group, layer.index, side, block_bytes, &mut lists.k_blocks)?;
            let (pos, n, len) = (seq.first_pos, seq.n_tokens, group.block_len);
            kv::slots(&lists.k_blocks, pos, n, len, &mut lists.slots)?;
        }
        let args = KvStore {
            dtype,
            n_head_kv: layer.n_head_kv as usize,
            head_dim: head_dim as usize,
            block_len: group.block_len as usize,
            rows,
            slots: &lists.slots,
        };
        // SAFETY: slots are places in KvBlocks of writable tiles whose sizes were checked; each token has its own.
        unsafe { frame.executable.workers.kernels.kv_store(&args) }.map_err(|e| failed(&e))?;
    }
    Ok(())
}

fn attention(frame: &Frame<'_>, op: &Op, out: ValueId, lists: &mut Lists) -> Result<()> {
    let OpKind::Attention { kv_layer, n_head, scale, softcap, window } = op.kind else {
        return Err(Error::invalid("no attention"));
    };
    let layer = frame.executable.program.kv_layers.get(kv_layer as usize);
    let layer = layer.ok_or_else(|| Error::invalid(format!("no KV layer {kv_layer}")))?;
    let group = frame.run.kv_group(layer.group)?;
    let bytes = layer.block_bytes(group.block_len);
    let (k_bytes, v_bytes) = bytes.ok_or_else(|| Error::invalid("a KvBlock over 2^64 bytes"))?;
    let query = *op.inputs.first().ok_or_else(|| Error::invalid("attention without a query"))?;
    let sinks = op.inputs.get(1).map(|id| frame.f32s(*id)).transpose()?;
    let (q, y, work) = (frame.f32s(query)?, frame.f32s_mut(out)?, frame.work()?);
    let (q_row, y_row) = (frame.row_len(query)?, frame.row_len(out)?);
    let workers = &frame.executable.workers;
    // One sequence at a time: its rows are a piece of the ubatch, and the kernel divides it over the threads.
    for (i, blocks) in lists.blocks.iter().enumerate() {
        let seq = frame.run.seq(i)?;
        let blocks = &blocks[layer.group as usize];
        lists.k_blocks.clear();
        lists.v_blocks.clear();
        blocks.addresses(&group, layer.index, 0, k_bytes, &mut lists.k_blocks)?;
        blocks.addresses(&group, layer.index, 1, v_bytes, &mut lists.v_blocks)?;
        let (first, n) = (seq.first_token as usize, seq.n_tokens as usize);
        let seqs = [AttnSeq {
            k_blocks: &lists.k_blocks,
            v_blocks: &lists.v_blocks,
            n_kv: seq.first_pos as usize + n,
            first_row: 0,
            n_rows: n,
        }];
        let mut args = Attention {
            n_head: n_head as usize,
            n_head_kv: layer.n_head_kv as usize,
            head_dim_k: layer.head_dim_k as usize,
            head_dim_v: layer.head_dim_v as usize,
            k_dtype: layer.dtype_k,
            v_dtype: layer.dtype_v,
            block_len: group.block_len as usize,
            scale,
            softcap: (softcap != 0.0).then_some(softcap),
            window: (window != 0).then_some(window),
            causal: true,
            sinks,
            seqs: &seqs,
            positions: &lists.positions[first..first + n],
            q: &q[first * q_row..(first + n) * q_row],
            out: &mut y[first * y_row..(first + n) * y_row],
        };
        // SAFETY: the blocks lie in tiles whose sizes were checked, and nobody writes them while this op runs.
        unsafe { workers.kernels.attention(&workers.pool, &mut args, work) }
            .map_err(|e| failed(&e))?;
    }
    Ok(())
}

fn top_k(frame: &Frame<'_>, op: &Op, k: usize) -> Result<()> {
    let ([x, ..], [ids, values]) = (op.inputs.as_slice(), op.outputs.as_slice()) else {
        return Err(Error::invalid("top_k without its values"));
    };
    let row = frame.row_len(*x)?;
    let (x, ids, values) = (frame.f32s(*x)?, frame.i32s_mut(*ids)?, frame.f32s_mut(*values)?);
    let outputs = ids.chunks_exact_mut(k).zip(values.chunks_exact_mut(k));
    for (x, (ids, values)) in x.chunks_exact(row).zip(outputs) {
        // SAFETY: i32 and u32 have the same size and alignment, and every pattern is valid for both.
        let ids = unsafe { std::slice::from_raw_parts_mut(ids.as_mut_ptr().cast(), ids.len()) };
        frame.executable.workers.kernels.top_k(x, values, ids).map_err(|e| failed(&e))?;
    }
    Ok(())
}
