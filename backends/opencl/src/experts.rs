//! Mixtures of experts: launches of the router, of products with the rows that it chose, and of the sum of what they make.
//!
//! Which experts are chosen is known to the device alone: kernels read the ids that the router wrote, and the host waits for nothing. A *slot* is one expert
//! of one row. With few rows every slot runs by itself, and no weight but those of the chosen experts is read; with many, slots are sorted by expert on
//! the device, and the kernels of products take groups of slots of one expert as their columns. There are as many work-groups as the worst division of
//! slots would need; those without a group end at once.

use crate::bound::Bound;
use crate::build::{
    Builder, ELEMENTS, MATMUL_CPU, MATMUL_GPU, MATVEC_GPU, MATVEC_WG, TEAMS, input, output,
    row_group, rows_per_team,
};
use crate::facts::Facts;
use crate::groups::rows_of;
use crate::launch::{Arg, Extent, Launch, Memory, u32_of};
use crate::plan::rows_max;
use crate::programs::{Source, file};
use crate::weight::grids;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Op, OpKind, Program, RouterGating};
use tegula_sdk::{Error, Result};

const ROUTER: &[&str] = &[file::COMMON, file::RANK, file::ROUTER];
/// Local memory of the kernels: three words for each expert, and a few for each work-item.
const BYTES_PER_EXPERT: u64 = 12;
const BYTES_BESIDE: u64 = 8 << 10;
/// Work-items of a group of the router.
const ROUTER_WG: u64 = 64;
/// Slots of a group: for processors, and for others with many experts or few.
const GROUP_CPU: u64 = 4;
const GROUP_SMALL: u64 = 32;
const GROUP_LARGE: u64 = 64;

/// Slots of a group; a prompt of 512 tokens should fill most of a large one.
fn group_size(facts: &Facts, n_expert: u64, k: u64) -> u64 {
    match (facts.cpu_kernels, n_expert <= 4 * k) {
        (true, _) => GROUP_CPU,
        (false, false) => GROUP_SMALL,
        (false, true) => GROUP_LARGE,
    }
}

/// Experts of an op of a router or of a product.
fn n_expert_of(program: &Program, op: &Op) -> Option<u64> {
    match op.kind {
        OpKind::MatmulExperts { n_expert } => Some(n_expert.into()),
        OpKind::RouterTopk { .. } => Some(program.value(*op.inputs.first()?).ok()?.row_len()),
        _ => None,
    }
}

/// Whether the kernels of a router or a product with experts have room for that many.
pub(crate) fn fits(facts: &Facts, program: &Program, op: &Op) -> bool {
    n_expert_of(program, op).is_some_and(|n_expert| {
        let bytes = n_expert.saturating_mul(BYTES_PER_EXPERT).saturating_add(BYTES_BESIDE);
        bytes <= facts.local_bytes
    })
}

/// Bytes of the lists of groups and of slots, at most.
pub(crate) fn list_bytes(
    facts: &Facts,
    program: &Program,
    options: &CompileOptions,
) -> Result<(u64, u64)> {
    let (mut groups, mut slots) = (0, 0);
    for op in &program.ops {
        let OpKind::MatmulExperts { n_expert } = op.kind else { continue };
        let ids = program.value(input(op, 2)?)?;
        let (k, n_expert) = (ids.row_len(), u64::from(n_expert));
        let n = rows_max(ids.rows(), options).saturating_mul(k);
        let size = group_size(facts, n_expert, k);
        groups = groups.max(n.div_ceil(size).saturating_add(n_expert).saturating_mul(16));
        slots = slots.max(n.saturating_mul(4));
    }
    Ok((groups, slots))
}

/// A piece of a stack in one tile, and of its bias.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Part {
    w: Memory,
    bias: Option<Memory>,
    first_row: u64,
    n_rows: u64,
}

/// The tiles of a stack with rows of `stride` bytes, cut where those of its bias are, whose rows each have an element for each of an expert's `n_rows`.
fn parts(weight: &Bound, stride: u64, bias: Option<&Bound>, n_rows: u64) -> Vec<Part> {
    let mut out = Vec::new();
    for tile in &weight.tiles {
        let Some(bias) = bias else {
            let (w, first_row, n_rows) = (tile.at, tile.first_row, tile.n_rows);
            out.push(Part { w, bias: None, first_row, n_rows });
            continue;
        };
        for other in &bias.tiles {
            let begin = other.first_row * n_rows;
            let first = tile.first_row.max(begin);
            let end = (tile.first_row + tile.n_rows).min(begin + other.n_rows * n_rows);
            if first < end {
                let skip = (first - tile.first_row) * stride;
                out.push(Part {
                    w: Memory(tile.at.0, tile.at.1 + skip),
                    bias: Some(Memory(other.at.0, other.at.1 + 4 * (first - begin))),
                    first_row: first,
                    n_rows: end - first,
                });
            }
        }
    }
    out
}

impl Builder<'_> {
    /// A product with experts, over all tiles of its weight.
    pub(crate) fn experts(&self, op: &Op, few: bool, out: &mut Vec<Launch>) -> Result<()> {
        let OpKind::MatmulExperts { n_expert } = op.kind else {
            return Err(Error::invalid("no product with experts"));
        };
        let n_expert = u64::from(n_expert).max(1);
        let (x, ids, y) = (input(op, 0)?, input(op, 2)?, output(op, 0)?);
        let (bound, rows) = self.matrix(input(op, 1)?)?;
        let bias = op.inputs.get(3).map(|id| self.bound(*id)).transpose()?;
        let k = self.row_len(ids)?;
        let n_rows = bound.tiles.iter().map(|tile| tile.n_rows).sum::<u64>() / n_expert;
        let sharing = if self.row_len(x)? == rows.n_in { k } else { 1 };
        let facts = &self.shared.facts;
        let dim = rows_of(self.program, x);
        let size = if few { 1 } else { group_size(facts, n_expert, k) };
        if !few {
            self.sort(op, size, out)?;
        }
        let columns = Extent { dim, mul: k, div: size, plus: if few { 0 } else { n_expert } };
        let weight = ("WEIGHT", rows.layout as u64);
        let experts = ("EXPERTS", if few { 1 } else { 2 });
        let is_matvec = few && !facts.cpu_kernels;
        let (mut source, name, per_group, local) = if facts.cpu_kernels {
            (Source::new(MATMUL_CPU, &[weight, ("NT", size), experts]), "matmul", 16, 16)
        } else if is_matvec {
            let per_team = rows_per_team(n_rows.saturating_mul(k), facts, false);
            let source = Source::new(
                MATVEC_GPU,
                &[
                    weight,
                    ("WG", MATVEC_WG),
                    ("R", per_team),
                    ("SETS", 1),
                    ("GLU", 0),
                    ("NORM", 0),
                    experts,
                ],
            );
            (source, "matvec", TEAMS * per_team, MATVEC_WG)
        } else {
            (Source::new(MATMUL_GPU, &[weight, ("BN", size), experts]), "matmul", 128, 128)
        };
        source.prelude = grids::prelude(rows.layout);
        for part in parts(bound, rows.stride, bias, n_rows) {
            let mut args = vec![
                self.operand(x)?,
                Arg::U32(u32_of(rows.n_in)?),
                Arg::U32(u32_of(rows.groups)?),
                Arg::U32(u32_of(rows.stride)?),
            ];
            if !is_matvec {
                args.push(Arg::Rows(dim));
            }
            args.extend([
                Arg::Fixed(part.w),
                Arg::Value(y),
                part.bias.map_or(self.operand(x)?, Arg::Fixed),
                self.operand(x)?,
                Arg::U32(u32_of(n_rows)?),
                Arg::U32(0),
                Arg::U32(u32_of(n_rows)?),
                Arg::U32(part.bias.is_some().into()),
                self.operand(ids)?,
                if few { self.operand(ids)? } else { Arg::Region(self.lists.0) },
                Arg::U64(self.lists.1),
                Arg::U32(u32_of(n_expert)?),
                Arg::U32(u32_of(sharing)?),
                Arg::U32(u32_of(part.first_row)?),
                Arg::U32(u32_of(part.n_rows)?),
            ]);
            out.push(Launch {
                what: "matmul experts",
                call: self.call(&source, name)?,
                args,
                groups: [Extent::fixed(n_rows.div_ceil(per_group)), columns],
                local: local as usize,
            });
        }
        Ok(())
    }

    /// Sorts the slots of a product's ids, unless the product before has had the same: gate, up and down go to the same experts.
    fn sort(&self, op: &Op, size: u64, out: &mut Vec<Launch>) -> Result<()> {
        let ids = input(op, 2)?;
        if self.sorted.replace(Some((ids, size))) == Some((ids, size)) {
            return Ok(());
        }
        let n_expert = n_expert_of(self.program, op).unwrap_or(1);
        let wg = row_group(&self.shared.facts);
        let source = Source::new(ROUTER, &[("WG", wg), ("EXPERTS_MAX", n_expert)]);
        out.push(Launch {
            what: "sort experts",
            call: self.call(&source, "sort_slots")?,
            args: vec![
                self.operand(ids)?,
                Arg::Region(self.lists.0),
                Arg::U64(self.lists.1),
                Arg::Rows(rows_of(self.program, ids)),
                Arg::U32(u32_of(self.row_len(ids)?)?),
                Arg::U32(u32_of(n_expert)?),
                Arg::U32(u32_of(size)?),
            ],
            groups: [Extent::ONE, Extent::ONE],
            local: wg as usize,
        });
        Ok(())
    }

    pub(crate) fn router(&self, op: &Op, out: &mut Vec<Launch>) -> Result<()> {
        let OpKind::RouterTopk { k, gating, normalise, scale } = op.kind else {
            return Err(Error::invalid("no router"));
        };
        let x = input(op, 0)?;
        let n_expert = self.row_len(x)?;
        let bias = op.inputs.get(1).map(|id| self.operand(*id)).transpose()?;
        let number = match gating {
            RouterGating::Softmax => 0,
            RouterGating::Sigmoid => 1,
            RouterGating::SoftmaxSelected => 2,
        };
        let wg = row_group(&self.shared.facts).min(ROUTER_WG);
        let source = Source::new(ROUTER, &[("WG", wg), ("EXPERTS_MAX", n_expert)]);
        out.push(Launch {
            what: "router_topk",
            call: self.call(&source, "router_topk")?,
            args: vec![
                self.operand(x)?,
                bias.unwrap_or(self.operand(x)?),
                Arg::Value(output(op, 0)?),
                Arg::Value(output(op, 1)?),
                Arg::U32(u32_of(n_expert)?),
                Arg::U32(k),
                Arg::U32(number),
                Arg::U32(normalise.into()),
                Arg::U32(bias.is_some().into()),
                Arg::F32(scale),
            ],
            groups: [Extent { dim: rows_of(self.program, x), ..Extent::ONE }, Extent::ONE],
            local: wg as usize,
        });
        Ok(())
    }

    pub(crate) fn combine(&self, op: &Op, out: &mut Vec<Launch>) -> Result<()> {
        let (x, weights, y) = (input(op, 0)?, input(op, 1)?, output(op, 0)?);
        let (m, dim) = (self.row_len(y)?, rows_of(self.program, y));
        let wg = row_group(&self.shared.facts);
        let source = Source::new(ROUTER, &[("WG", wg), ("EXPERTS_MAX", 1)]);
        let local = ELEMENTS.min(wg.max(64));
        out.push(Launch {
            what: "combine_experts",
            call: self.call(&source, "combine_experts")?,
            args: vec![
                self.operand(x)?,
                self.operand(weights)?,
                Arg::Value(y),
                Arg::Count(dim, m),
                Arg::U32(u32_of(m)?),
                Arg::U32(u32_of(self.row_len(weights)?)?),
            ],
            groups: [Extent { dim, mul: m, div: local, ..Extent::ONE }, Extent::ONE],
            local: local as usize,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bound::TileAt;

    fn bound(tiles: &[(u64, u64)]) -> Bound {
        let at = |first: u64| Memory(std::ptr::null_mut(), 1000 * first);
        let tiles =
            tiles.iter().map(|(first, n)| TileAt { at: at(*first), first_row: *first, n_rows: *n });
        Bound { rows: None, tiles: tiles.collect() }
    }

    /// A bias that is cut elsewhere than its weight would be read beyond its end.
    #[test]
    fn parts_are_cut_where_bias_or_weight_are() {
        let (weight, bias) = (bound(&[(0, 5), (5, 7)]), bound(&[(0, 1), (1, 3)]));
        let cut: Vec<_> = parts(&weight, 16, Some(&bias), 3)
            .iter()
            .map(|part| (part.first_row, part.n_rows, part.w.1, part.bias.map(|bias| bias.1)))
            .collect();
        let expected =
            [(0, 3, 0, Some(0)), (3, 2, 48, Some(1000)), (5, 7, 5000, Some(1000 + 4 * 2))];
        assert_eq!(cut, expected);
        assert_eq!(parts(&weight, 16, None, 3).len(), 2);
    }
}
