//! Ops over experts: the router, products with the chosen experts, and their weighted sum.

use super::{failed, pieces};
use crate::executable::Frame;
use crate::kernels::generic::shared::SharedMut;
use crate::kernels::{
    Choices, EXPERT_PRODUCTS_MAX, ExpertWeights, Gating, KernelError, Router, RouterGroups,
};
use std::sync::Mutex;
use tegula_sdk::program::{Op, OpKind, RouterGating};
use tegula_sdk::{Error, Result};

/// Logits of a task of the router: some ten microseconds of exponentials.
const ROUTER_PIECE: usize = 4 * 1024;

/// One op, or two of the same choices.
pub(super) fn products(frame: &Frame<'_>, ops: &[Op]) -> Result<()> {
    let missing = || Error::invalid("matmul_experts without its values");
    let first = ops.first().ok_or_else(missing)?;
    let (OpKind::MatmulExperts { n_expert }, [x, weight, ids, ..]) =
        (&first.kind, first.inputs.as_slice())
    else {
        return Err(missing());
    };
    let choices = Choices {
        n_expert: *n_expert as usize,
        k: frame.row_len(*ids)?,
        ids: frame.i32s(*ids)?,
        n_in: frame.matrix(*weight)?.n_in,
        x: frame.f32s(*x)?,
    };
    match ops {
        [one] => run(frame, &choices, &mut [weights(frame, one, *n_expert)?]),
        [one, two, ..] => {
            const { assert!(EXPERT_PRODUCTS_MAX == 2) };
            let mut both = [weights(frame, one, *n_expert)?, weights(frame, two, *n_expert)?];
            run(frame, &choices, &mut both)
        }
        [] => Err(missing()),
    }
}

fn run(frame: &Frame<'_>, choices: &Choices<'_>, weights: &mut [ExpertWeights<'_>]) -> Result<()> {
    let workers = &frame.executable.workers;
    // SAFETY: every tile was checked to hold its rows (Matrix::new) and is only read while the executable lives.
    unsafe { workers.kernels.matmul_experts(&workers.pool, choices, weights, frame.work()?) }
        .map_err(|e| failed(&e))
}

fn weights<'a>(frame: &Frame<'a>, op: &Op, n_expert: u32) -> Result<ExpertWeights<'a>> {
    let ([_, weight, _, bias @ ..], [out]) = (op.inputs.as_slice(), op.outputs.as_slice()) else {
        return Err(Error::invalid("matmul_experts without its values"));
    };
    let matrix = frame.matrix(*weight)?;
    let bias = bias.first().map(|id| frame.matrix(*id)).transpose()?;
    Ok(ExpertWeights {
        dtype: matrix.dtype,
        n_rows: matrix.n_rows / (n_expert as usize).max(1),
        tiles: &matrix.tiles,
        bias: bias.map(|bias| bias.tiles.as_slice()),
        y: frame.f32s_mut(*out)?,
    })
}

pub(super) fn router(frame: &Frame<'_>, op: &Op) -> Result<()> {
    let ([logits, bias @ ..], [ids, weights]) = (op.inputs.as_slice(), op.outputs.as_slice())
    else {
        return Err(Error::invalid("router_topk without its values"));
    };
    let (k, gating, normalise, scale, groups) = match &op.kind {
        OpKind::RouterTopk { k, gating, normalise, scale } => {
            (k, gating, normalise, scale, RouterGroups::ONE)
        }
        OpKind::RouterTopkGrouped {
            k,
            gating,
            normalise,
            scale,
            n_group,
            n_group_used,
            n_score,
        } => {
            let [n_group, n_used, n_score] =
                [*n_group, *n_group_used, *n_score].map(|n| n as usize);
            (k, gating, normalise, scale, RouterGroups { n_group, n_used, n_score })
        }
        _ => return Err(Error::invalid("not a router")),
    };
    let n_expert = frame.row_len(*logits)?;
    let gating = match gating {
        RouterGating::Softmax => Gating::Softmax,
        RouterGating::Sigmoid => Gating::Sigmoid,
        RouterGating::SoftmaxSelected => Gating::SoftmaxSelected,
    };
    let bias = bias.first().map(|id| frame.f32s(*id)).transpose()?;
    let (k, normalise, scale) = (*k as usize, *normalise, *scale);
    let router = Router { n_expert, k, gating, normalise, scale, bias, groups };
    let logits = frame.f32s(*logits)?;
    let (ids, weights) = (frame.i32s_mut(*ids)?, frame.f32s_mut(*weights)?);
    // SAFETY: i32 and u32 have the same size and alignment, and every pattern is valid for both.
    let ids = unsafe { std::slice::from_raw_parts_mut(ids.as_mut_ptr().cast::<u32>(), ids.len()) };
    let workers = &frame.executable.workers;
    let n = logits.len() / n_expert;
    let rows = (ROUTER_PIECE / n_expert).max(1);
    let (ids, weights) = (SharedMut::new(ids), SharedMut::new(weights));
    let work = SharedMut::new(frame.work()?);
    let fault: Mutex<Option<KernelError>> = Mutex::new(None);
    let ran = workers.pool.run(n.div_ceil(rows), |worker, task| {
        let (first, end) = (task * rows, n.min((task + 1) * rows));
        let len = Router::scratch_len(n_expert);
        // SAFETY: tasks have rows of their own, and a worker number is in use once at a time.
        let (ids, weights, scratch) = unsafe {
            let n = (end - first) * k;
            (ids.slice(first * k, n), weights.slice(first * k, n), work.slice(worker * len, len))
        };
        let logits = &logits[first * n_expert..end * n_expert];
        let done = workers.kernels.router_topk(&router, logits, ids, weights, scratch);
        if let Err(error) = done {
            *fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
        }
    });
    ran.map_err(|error| failed(&error.into()))?;
    match fault.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(failed(&error)),
        None => Ok(()),
    }
}

pub(super) fn combine(frame: &Frame<'_>, op: &Op) -> Result<()> {
    let ([x, weights], [out]) = (op.inputs.as_slice(), op.outputs.as_slice()) else {
        return Err(Error::invalid("combine_experts without its values"));
    };
    let (k, m) = (frame.row_len(*weights)?, frame.row_len(*out)?);
    let (x, weights, y) = (frame.f32s(*x)?, frame.f32s(*weights)?, frame.f32s_mut(*out)?);
    let workers = &frame.executable.workers;
    pieces(&workers.pool, y, m, |at, y| {
        let (x, rows) = (&x[at.start * k..at.end * k], at.start / m..at.end / m);
        workers.kernels.combine_experts(m, x, &weights[rows.start * k..rows.end * k], y)
    })
}
