//! Cuts a program into stages, each for one device, run one after the other.
//!
//! An op's device is decided elsewhere; here runs of ops with the same device become programs of their own. What one stage makes and a later one
//! reads is an output of the first and an input of the second. A layer's keys and values belong to exactly one stage, and so does its recurrent state.

use crate::{Error, Result};
use std::collections::HashMap;
use tegula_program::{KvLayer, Op, OpKind, Program, Value, ValueId, ValueKind};

/// One device's part of a program.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    /// Index of the device.
    pub device: usize,
    /// What it runs.
    pub program: Program,
    /// For each input of `program`, the value of the whole program that it is.
    pub inputs: Vec<ValueId>,
    /// For each output of `program`, the value of the whole program that it is.
    pub outputs: Vec<ValueId>,
}

/// Makes every op between the first and last use of a KV layer run on one device: that of its attention.
pub(crate) fn keep_kv_together(program: &Program, devices: &mut [usize]) {
    let mut uses: HashMap<u32, (usize, usize)> = HashMap::new();
    for (i, op) in program.ops.iter().enumerate() {
        if let Some(layer) = op.kind.kv_layer() {
            uses.entry(layer).or_insert((i, i)).1 = i;
        }
    }
    for (first, last) in uses.into_values() {
        if let Some(device) = devices.get(last).copied() {
            for slot in devices.iter_mut().take(last + 1).skip(first) {
                *slot = device;
            }
        }
    }
}

/// Cuts `program` where the device changes. `devices` has one entry for each op.
pub(crate) fn partition(program: &Program, devices: &[usize]) -> Result<Vec<Stage>> {
    let mut bounds: Vec<(usize, usize, usize)> = Vec::new();
    for (i, device) in devices.iter().enumerate().take(program.ops.len()) {
        match bounds.last_mut() {
            Some((known, _, end)) if known == device => *end = i + 1,
            _ => bounds.push((*device, i, i + 1)),
        }
    }
    if let [(device, ..)] = bounds.as_slice() {
        return Ok(vec![Stage {
            device: *device,
            program: program.clone(),
            inputs: program.inputs.clone(),
            outputs: program.outputs.clone(),
        }]);
    }
    let mut last_use = vec![0usize; program.values.len()];
    for (i, op) in program.ops.iter().enumerate() {
        for id in &op.inputs {
            last_use[id.index()] = i;
        }
    }
    let n_stages = bounds.len();
    let mut stages = Vec::with_capacity(n_stages);
    for (index, (device, begin, end)) in bounds.into_iter().enumerate() {
        let name = format!("{}[{}/{n_stages}]", program.name, index + 1);
        let mut cut = Cut::new(program, name);
        for op in program.ops.get(begin..end).unwrap_or(&[]) {
            cut.op(op)?;
        }
        stages.push(cut.finish(device, |id| last_use[id.index()] >= end)?);
    }
    Ok(stages)
}

/// Copies a run of ops into a program of its own.
struct Cut<'a> {
    whole: &'a Program,
    part: Program,
    ids: HashMap<ValueId, ValueId>,
    inputs: Vec<ValueId>,
    made: Vec<ValueId>,
    kv_layers: HashMap<u32, u32>,
    groups: HashMap<u32, u32>,
}

impl<'a> Cut<'a> {
    fn new(whole: &'a Program, name: String) -> Self {
        Self {
            whole,
            part: Program { name, ..Program::default() },
            ids: HashMap::new(),
            inputs: Vec::new(),
            made: Vec::new(),
            kv_layers: HashMap::new(),
            groups: HashMap::new(),
        }
    }

    fn push(&mut self, id: ValueId, value: Value) -> ValueId {
        let local = ValueId(u32::try_from(self.part.values.len()).unwrap_or(u32::MAX));
        self.part.values.push(value);
        self.ids.insert(id, local);
        local
    }

    /// The local id of something that an op reads.
    fn read(&mut self, id: ValueId) -> Result<ValueId> {
        if let Some(local) = self.ids.get(&id) {
            return Ok(*local);
        }
        let mut value = self.whole.value(id)?.clone();
        if value.kind != ValueKind::Weight {
            // An activation of an earlier stage comes in like an input of the whole program.
            if value.kind == ValueKind::Result {
                value.name = format!("{}.{}", value.name, id.0);
            }
            value.kind = ValueKind::Input;
        }
        let is_input = value.kind == ValueKind::Input;
        let local = self.push(id, value);
        if is_input {
            self.part.inputs.push(local);
            self.inputs.push(id);
        }
        Ok(local)
    }

    fn op(&mut self, op: &Op) -> Result<()> {
        let inputs = op.inputs.iter().map(|id| self.read(*id)).collect::<Result<Vec<_>>>()?;
        let kind = match op.kind {
            OpKind::KvStore { kv_layer } => OpKind::KvStore { kv_layer: self.kv_layer(kv_layer)? },
            OpKind::Attention { kv_layer, n_head, scale, softcap, window } => OpKind::Attention {
                kv_layer: self.kv_layer(kv_layer)?,
                n_head,
                scale,
                softcap,
                window,
            },
            other => match other.state_layer() {
                Some(layer) => other.with_state_layer(self.state_layer(layer)?),
                None => other,
            },
        };
        let mut outputs = Vec::with_capacity(op.outputs.len());
        for id in &op.outputs {
            let value = self.whole.value(*id)?;
            outputs.push(self.push(*id, value.clone()));
            self.made.push(*id);
        }
        self.part.ops.push(Op { kind, layer: op.layer, inputs, outputs });
        Ok(())
    }

    /// The local number of a state layer, which one op names once.
    fn state_layer(&mut self, id: u32) -> Result<u32> {
        let layer = self.whole.state_layers.get(id as usize).copied();
        let layer = layer.ok_or_else(|| Error::Overflow { what: format!("state layer {id}") })?;
        self.part.state_layers.push(layer);
        Ok(u32::try_from(self.part.state_layers.len() - 1).unwrap_or(u32::MAX))
    }

    /// The local number of a KV layer; groups and indices are numbered anew without gaps.
    fn kv_layer(&mut self, id: u32) -> Result<u32> {
        if let Some(local) = self.kv_layers.get(&id) {
            return Ok(*local);
        }
        let layer = self.whole.kv_layers.get(id as usize).copied();
        let layer = layer.ok_or_else(|| Error::Overflow { what: format!("KV layer {id}") })?;
        let n_groups = u32::try_from(self.groups.len()).unwrap_or(u32::MAX);
        let group = *self.groups.entry(layer.group).or_insert(n_groups);
        let index = self.part.kv_layers.iter().filter(|other| other.group == group).count();
        let local = u32::try_from(self.part.kv_layers.len()).unwrap_or(u32::MAX);
        self.part.kv_layers.push(KvLayer {
            group,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            ..layer
        });
        self.kv_layers.insert(id, local);
        Ok(local)
    }

    fn finish(mut self, device: usize, is_read_later: impl Fn(ValueId) -> bool) -> Result<Stage> {
        let mut outputs = Vec::new();
        for id in &self.made {
            if self.whole.outputs.contains(id) || is_read_later(*id) {
                if let Some(local) = self.ids.get(id) {
                    self.part.outputs.push(*local);
                }
                outputs.push(*id);
            }
        }
        self.part.verify()?;
        Ok(Stage { device, program: self.part, inputs: self.inputs, outputs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tegula_program::{Activation, DType, Dim, Norm, ProgramBuilder};

    fn program(n_layers: u32) -> Program {
        let mut b = ProgramBuilder::new("test");
        let tokens = b.input("tokens", DType::I32, &[Dim::NTokens]);
        let rows = b.input("rows", DType::I32, &[Dim::NOutputs]);
        let table = b.weight("table", DType::F32, &[50, 32]);
        let mut x = b.embed(tokens, table);
        for i in 0..n_layers {
            b.layer(Some(i));
            let kv = b.kv_layer(KvLayer {
                group: 0,
                index: 0,
                n_head_kv: 1,
                head_dim_k: 32,
                head_dim_v: 32,
                dtype_k: DType::F16,
                dtype_v: DType::F16,
            });
            let h = b.rms_norm(x, None, Norm { eps: 1e-5, n: 32 });
            b.kv_store(kv, h, h);
            let q = b.scale(h, 0.5);
            let a = b.attention(kv, q, None, 1, 1.0, 0.0, 0);
            let a = b.unary(Activation::Silu, a);
            x = b.add(x, a);
        }
        b.layer(None);
        let x = b.gather_rows(x, rows);
        let logits = b.matmul(x, table, None);
        b.output("logits", logits);
        b.finish().unwrap()
    }

    proptest! {
        /// Whatever the assignment, every op runs once and in order, and every stage is given all it reads.
        #[test]
        fn stages_are_whole(devices in prop::collection::vec(0usize..3, 40)) {
            let program = program(5);
            let mut devices = devices[..program.ops.len().min(40)].to_vec();
            devices.resize(program.ops.len(), 0);
            keep_kv_together(&program, &mut devices);
            let stages = partition(&program, &devices).unwrap();
            let n: usize = stages.iter().map(|stage| stage.program.ops.len()).sum();
            prop_assert_eq!(n, program.ops.len());
            let kv: usize = stages.iter().map(|stage| stage.program.kv_layers.len()).sum();
            prop_assert_eq!(kv, program.kv_layers.len());
            let mut known: Vec<ValueId> = program.inputs.clone();
            for stage in &stages {
                prop_assert!(stage.inputs.iter().all(|id| known.contains(id)));
                known.extend(&stage.outputs);
            }
            prop_assert!(program.outputs.iter().all(|id| known.contains(id)));
        }
    }

    /// One device gets the program as it is.
    #[test]
    fn one_device_is_one_stage() {
        let program = program(3);
        let stages = partition(&program, &vec![0; program.ops.len()]).unwrap();
        assert_eq!(stages.len(), 1);
        assert_eq!(stages[0].program.ops, program.ops);
        assert_eq!(stages[0].program.kv_layers, program.kv_layers);
        assert_eq!(stages[0].inputs, program.inputs);
    }
}
