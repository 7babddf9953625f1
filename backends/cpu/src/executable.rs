//! A compiled program: resolved weights, places in scratch, rope tables; and a run of it, op by op.
//!
//! Nothing is allocated in a run once its lists have grown to the size of the first one.

#![expect(unsafe_code, reason = "values lie in memory that the core owns")]

use crate::device::Workers;
use crate::kernels::{Attention, Choices, ConvState, KvSlot, MatMul, Router, StateSeq};
use crate::kv::SeqBlocks;
use crate::ops;
use crate::rope::RopeTable;
use crate::weight::Matrix;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::{Dim, OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch::{self, ScratchPlan};
use tegula_sdk::{Error, Operand, Result, Run, WeightBinding};

/// Index of the kernels' working area among the plan's extra regions; rope tables follow it.
const WORK: usize = 0;

/// A program that can be run.
#[derive(Debug)]
pub struct Executable {
    pub(crate) program: Program,
    pub(crate) options: CompileOptions,
    pub(crate) weights: Vec<Option<Matrix>>,
    pub(crate) ropes: Vec<RopeTable>,
    pub(crate) workers: Workers,
    /// Outputs whose value a later output names too: they get copies of what that one got.
    shared_outputs: Vec<usize>,
    scratch: ScratchPlan,
    lists: Lists,
}

/// Lists that are filled anew in each run and keep their capacity.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    addresses: Vec<*mut u8>,
    /// For each sequence, for each KV group.
    pub(crate) blocks: Vec<Vec<SeqBlocks>>,
    pub(crate) positions: Vec<u32>,
    pub(crate) k_blocks: Vec<*const u8>,
    pub(crate) v_blocks: Vec<*const u8>,
    pub(crate) slots: Vec<KvSlot>,
    pub(crate) states: Vec<StateSeq>,
    state_slots: Vec<u32>,
}

// SAFETY: the addresses are only followed during the run that filled them, in which the core keeps what they point to.
unsafe impl Send for Lists {}

/// Places values and working areas, and says how many bytes of lists a run keeps beside them.
pub(crate) fn plan_scratch(
    program: &Program,
    options: &CompileOptions,
    n_threads: usize,
) -> Result<(ScratchPlan, u64)> {
    let mut extra = vec![work_bytes(program, options, n_threads)?];
    for table in rope_tables(program, &[]) {
        let bytes =
            rows_max(program, table.positions, options)?.checked_mul(table.n_rot as u64 * 4);
        extra.push(bytes.ok_or_else(|| Error::invalid("a rope table over 2^64 bytes"))?);
    }
    let plan = scratch::plan(program, options, &extra)?;
    // Block tables dominate: two addresses and a place for each block, which has at least one token.
    let per_token = 2 * size_of::<*const u8>() + 24 + size_of::<KvSlot>() + 4;
    let lists = u64::from(options.n_ctx_max).saturating_mul(per_token as u64) / 8
        + program.values.len() as u64 * 8
        + u64::from(options.n_seqs_max) * (size_of::<StateSeq>() + size_of::<u32>()) as u64;
    Ok((plan, lists))
}

/// The working area of all ops' kernels: the largest that any wants, as far as a chunk holds it, and no less than the largest
/// that any needs.
fn work_bytes(program: &Program, options: &CompileOptions, n_threads: usize) -> Result<u64> {
    let (mut wanted, mut needed) = (1usize, 1usize);
    for op in &program.ops {
        let len = match op.kind {
            OpKind::Matmul => {
                let x = program.value(op.inputs[0])?;
                let n_in = usize::try_from(x.row_len()).unwrap_or(usize::MAX);
                let rows = rows_max(program, op.inputs[0], options)?;
                let rows = usize::try_from(rows).unwrap_or(usize::MAX);
                wanted = wanted.max(MatMul::scratch_len(n_threads, n_in, rows));
                MatMul::scratch_min(n_threads, n_in, rows)
            }
            OpKind::Attention { kv_layer, n_head, .. } => {
                let layer = program.kv_layers.get(kv_layer as usize);
                let layer = layer.ok_or_else(|| Error::invalid("a KV layer that is not there"))?;
                let (n_head, n_head_kv) = (n_head as usize, layer.n_head_kv as usize);
                let (dk, dv) = (layer.head_dim_k as usize, layer.head_dim_v as usize);
                wanted = wanted.max(Attention::scratch_len(n_threads, n_head, n_head_kv, dk, dv));
                Attention::scratch_min(n_threads, n_head, n_head_kv, dk, dv)
            }
            OpKind::MatmulExperts { n_expert } => {
                let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
                let (k, n_in) = (program.value(op.inputs[2])?, program.value(op.inputs[1])?);
                let (k, n_in) = (size(k.row_len()), size(n_in.row_len()));
                let rows = size(rows_max(program, op.inputs[0], options)?);
                Choices::scratch_len(n_threads, n_expert as usize, k, n_in, rows)
            }
            OpKind::RouterTopk { .. } | OpKind::RouterTopkGrouped { .. } => {
                let n_expert = program.value(op.inputs[0])?.row_len();
                let one = Router::scratch_len(usize::try_from(n_expert).unwrap_or(usize::MAX));
                one.saturating_mul(n_threads)
            }
            OpKind::ConvState { .. } => {
                let kernel = program.value(op.inputs[1])?.row_len();
                ConvState::scratch_len(n_threads, usize::try_from(kernel).unwrap_or(usize::MAX))
            }
            _ => 0,
        };
        needed = needed.max(len);
    }
    let bytes = |len: usize| {
        (len as u64).checked_mul(4).ok_or_else(|| Error::invalid("a working area over 2^64 bytes"))
    };
    Ok(bytes(wanted)?.min(options.scratch_chunk_max / 4 * 4).max(bytes(needed)?))
}

/// The greatest number of rows of a value.
fn rows_max(program: &Program, id: ValueId, options: &CompileOptions) -> Result<u64> {
    Ok(match program.value(id)?.rows() {
        Dim::Fixed(n) => n,
        Dim::NTokens => options.n_tokens_max.into(),
        Dim::NOutputs => options.n_outputs_max.into(),
    })
}

/// The distinct tables that a program's rope ops need.
fn rope_tables(program: &Program, weights: &[Option<Matrix>]) -> Vec<RopeTable> {
    let mut tables: Vec<RopeTable> = Vec::new();
    for op in &program.ops {
        if tables.iter().any(|table| table.serves(&op.kind, &op.inputs)) {
            continue;
        }
        let factors = op.inputs.get(2).and_then(|id| weights.get(id.index())?.as_ref());
        let factors = factors.and_then(vector);
        tables.extend(RopeTable::new(&op.kind, &op.inputs, factors));
    }
    tables
}

/// A weight vector's elements.
pub(crate) fn vector(matrix: &Matrix) -> Option<&[f32]> {
    let tile = matrix.tiles.first().filter(|tile| tile.n_rows == 1)?;
    // SAFETY: a vector is one row of `n_in` f32 inside its tile, aligned (Matrix::new checks both), and lives as long as the executable.
    Some(unsafe { std::slice::from_raw_parts(tile.data.cast(), matrix.n_in) })
}

impl Executable {
    /// Resolves weights and plans scratch.
    pub(crate) fn new(
        program: Program,
        options: &CompileOptions,
        bindings: Vec<WeightBinding<HostBuffer>>,
        workers: Workers,
    ) -> Result<Self> {
        let mut weights: Vec<Option<Matrix>> = program.values.iter().map(|_| None).collect();
        for binding in bindings {
            let value = program.value(binding.value)?;
            weights[binding.value.index()] = Some(Matrix::new(value, &binding)?);
        }
        if let Some((_, value)) = program.weights().find(|(id, _)| weights[id.index()].is_none()) {
            return Err(Error::invalid(format!("weight `{}` is not bound", value.name)));
        }
        let ropes = rope_tables(&program, &weights);
        let (scratch, _) = plan_scratch(&program, options, workers.pool.n_threads())?;
        let lists = Lists::default();
        let outputs = &program.outputs;
        let is_shared = |i: &usize| outputs[i + 1..].contains(&outputs[*i]);
        let shared_outputs = (0..outputs.len()).filter(is_shared).collect();
        let options = *options;
        Ok(Self { program, options, weights, ropes, workers, shared_outputs, scratch, lists })
    }

    /// Runs the ops in order.
    ///
    /// # Safety
    /// Host memory named in the run is valid.
    pub(crate) unsafe fn run(&mut self, run: &Run<'_, HostBuffer>) -> Result<()> {
        for (what, n, most) in [
            ("tokens", u64::from(run.n_tokens()), self.options.n_tokens_max),
            ("outputs", u64::from(run.n_outputs()), self.options.n_outputs_max),
            ("sequences", run.n_seqs() as u64, self.options.n_seqs_max),
        ] {
            if n > u64::from(most) {
                return Err(Error::invalid(format!("{n} {what}, compiled for {most}")));
            }
        }
        let mut lists = std::mem::take(&mut self.lists);
        let result = self.run_with(run, &mut lists);
        self.lists = lists;
        result
    }

    fn run_with(&self, run: &Run<'_, HostBuffer>, lists: &mut Lists) -> Result<()> {
        self.fill_addresses(run, &mut lists.addresses)?;
        self.fill_seqs(run, lists)?;
        let addresses = std::mem::take(&mut lists.addresses);
        let frame = Frame { executable: self, run, addresses: &addresses };
        let result = frame.fill_ropes().and_then(|()| {
            let mut ops = self.program.ops.as_slice();
            while let Some(op) = ops.first() {
                let done = ops::run_first(&frame, ops, lists).map_err(|error| {
                    let index = self.program.ops.len() - ops.len();
                    let message = format!("op {index} ({}): {}", op.kind.name(), error.message);
                    Error { message, ..error }
                })?;
                ops = ops.get(done..).unwrap_or_default();
            }
            self.copy_shared_outputs(run, &addresses)
        });
        lists.addresses = addresses;
        result
    }

    fn fill_addresses(&self, run: &Run<'_, HostBuffer>, out: &mut Vec<*mut u8>) -> Result<()> {
        out.clear();
        out.resize(self.program.values.len(), std::ptr::null_mut());
        for (slot, place) in out.iter_mut().zip(&self.scratch.values) {
            if let Some(place) = place {
                let piece = run.scratch(place.chunk)?;
                let offset = piece.offset.saturating_add(place.offset);
                *slot = piece.buffer.ptr_mut(offset, place.size)?;
            }
        }
        for (i, id) in self.program.inputs.iter().enumerate() {
            out[id.index()] = self.bound(*id, &run.input(i)?, false, run)?;
        }
        for (i, id) in self.program.outputs.iter().enumerate() {
            out[id.index()] = self.bound(*id, &run.output(i)?, true, run)?;
        }
        Ok(())
    }

    /// The address of an input or output.
    fn bound(
        &self,
        id: ValueId,
        operand: &Operand<'_, HostBuffer>,
        is_written: bool,
        run: &Run<'_, HostBuffer>,
    ) -> Result<*mut u8> {
        let needed = self.bytes(id, run)?;
        if needed == 0 {
            // The host may give any address for a value without rows; slices want an aligned one.
            return Ok(std::ptr::NonNull::<f32>::dangling().as_ptr().cast());
        }
        let address = match operand {
            Operand::Host(ptr, size) if *size >= needed => *ptr,
            Operand::Buffer(range) if range.size >= needed && is_written => {
                range.buffer.ptr_mut(range.offset, needed)?
            }
            Operand::Buffer(range) if range.size >= needed => {
                range.buffer.ptr(range.offset, needed)?.cast_mut()
            }
            _ => return Err(Error::invalid(format!("value {} is bound too short", id.0))),
        };
        if !(address as usize).is_multiple_of(align_of::<f32>()) {
            return Err(Error::invalid(format!("value {} is not aligned to 4 bytes", id.0)));
        }
        Ok(address)
    }

    /// Ops write a value once, where the last output that names it lies.
    fn copy_shared_outputs(&self, run: &Run<'_, HostBuffer>, addresses: &[*mut u8]) -> Result<()> {
        for i in &self.shared_outputs {
            let id = self.program.outputs[*i];
            let to = self.bound(id, &run.output(*i)?, true, run)?;
            let bytes = usize::try_from(self.bytes(id, run)?).unwrap_or(usize::MAX);
            // SAFETY: both places hold the value's bytes (`bound`); `copy` allows that they are the same.
            unsafe { std::ptr::copy(addresses[id.index()], to, bytes) };
        }
        Ok(())
    }

    /// Bytes of a value in this run.
    fn bytes(&self, id: ValueId, run: &Run<'_, HostBuffer>) -> Result<u64> {
        Ok(self.elements(id, run)? as u64 * 4)
    }

    /// Elements of a value made or given at run time.
    fn elements(&self, id: ValueId, run: &Run<'_, HostBuffer>) -> Result<usize> {
        let value = self.program.value(id)?;
        let rows = match value.rows() {
            Dim::Fixed(n) => n,
            Dim::NTokens => u64::from(run.n_tokens()),
            Dim::NOutputs => u64::from(run.n_outputs()),
        };
        let n = rows.checked_mul(value.row_len()).and_then(|n| usize::try_from(n).ok());
        n.filter(|n| n.checked_mul(4).is_some())
            .ok_or_else(|| Error::invalid(format!("`{}` has too many elements", value.name)))
    }

    fn fill_seqs(&self, run: &Run<'_, HostBuffer>, lists: &mut Lists) -> Result<()> {
        if !self.program.state_layers.is_empty() {
            lists.state_slots.clear();
            for i in 0..run.n_seqs() {
                lists.state_slots.push(run.seq(i)?.state_slot);
            }
            lists.state_slots.sort_unstable();
            if let Some([slot, _]) = lists.state_slots.array_windows().find(|[a, b]| a == b) {
                return Err(Error::invalid(format!("two sequences have slot {slot}")));
            }
        }
        let n_groups = run.n_kv_groups();
        lists.blocks.resize_with(run.n_seqs(), Vec::new);
        lists.positions.clear();
        lists.positions.resize(run.n_tokens() as usize, 0);
        for (i, blocks) in lists.blocks.iter_mut().enumerate() {
            let seq = run.seq(i)?;
            blocks.resize_with(n_groups, SeqBlocks::default);
            for (group, blocks) in (0u32..).zip(blocks) {
                blocks.fill(&run.kv_group(group)?, &seq, group)?;
            }
            let rows = seq.first_token as usize..(seq.first_token + seq.n_tokens) as usize;
            let positions = lists.positions.get_mut(rows);
            let positions = positions.ok_or_else(|| Error::invalid("a sequence past the run"))?;
            for (position, n) in positions.iter_mut().zip(seq.first_pos..) {
                *position = n;
            }
        }
        Ok(())
    }
}

/// One run as ops see it.
pub(crate) struct Frame<'a> {
    pub(crate) executable: &'a Executable,
    pub(crate) run: &'a Run<'a, HostBuffer>,
    addresses: &'a [*mut u8],
}

impl<'a> Frame<'a> {
    /// The weight matrix.
    pub(crate) fn matrix(&self, id: ValueId) -> Result<&'a Matrix> {
        let matrix = self.executable.weights.get(id.index()).and_then(Option::as_ref);
        matrix.ok_or_else(|| Error::invalid(format!("value {} is no weight", id.0)))
    }

    /// Elements of a row.
    pub(crate) fn row_len(&self, id: ValueId) -> Result<usize> {
        let n = self.executable.program.value(id)?.row_len();
        usize::try_from(n).map_err(|_| Error::invalid(format!("rows of {n} elements")))
    }

    /// The addresses that a value made or given at run time takes.
    pub(crate) fn span(&self, id: ValueId) -> Result<std::ops::Range<usize>> {
        let (address, n) = self.address(id)?;
        Ok(address.addr()..address.addr().saturating_add(4 * n))
    }

    fn address(&self, id: ValueId) -> Result<(*mut u8, usize)> {
        let n = self.executable.elements(id, self.run)?;
        let address = self.addresses.get(id.index()).copied().unwrap_or(std::ptr::null_mut());
        if address.is_null() {
            return Err(Error::invalid(format!("value {} lies nowhere", id.0)));
        }
        Ok((address, n))
    }

    /// An f32 value or weight vector, to read.
    pub(crate) fn f32s(&self, id: ValueId) -> Result<&'a [f32]> {
        if self.executable.program.value(id)?.kind == ValueKind::Weight {
            let matrix = self.matrix(id)?;
            return vector(matrix).ok_or_else(|| Error::invalid("a vector of several tiles"));
        }
        let (address, n) = self.address(id)?;
        // SAFETY: `n` elements lie at the address, aligned (checked when it was filled), for the run; the scratch plan keeps values
        // that are alive at the same op apart, so nobody writes them while this op reads.
        Ok(unsafe { std::slice::from_raw_parts(address.cast(), n) })
    }

    /// An i32 value, to read.
    pub(crate) fn i32s(&self, id: ValueId) -> Result<&'a [i32]> {
        let (address, n) = self.address(id)?;
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts(address.cast(), n) })
    }

    /// The value that an op makes.
    pub(crate) fn f32s_mut(&self, id: ValueId) -> Result<&'a mut [f32]> {
        let (address, n) = self.address(id)?;
        // SAFETY: as above; only the op that makes the value asks, once.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), n) })
    }

    /// The i32 value that an op makes.
    pub(crate) fn i32s_mut(&self, id: ValueId) -> Result<&'a mut [i32]> {
        let (address, n) = self.address(id)?;
        // SAFETY: as above.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), n) })
    }

    fn region(&self, index: usize) -> Result<&'a mut [f32]> {
        let place = self.executable.scratch.extra.get(index);
        let place = place.ok_or_else(|| Error::invalid("a working area that is not planned"))?;
        let piece = self.run.scratch(place.chunk)?;
        let address =
            piece.buffer.ptr_mut(piece.offset.saturating_add(place.offset), place.size)?;
        // SAFETY: the region is inside its scratch piece and aligned to a cache line by the plan; each is used by one op at a time.
        Ok(unsafe { std::slice::from_raw_parts_mut(address.cast(), place.size as usize / 4) })
    }

    /// The kernels' working area.
    pub(crate) fn work(&self) -> Result<&'a mut [f32]> {
        self.region(WORK)
    }

    /// Fills the tables whose positions the host gives: before all ops, since any of them may turn by one.
    fn fill_ropes(&self) -> Result<()> {
        for (i, table) in self.executable.ropes.iter().enumerate() {
            if !self.is_made(table.positions)? {
                self.fill_rope(i)?;
            }
        }
        Ok(())
    }

    /// Whether an op makes the value.
    fn is_made(&self, id: ValueId) -> Result<bool> {
        Ok(self.executable.program.value(id)?.kind == ValueKind::Result)
    }

    fn fill_rope(&self, index: usize) -> Result<()> {
        let table = &self.executable.ropes[index];
        let positions = self.i32s(table.positions)?;
        let out = self.region(WORK + 1 + index)?;
        let out = out.get_mut(..positions.len() * table.n_rot);
        let out = out.ok_or_else(|| Error::invalid("more positions than were planned for"))?;
        table.fill(positions, out).map_err(|error| Error::invalid(error.to_string()))
    }

    /// The filled table that a rope op turns by.
    pub(crate) fn rope_table(&self, kind: &OpKind, inputs: &[ValueId]) -> Result<&'a [f32]> {
        let tables = &self.executable.ropes;
        let index = tables.iter().position(|table| table.serves(kind, inputs));
        let index = index.ok_or_else(|| Error::invalid("a rope without its table"))?;
        if self.is_made(tables[index].positions)? {
            self.fill_rope(index)?;
        }
        let n = self.i32s(tables[index].positions)?.len() * tables[index].n_rot;
        let region = self.region(WORK + 1 + index)?;
        region.get(..n).ok_or_else(|| Error::invalid("a rope table too short"))
    }
}
