//! One compiled model of an executable: its constants, its request, and how a run's values are given to it.

#![expect(
    unsafe_code,
    reason = "constants are written into OpenVINO's memory, values are tensors over the core's"
)]

use crate::emit;
use crate::engine::Engine;
use crate::ir::{Blob, Fill, Ir};
use crate::ov::{Context, Element, Request, Tensor};
use crate::partition::ModelStep;
use crate::slots::{Slot, Slots};
use crate::tiles::Tiles;
use crate::weights::{Form, convert};
use std::collections::HashMap;
use tegula_sdk::program::{Dim, Program, Value, ValueId};
use tegula_sdk::{Error, Result};

/// Rows that a model is given at once. All its ops work row by row, so more rows are several runs: what OpenVINO holds for a model's inside grows with
/// the rows, and there is a model to each layer.
pub(crate) const ROWS_MAX: u64 = 128;

/// A value that crosses the model's border.
struct Operand {
    id: ValueId,
    element: Element,
    row_len: i64,
    is_vector: bool,
    rows: Dim,
    /// Address and rows that the request has.
    bound: Option<(usize, u64)>,
}

impl Operand {
    fn new(id: ValueId, value: &Value) -> Result<Self> {
        let row_len =
            i64::try_from(value.row_len()).map_err(|_| Error::invalid("a row of 2^63 elements"))?;
        Ok(Self {
            id,
            element: emit::element(value),
            row_len,
            is_vector: value.dims.len() == 1,
            rows: value.rows(),
            bound: None,
        })
    }

    fn tensor(&self, context: Option<&Context>, slot: Slot, rows: u64) -> Result<Tensor> {
        let rows = i64::try_from(rows).unwrap_or(i64::MAX);
        let dims = [rows, self.row_len];
        let dims = if self.is_vector { &dims[..1] } else { &dims[..] };
        // SAFETY: the slot has these rows; a request is given new tensors whenever places change, and is run only during the run they are valid for.
        unsafe {
            match context.filter(|_| slot.is_shared) {
                Some(context) => {
                    let texts = [("SHARED_MEM_TYPE", "USM_USER_BUFFER")];
                    let handle = [("MEM_HANDLE", slot.ptr.cast_const().cast())];
                    context.tensor(self.element, dims, &texts, &handle)
                }
                None => Tensor::of_host(self.element, dims, slot.ptr),
            }
        }
    }
}

/// A model that can be run.
pub(crate) struct ModelRun {
    request: Request,
    context: Option<Context>,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    /// Whether rows may be given in pieces: every value has a row for each token.
    is_by_token: bool,
}

impl ModelRun {
    /// Writes, fills and compiles a model.
    pub(crate) fn new(
        engine: &Engine,
        program: &Program,
        step: &ModelStep,
        weights: &HashMap<ValueId, Tiles>,
    ) -> Result<Self> {
        let ir = emit::model(program, step, engine.constant_max)?;
        let memory = ir.memory()?;
        if let Some(memory) = &memory {
            fill(&ir, memory, weights)?;
        }
        let model = engine.core.read(&ir.xml(&program.name), memory.as_ref())?;
        let compiled = engine.compile(&model, ir.size)?;
        let request = compiled.request()?;
        let operands = |ids: &[ValueId]| {
            ids.iter().map(|id| Operand::new(*id, program.value(*id)?)).collect::<Result<Vec<_>>>()
        };
        let (inputs, outputs) = (operands(&step.inputs)?, operands(&step.outputs)?);
        let is_by_token = inputs.iter().chain(&outputs).all(|operand| operand.rows == Dim::NTokens);
        let context = engine.context.clone();
        Ok(Self { request, context, inputs, outputs, is_by_token })
    }

    /// Runs it on the values of a run.
    pub(crate) fn run(&mut self, program: &Program, slots: &Slots, n_tokens: u64) -> Result<()> {
        let rows = |operand: &Operand| Ok::<_, Error>(slots.rows(program.value(operand.id)?));
        let mut wanted = 0;
        for output in &self.outputs {
            wanted = wanted.max(rows(output)?);
        }
        if wanted == 0 {
            return Ok(());
        }
        let piece = if self.is_by_token { ROWS_MAX } else { u64::MAX };
        let mut first = 0;
        while first < n_tokens || first == 0 {
            let n = piece.min(n_tokens - first);
            let mut spare = Vec::new();
            for is_input in [true, false] {
                let operands = if is_input { &mut self.inputs } else { &mut self.outputs };
                for (index, operand) in operands.iter_mut().enumerate() {
                    let mut slot = slots.get(operand.id)?;
                    let mut n_rows = slots.rows(program.value(operand.id)?);
                    if self.is_by_token {
                        n_rows = n;
                        slot = part(slot, operand, first, n)?;
                    }
                    if n_rows == 0 {
                        // Nothing is wanted of this value, but of others: one row that nobody reads stands for it.
                        let len = usize::try_from(operand.row_len).unwrap_or(usize::MAX);
                        spare.push(vec![0u32; len]);
                        n_rows = 1;
                        let row = spare.last_mut().map(|row| row.as_mut_ptr().cast());
                        slot.ptr = row.unwrap_or(slot.ptr);
                        slot.is_shared = false;
                    }
                    let place = (slot.ptr.addr(), n_rows);
                    if operand.bound != Some(place) || !spare.is_empty() {
                        let tensor = operand.tensor(self.context.as_ref(), slot, n_rows)?;
                        operand.bound = None;
                        match is_input {
                            true => self.request.input(index, &tensor)?,
                            false => self.request.output(index, &tensor)?,
                        }
                        operand.bound = spare.is_empty().then_some(place);
                    }
                }
            }
            self.request.infer()?;
            first = first.saturating_add(n).max(1);
            if !self.is_by_token {
                break;
            }
        }
        Ok(())
    }
}

/// Rows `first .. first + n` of a value.
fn part(slot: Slot, operand: &Operand, first: u64, n: u64) -> Result<Slot> {
    let row = usize::try_from(operand.row_len).ok().and_then(|n| n.checked_mul(4));
    let at = |rows: u64| usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(row?));
    match (at(first), at(n)) {
        (Some(begin), Some(len)) if begin + len <= slot.len => {
            Ok(Slot { ptr: slot.ptr.wrapping_add(begin), len, ..slot })
        }
        _ => Err(Error::invalid("a value with fewer rows than the run has tokens")),
    }
}

/// Writes all constants of a model.
fn fill(ir: &Ir, memory: &Tensor, weights: &HashMap<ValueId, Tiles>) -> Result<()> {
    let base = memory.data()?;
    let range = |blob: &Blob| -> Result<&mut [u8]> {
        if blob.offset.checked_add(blob.size).is_none_or(|end| end > ir.size) {
            return Err(Error::invalid("a constant outside its memory"));
        }
        let (offset, size) = (blob.offset as usize, blob.size as usize);
        // SAFETY: inside the tensor's `ir.size` bytes; constants do not overlap, and each is taken once.
        Ok(unsafe { std::slice::from_raw_parts_mut(base.as_ptr().add(offset), size) })
    };
    for (i, blob) in ir.blobs.iter().enumerate() {
        match &blob.fill {
            Fill::Bytes(bytes) => range(blob)?.copy_from_slice(bytes),
            Fill::Weight { value, part: 0, first_row, n_rows } => {
                // Its scales and zero points follow it.
                let mut parts: [&mut [u8]; 3] = [range(blob)?, &mut [], &mut []];
                for other in ir.blobs.iter().skip(i + 1).take(2) {
                    if let Fill::Weight { value: v, part, first_row: f, .. } = &other.fill
                        && (v, f) == (value, first_row)
                        && let Some(slot) = parts.get_mut(*part).filter(|_| *part > 0)
                    {
                        *slot = range(other)?;
                    }
                }
                let tiles = weights.get(value);
                let tiles = tiles.ok_or_else(|| Error::invalid("a weight that is not bound"))?;
                fill_weight(tiles, *first_row, *n_rows, parts)?;
            }
            Fill::Weight { .. } => {}
        }
    }
    Ok(())
}

fn fill_weight(tiles: &Tiles, first: u64, n: u64, parts: [&mut [u8]; 3]) -> Result<()> {
    // Bytes of one row of each part: whole, because rows are whole groups.
    let row =
        parts.each_ref().map(|part| part.len() / usize::try_from(n.max(1)).unwrap_or(usize::MAX));
    let [main, scales, zeros] = parts;
    let form = Form::of(tiles.dtype, tiles.n_rows);
    tiles.each(first, n, |before, bytes| {
        let rows = bytes.len() as u64 / tiles.dtype.row_bytes(tiles.n_in)?.max(1);
        let (begin, rows) = (before as usize, rows as usize);
        let of = |part: usize| begin * row[part]..(begin + rows) * row[part];
        convert(form, tiles.dtype, bytes, [&mut main[of(0)], &mut scales[of(1)], &mut zeros[of(2)]])
    })
}
