//! Decides which op goes to which slot of which device: by layers, by what each device can run, by what was asked for.

use super::slots::Slot;
use crate::partition::keep_kv_together;
use crate::{Error, Result};
use regex::Regex;
use std::str::FromStr;
use tegula_program::Program;

/// How layers are divided over the selected devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Split {
    /// The first device takes all that fits, the next one the rest, and so on: the fewest transfers.
    #[default]
    Fill,
    /// One device only, the first.
    None,
    /// Layers in proportion to free memory, over all selected devices but the host's processor, unless it is the only one.
    Layer,
    /// Layers in these proportions, one number for each selected device.
    Proportions(Vec<f32>),
}

impl FromStr for Split {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "fill" => Ok(Self::Fill),
            "none" => Ok(Self::None),
            "layer" => Ok(Self::Layer),
            list => {
                let numbers: Result<Vec<f32>, _> =
                    list.split(',').map(|n| n.trim().parse::<f32>()).collect();
                numbers
                    .ok()
                    .filter(|n| n.iter().all(|x| x.is_finite() && *x >= 0.0))
                    .filter(|n| n.iter().sum::<f32>() > 0.0)
                    .map(Self::Proportions)
                    .ok_or_else(|| Error::Option {
                        name: "--split",
                        why: format!(
                            "`{text}` is neither fill, none, layer nor numbers such as 3,1"
                        ),
                    })
            }
        }
    }
}

/// Weights whose names match are kept on a device, and the ops that read them run there.
#[derive(Debug, Clone)]
pub struct PlaceRule {
    /// Matched anywhere in a tensor's name.
    pub pattern: Regex,
    /// A device selector; the first device it names.
    pub device: String,
}

impl FromStr for PlaceRule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fault = |why: String| Error::Option { name: "--place", why };
        let (pattern, device) = text.rsplit_once('=').ok_or_else(|| {
            fault(format!(r"`{text}` is not PATTERN=DEVICE, such as blk\.2[0-9]\.ffn_=cpu"))
        })?;
        let pattern = Regex::new(pattern).map_err(|e| fault(e.to_string()))?;
        Ok(Self { pattern, device: device.trim().to_owned() })
    }
}

/// Layers of each device, in order of devices; they sum to the program's layers.
pub(crate) type LayerCounts = Vec<u32>;

/// Number of layers, by the highest that an op names.
pub(crate) fn n_layers(program: &Program) -> u32 {
    program.ops.iter().filter_map(|op| op.layer).max().map_or(0, |layer| layer.saturating_add(1))
}

/// The counts to begin with; `free` is each device's free memory, 0 where it is unknown or does not count.
pub(crate) fn first_counts(split: &Split, n_layers: u32, free: &[u64]) -> Result<LayerCounts> {
    let all_on_first = || {
        let mut counts = vec![0; free.len()];
        if let Some(first) = counts.first_mut() {
            *first = n_layers;
        }
        counts
    };
    let shares: Vec<f64> = match split {
        Split::Fill | Split::None => return Ok(all_on_first()),
        Split::Layer => free.iter().map(|bytes| *bytes as f64).collect(),
        Split::Proportions(numbers) if numbers.len() == free.len() => {
            numbers.iter().map(|n| f64::from(*n)).collect()
        }
        Split::Proportions(numbers) => {
            return Err(Error::Option {
                name: "--split",
                why: format!("{} numbers for {} devices", numbers.len(), free.len()),
            });
        }
    };
    let total: f64 = shares.iter().sum();
    if total <= 0.0 {
        return Ok(all_on_first());
    }
    // Boundaries are rounded, not counts, so that the counts sum to all layers.
    let (mut sum, mut before) = (0.0, 0u32);
    let counts = shares.iter().map(|share| {
        sum += share;
        let end = (f64::from(n_layers) * sum / total).round() as u32;
        let count = end.saturating_sub(before);
        before = end;
        count
    });
    Ok(counts.collect())
}

/// Layers of each slot that is to be filled, from the layers of each device: all in the memory that the device advises.
pub(crate) fn counts_of_slots(counts: &LayerCounts, slots: &[Slot]) -> LayerCounts {
    let filled = slots.iter().filter_map(|slot| Some((slot, *counts.get(slot.device)?)));
    filled.map(|(slot, count)| if slot.is_advised { count } else { 0 }).collect()
}

/// Moves one layer out of `over`, the slots that take of memory that is over its budget, to the next slot beyond them. False if there is none to move or
/// nowhere to.
pub(crate) fn shift(counts: &mut LayerCounts, over: &[usize]) -> bool {
    let slots = 0..counts.len();
    let from = slots.clone().rev().find(|slot| over.contains(slot) && counts[*slot] > 0);
    let Some(from) = from else { return false };
    let Some(to) = slots.skip(from + 1).find(|slot| !over.contains(slot)) else { return false };
    counts[from] -= 1;
    counts[to] += 1;
    true
}

/// The slot of every op. `supports[d][op]` says what device `d` can run; `pinned` is the device of ops that a rule places.
pub(crate) fn slots_of_ops(
    program: &Program,
    counts: &LayerCounts,
    slots: &[Slot],
    supports: &[Vec<bool>],
    pinned: &[Option<usize>],
    names: &[String],
) -> Result<Vec<usize>> {
    let mut ends = Vec::with_capacity(counts.len());
    let mut sum = 0u32;
    for count in counts {
        sum = sum.saturating_add(*count);
        ends.push(sum);
    }
    let slot_of_layer = |layer: u32| ends.iter().position(|end| layer < *end).unwrap_or(0);
    let slot_of_device = |device: usize| {
        slots.iter().position(|slot| slot.device == device && slot.is_advised).unwrap_or(0)
    };
    let can = |slot: usize, op: usize| {
        let device = slots.get(slot).and_then(|slot| supports.get(slot.device));
        device.and_then(|ops| ops.get(op)).copied().unwrap_or(false)
    };
    let n_layers = n_layers(program);
    let mut seen_layers = false;
    let mut out = Vec::with_capacity(program.ops.len());
    let mut missing: Vec<&str> = Vec::new();
    for (i, op) in program.ops.iter().enumerate() {
        seen_layers |= op.layer.is_some();
        // Ops before the layers go with the first, ops after them with the last.
        let layer = op.layer.unwrap_or(if seen_layers { n_layers.saturating_sub(1) } else { 0 });
        let pinned = pinned.get(i).copied().flatten().map(slot_of_device);
        let wanted = pinned.unwrap_or_else(|| slot_of_layer(layer));
        let slot = if can(wanted, i) {
            wanted
        } else {
            // The last devices first: the host's processor stands at the end and can run everything.
            let others = (0..supports.len()).rev().map(slot_of_device);
            others.into_iter().find(|slot| can(*slot, i)).unwrap_or_else(|| {
                missing.push(op.kind.name());
                wanted
            })
        };
        out.push(slot);
    }
    if !missing.is_empty() {
        missing.sort_unstable();
        missing.dedup();
        return Err(Error::OpsUnsupported { device: names.join(", "), ops: missing.join(", ") });
    }
    keep_kv_together(program, &mut out);
    for (i, slot) in out.iter().enumerate() {
        if !can(*slot, i) {
            let device = slots.get(*slot).and_then(|slot| names.get(slot.device));
            return Err(Error::OpsUnsupported {
                device: device.cloned().unwrap_or_default(),
                ops: program.ops.get(i).map_or("?", |op| op.kind.name()).to_owned(),
            });
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong `--split` or `--place` must be refused, not mean something else.
    #[test]
    fn options_are_read_or_refused() {
        assert_eq!("layer".parse::<Split>().unwrap(), Split::Layer);
        assert_eq!("3,1".parse::<Split>().unwrap(), Split::Proportions(vec![3.0, 1.0]));
        for text in ["", "rows", "3,", "-1,2", "0,0", "nan,1"] {
            assert!(text.parse::<Split>().is_err(), "{text}");
        }
        let rule: PlaceRule = r"blk\.(2[0-9])\.ffn_.*_exps=cpu".parse().unwrap();
        assert!(rule.pattern.is_match("blk.23.ffn_up_exps.weight"));
        assert!(!rule.pattern.is_match("blk.3.ffn_up_exps.weight"));
        assert_eq!(rule.device, "cpu");
        for text in ["", "abc", "(=cpu"] {
            assert!(text.parse::<PlaceRule>().is_err(), "{text}");
        }
    }

    /// Every layer has one device, whatever the proportions.
    #[test]
    fn counts_sum_to_all_layers() {
        let table: [(Split, &[u64], &[u32]); 6] = [
            (Split::Fill, &[5, 5], &[28, 0]),
            (Split::Layer, &[10, 10], &[14, 14]),
            (Split::Layer, &[30, 10], &[21, 7]),
            (Split::Layer, &[0, 0], &[28, 0]),
            (Split::Proportions(vec![1.0, 1.0, 1.0]), &[1, 1, 1], &[9, 10, 9]),
            (Split::Proportions(vec![0.0, 1.0]), &[1, 1], &[0, 28]),
        ];
        for (split, free, expected) in table {
            assert_eq!(first_counts(&split, 28, free).unwrap(), expected, "{split:?}");
        }
        assert!(first_counts(&Split::Proportions(vec![1.0]), 28, &[1, 1]).is_err());
    }

    /// A layer that moves must leave the memory that is full, and none may be lost on the way.
    #[test]
    fn layers_move_out_of_full_memory() {
        type Row = (&'static [u32], &'static [usize], Option<&'static [u32]>);
        let table: [Row; 7] = [
            (&[4, 0], &[0], Some(&[3, 1])),
            (&[4, 0, 0], &[0, 1], Some(&[3, 0, 1])),
            (&[3, 1, 0], &[0, 1], Some(&[3, 0, 1])),
            (&[3, 1, 0], &[0, 2], Some(&[2, 2, 0])),
            (&[0, 4], &[1], None),
            (&[0, 4], &[0], None),
            (&[2, 2], &[0, 1], None),
        ];
        for (before, over, after) in table {
            let mut counts = before.to_vec();
            let moved = shift(&mut counts, over);
            assert_eq!(moved, after.is_some(), "{before:?} {over:?}");
            assert_eq!(counts, after.unwrap_or(before), "{before:?} {over:?}");
        }
    }
}
