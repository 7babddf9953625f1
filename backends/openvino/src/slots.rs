//! Where the values of a run lie: bound memory, scratch, or aligned copies of bound memory that is not aligned.

#![expect(unsafe_code, reason = "the core names memory by address")]

use crate::buffer::Buffer;
use tegula_sdk::program::{Dim, Program, Value, ValueId};
use tegula_sdk::scratch::ScratchPlan;
use tegula_sdk::{Error, Operand, Result, Run};

/// Bytes of one value. Valid for the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    /// Whether a GPU addresses it.
    pub(crate) is_shared: bool,
}

/// All values of a run.
#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Option<Slot>>,
    /// Aligned copies, by order of need; kept for later runs.
    staging: Vec<Vec<u64>>,
    /// Bytes to be copied when the run is done: from, to.
    after: Vec<(Slot, Slot)>,
    n_tokens: u64,
    n_outputs: u64,
}

// SAFETY: addresses are only used during a run, which has the executable to itself.
unsafe impl Send for Slots {}

impl Slots {
    /// Rows of a value in this run.
    pub(crate) fn rows(&self, value: &Value) -> u64 {
        match value.rows() {
            Dim::Fixed(n) => n,
            Dim::NTokens => self.n_tokens,
            Dim::NOutputs => self.n_outputs,
        }
    }

    /// Finds all values of a run.
    ///
    /// # Safety
    /// Host memory named in the run is valid until [`Slots::finish`] is done.
    pub(crate) unsafe fn begin(
        &mut self,
        program: &Program,
        plan: &ScratchPlan,
        run: &Run<'_, Buffer>,
    ) -> Result<()> {
        self.n_tokens = run.n_tokens().into();
        self.n_outputs = run.n_outputs().into();
        self.slots.clear();
        self.slots.resize(program.values.len(), None);
        self.after.clear();
        let mut n_staged = 0;
        for (i, id) in program.inputs.iter().enumerate() {
            let bound = self.bound(program, *id, &run.input(i)?, true)?;
            let slot = self.aligned(bound, &mut n_staged);
            if slot.ptr != bound.ptr {
                // SAFETY: both have `len` bytes; the copy is our own memory.
                unsafe { std::ptr::copy_nonoverlapping(bound.ptr, slot.ptr, bound.len) };
            }
            self.slots[id.index()] = Some(slot);
        }
        for (i, id) in program.outputs.iter().enumerate() {
            let bound = self.bound(program, *id, &run.output(i)?, false)?;
            if let Some(Some(first)) = self.slots.get(id.index()) {
                // One value under two names.
                self.after.push((*first, bound));
                continue;
            }
            let slot = self.aligned(bound, &mut n_staged);
            if slot.ptr != bound.ptr {
                self.after.push((slot, bound));
            }
            self.slots[id.index()] = Some(slot);
        }
        for (i, place) in plan.values.iter().enumerate() {
            let (Some(place), Some(None)) = (place, self.slots.get(i)) else { continue };
            let value = program.value(ValueId(u32::try_from(i).unwrap_or(u32::MAX)))?;
            let len = self.bytes(value)?;
            let piece = run.scratch(place.chunk)?;
            if place.offset.checked_add(len as u64).is_none_or(|end| end > piece.size) {
                return Err(Error::invalid(format!("scratch piece {} is too small", place.chunk)));
            }
            let ptr = piece.buffer.ptr_mut(piece.offset + place.offset, len as u64)?;
            self.slots[i] = Some(Slot { ptr, len, is_shared: piece.buffer.is_shared() });
        }
        Ok(())
    }

    /// Copies what had to be made elsewhere.
    ///
    /// # Safety
    /// As [`Slots::begin`].
    pub(crate) unsafe fn finish(&mut self) {
        for (from, to) in self.after.drain(..) {
            // SAFETY: both have the value's bytes; `copy` allows overlap.
            unsafe { std::ptr::copy(from.ptr, to.ptr, from.len.min(to.len)) };
        }
    }

    fn bytes(&self, value: &Value) -> Result<usize> {
        let bytes = value.dtype.row_bytes(value.row_len())?.checked_mul(self.rows(value));
        bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or_else(|| Error::invalid(format!("`{}` is larger than all memory", value.name)))
    }

    fn bound(
        &self,
        program: &Program,
        id: ValueId,
        operand: &Operand<'_, Buffer>,
        is_input: bool,
    ) -> Result<Slot> {
        let value = program.value(id)?;
        let len = self.bytes(value)?;
        let (ptr, size, is_shared) = match operand {
            Operand::Host(ptr, size) => (*ptr, *size, false),
            Operand::Buffer(range) => {
                let buffer = range.buffer;
                let ptr = match is_input {
                    true => buffer.ptr(range.offset, range.size)?.cast_mut(),
                    false => buffer.ptr_mut(range.offset, range.size)?,
                };
                (ptr, range.size, buffer.is_shared())
            }
        };
        if size < len as u64 {
            return Err(Error::invalid(format!(
                "`{}` is bound to {size} bytes of {len}",
                value.name
            )));
        }
        Ok(Slot { ptr, len, is_shared })
    }

    /// The slot itself where it is aligned for numbers, else memory of our own.
    fn aligned(&mut self, slot: Slot, n_staged: &mut usize) -> Slot {
        if slot.ptr.cast::<f32>().is_aligned() {
            return slot;
        }
        if self.staging.len() == *n_staged {
            self.staging.push(Vec::new());
        }
        let memory = &mut self.staging[*n_staged];
        *n_staged += 1;
        memory.resize(slot.len.div_ceil(8).max(memory.len()), 0);
        Slot { ptr: memory.as_mut_ptr().cast(), len: slot.len, is_shared: false }
    }

    /// The place of a value.
    pub(crate) fn get(&self, id: ValueId) -> Result<Slot> {
        let slot = self.slots.get(id.index()).copied().flatten();
        slot.ok_or_else(|| Error::invalid(format!("value {} has no place", id.0)))
    }

    /// A value that is read, as f32.
    pub(crate) fn floats(&self, id: ValueId) -> Result<&[f32]> {
        let slot = self.get(id)?;
        // SAFETY: aligned, readable, and not written while this is borrowed: an op never writes what it reads.
        Ok(unsafe { std::slice::from_raw_parts(slot.ptr.cast(), slot.len / 4) })
    }

    /// A value that is read, as i32.
    pub(crate) fn ints(&self, id: ValueId) -> Result<&[i32]> {
        let slot = self.get(id)?;
        // SAFETY: as `floats`.
        Ok(unsafe { std::slice::from_raw_parts(slot.ptr.cast(), slot.len / 4) })
    }

    /// A value that is made, as f32.
    ///
    /// # Safety
    /// The caller holds no other reference to this value.
    #[expect(
        clippy::mut_from_ref,
        reason = "values are memory of their own; an op makes each once"
    )]
    pub(crate) unsafe fn floats_mut(&self, id: ValueId) -> Result<&mut [f32]> {
        let slot = self.get(id)?;
        // SAFETY: aligned and writable; nobody else refers to it by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts_mut(slot.ptr.cast(), slot.len / 4) })
    }

    /// A value that is made, as i32.
    ///
    /// # Safety
    /// As [`Slots::floats_mut`].
    #[expect(
        clippy::mut_from_ref,
        reason = "values are memory of their own; an op makes each once"
    )]
    pub(crate) unsafe fn ints_mut(&self, id: ValueId) -> Result<&mut [i32]> {
        let slot = self.get(id)?;
        // SAFETY: as `floats_mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(slot.ptr.cast(), slot.len / 4) })
    }
}
