//! Programs: ops that the device may not have, and weights whose layout is the shim's own.

use crate::backend::thunks;
use crate::config::{Code, Point};
use crate::device::{FakeDevice, LAYOUT_GROUPED};
use crate::failure::{Failure, Result, forwarded, guard, need, object, put, sized};
use crate::faults::{Effect, milliseconds};
use crate::statement::INNER_TYPE;
use std::sync::atomic::AtomicBool;
use tegula_abi::{
    self as abi, BufferRange, CompileOptions, DType, OpCode, Program, Slice, Status, ValueKind,
    WeightBinding, WeightDesc, WeightLayout, WeightTile, weight_use,
};

/// A compiled program.
#[derive(Debug)]
pub(crate) struct FakeExecutable {
    pub(crate) inner: *mut abi::ExecutableHandle,
    /// Milliseconds that its weights in slow memory cost a run.
    pub(crate) slow_ms: f64,
    /// Types of its outputs.
    pub(crate) outputs: Vec<DType>,
    /// Held by the run that is going on.
    pub(crate) is_running: AtomicBool,
    /// Buffers of its weights.
    buffers: Vec<usize>,
    /// The tiles as the inner backend was given them; they live as long as it.
    _tiles: Vec<Vec<WeightTile>>,
}

// The functions are called by the host under the boundary's contract; see `device.rs`.

thunks! {
    fn program_supports(
        device: *const abi::DeviceHandle, program: *const Program, out: *mut u8, out_len: usize; err
    ) {
        let (device, flat) = (object::<FakeDevice, _>(device)?, sized(program)?);
        if matches!(device.strike(Point::Supports, 0)?, Effect::Null) {
            return Ok(());
        }
        forwarded(need(device.table().program_supports)?(device.inner, program, out, out_len, err))?;
        for at in device.unsupported(&flat)? {
            if at < out_len {
                out.add(at).write(0);
            }
        }
        Ok(())
    }

    fn program_memory(
        device: *const abi::DeviceHandle, program: *const Program, options: *const CompileOptions,
        out: *mut abi::ExecutableMemory; err
    ) {
        let (device, options) = (object::<FakeDevice, _>(device)?, sized(options)?);
        if matches!(device.strike(Point::Memory, 0)?, Effect::Null) {
            return Ok(());
        }
        let options = device.inner_options(&options)?;
        let call = need(device.table().program_memory)?;
        let status = call(device.inner, program, &raw const options, out, err);
        if let Ok(answer) = sized(out.cast_const()) {
            let size = device.state.config.stated_size("executable_memory", answer.struct_size);
            out.cast::<usize>().write(size);
        }
        forwarded(status)
    }

    fn program_compile(
        device: *const abi::DeviceHandle, program: *const Program, options: *const CompileOptions,
        weights: *const Slice<WeightBinding>, out: *mut *mut abi::ExecutableHandle; err
    ) {
        let device = object::<FakeDevice, _>(device)?;
        let (flat, options) = (sized(program)?, sized(options)?);
        if matches!(device.strike(Point::Compile, 0)?, Effect::Null) {
            return Ok(());
        }
        if !device.unsupported(&flat)?.is_empty() {
            return Err(Failure::new(Status::UNSUPPORTED, "an op that the fake device does not have"));
        }
        let weights = *object::<Slice<WeightBinding>, _>(weights)?;
        let mut executable = device.bind(&flat, &weights, err)?;
        let bindings: Vec<_> = (0..weights.len).filter_map(|i| weights.get(i)).zip(&executable._tiles)
            .map(|(binding, tiles)| WeightBinding {
                struct_size: size_of::<WeightBinding>(), value: binding.value, tiles: Slice::of(tiles),
            })
            .collect();
        let (options, bindings) = (device.inner_options(&options)?, Slice::of(&bindings));
        let compile = need(device.table().program_compile)?;
        forwarded(compile(
            device.inner, program, &raw const options, &raw const bindings, &raw mut executable.inner, err
        ))?;
        let mut ledger = device.state.ledger();
        ledger.bind(&executable.buffers, true);
        ledger.device(device.index).executables += 1;
        put(out, Box::into_raw(Box::new(executable)).cast())
    }
}

pub(crate) unsafe extern "C" fn executable_free(
    device: *const abi::DeviceHandle,
    executable: *mut abi::ExecutableHandle,
) {
    let run = || {
        // SAFETY: the boundary's contract: the executable is given back, once, to its device.
        let (device, executable) = unsafe {
            let device = object::<FakeDevice, _>(device)?;
            (device, Box::from_raw(executable.cast::<FakeExecutable>()))
        };
        // SAFETY: the inner table's function, with its own handles.
        unsafe { need(device.table().executable_free)?(device.inner, executable.inner) }
        let mut ledger = device.state.ledger();
        ledger.bind(&executable.buffers, false);
        ledger.device(device.index).executables -= 1;
        drop(ledger);
        device.state.publish();
        Ok(())
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) };
}

/// A weight value of a program, as [`WeightDesc`].
///
/// # Safety
/// The program's arrays are alive.
unsafe fn weight_desc(program: &Program, value: u32) -> Result<WeightDesc> {
    let none = || Failure::invalid(format!("value {value} is no weight"));
    // SAFETY: alive by the caller's word, here and below.
    let raw = unsafe { program.values.get(value as usize) };
    let raw = raw.filter(|raw| raw.kind == ValueKind::WEIGHT).ok_or_else(none)?;
    let dims = raw.dims.get(..raw.n_dims as usize).ok_or_else(none)?;
    let dims: Vec<u64> = dims.iter().filter_map(|dim| u64::try_from(*dim).ok()).collect();
    let (n_in, rows) = dims.split_last().ok_or_else(none)?;
    let mut uses = 0;
    for i in 0..program.ops.len {
        // SAFETY: as above.
        let Some(op) = (unsafe { program.ops.get(i) }) else { continue };
        // SAFETY: as above.
        let inputs = unsafe { op.inputs.frozen() }.unwrap_or_default();
        for (position, _) in inputs.iter().enumerate().filter(|(_, input)| **input == value) {
            uses |= match (op.code, position) {
                (OpCode::MATMUL, 1) => weight_use::MATMUL,
                (OpCode::EMBED, 1) => weight_use::EMBED,
                _ => weight_use::VECTOR,
            };
        }
    }
    Ok(WeightDesc {
        struct_size: size_of::<WeightDesc>(),
        dtype: raw.dtype,
        uses,
        n_in: *n_in,
        n_rows: rows.iter().product(),
        rows_per_expert: 0,
    })
}

impl FakeDevice {
    /// Indices of the ops that the configuration takes away.
    ///
    /// # Safety
    /// The program's arrays are alive.
    unsafe fn unsupported(&self, program: &Program) -> Result<Vec<usize>> {
        let code = |code: &Code| code.resolve(|n| OpCode(n as u32).name());
        let codes = &self.state.device(self.index)?.unsupported_ops;
        let codes: Vec<i64> = codes.iter().map(code).collect::<Result<_, _>>()?;
        // SAFETY: alive by the caller's word.
        let op = |i: &usize| unsafe { program.ops.get(*i) };
        let is_gone = |i: &usize| op(i).is_some_and(|op| codes.contains(&op.code.0.into()));
        Ok((0..program.ops.len).filter(is_gone).collect())
    }

    /// The options for the inner backend, whose buffer types are not ours.
    fn inner_options(&self, options: &CompileOptions) -> Result<CompileOptions> {
        self.state.buffer_type(self.index, options.scratch_type)?;
        Ok(CompileOptions {
            struct_size: size_of::<CompileOptions>(),
            scratch_type: INNER_TYPE,
            ..*options
        })
    }

    /// The executable without its inner one: tiles checked and as the inner backend reads them.
    ///
    /// # Safety
    /// Program and weights are alive; `err` is null or valid.
    unsafe fn bind(
        &self,
        program: &Program,
        weights: &Slice<WeightBinding>,
        err: *mut abi::ErrorRecord,
    ) -> Result<FakeExecutable> {
        let short = || Failure::invalid("bindings of a shorter revision");
        let (mut all, mut buffers, mut slow_ms) = (Vec::new(), Vec::new(), 0.0);
        for i in 0..weights.len {
            // SAFETY: alive by the caller's word, here and below.
            let binding = unsafe { weights.get(i) }.ok_or_else(short)?;
            // SAFETY: as above.
            let desc = unsafe { weight_desc(program, binding.value) }?;
            // SAFETY: as above.
            let (stated, inner) = unsafe { self.layout(&desc, err) }?;
            let mut tiles = Vec::new();
            for j in 0..binding.tiles.len {
                // SAFETY: as above.
                let tile = unsafe { binding.tiles.get(j) }.ok_or_else(short)?;
                slow_ms += self.check_tile(&tile, &stated)?;
                tiles.extend(inner_tiles(&tile, &stated, &inner));
                buffers.push(tile.range.buffer.addr());
            }
            all.push(tiles);
        }
        buffers.sort_unstable();
        buffers.dedup();
        // SAFETY: the program is alive.
        let outputs = unsafe { program.outputs.frozen() }.unwrap_or_default();
        // SAFETY: as above.
        let dtype = |id: &u32| unsafe { program.values.get(*id as usize) }.map(|v| v.dtype);
        Ok(FakeExecutable {
            inner: std::ptr::null_mut(),
            slow_ms,
            outputs: outputs.iter().map(|id| dtype(id).unwrap_or(DType::F32)).collect(),
            is_running: AtomicBool::new(false),
            buffers,
            _tiles: all,
        })
    }

    /// Checks a tile against its buffer and its layout; gives the milliseconds that reading it costs.
    pub(crate) fn check_tile(&self, tile: &WeightTile, layout: &WeightLayout) -> Result<f64> {
        let mut ledger = self.state.ledger();
        let live = ledger.range(self.index, &tile.range, false)?;
        let config = self.state.buffer_type(self.index, live.buffer_type)?;
        // Imported bytes lie where their file has them: only what a kernel cannot do without is asked of them.
        let own = if live.imported { 1 } else { config.alignment.max(1) };
        let alignment = layout.alignment.max(own);
        let size =
            layout.group_bytes.checked_mul(tile.n_rows.div_ceil(layout.rows_per_group.into()));
        let what = if tile.layout != layout.layout {
            format!("of layout {}, {} was stated", tile.layout, layout.layout)
        } else if !tile.range.offset.is_multiple_of(alignment) {
            format!("at {}, not aligned to {alignment}", tile.range.offset)
        } else if !tile.first_row.is_multiple_of(layout.rows_per_group.into()) {
            format!("from row {}, inside a group of {}", tile.first_row, layout.rows_per_group)
        } else if size != Some(tile.range.size) {
            format!("of {} bytes for {} rows", tile.range.size, tile.n_rows)
        } else {
            return Ok(milliseconds(config.slow_ms_per_mib, tile.range.size));
        };
        Err(ledger.refuse(format!("a weight's tile {what}")))
    }
}

/// A tile as the inner backend reads it: one for each group where groups are padded.
pub(crate) fn inner_tiles(
    tile: &WeightTile,
    stated: &WeightLayout,
    inner: &WeightLayout,
) -> Vec<WeightTile> {
    if stated.layout != LAYOUT_GROUPED {
        return vec![*tile];
    }
    let group = u64::from(stated.rows_per_group);
    let n_groups = tile.n_rows.div_ceil(group);
    let of_group = |i: u64| {
        let n_rows = group.min(tile.n_rows - i * group);
        WeightTile {
            struct_size: size_of::<WeightTile>(),
            first_row: tile.first_row + i * group,
            n_rows,
            range: BufferRange {
                offset: tile.range.offset + i * stated.group_bytes,
                size: n_rows.div_ceil(inner.rows_per_group.into()) * inner.group_bytes,
                ..tile.range
            },
            layout: inner.layout,
        }
    };
    (0..n_groups).map(of_group).collect()
}
