//! Mixtures of experts: the router, products with the rows that it chose, and the sum of what they make.
//!
//! Which experts are chosen is known to the device alone: kernels read the ids that the router wrote, so a run is recorded once and the host waits
//! for nothing. A *slot* is one expert of one row.
//!
//! * up to 8 rows: every slot by itself (`matvec`), and no weight but those of the chosen experts is read;
//! * more: slots are sorted by expert on the device (`experts_sort`), and the kernels of products take groups of slots of one expert as their
//!   columns: `matvec` where experts have few, else `matmul_coopmat` or `matmul`. There are as many workgroups as the worst
//!   division of slots would need; those without a group end at once.

use crate::pipelines::Kernel;
use crate::product::{
    Call, FEW, Part, coopmat_kernel, fits_half, matmul_kernel, matvec_kernel, rows_max,
};
use crate::push::Push;
use crate::record::{Groups, Recorder, Span};
use crate::shaders::Shader;
use crate::steps::{Context, Elementwise, activation_number};
use crate::weight::Matrix;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Activation, Op, OpKind, Program, RouterGating, ValueId};
use tegula_sdk::{Error, Result};

/// Most experts of a layer, as the sorting kernel has it.
pub(crate) const EXPERTS_MAX: u32 = 2048;
/// Slots of a group for few columns.
const GROUP_FEW: u32 = 8;
/// Mean slots of an expert up to which groups are of few.
const MEAN_FEW: u32 = 4;
/// Columns of the f32 kernel's tiles.
const GROUP_MANY: u32 = 64;
/// How the kernels find their columns.
const BY_SLOT: u32 = 1;
const BY_GROUP: u32 = 2;

/// What the kernels of products are told of experts; all zero where there are none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Experts {
    pub(crate) ids: u64,
    pub(crate) groups: u64,
    pub(crate) slots: u64,
    pub(crate) n_expert: u32,
    /// Slots that read one row of x.
    pub(crate) sharing: u32,
    /// Rows of an expert.
    pub(crate) n_rows: u32,
}

impl Default for Experts {
    fn default() -> Self {
        Self { ids: 0, groups: 0, slots: 0, n_expert: 1, sharing: 1, n_rows: 0 }
    }
}

/// Groups of up to `size` that `n` slots make, at most.
fn n_groups_max(n: u64, n_expert: u32, size: u32) -> u64 {
    n / u64::from(size) + n.min(n_expert.into())
}

/// Bytes of the region for sorted slots, 0 where none is needed.
pub(crate) fn region_bytes(program: &Program, options: &CompileOptions) -> Result<u64> {
    let mut most = 0;
    for op in &program.ops {
        let OpKind::MatmulExperts { n_expert } = op.kind else { continue };
        let ids = program.value(op.inputs[2])?;
        let rows = rows_max(ids, options);
        if rows > FEW.into() {
            let slots = rows.saturating_mul(ids.row_len());
            let groups = n_groups_max(slots, n_expert, GROUP_FEW).saturating_mul(16);
            most = most.max(groups.saturating_add(slots.saturating_mul(4)));
        }
    }
    Ok(most)
}

/// One product of a run.
struct Stack<'a> {
    matrix: &'a Matrix,
    /// Tiles of the weight, cut where those of the bias are.
    parts: Vec<Part>,
    experts: Experts,
    x: Span,
    /// The ids of all slots.
    ids: Span,
    n_slots: u32,
}

impl<'e> Context<'e> {
    fn stack(&self, index: usize, y: ValueId) -> Result<Stack<'e>> {
        let exe = self.exe;
        let op = &exe.program.ops[index];
        let OpKind::MatmulExperts { n_expert } = op.kind else {
            return Err(Error::invalid("a product with experts that is none"));
        };
        let matrix = exe.matrix(op.inputs[1])?;
        let (x, ids) = (op.inputs[0], op.inputs[2]);
        let k = self.row_len(ids)?;
        let slots = u64::from(self.rows(y)?) * u64::from(k);
        let n_slots = u32::try_from(slots).map_err(|_| Error::unsupported("2^32 experts"))?;
        let n_rows = matrix.n_rows / n_expert.max(1);
        let sharing = if self.row_len(x)? == matrix.n_in { k } else { 1 };
        let bias = op.inputs.get(3).map(|id| exe.matrix(*id)).transpose()?;
        let to = self.at(y);
        let parts = parts(matrix, bias, n_rows).into_iter().map(|part| Part { y: to, ..part });
        Ok(Stack {
            matrix,
            parts: parts.collect(),
            experts: Experts { ids: self.at(ids), n_expert, sharing, n_rows, ..Experts::default() },
            x: self.whole(x)?,
            ids: self.whole(ids)?,
            n_slots,
        })
    }

    /// Records the product that op `index` is; with `second`, which lies alike, the gated product of the two.
    pub(crate) fn experts(
        &mut self,
        recorder: &mut Recorder<'_>,
        index: usize,
        second: Option<(usize, Activation)>,
        y: ValueId,
    ) -> Result<()> {
        let mut stack = self.stack(index, y)?;
        if stack.n_slots == 0 || stack.experts.n_rows == 0 {
            return Ok(());
        }
        let mut activation = 0;
        if let Some((second, function)) = second {
            activation = activation_number(function);
            let second = self.stack(second, y)?;
            for (part, other) in stack.parts.iter_mut().zip(&second.parts) {
                part.w2 = other.w;
            }
        }
        let writes = [self.whole(y)?];
        if self.rows(y)? <= FEW {
            recorder.order(&[stack.x, stack.ids], &writes);
            let is_pair = u32::from(second.is_some());
            return stack.few(recorder, (BY_SLOT, 1, stack.n_slots), (is_pair, activation));
        }
        let mean = stack.n_slots.div_ceil(stack.experts.n_expert.max(1));
        let has_half = recorder.gpu.physical.has_matrices
            && fits_half(stack.matrix.format, stack.matrix.n_in)
            && self.places.half.1 > 0;
        let size = match mean {
            n if n <= MEAN_FEW => GROUP_FEW,
            _ if !has_half => GROUP_MANY,
            0..=32 => 32,
            33..=64 => 64,
            _ => 128,
        };
        let n_groups = self.sort(recorder, &mut stack, size)?;
        let lists = self.places.experts;
        if size == GROUP_FEW {
            recorder.order(&[stack.x, lists], &writes);
            return stack.few(recorder, (BY_GROUP, GROUP_FEW, n_groups), (0, 0));
        }
        let n_rows = stack.experts.n_rows;
        if !has_half {
            recorder.order(&[stack.x, lists], &writes);
            let kernel = matmul_kernel(stack.matrix, Some(BY_GROUP));
            let groups = Groups::Are([n_rows.div_ceil(64), n_groups, 1]);
            return stack.run(
                recorder,
                &kernel,
                groups,
                stack.call((stack.x.0, stack.matrix.n_in)),
            );
        }
        let rows = stack.n_slots / stack.experts.sharing;
        let n_in = stack.matrix.n_in;
        let (half, stride, scales) = self.round_to_half(recorder, stack.x, n_in, rows)?;
        recorder.order(&[self.places.half, lists], &writes);
        for part in &mut stack.parts {
            part.w2 = scales;
        }
        let kernel = coopmat_kernel(stack.matrix, size, Some(BY_GROUP));
        let groups = Groups::Are([n_rows.div_ceil(128), n_groups, 1]);
        stack.run(recorder, &kernel, groups, stack.call((half, stride)))
    }

    /// Records gate and up together where rows are few and their tiles lie alike, else one after the other.
    pub(crate) fn gated_experts(
        &mut self,
        recorder: &mut Recorder<'_>,
        (gate, up): (usize, usize),
        activation: Activation,
        y: ValueId,
    ) -> Result<()> {
        let ops = &self.exe.program.ops;
        let (to_gate, to_up) = (ops[gate].outputs[0], ops[up].outputs[0]);
        let tiles = |op: usize| -> Result<&[_]> { Ok(&self.exe.matrix(ops[op].inputs[1])?.tiles) };
        let (a, b) = (tiles(gate)?, tiles(up)?);
        let is_alike =
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a.first, a.n) == (b.first, b.n));
        if is_alike && self.rows(y)? <= FEW {
            return self.experts(recorder, gate, Some((up, activation)), y);
        }
        self.experts(recorder, gate, None, to_gate)?;
        self.experts(recorder, up, None, to_up)?;
        let number = activation_number(activation);
        self.elementwise(recorder, Elementwise::Glu, number, [0.0; 2], &[to_gate, to_up], y)
    }

    /// Sorts slots into groups of up to `size`, unless they are; gives the number of groups at most.
    fn sort(
        &mut self,
        recorder: &mut Recorder<'_>,
        stack: &mut Stack<'_>,
        size: u32,
    ) -> Result<u32> {
        let region = self.places.experts;
        let n_expert = stack.experts.n_expert;
        let n = n_groups_max(stack.n_slots.into(), n_expert, size);
        let slots = region.0 + 16 * n;
        if slots + 4 * u64::from(stack.n_slots) > region.0 + region.1 {
            return Err(Error::invalid("slots of experts do not fit their region"));
        }
        (stack.experts.groups, stack.experts.slots) = (region.0, slots);
        let n = u32::try_from(n).map_err(|_| Error::unsupported("2^32 groups"))?;
        // Gate, up and down go to the same experts.
        if self.sorted != Some((stack.ids, recorder.n_writes(stack.ids), size)) {
            let push = Push::new()
                .u64(stack.ids.0)
                .u64(region.0)
                .u64(slots)
                .u32(stack.n_slots)
                .u32(n_expert)
                .u32(size)
                .u32(n);
            let kernel = Kernel::new(Shader::ExpertsSort, &[]);
            recorder.run(&kernel, &push, Groups::Are([1, 1, 1]), &[stack.ids], &[region])?;
            self.sorted = Some((stack.ids, recorder.n_writes(stack.ids), size));
        }
        Ok(n)
    }

    pub(crate) fn router(&self, recorder: &mut Recorder<'_>, op: &Op) -> Result<()> {
        let OpKind::RouterTopk { k, gating, normalise, scale } = op.kind else {
            return Err(Error::invalid("a router that is none"));
        };
        let [ids, weights] = op.outputs.as_slice() else {
            return Err(Error::invalid("a router makes two values"));
        };
        let x = op.inputs[0];
        let n = self.rows(x)?;
        let number = match gating {
            RouterGating::Softmax => 0,
            RouterGating::Sigmoid => 1,
            RouterGating::SoftmaxSelected => 2,
        };
        let push = Push::new()
            .u64(self.at(x))
            .u64(op.inputs.get(1).map_or(0, |id| self.at(*id)))
            .u64(self.at(*ids))
            .u64(self.at(*weights))
            .u32(self.row_len(x)?)
            .u32(n)
            .u32(k)
            .u32(normalise.into())
            .f32(scale);
        let physical = &recorder.gpu.physical;
        // One subgroup, so that nothing waits for another.
        let threads = physical.subgroup.max(32);
        let n_subgroups = threads.div_ceil(physical.subgroup_min.max(1));
        let kernel =
            Kernel::new(Shader::Router, &[(1, number), (20, threads), (21, n_subgroups.max(1))]);
        let writes = [self.whole(*ids)?, self.whole(*weights)?];
        let groups = Groups::Are([n.min(32_768), 1, 1]);
        recorder.run(&kernel, &push, groups, &[self.whole(x)?], &writes)
    }

    pub(crate) fn combine(
        &self,
        recorder: &mut Recorder<'_>,
        inputs: &[ValueId],
        residual: Option<ValueId>,
        y: ValueId,
    ) -> Result<()> {
        let (x, weights) = (inputs[0], inputs[1]);
        let (n, m) = (self.rows(y)?, self.row_len(y)?);
        let push = Push::new()
            .u64(self.at(x))
            .u64(self.at(weights))
            .u64(self.at(y))
            .u64(residual.map_or(0, |id| self.at(id)))
            .u32(n)
            .u32(m)
            .u32(self.row_len(weights)?);
        let mut reads = vec![self.whole(x)?, self.whole(weights)?];
        if let Some(id) = residual {
            reads.push(self.whole(id)?);
        }
        let kernel = Kernel::new(Shader::Combine, &[]);
        let groups = Groups::strided(u64::from(n) * u64::from(m), 256);
        recorder.run(&kernel, &push, groups, &reads, &[self.whole(y)?])
    }
}

impl Stack<'_> {
    fn call(&self, (x, x_stride): (u64, u32)) -> Call {
        Call { x, x_stride, n: self.n_slots, experts: self.experts, ..Call::default() }
    }

    /// `matvec` over `n` groups of up to `cols` columns; a pair is a gated one.
    fn few(
        &self,
        recorder: &mut Recorder<'_>,
        (mode, cols, n): (u32, u32, u32),
        (is_pair, activation): (u32, u32),
    ) -> Result<()> {
        let n_rows = self.experts.n_rows;
        let rows = if u64::from(n_rows) * u64::from(n) >= 2048 { 2 } else { 1 };
        let constants = [(1, rows), (2, cols), (3, is_pair), (5, 0), (30, mode)];
        let kernel = matvec_kernel(recorder.gpu, self.matrix, constants);
        let groups = Groups::flat(n_rows.div_ceil(rows).into(), n)?;
        let call = Call { activation, ..self.call((self.x.0, self.matrix.n_in)) };
        self.run(recorder, &kernel, groups, call)
    }

    /// Records a kernel over all parts.
    fn run(
        &self,
        recorder: &mut Recorder<'_>,
        kernel: &Kernel,
        groups: Groups,
        call: Call,
    ) -> Result<()> {
        for part in &self.parts {
            recorder.run(kernel, &call.push(self.matrix, part), groups, &[], &[])?;
        }
        Ok(())
    }
}

/// The tiles of a stack, cut where those of its bias are.
fn parts(matrix: &Matrix, bias: Option<&Matrix>, n_rows: u32) -> Vec<Part> {
    let mut out = Vec::new();
    for tile in &matrix.tiles {
        let Some(bias) = bias else {
            let (w, first) = (tile.address, tile.first);
            out.push(Part { w, first, n_rows: tile.n, ..Part::default() });
            continue;
        };
        for other in &bias.tiles {
            // A row of the bias has an element for each of an expert's rows.
            let (begin, end) = (other.first * n_rows, (other.first + other.n) * n_rows);
            let first = tile.first.max(begin);
            let end = (tile.first + tile.n).min(end);
            if first < end {
                out.push(Part {
                    w: tile.address + u64::from(first - tile.first) * u64::from(matrix.row_bytes),
                    bias: other.address + 4 * u64::from(first - begin),
                    first,
                    n_rows: end - first,
                    ..Part::default()
                });
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Format;
    use crate::weight::Rows;
    use tegula_sdk::quant::DType;

    fn matrix(n_in: u32, tiles: &[(u32, u32)]) -> Matrix {
        let tiles: Vec<_> = tiles
            .iter()
            .map(|(first, n)| Rows { address: 1000 * u64::from(*first), first: *first, n: *n })
            .collect();
        let n_rows = tiles.iter().map(|tile| tile.n).sum();
        Matrix {
            format: Format::F32,
            table: [0; 4],
            n_in,
            n_rows,
            row_bytes: 16,
            tiles,
            dtype: DType::F32,
            vector: None,
        }
    }

    /// A bias that is cut elsewhere than its weight would be read beyond its end.
    #[test]
    fn parts_are_cut_where_bias_or_weight_are() {
        let (weight, bias) = (matrix(4, &[(0, 5), (5, 7)]), matrix(3, &[(0, 1), (1, 3)]));
        let cut: Vec<_> = parts(&weight, Some(&bias), 3)
            .iter()
            .map(|part| (part.first, part.n_rows, part.w, part.bias))
            .collect();
        assert_eq!(cut, [(0, 3, 0, 0), (3, 2, 48, 1000), (5, 7, 5000, 1008)]);
        assert_eq!(parts(&weight, None, 3).len(), 2);
    }

    /// Workgroups for fewer groups than there are would leave slots without a result.
    #[test]
    fn groups_are_enough_for_every_division() {
        for (counts, size) in [(vec![1, 1, 1, 9], 8), (vec![0, 16, 0], 8), (vec![65; 3], 64)] {
            let n: u64 = counts.iter().sum();
            let groups: u64 = counts.iter().map(|count| count.div_ceil(size)).sum();
            let n_expert = u32::try_from(counts.len()).unwrap();
            assert!(n_groups_max(n, n_expert, u32::try_from(size).unwrap()) >= groups);
        }
    }
}
