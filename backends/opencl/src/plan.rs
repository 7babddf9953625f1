//! What a program takes of scratch: its values by lifetime over groups of ops, and regions that live for the whole run.

use crate::attention::{layer_of, state_rows};
use crate::experts;
use crate::facts::Facts;
use crate::groups::{Group, group, planned};
use std::collections::HashSet;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Dim, OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch::{self, ScratchPlan, value_bytes};
use tegula_sdk::{Error, Result};

/// Groups, and where everything lies.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) groups: Vec<Group>,
    pub(crate) scratch: ScratchPlan,
    /// Extra region of each input, then of each output.
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Extra region of attention's running state, and the rows that fit it.
    pub(crate) state: (usize, u64),
    /// Extra region of ranking.
    pub(crate) rank: usize,
    /// Extra region of slots sorted by expert, and the byte of it where the slots follow their groups.
    pub(crate) lists: (usize, u64),
}

pub(crate) fn rows_max(dim: Dim, options: &CompileOptions) -> u64 {
    match dim {
        Dim::Fixed(n) => n,
        Dim::NTokens => options.n_tokens_max.into(),
        Dim::NOutputs => options.n_outputs_max.into(),
    }
}

/// Plans a program. Which weights lie in one tile is not known yet, and must not matter for scratch: groups are made as if all did. One that turns
/// out to have a weight in several tiles runs op by op, in the same places.
pub(crate) fn plan(facts: &Facts, program: &Program, options: &CompileOptions) -> Result<Plan> {
    let groups = group(program, &|_| true);
    let mut extra = Vec::new();
    for id in &program.inputs {
        extra.push(value_bytes(program, id.index(), options)?);
    }
    let outputs = extra.len();
    let mut seen: HashSet<ValueId> = HashSet::new();
    for id in &program.outputs {
        // A value that is named twice has one place.
        let bytes = if seen.insert(*id) { value_bytes(program, id.index(), options)? } else { 0 };
        extra.push(bytes);
    }
    let state = extra.len();
    let (mut row_bytes, mut heads, mut rows) = (0u64, 0u64, 0u64);
    let n_tokens = u64::from(options.n_tokens_max);
    for op in &program.ops {
        let (OpKind::Attention { n_head, .. }, Some((_, layer))) = (op.kind, layer_of(program, op))
        else {
            continue;
        };
        row_bytes = row_bytes.max((u64::from(layer.head_dim_v) + 2) * 4);
        heads = heads.max(n_head.into());
        rows = rows.max(state_rows(facts, n_head.into(), layer.n_head_kv.into(), n_tokens));
    }
    let least = n_tokens.checked_mul(heads).ok_or_else(|| Error::invalid("too many heads"))?;
    // More rows let a context be split; they are had where they fit, and never the reason for a smaller ubatch.
    let fit = options.scratch_chunk_max / row_bytes.max(1);
    let rows = rows.min(fit).max(least);
    extra.push(rows.saturating_mul(row_bytes));
    let mut rank = 0u64;
    for op in &program.ops {
        if let (OpKind::TopK { k }, Some(x)) = (op.kind, op.inputs.first()) {
            let rows = rows_max(program.value(*x)?.rows(), options);
            rank = rank.max(rows.saturating_mul(u64::from(k)).saturating_mul(8));
        }
    }
    extra.push(rank);
    let (groups_bytes, slots_bytes) = experts::list_bytes(facts, program, options)?;
    extra.push(groups_bytes.saturating_add(slots_bytes));
    let scratch = scratch::plan(&planned(program, &groups), options, &extra)?;
    Ok(Plan {
        groups,
        scratch,
        inputs: 0,
        outputs,
        state: (state, rows),
        rank: state + 1,
        lists: (state + 2, groups_bytes),
    })
}

/// Bytes of an input or result in a run of so many rows.
pub(crate) fn bytes_of(program: &Program, id: ValueId, rows: impl Fn(Dim) -> u64) -> Result<u64> {
    let value = program.value(id)?;
    if value.kind == ValueKind::Weight {
        return Err(Error::invalid("a weight among the operands of a run"));
    }
    let bytes = rows(value.rows()).checked_mul(value.row_len()).and_then(|n| n.checked_mul(4));
    bytes.ok_or_else(|| Error::invalid(format!("`{}` has over 2^64 bytes", value.name)))
}
