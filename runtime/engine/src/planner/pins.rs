//! Ops whose device was asked for: by the names of their weights (`--place`), or because they are experts (`--cpu-experts`).

use super::{OpenDevice, Planner};
use crate::{Error, Result};
use regex::Regex;
use tegula_plugin::DeviceKind;
use tegula_program::{Op, OpKind, Program, ValueKind};

/// Names of a layer's experts, with the layer.
const EXPERTS: &str = r"^blk\.([0-9]+)\.ffn_.*_exps";

impl Planner<'_> {
    /// The device that a rule gives each op. Devices that only a rule names are added behind the others.
    pub(super) fn pin_ops(&mut self) -> Result<Vec<Option<usize>>> {
        let mut rules = Vec::new();
        for rule in &self.options.place {
            let entry = self.runtime.select(Some(&rule.device))?.into_iter().next();
            let entry = entry.ok_or_else(|| Error::NoDevice("the rule names no device".into()))?;
            rules.push((rule.pattern.clone(), self.device_index(entry)?));
        }
        let mut out: Vec<Option<usize>> = self
            .program
            .ops
            .iter()
            .map(|op| {
                let rule = |name: &str| rules.iter().find(|(p, _)| p.is_match(name));
                weight_names(self.program, op).find_map(|name| Some(rule(name)?.1))
            })
            .collect();
        self.pin_experts(&mut out)?;
        fill_between(self.program, &mut out);
        Ok(out)
    }

    fn pin_experts(&mut self, pins: &mut [Option<usize>]) -> Result<()> {
        let n_layers = self.options.cpu_experts;
        if n_layers == 0 {
            return Ok(());
        }
        let program = self.program;
        let experts = experts(program, n_layers)?;
        if experts.is_empty() {
            log::warn!("--cpu-experts {n_layers} changes nothing: this model has no experts there");
            return Ok(());
        }
        let cpu = self.processor()?;
        for index in experts {
            if let Some(pin @ None) = pins.get_mut(index) {
                *pin = Some(cpu);
            }
        }
        Ok(())
    }

    /// The host's processor: the selected one, else the one that is taken most willingly.
    fn processor(&mut self) -> Result<usize> {
        let is_cpu = |d: &OpenDevice| d.entry.info.kind == DeviceKind::CPU;
        if let Some(index) = self.devices.iter().position(is_cpu) {
            return Ok(index);
        }
        let devices = self.runtime.devices().into_iter();
        let entry = devices
            .filter(|entry| entry.info.kind == DeviceKind::CPU && entry.info.rank > 0)
            .max_by_key(|entry| entry.info.rank)
            .ok_or_else(|| {
                Error::NoDevice("--cpu-experts: no backend gives the host's processor".into())
            })?;
        self.device_index(entry)
    }

    /// The index of a device, which is opened if it is not yet.
    fn device_index(&mut self, entry: crate::DeviceEntry) -> Result<usize> {
        let known = self.devices.iter().position(|d| d.entry.id() == entry.id());
        if let Some(index) = known {
            return Ok(index);
        }
        let device = self.runtime.open_device(&entry, self.n_threads)?;
        self.devices.push(OpenDevice { entry, device });
        Ok(self.devices.len() - 1)
    }
}

/// Names of the weights that an op reads.
fn weight_names<'a>(program: &'a Program, op: &'a Op) -> impl Iterator<Item = &'a str> {
    op.inputs.iter().filter_map(|id| {
        let value = program.values.get(id.index())?;
        (value.kind == ValueKind::Weight).then_some(value.name.as_str())
    })
}

/// Indices of the ops that read experts of layers below `n_layers`.
fn experts(program: &Program, n_layers: u32) -> Result<Vec<usize>> {
    let name = "--cpu-experts";
    let pattern = Regex::new(EXPERTS).map_err(|e| Error::Option { name, why: e.to_string() })?;
    let is_expert = |name: &str| {
        let layer = pattern.captures(name).and_then(|c| c.get(1)?.as_str().parse::<u32>().ok());
        layer.is_some_and(|layer| layer < n_layers)
    };
    let ops = program.ops.iter().enumerate();
    Ok(ops.filter(|(_, op)| weight_names(program, op).any(is_expert)).map(|(i, _)| i).collect())
}

/// Ops without weights or keys and values between two of one layer that were placed on one device go with them: the activation between two
/// halves of an MLP is not worth two crossings.
fn fill_between(program: &Program, pins: &mut [Option<usize>]) {
    let is_free = |op: &Op| {
        weight_names(program, op).next().is_none()
            && !matches!(op.kind, OpKind::KvStore { .. } | OpKind::Attention { .. })
    };
    let mut last: Option<(usize, usize)> = None;
    for (i, op) in program.ops.iter().enumerate() {
        match pins.get(i).copied().flatten() {
            Some(device) => {
                if let Some((from, same)) = last
                    && same == device
                    && program.ops.get(from).is_some_and(|other| other.layer == op.layer)
                {
                    pins.iter_mut().take(i).skip(from).for_each(|pin| *pin = Some(device));
                }
                last = Some((i, device));
            }
            None if !is_free(op) => last = None,
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_program::{Activation, DType, Dim, ProgramBuilder};

    /// A program of layers named as a mixture of experts names them, with plain matmuls for its ops.
    fn program(n_layers: u32) -> Program {
        let mut b = ProgramBuilder::new("experts");
        let tokens = b.input("tokens", DType::I32, &[Dim::NTokens]);
        let table = b.weight("token_embd.weight", DType::F32, &[50, 32]);
        let mut x = b.embed(tokens, table);
        for i in 0..n_layers {
            b.layer(Some(i));
            let mut weight = |part: &str| {
                let name = format!("blk.{i}.{part}.weight");
                b.weight(&name, DType::F32, &[32, 32])
            };
            let [q, up, down, shared] =
                ["attn_q", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp"].map(&mut weight);
            let h = b.matmul(x, q, None);
            let y = b.matmul(h, up, None);
            let y = b.unary(Activation::Silu, y);
            let y = b.matmul(y, down, None);
            let s = b.matmul(h, shared, None);
            x = b.add(y, s);
        }
        b.output("x", x);
        b.finish().unwrap()
    }

    /// Experts of the first layers, with what lies between them, and nothing else: more would be slow, less would not fit.
    #[test]
    fn experts_of_the_first_layers_are_found() {
        let program = program(12);
        for n in [0, 1, 2, 11, 12, 99] {
            let mut pins = vec![None; program.ops.len()];
            for index in experts(&program, n).unwrap() {
                pins[index] = Some(7);
            }
            fill_between(&program, &mut pins);
            for (op, pin) in program.ops.iter().zip(&pins) {
                let is_between = matches!(op.kind, OpKind::Unary { .. });
                let is_expert = weight_names(&program, op).any(|name| name.contains("_exps"));
                let is_first = op.layer.is_some_and(|layer| layer < n);
                let expected = ((is_expert || is_between) && is_first).then_some(7);
                assert_eq!(*pin, expected, "{n}: {:?} of layer {:?}", op.kind, op.layer);
            }
        }
    }
}
