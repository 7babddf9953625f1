//! Which ops of a program a device can run.

use tegula_plugin::{Device, DeviceError, DeviceErrorKind};
use tegula_program::ffi::FfiProgram;
use tegula_program::{KvLayer, Op, OpKind, Program, StateLayer, Value, ValueId, ValueKind};

/// For each op, whether `device` can run it. A backend of an older revision refuses a program with an op code that it does not know as a whole; it
/// is asked op by op then, so that it still runs what it knows.
pub(super) fn supports(device: &Device, program: &Program) -> Result<Vec<bool>, DeviceError> {
    match device.supports(&FfiProgram::new(program)) {
        Err(error) if error.kind == DeviceErrorKind::Unsupported => {
            let known = |op: &Op| match device.supports(&FfiProgram::new(&alone(program, op))) {
                Ok(flags) => Ok(flags.first().copied().unwrap_or(false)),
                Err(error) if error.kind == DeviceErrorKind::Unsupported => Ok(false),
                Err(error) => Err(error),
            };
            let flags: Vec<bool> = program.ops.iter().map(known).collect::<Result<_, _>>()?;
            log::info!("{}: {error}; asked op by op", device.info().id());
            Ok(flags)
        }
        other => other,
    }
}

/// A program of one op.
fn alone(program: &Program, op: &Op) -> Program {
    let mut part = Program { name: program.name.clone(), ..Program::default() };
    let mut local = |id: &ValueId, made: bool| {
        let mut value: Value = program.values.get(id.index())?.clone();
        if !made && value.kind == ValueKind::Result {
            value.kind = ValueKind::Input;
        }
        let new = ValueId(u32::try_from(part.values.len()).ok()?);
        if value.kind == ValueKind::Input {
            part.inputs.push(new);
        }
        if made {
            part.outputs.push(new);
        }
        part.values.push(value);
        Some(new)
    };
    let inputs = op.inputs.iter().filter_map(|id| local(id, false)).collect();
    let outputs = op.outputs.iter().filter_map(|id| local(id, true)).collect();
    let kind = match op.kind {
        OpKind::KvStore { .. } => OpKind::KvStore { kv_layer: 0 },
        OpKind::Attention { n_head, scale, softcap, window, .. } => {
            OpKind::Attention { kv_layer: 0, n_head, scale, softcap, window }
        }
        other => other.with_state_layer(0),
    };
    let kv = op.kind.kv_layer().and_then(|layer| program.kv_layers.get(layer as usize));
    part.kv_layers = kv.map(|kv| KvLayer { group: 0, index: 0, ..*kv }).into_iter().collect();
    let state = op.kind.state_layer().and_then(|layer| program.state_layers.get(layer as usize));
    part.state_layers = state.copied().into_iter().collect::<Vec<StateLayer>>();
    part.ops = vec![Op { kind, layer: op.layer, inputs, outputs }];
    part
}
