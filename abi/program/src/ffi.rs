//! Programs over the boundary: flat arrays out, a verified [`Program`] back.

mod params;

use crate::{Dim, KvLayer, Op, Program, ProgramError, StateLayer, Value, ValueId, ValueKind};
use params::{Params, kind_in};
use std::mem::size_of;
use tegula_abi as abi;
use tegula_quant::DType;

/// More values or ops than any model has; a longer array is damage.
const MAX_ITEMS: usize = 1 << 20;

fn fault(why: impl Into<String>) -> ProgramError {
    ProgramError::Boundary { why: why.into() }
}

/// A program in the boundary's form, with everything it points to. It borrows nothing from the [`Program`].
#[derive(Debug)]
pub struct FfiProgram {
    program: Box<abi::Program>,
    // What `program` points to. Boxed or in Vecs that are never touched again, so the addresses hold.
    _name: Box<str>,
    _names: Vec<Box<str>>,
    _values: Vec<abi::Value>,
    _ids: Vec<Vec<u32>>,
    _params: Vec<Params>,
    _ops: Vec<abi::Op>,
    _kv_layers: Vec<abi::KvLayer>,
    _state_layers: Vec<abi::StateLayer>,
}

// SAFETY: the raw pointers all point into memory that the struct owns and never changes.
unsafe impl Send for FfiProgram {}
// SAFETY: as above.
unsafe impl Sync for FfiProgram {}

fn value_out(value: &Value, name: &str) -> abi::Value {
    let mut dims = [0i64; 4];
    for (to, dim) in dims.iter_mut().zip(&value.dims) {
        *to = match dim {
            // verify() keeps dimensions far below i64::MAX.
            Dim::Fixed(n) => i64::try_from(*n).unwrap_or(i64::MAX),
            Dim::NTokens => abi::DIM_N_TOKENS,
            Dim::NOutputs => abi::DIM_N_OUTPUTS,
        };
    }
    abi::Value {
        struct_size: size_of::<abi::Value>(),
        kind: match value.kind {
            ValueKind::Input => abi::ValueKind::INPUT,
            ValueKind::Weight => abi::ValueKind::WEIGHT,
            ValueKind::Result => abi::ValueKind::RESULT,
        },
        dtype: abi::DType(value.dtype.id()),
        n_dims: u32::try_from(value.dims.len()).unwrap_or(0),
        reserved: 0,
        dims,
        name: abi::Str::of(name),
    }
}

impl FfiProgram {
    /// Lays the program out for the boundary.
    pub fn new(program: &Program) -> Self {
        let raw = |ids: &[ValueId]| ids.iter().map(|id| id.0).collect::<Vec<u32>>();
        let name: Box<str> = program.name.as_str().into();
        let names: Vec<Box<str>> = program.values.iter().map(|v| v.name.as_str().into()).collect();
        let values: Vec<_> =
            program.values.iter().zip(&names).map(|(value, name)| value_out(value, name)).collect();
        let params: Vec<_> = program.ops.iter().map(|op| Params::of(&op.kind)).collect();
        let mut ids: Vec<Vec<u32>> = vec![raw(&program.inputs), raw(&program.outputs)];
        let mut ops = Vec::with_capacity(program.ops.len());
        for (op, params) in program.ops.iter().zip(&params) {
            let (inputs, outputs) = (raw(&op.inputs), raw(&op.outputs));
            ops.push(abi::Op {
                struct_size: size_of::<abi::Op>(),
                code: op.kind.code(),
                layer: op.layer.and_then(|layer| i32::try_from(layer).ok()).unwrap_or(-1),
                inputs: abi::Slice::of(&inputs),
                outputs: abi::Slice::of(&outputs),
                params: params.address(),
            });
            ids.push(inputs);
            ids.push(outputs);
        }
        let kv_layers: Vec<_> = program.kv_layers.iter().map(kv_layer_out).collect();
        let state = |layer: &StateLayer| abi::StateLayer {
            struct_size: size_of::<abi::StateLayer>(),
            n_elements: layer.n_elements,
        };
        let state_layers: Vec<_> = program.state_layers.iter().map(state).collect();
        let flat = abi::Program {
            struct_size: size_of::<abi::Program>(),
            name: abi::Str::of(&name),
            values: abi::Slice::of(&values),
            ops: abi::Slice::of(&ops),
            inputs: abi::Slice::of(&ids[0]),
            outputs: abi::Slice::of(&ids[1]),
            kv_layers: abi::Slice::of(&kv_layers),
            state_layers: abi::Slice::of(&state_layers),
        };
        Self {
            program: Box::new(flat),
            _name: name,
            _names: names,
            _values: values,
            _ids: ids,
            _params: params,
            _ops: ops,
            _kv_layers: kv_layers,
            _state_layers: state_layers,
        }
    }

    /// The flat form; lives as long as `self`.
    pub fn as_abi(&self) -> &abi::Program {
        &self.program
    }
}

fn kv_layer_out(kv: &KvLayer) -> abi::KvLayer {
    abi::KvLayer {
        struct_size: size_of::<abi::KvLayer>(),
        group: kv.group,
        index: kv.index,
        n_head_kv: kv.n_head_kv,
        head_dim_k: kv.head_dim_k,
        head_dim_v: kv.head_dim_v,
        dtype_k: abi::DType(kv.dtype_k.id()),
        dtype_v: abi::DType(kv.dtype_v.id()),
    }
}

/// Reads a program that the host passed, and verifies it. Ops and types of a newer revision are an error that names them.
///
/// # Safety
/// `program` is null or points to a program whose arrays, names and parameters are alive during the call.
pub unsafe fn read_program(program: *const abi::Program) -> Result<Program, ProgramError> {
    // SAFETY: everything read below lies in the program that the caller vouches for, and is read by copies of sizes that it states.
    unsafe {
        let flat = abi::read_sized(program).ok_or_else(|| fault("no program, or one too short"))?;
        let name = flat.name.get().ok_or_else(|| fault("a name that is not UTF-8"))?.to_owned();
        let out = Program {
            name,
            values: read_all(&flat.values, "values", |v| value_in(v))?,
            ops: read_all(&flat.ops, "ops", |op| op_in(op))?,
            inputs: ids_in(&flat.inputs)?,
            outputs: ids_in(&flat.outputs)?,
            kv_layers: read_all(&flat.kv_layers, "kv_layers", kv_layer_in)?,
            state_layers: read_all(&flat.state_layers, "state_layers", |layer| {
                Ok(StateLayer { n_elements: layer.n_elements })
            })?,
        };
        out.verify()?;
        Ok(out)
    }
}

/// # Safety
/// The slice's memory is alive.
unsafe fn read_all<T: abi::Crossing, U>(
    slice: &abi::Slice<T>,
    what: &str,
    convert: impl Fn(&T) -> Result<U, ProgramError>,
) -> Result<Vec<U>, ProgramError> {
    if slice.len > MAX_ITEMS {
        return Err(fault(format!("{} {what}", slice.len)));
    }
    let mut out = Vec::with_capacity(slice.len);
    for i in 0..slice.len {
        // SAFETY: alive by the caller's word.
        let item = unsafe { slice.get(i) };
        out.push(convert(&item.ok_or_else(|| fault(format!("{what} of a shorter revision")))?)?);
    }
    Ok(out)
}

/// # Safety
/// The slice's memory is alive.
unsafe fn ids_in(slice: &abi::Slice<u32>) -> Result<Vec<ValueId>, ProgramError> {
    if slice.len > MAX_ITEMS {
        return Err(fault(format!("{} ids", slice.len)));
    }
    // SAFETY: alive by the caller's word.
    let ids = unsafe { slice.frozen() }.ok_or_else(|| fault("a list of ids that is no array"))?;
    Ok(ids.iter().map(|id| ValueId(*id)).collect())
}

fn dtype_in(dtype: abi::DType) -> Result<DType, ProgramError> {
    DType::from_id(dtype.0).ok_or_else(|| fault(format!("element type {}", dtype.0)))
}

/// # Safety
/// The value's name is alive.
unsafe fn value_in(value: &abi::Value) -> Result<Value, ProgramError> {
    let kind = match value.kind {
        abi::ValueKind::INPUT => ValueKind::Input,
        abi::ValueKind::WEIGHT => ValueKind::Weight,
        abi::ValueKind::RESULT => ValueKind::Result,
        other => return Err(fault(format!("value kind {}", other.0))),
    };
    let n_dims = value.n_dims as usize;
    let dims = value.dims.get(..n_dims).ok_or_else(|| fault(format!("{n_dims} dimensions")))?;
    let dims = dims.iter().map(|dim| match *dim {
        abi::DIM_N_TOKENS => Ok(Dim::NTokens),
        abi::DIM_N_OUTPUTS => Ok(Dim::NOutputs),
        n => u64::try_from(n).map(Dim::Fixed).map_err(|_| fault(format!("dimension {n}"))),
    });
    // SAFETY: alive by the caller's word.
    let name = unsafe { value.name.get() }.ok_or_else(|| fault("a name that is not UTF-8"))?;
    Ok(Value {
        kind,
        dtype: dtype_in(value.dtype)?,
        dims: dims.collect::<Result<_, _>>()?,
        name: name.to_owned(),
    })
}

fn kv_layer_in(kv: &abi::KvLayer) -> Result<KvLayer, ProgramError> {
    Ok(KvLayer {
        group: kv.group,
        index: kv.index,
        n_head_kv: kv.n_head_kv,
        head_dim_k: kv.head_dim_k,
        head_dim_v: kv.head_dim_v,
        dtype_k: dtype_in(kv.dtype_k)?,
        dtype_v: dtype_in(kv.dtype_v)?,
    })
}

/// # Safety
/// The op's lists and parameters are alive.
unsafe fn op_in(op: &abi::Op) -> Result<Op, ProgramError> {
    // SAFETY: alive by the caller's word.
    unsafe {
        Ok(Op {
            kind: kind_in(op)?,
            layer: u32::try_from(op.layer).ok(),
            inputs: ids_in(&op.inputs)?,
            outputs: ids_in(&op.outputs)?,
        })
    }
}
