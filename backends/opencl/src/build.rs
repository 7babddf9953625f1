//! From ops to kernels: which programs they need, which arguments, which shapes.

use crate::bound::Bound;
use crate::context::Shared;
use crate::facts::Facts;
use crate::groups::{Form, Group, rows_of};
use crate::launch::{Arg, Call, Extent, Launch, Memory, u32_of};
use crate::programs::{Source, file};
use crate::weight::grids;
use crate::weight::layout::Rows;
use std::cell::Cell;
use tegula_sdk::program::{Activation, Dim, Op, OpKind, Program, RopeStyle, ValueId};
use tegula_sdk::{Error, Result};

/// Work-items of a group in kernels over elements.
pub(crate) const ELEMENTS: u64 = 256;
/// With at most so many rows a group's own kernels run.
pub(crate) const FEW_ROWS: u64 = 4;
/// Work-items of a matvec's group, and teams of 32 in it.
pub(crate) const MATVEC_WG: u64 = 256;
pub(crate) const TEAMS: u64 = MATVEC_WG / 32;

/// What building needs to know.
pub(crate) struct Builder<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) program: &'a Program,
    pub(crate) weights: &'a [Option<Bound>],
    /// Turns of a rope op: memory made when the executable is.
    pub(crate) turns: &'a dyn Fn(usize) -> Option<Memory>,
    /// Region of scratch for ranking.
    pub(crate) rank_region: usize,
    /// Region of scratch for sorted slots, and the byte where they follow their groups.
    pub(crate) lists: (usize, u64),
    /// Ids whose slots are sorted when the next op runs with many rows, and how many make a group.
    pub(crate) sorted: Cell<Option<(ValueId, u64)>>,
}

/// Work-items of a group that reduces a row.
pub(crate) fn row_group(facts: &Facts) -> u64 {
    // A processor runs work-items one after the other: more of them only cost barriers.
    let wanted = if facts.cpu_kernels { 16 } else { 256 };
    let most = u64::try_from(facts.work_group_max).unwrap_or(1).max(1);
    let most = if most.is_power_of_two() { most } else { most.next_power_of_two() / 2 };
    wanted.min(most)
}

/// A program's parts that do not depend on weights.
pub(crate) fn simple(file: &'static [&'static str], wg: u64) -> Source {
    Source::new(file, &[("WG", wg)])
}

const ELEMENTWISE: &[&str] = &[file::COMMON, file::ELEMENTWISE];
const NORM: &[&str] = &[file::COMMON, file::NORM];
const ROPE: &[&str] = &[file::COMMON, file::ROPE];
pub(crate) const RANK: &[&str] = &[file::COMMON, file::RANK];
const EMBED: &[&str] = &[file::COMMON, file::WEIGHTS, file::EMBED];
pub(crate) const MATVEC_GPU: &[&str] =
    &[file::COMMON, file::TEAM, file::WEIGHTS, file::EXPERTS, file::MATVEC_GPU];
pub(crate) const MATMUL_GPU: &[&str] =
    &[file::COMMON, file::WEIGHTS, file::EXPERTS, file::MATMUL_GPU];
pub(crate) const MATMUL_CPU: &[&str] =
    &[file::COMMON, file::WEIGHTS, file::EXPERTS, file::MATMUL_CPU];

fn activation_number(activation: Activation) -> u32 {
    let known = Activation::ALL.iter().find(|(known, _)| *known == activation);
    known.map_or(u32::MAX, |(_, number)| number.0)
}

impl Builder<'_> {
    pub(crate) fn op(&self, index: usize) -> Result<&Op> {
        self.program.ops.get(index).ok_or_else(|| Error::invalid("an op that is not there"))
    }

    pub(crate) fn bound(&self, id: ValueId) -> Result<&Bound> {
        let bound = self.weights.get(id.index()).and_then(Option::as_ref);
        bound.ok_or_else(|| Error::invalid(format!("value {} is no weight", id.0)))
    }

    pub(crate) fn matrix(&self, id: ValueId) -> Result<(&Bound, &Rows)> {
        let bound = self.bound(id)?;
        let rows = bound.rows.as_ref();
        Ok((bound, rows.ok_or_else(|| Error::invalid("a vector where a matrix is read"))?))
    }

    /// A value, or a weight vector.
    pub(crate) fn operand(&self, id: ValueId) -> Result<Arg> {
        match self.weights.get(id.index()).and_then(Option::as_ref) {
            None => Ok(Arg::Value(id)),
            Some(bound) => match bound.tiles.as_slice() {
                [tile] => Ok(Arg::Fixed(tile.at)),
                _ => Err(Error::invalid("a vector in several tiles")),
            },
        }
    }

    pub(crate) fn row_len(&self, id: ValueId) -> Result<u64> {
        Ok(self.program.value(id)?.row_len())
    }

    pub(crate) fn call(&self, source: &Source, name: &str) -> Result<Call> {
        Ok(Call::new(self.shared.programs.kernel(self.shared, source, name)?))
    }

    /// The launches of a group with few rows, where they differ from its ops one by one.
    pub(crate) fn few(&self, group: &Group) -> Result<Option<Vec<Launch>>> {
        let Form::Products { norm, products, glu } = &group.form else { return Ok(None) };
        if self.shared.facts.cpu_kernels {
            return Ok(None);
        }
        let mut launches = Vec::new();
        let mut rest: Vec<_> = products.clone();
        while let Some((first, _)) = rest.first().copied() {
            // Those whose rows look alike, up to three at once.
            let key = |index: usize| -> Result<_> {
                let op = self.op(index)?;
                let (_, rows) = self.matrix(input(op, 1)?)?;
                Ok((rows.layout, rows.n_in))
            };
            let wanted = key(first)?;
            let (mut set, mut others) = (Vec::new(), Vec::new());
            for product in rest {
                if set.len() < 3 && key(product.0)? == wanted {
                    set.push(product);
                } else {
                    others.push(product);
                }
            }
            rest = others;
            launches.push(self.matvec(&set, *norm, *glu)?);
        }
        Ok(Some(launches))
    }

    /// One kernel for products that share their input and layout.
    fn matvec(
        &self,
        set: &[(usize, Option<usize>)],
        norm: Option<usize>,
        glu: Option<usize>,
    ) -> Result<Launch> {
        let (first, _) = set.first().copied().ok_or_else(|| Error::invalid("no product"))?;
        let first = self.op(first)?;
        let (_, rows) = self.matrix(input(first, 1)?)?;
        let mut widest = 0;
        for (product, _) in set {
            let (bound, _) = self.matrix(input(self.op(*product)?, 1)?)?;
            widest = widest.max(bound.tiles.iter().map(|tile| tile.n_rows).max().unwrap_or(0));
        }
        let per_team = rows_per_team(widest, &self.shared.facts, glu.is_some());
        let x = match norm {
            Some(norm) => input(self.op(norm)?, 0)?,
            None => input(first, 0)?,
        };
        let mut args = vec![
            self.operand(x)?,
            Arg::U32(u32_of(rows.n_in)?),
            Arg::U32(u32_of(rows.groups)?),
            Arg::U32(u32_of(rows.stride)?),
        ];
        if let Some(norm) = norm {
            let op = self.op(norm)?;
            let OpKind::RmsNorm { eps, .. } = op.kind else {
                return Err(Error::invalid("no norm"));
            };
            args.extend([self.operand(input(op, 1)?)?, Arg::F32(eps)]);
        }
        if let Some(glu) = glu {
            let OpKind::Glu { activation } = self.op(glu)?.kind else {
                return Err(Error::invalid("no gated unit"));
            };
            args.push(Arg::U32(activation_number(activation)));
        }
        // Of a gated unit the gate comes first, whichever was made first.
        let mut set = set.to_vec();
        if let Some(glu) = glu {
            let gate = input(self.op(glu)?, 0)?;
            if self.op(set[0].0)?.outputs.first() != Some(&gate) {
                set.reverse();
            }
        }
        let mut groups = 0;
        for (product, sum) in &set {
            let op = self.op(*product)?;
            let out = match (glu, sum) {
                (Some(glu), _) => output(self.op(glu)?, 0)?,
                (None, Some(sum)) => output(self.op(*sum)?, 0)?,
                (None, None) => output(op, 0)?,
            };
            let residual = match sum {
                Some(sum) => self.other_input(*sum, output(op, 0)?)?,
                None => None,
            };
            let (bound, _) = self.matrix(input(op, 1)?)?;
            let [tile] = bound.tiles.as_slice() else {
                return Err(Error::invalid("a weight in several tiles"));
            };
            self.set_args(&mut args, op, x, out, residual, (tile.at, 0, tile.n_rows))?;
            let own = tile.n_rows.div_ceil(TEAMS * per_team);
            groups = if glu.is_some() { own } else { groups + own };
        }
        let mut source = Source::new(
            MATVEC_GPU,
            &[
                ("WEIGHT", rows.layout as u64),
                ("WG", MATVEC_WG),
                ("R", per_team),
                ("SETS", set.len() as u64),
                ("GLU", glu.is_some().into()),
                ("NORM", norm.is_some().into()),
            ],
        );
        source.prelude = grids::prelude(rows.layout);
        Ok(Launch {
            what: if glu.is_some() { "matmul glu" } else { "matmul" },
            call: self.call(&source, "matvec")?,
            args,
            groups: [
                Extent::fixed(groups),
                Extent { dim: rows_of(self.program, x), ..Extent::ONE },
            ],
            local: MATVEC_WG as usize,
        })
    }

    fn other_input(&self, sum: usize, result: ValueId) -> Result<Option<ValueId>> {
        Ok(self.op(sum)?.inputs.iter().copied().find(|id| *id != result))
    }

    /// Weight, output, bias and residual of one product.
    fn set_args(
        &self,
        args: &mut Vec<Arg>,
        op: &Op,
        x: ValueId,
        out: ValueId,
        residual: Option<ValueId>,
        (at, first_row, n_rows): (Memory, u64, u64),
    ) -> Result<()> {
        let bias = op.inputs.get(2).map(|id| self.operand(*id)).transpose()?;
        let flags = u32::from(bias.is_some()) | u32::from(residual.is_some()) << 1;
        args.extend([
            Arg::Fixed(at),
            Arg::Value(out),
            bias.unwrap_or(self.operand(x)?),
            match residual {
                Some(id) => self.operand(id)?,
                None => self.operand(x)?,
            },
            Arg::U32(u32_of(n_rows)?),
            Arg::U32(u32_of(first_row)?),
            Arg::U32(u32_of(self.row_len(out)?)?),
            Arg::U32(flags),
        ]);
        Ok(())
    }

    /// An op by itself; `few` for few rows.
    pub(crate) fn plain(&self, index: usize, few: bool, out: &mut Vec<Launch>) -> Result<()> {
        let op = self.op(index)?;
        match op.kind {
            OpKind::Embed => self.embed(op, out),
            OpKind::Matmul => self.matmul(index, few, out),
            OpKind::RmsNorm { eps, n } => self.norm(op, "rms_norm", eps, n, out),
            OpKind::LayerNorm { eps, n } => self.norm(op, "layer_norm", eps, n, out),
            OpKind::L2Norm { eps, n } => self.norm(op, "l2_norm", eps, n, out),
            OpKind::MatmulExperts { .. } => self.experts(op, few, out),
            OpKind::RouterTopk { .. } => self.router(op, out),
            OpKind::CombineExperts => self.combine(op, out),
            OpKind::Rope { .. } => self.rope(&[index], out),
            OpKind::Argmax | OpKind::TopK { .. } => self.rank(op, out),
            OpKind::KvStore { .. }
            | OpKind::Attention { .. }
            | OpKind::ConvState { .. }
            | OpKind::GatedDelta { .. } => Err(Error::invalid("an op with state among others")),
            _ => self.elements(op, out),
        }
    }

    fn embed(&self, op: &Op, out: &mut Vec<Launch>) -> Result<()> {
        let (ids, table, y) = (input(op, 0)?, input(op, 1)?, output(op, 0)?);
        let (bound, rows) = self.matrix(table)?;
        let dim = rows_of(self.program, y);
        let n_vocab: u64 = bound.tiles.iter().map(|tile| tile.n_rows).sum();
        let mut source = Source::new(EMBED, &[("WEIGHT", rows.layout as u64)]);
        source.prelude = grids::prelude(rows.layout);
        for tile in &bound.tiles {
            let args = vec![
                self.operand(ids)?,
                Arg::Fixed(tile.at),
                Arg::Value(y),
                Arg::Count(dim, rows.groups),
                Arg::U32(u32_of(rows.n_in)?),
                Arg::U32(u32_of(rows.groups)?),
                Arg::U32(u32_of(rows.stride)?),
                Arg::U32(u32_of(tile.first_row)?),
                Arg::U32(u32_of(tile.n_rows)?),
                Arg::U32(u32_of(n_vocab)?),
            ];
            let local = 32;
            out.push(Launch {
                what: "embed",
                call: self.call(&source, "embed")?,
                args,
                groups: [Extent { dim, mul: rows.groups, div: local, ..Extent::ONE }, Extent::ONE],
                local: local as usize,
            });
        }
        Ok(())
    }

    fn matmul(&self, index: usize, few: bool, out: &mut Vec<Launch>) -> Result<()> {
        let op = self.op(index)?;
        let (x, y) = (input(op, 0)?, output(op, 0)?);
        let (bound, rows) = self.matrix(input(op, 1)?)?;
        let dim = rows_of(self.program, x);
        let facts = &self.shared.facts;
        let weight = ("WEIGHT", rows.layout as u64);
        for tile in &bound.tiles {
            let mut args = vec![
                self.operand(x)?,
                Arg::U32(u32_of(rows.n_in)?),
                Arg::U32(u32_of(rows.groups)?),
                Arg::U32(u32_of(rows.stride)?),
            ];
            let place = (tile.at, tile.first_row, tile.n_rows);
            let (mut source, name, groups, local);
            if facts.cpu_kernels {
                let per_item = if few { 1 } else { 4 };
                source = Source::new(MATMUL_CPU, &[weight, ("NT", per_item)]);
                args.push(Arg::Rows(dim));
                (name, local) = ("matmul", 16);
                groups = [
                    Extent::fixed(tile.n_rows.div_ceil(local)),
                    Extent { dim, mul: 1, div: per_item, ..Extent::ONE },
                ];
            } else if few {
                let per_team = rows_per_team(tile.n_rows, facts, false);
                source = Source::new(
                    MATVEC_GPU,
                    &[
                        weight,
                        ("WG", MATVEC_WG),
                        ("R", per_team),
                        ("SETS", 1),
                        ("GLU", 0),
                        ("NORM", 0),
                    ],
                );
                (name, local) = ("matvec", MATVEC_WG);
                groups = [
                    Extent::fixed(tile.n_rows.div_ceil(TEAMS * per_team)),
                    Extent { dim, ..Extent::ONE },
                ];
            } else {
                let tokens = 64;
                source = Source::new(MATMUL_GPU, &[weight, ("BN", tokens)]);
                args.push(Arg::Rows(dim));
                (name, local) = ("matmul", 128);
                groups = [
                    Extent::fixed(tile.n_rows.div_ceil(128)),
                    Extent { dim, mul: 1, div: tokens, ..Extent::ONE },
                ];
            }
            self.set_args(&mut args, op, x, y, None, place)?;
            source.prelude = grids::prelude(rows.layout);
            let call = self.call(&source, name)?;
            out.push(Launch { what: "matmul", call, args, groups, local: local as usize });
        }
        Ok(())
    }

    fn norm(
        &self,
        op: &Op,
        name: &'static str,
        eps: f32,
        n: u32,
        out: &mut Vec<Launch>,
    ) -> Result<()> {
        let (x, y) = (input(op, 0)?, output(op, 0)?);
        let wg = row_group(&self.shared.facts);
        let x_arg = self.operand(x)?;
        let vector = |i: usize| op.inputs.get(i).map(|id| self.operand(*id)).transpose();
        let (weight, bias) = (vector(1)?, vector(2)?);
        let mut args = vec![x_arg];
        let mut flag = None;
        if name != "l2_norm" {
            args.push(weight.unwrap_or(x_arg));
            flag = Some(weight.is_some());
        }
        if name == "layer_norm" {
            args.push(bias.unwrap_or(x_arg));
            flag = Some(bias.is_some());
        }
        args.extend([Arg::Value(y), Arg::U32(n), Arg::F32(eps)]);
        args.extend(flag.map(|flag| Arg::U32(flag.into())));
        let per_row = self.row_len(x)? / u64::from(n).max(1);
        out.push(Launch {
            what: name,
            call: self.call(&simple(NORM, wg), name)?,
            args,
            groups: [
                Extent { dim: rows_of(self.program, x), mul: per_row, ..Extent::ONE },
                Extent::ONE,
            ],
            local: wg as usize,
        });
        Ok(())
    }

    /// One rope, or two that turn alike.
    pub(crate) fn rope(&self, ops: &[usize], out: &mut Vec<Launch>) -> Result<()> {
        let index = ops.first().copied().ok_or_else(|| Error::invalid("no rope"))?;
        let op = self.op(index)?;
        let OpKind::Rope { style, head_dim, n_rot, attn_factor, .. } = op.kind else {
            return Err(Error::invalid("no rope"));
        };
        let (x, y) = (input(op, 0)?, output(op, 0)?);
        let turns = (self.turns)(index).ok_or_else(|| Error::invalid("rope without turns"))?;
        let (x2, y2) = match ops.get(1) {
            Some(second) => (input(self.op(*second)?, 0)?, output(self.op(*second)?, 0)?),
            None => (x, y),
        };
        let heads = |x| Ok::<_, Error>(self.row_len(x)? / u64::from(head_dim).max(1));
        let (n_head, n_head2) = (heads(x)?, heads(x2)?);
        let items = u64::from(head_dim - n_rot / 2);
        let per_row2 = if ops.len() > 1 { n_head2 * items } else { 0 };
        let dim = rows_of(self.program, x);
        out.push(Launch {
            what: "rope",
            call: self.call(&Source::new(ROPE, &[]), "rope")?,
            args: vec![
                self.operand(x)?,
                self.operand(x2)?,
                self.operand(input(op, 1)?)?,
                Arg::Fixed(turns),
                Arg::Value(y),
                Arg::Value(y2),
                Arg::Count(dim, n_head * items),
                Arg::Count(dim, per_row2),
                Arg::U32(u32_of(n_head)?),
                Arg::U32(u32_of(n_head2)?),
                Arg::U32(head_dim),
                Arg::U32(n_rot),
                Arg::U32((style == RopeStyle::Neox).into()),
                Arg::F32(attn_factor),
            ],
            groups: [
                Extent { dim, mul: n_head * items + per_row2, div: 64, ..Extent::ONE },
                Extent::ONE,
            ],
            local: 64,
        });
        Ok(())
    }

    fn rank(&self, op: &Op, out: &mut Vec<Launch>) -> Result<()> {
        let x = input(op, 0)?;
        let wg = row_group(&self.shared.facts);
        let row = Arg::U32(u32_of(self.row_len(x)?)?);
        let (what, args) = match op.kind {
            OpKind::TopK { k } => (
                "top_k",
                vec![
                    self.operand(x)?,
                    Arg::Value(output(op, 0)?),
                    Arg::Value(output(op, 1)?),
                    Arg::Region(self.rank_region),
                    row,
                    Arg::U32(k),
                ],
            ),
            _ => ("argmax", vec![self.operand(x)?, Arg::Value(output(op, 0)?), row]),
        };
        out.push(Launch {
            what,
            call: self.call(&simple(RANK, wg), what)?,
            args,
            groups: [Extent { dim: rows_of(self.program, x), ..Extent::ONE }, Extent::ONE],
            local: wg as usize,
        });
        Ok(())
    }

    fn elements(&self, op: &Op, out: &mut Vec<Launch>) -> Result<()> {
        let y = output(op, 0)?;
        let (row, dim) = (self.row_len(y)?, rows_of(self.program, y));
        let mut args = Vec::new();
        for id in &op.inputs {
            args.push(self.operand(*id)?);
        }
        args.extend([Arg::Value(y), Arg::Count(dim, row)]);
        let lengths = |i: usize| u32_of(self.row_len(input(op, i)?)?).map(Arg::U32);
        match op.kind {
            OpKind::Add | OpKind::Mul => {
                // One row for every row, or one number for every element.
                let b = self.program.value(input(op, 1)?)?;
                args.push(Arg::U64(if b.dims.len() == 1 { b.row_len() } else { 0 }));
            }
            OpKind::Glu { activation } | OpKind::Unary { activation } => {
                args.push(Arg::U32(activation_number(activation)));
            }
            OpKind::Scale { factor } => args.push(Arg::F32(factor)),
            OpKind::Softcap { cap } => args.push(Arg::F32(cap)),
            OpKind::Slice { begin, len } => {
                args.extend([lengths(0)?, Arg::U32(begin), Arg::U32(len)]);
            }
            OpKind::SliceGroups { group, begin, len } => {
                args.extend([group, begin, len].map(Arg::U32));
            }
            OpKind::GluClamped { alpha, limit } => args.extend([alpha, limit].map(Arg::F32)),
            OpKind::Concat => args.extend([lengths(0)?, lengths(1)?]),
            OpKind::GatherRows => {
                args.extend([lengths(0)?, Arg::Rows(rows_of(self.program, input(op, 0)?))]);
            }
            _ => return Err(Error::unsupported(format!("op {}", op.kind.name()))),
        }
        let what = op.kind.name();
        // A group is to the kernel what a row is to it elsewhere.
        let name = if what == "slice_groups" { "slice" } else { what };
        let local = ELEMENTS.min(row_group(&self.shared.facts).max(64));
        out.push(Launch {
            what,
            call: self.call(&Source::new(ELEMENTWISE, &[]), name)?,
            args,
            groups: [Extent { dim, mul: row, div: local, ..Extent::ONE }, Extent::ONE],
            local: local as usize,
        });
        Ok(())
    }
}

/// Rows that a team of 32 computes: more share the activations they load, fewer fill the device.
pub(crate) fn rows_per_team(n_rows: u64, facts: &Facts, pairs: bool) -> u64 {
    let units = u64::from(facts.compute_units);
    let groups = |per_team: u64| n_rows.div_ceil(TEAMS * per_team);
    let most = if pairs { 2 } else { 4 };
    [4, 2].into_iter().find(|r| *r <= most && groups(*r) >= units).unwrap_or(1)
}

pub(crate) fn input(op: &Op, i: usize) -> Result<ValueId> {
    let id = op.inputs.get(i).copied();
    id.ok_or_else(|| Error::invalid(format!("{} without input {i}", op.kind.name())))
}

pub(crate) fn output(op: &Op, i: usize) -> Result<ValueId> {
    let id = op.outputs.get(i).copied();
    id.ok_or_else(|| Error::invalid(format!("{} without output {i}", op.kind.name())))
}

/// The rows of what a group makes, by which its launches are chosen.
pub(crate) fn rows_of_group(program: &Program, group: &Group) -> Dim {
    let op = group.ops.first().and_then(|i| program.ops.get(*i));
    let id = op.and_then(|op| op.outputs.first().or(op.inputs.first()));
    id.map_or(Dim::Fixed(1), |id| rows_of(program, *id))
}
