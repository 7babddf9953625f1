//! What is done between models, on the host: reading tables row by row, turning by positions, the KV cache, and choosing from results.

#![expect(unsafe_code, reason = "ops write values that the core names by address")]

use crate::attention::{self, Params, Work};
use crate::buffer::Buffer;
use crate::kernels::Kernels;
use crate::kv::{self, GroupPlaces};
use crate::pool::Pool;
use crate::rope::Table;
use crate::slots::Slots;
use crate::tiles::Tiles;
use std::collections::HashMap;
use std::sync::Mutex;
use tegula_sdk::program::{Op, OpKind, Program, ValueId};
use tegula_sdk::{Error, Result, Run};

/// The ops that no model does.
pub(crate) fn is_between(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::Embed
            | OpKind::Rope { .. }
            | OpKind::KvStore { .. }
            | OpKind::Attention { .. }
            | OpKind::Argmax
            | OpKind::TopK { .. }
            | OpKind::GatherRows
    )
}

/// What these ops keep from run to run.
#[derive(Default)]
pub(crate) struct State {
    /// Tables of embed.
    pub(crate) tables: HashMap<ValueId, Tiles>,
    /// Sinks and rope factors.
    pub(crate) vectors: HashMap<ValueId, Vec<f32>>,
    ropes: Vec<Table>,
    /// Working memory, one for each thread.
    pub(crate) work: Vec<Mutex<Work>>,
    order: Vec<i32>,
}

/// The run and its surroundings.
pub(crate) struct Around<'a> {
    pub(crate) program: &'a Program,
    pub(crate) run: &'a Run<'a, Buffer>,
    pub(crate) slots: &'a Slots,
    /// Block tables by KV group.
    pub(crate) groups: &'a [GroupPlaces],
    pub(crate) pool: &'a Pool,
    pub(crate) kernels: Kernels,
}

fn id(op: &Op, i: usize) -> Result<ValueId> {
    let id = op.inputs.get(i).copied();
    id.ok_or_else(|| Error::invalid(format!("{} without input {i}", op.kind.name())))
}

impl State {
    /// Does one op.
    pub(crate) fn run(&mut self, around: &Around<'_>, op: &Op) -> Result<()> {
        let slots = around.slots;
        match op.kind {
            OpKind::Embed => self.embed(around, op),
            OpKind::Rope { .. } => self.rope(slots, op),
            OpKind::KvStore { kv_layer } => {
                let layer = layer(around, kv_layer)?;
                let group = group(around, layer.group)?;
                kv::store(around.run, group, layer, 0, slots.floats(id(op, 0)?)?)?;
                kv::store(around.run, group, layer, 1, slots.floats(id(op, 1)?)?)
            }
            OpKind::Attention { kv_layer, n_head, scale, softcap, window } => {
                let layer = layer(around, kv_layer)?;
                let params =
                    Params { n_head: n_head as usize, scale, softcap, window: window as usize };
                let sinks = op.inputs.get(1).and_then(|id| self.vectors.get(id));
                // SAFETY: the result is the op's own; its query is another value.
                let out = unsafe { slots.floats_mut(made(op, 0)?) }?;
                attention::attention(
                    around.run,
                    group(around, layer.group)?,
                    layer,
                    params,
                    slots.floats(id(op, 0)?)?,
                    sinks.map(Vec::as_slice),
                    out,
                    (around.pool, around.kernels, &self.work),
                )
            }
            OpKind::Argmax => argmax(around, op),
            OpKind::TopK { k } => self.top_k(around, op, k as usize),
            OpKind::GatherRows => gather_rows(around, op),
            _ => Err(Error::unsupported(format!("{} between models", op.kind.name()))),
        }
    }

    fn embed(&self, around: &Around<'_>, op: &Op) -> Result<()> {
        let table = self.tables.get(&id(op, 1)?);
        let table = table.ok_or_else(|| Error::invalid("an embedding table that is not bound"))?;
        // SAFETY: the result is the op's own.
        let out = unsafe { around.slots.floats_mut(made(op, 0)?) }?;
        let ids = around.slots.ints(id(op, 0)?)?;
        let width = usize::try_from(table.n_in).unwrap_or(usize::MAX);
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
            let row = u64::try_from(*id).ok().filter(|row| *row < table.n_rows);
            let row = row.ok_or_else(|| Error::invalid(format!("id {id} of {}", table.n_rows)))?;
            table.row(row, out)?;
        }
        Ok(())
    }

    fn rope(&mut self, slots: &Slots, op: &Op) -> Result<()> {
        let factors = op.inputs.get(2).and_then(|id| self.vectors.get(id));
        let factors = factors.map_or(&[][..], Vec::as_slice);
        let known = self.ropes.iter().position(|table| table.serves(&op.kind, factors));
        let index = known.unwrap_or(self.ropes.len());
        if known.is_none() {
            self.ropes.push(Table::new(&op.kind, factors));
        }
        // SAFETY: the result is the op's own.
        let out = unsafe { slots.floats_mut(made(op, 0)?) }?;
        let table = self.ropes.get_mut(index);
        let table = table.ok_or_else(|| Error::invalid("a rope without a table"))?;
        table.turn(&op.kind, slots.ints(id(op, 1)?)?, slots.floats(id(op, 0)?)?, out)
    }

    fn top_k(&mut self, around: &Around<'_>, op: &Op, k: usize) -> Result<()> {
        let (x, width) = rows(around, op)?;
        // SAFETY: both results are the op's own.
        let (ids, values) = unsafe {
            (around.slots.ints_mut(made(op, 0)?)?, around.slots.floats_mut(made(op, 1)?)?)
        };
        for ((row, ids), values) in
            x.chunks_exact(width).zip(ids.chunks_exact_mut(k)).zip(values.chunks_exact_mut(k))
        {
            self.order.clear();
            self.order.extend(0..i32::try_from(width).unwrap_or(i32::MAX));
            let value = |i: &i32| row.get(*i as usize).copied().unwrap_or(f32::NAN);
            // NaN counts as less than everything, and equals go by index.
            let key = |x: f32| if x.is_nan() { f32::NEG_INFINITY } else { x };
            let by = |a: &i32, b: &i32| key(value(b)).total_cmp(&(key(value(a)))).then(a.cmp(b));
            let by = |a: &i32, b: &i32| match (value(a) == value(b), a.cmp(b)) {
                (true, order) => order,
                _ => by(a, b),
            };
            if k < width {
                self.order.select_nth_unstable_by(k, by);
                self.order.truncate(k);
            }
            self.order.sort_unstable_by(by);
            for ((i, id), out) in self.order.iter().zip(ids).zip(values) {
                *id = *i;
                *out = value(i);
            }
        }
        Ok(())
    }
}

fn made(op: &Op, i: usize) -> Result<ValueId> {
    let id = op.outputs.get(i).copied();
    id.ok_or_else(|| Error::invalid(format!("{} without result {i}", op.kind.name())))
}

fn layer<'a>(around: &Around<'a>, kv_layer: u32) -> Result<&'a tegula_sdk::program::KvLayer> {
    let layer = around.program.kv_layers.get(kv_layer as usize);
    layer.ok_or_else(|| Error::invalid(format!("KV layer {kv_layer} is not there")))
}

fn group<'a>(around: &Around<'a>, index: u32) -> Result<&'a GroupPlaces> {
    let group = around.groups.get(index as usize);
    group.ok_or_else(|| Error::invalid(format!("KV group {index} is not there")))
}

/// The first input, and the length of its rows.
fn rows<'a>(around: &Around<'a>, op: &Op) -> Result<(&'a [f32], usize)> {
    let x = id(op, 0)?;
    let width = around.program.value(x)?.row_len();
    Ok((around.slots.floats(x)?, usize::try_from(width).unwrap_or(usize::MAX)))
}

fn argmax(around: &Around<'_>, op: &Op) -> Result<()> {
    let (x, width) = rows(around, op)?;
    // SAFETY: the result is the op's own.
    let out = unsafe { around.slots.ints_mut(made(op, 0)?) }?;
    for (row, out) in x.chunks_exact(width).zip(out) {
        let first = (f32::NEG_INFINITY, 0);
        let best = row
            .iter()
            .zip(0..)
            .fold(first, |best, (x, i)| if *x > best.0 { (*x, i) } else { best });
        *out = best.1;
    }
    Ok(())
}

fn gather_rows(around: &Around<'_>, op: &Op) -> Result<()> {
    let (x, width) = rows(around, op)?;
    // SAFETY: the result is the op's own.
    let out = unsafe { around.slots.floats_mut(made(op, 0)?) }?;
    let n_rows = x.len() / width.max(1);
    for (row, out) in around.slots.ints(id(op, 1)?)?.iter().zip(out.chunks_exact_mut(width)) {
        let from = usize::try_from(*row).ok().filter(|row| *row < n_rows);
        let from = from.ok_or_else(|| Error::invalid(format!("row {row} of {n_rows}")))?;
        out.copy_from_slice(&x[from * width..(from + 1) * width]);
    }
    Ok(())
}
