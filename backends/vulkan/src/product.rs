//! Products with weights: which kernel for how many rows of activations, and how its work is cut.
//!
//! * up to 8 rows: `matvec`, which reads each weight once and keeps a sum for each row;
//! * more, where the device has cooperative matrices: `matmul_coopmat`, on activations rounded to f16 (weights of f32 keep to f32);
//! * more elsewhere: `matmul`, in f32.

use crate::experts::Experts;
use crate::gpu::Gpu;
use crate::layout::Format;
use crate::pipelines::Kernel;
use crate::plan::{Product, Prologue};
use crate::push::Push;
use crate::record::{Groups, Recorder, Span};
use crate::shaders::Shader;
use crate::steps::Context;
use crate::weight::{Matrix, Rows};
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Dim, OpKind, Program, Value};
use tegula_sdk::{Error, Result};

/// Rows of activations up to which weights are streamed.
pub(crate) const FEW: u32 = 8;
/// Elements that the coopmat kernel takes at a time; activations are padded to it.
const HALF_STEP: u32 = 64;

/// Bytes of the region for activations in f16 and their scales, 0 where none is needed.
pub(crate) fn half_bytes(gpu: &Gpu, program: &Program, options: &CompileOptions) -> Result<u64> {
    if !gpu.physical.has_matrices {
        return Ok(0);
    }
    let mut most = 0u64;
    for op in &program.ops {
        if !matches!(op.kind, OpKind::Matmul | OpKind::MatmulExperts { .. }) {
            continue;
        }
        let x = program.value(op.inputs[0])?;
        let weight = program.value(op.inputs[1])?;
        let tokens = rows_max(x, options);
        let n_in = weight.row_len();
        // Experts may each have a row of their own in x.
        let rows = tokens.saturating_mul(x.row_len() / n_in.max(1));
        let n_in = u32::try_from(n_in).map_err(|_| Error::unsupported("rows over 2^32"))?;
        if tokens <= FEW.into() || !fits_half(Format::of(weight.dtype), n_in) {
            continue;
        }
        let row = 2 * u64::from(n_in.next_multiple_of(HALF_STEP)) + 4;
        let bytes = rows.checked_mul(row).ok_or_else(|| Error::invalid("2^64 bytes"))?;
        most = most.max(bytes + 256);
    }
    Ok(most)
}

/// The most rows that a value has in a run.
pub(crate) fn rows_max(value: &Value, options: &CompileOptions) -> u64 {
    match value.rows() {
        Dim::Fixed(n) => n,
        Dim::NTokens => options.n_tokens_max.into(),
        Dim::NOutputs => options.n_outputs_max.into(),
    }
}

/// Whether a product may be taken in f16.
pub(crate) fn fits_half(format: Format, n_in: u32) -> bool {
    format != Format::F32 && n_in.is_multiple_of(32)
}

/// Whether rows of so many elements end inside 8 elements.
pub(crate) fn has_tail(n_in: u32) -> u32 {
    u32::from(!n_in.is_multiple_of(8))
}

pub(crate) fn table_constants(matrix: &Matrix) -> Vec<(u32, u32)> {
    if matrix.format != Format::Table {
        return Vec::new();
    }
    (10u32..).zip(matrix.table).collect()
}

/// One weight's part in a product: a tile, and where its rows go.
#[derive(Clone, Copy, Default)]
pub(crate) struct Part {
    pub(crate) w: u64,
    /// The other weight's tile in a gated pair.
    pub(crate) w2: u64,
    pub(crate) y: u64,
    pub(crate) bias: u64,
    pub(crate) residual: u64,
    /// Its first row in the weight; experts' products ask for it.
    pub(crate) first: u32,
    pub(crate) n_rows: u32,
}

impl Context<'_> {
    /// Records a product over all tiles of its weight.
    pub(crate) fn product(&mut self, recorder: &mut Recorder<'_>, product: &Product) -> Result<()> {
        let matrix = self.exe.matrix(product.weight)?;
        let n = self.rows(product.y)?;
        if n == 0 {
            return Ok(());
        }
        let bias = match product.bias {
            Some(id) => self.exe.matrix(id)?.address(),
            None => 0,
        };
        let (y, residual) = (self.at(product.y), product.residual.map_or(0, |id| self.at(id)));
        let part = |tile: &Rows| {
            let skip = |base: u64| if base == 0 { 0 } else { base + 4 * u64::from(tile.first) };
            Part {
                w: tile.address,
                w2: 0,
                y: skip(y),
                bias: skip(bias),
                residual: skip(residual),
                first: tile.first,
                n_rows: tile.n,
            }
        };
        let parts: Vec<Part> = matrix.tiles.iter().map(part).collect();
        let mut reads = vec![self.span(product.x, n)?];
        if let Some(id) = product.residual {
            reads.push(self.span(id, n)?);
        }
        let writes = [self.span(product.y, n)?];
        if n <= FEW {
            let norm = product.norm.filter(|_| n == 1);
            if let Some(norm) = norm {
                reads[0] = self.span(norm.x, n)?;
            }
            let x = norm.map_or(product.x, |norm| norm.x);
            let x = self.at(x);
            return self.matvec(recorder, matrix, (x, norm), &parts, n, None, &reads, &writes);
        }
        if recorder.gpu.physical.has_matrices
            && fits_half(matrix.format, matrix.n_in)
            && self.places.half.1 > 0
        {
            return self.coopmat(recorder, matrix, product, &parts, n, &reads, &writes);
        }
        let kernel = matmul_kernel(matrix, None);
        recorder.order(&reads, &writes);
        for part in &parts {
            let push = Call { x: self.at(product.x), x_stride: matrix.n_in, n, ..Call::default() };
            let push = push.push(matrix, part);
            let groups = [part.n_rows.div_ceil(64), n.div_ceil(64), 1];
            recorder.run(&kernel, &push, Groups::Are(groups), &[], &[])?;
        }
        Ok(())
    }

    /// Records gate and up together where their tiles lie alike and rows are few; gives whether it did.
    pub(crate) fn pair(
        &mut self,
        recorder: &mut Recorder<'_>,
        gate: &Product,
        up: &Product,
        activation: u32,
        y: tegula_sdk::program::ValueId,
    ) -> Result<bool> {
        let (first, second) = (self.exe.matrix(gate.weight)?, self.exe.matrix(up.weight)?);
        let n = self.rows(y)?;
        let is_alike = first.format == second.format
            && first.tiles.len() == second.tiles.len()
            && first.tiles.iter().zip(&second.tiles).all(|(a, b)| (a.first, a.n) == (b.first, b.n));
        if !is_alike || n > 2 {
            return Ok(false);
        }
        let norm = gate.norm.filter(|_| n == 1);
        let x = norm.map_or(gate.x, |norm| norm.x);
        let to = self.at(y);
        let parts: Vec<Part> = first
            .tiles
            .iter()
            .zip(&second.tiles)
            .map(|(a, b)| Part {
                w: a.address,
                w2: b.address,
                y: to + 4 * u64::from(a.first),
                bias: 0,
                residual: 0,
                first: a.first,
                n_rows: a.n,
            })
            .collect();
        let (reads, writes) = ([self.span(x, n)?], [self.span(y, n)?]);
        let x = (self.at(x), norm);
        self.matvec(recorder, first, x, &parts, n, Some(activation), &reads, &writes)?;
        Ok(true)
    }

    #[expect(clippy::too_many_arguments, reason = "one call for all forms of the kernel")]
    fn matvec(
        &self,
        recorder: &mut Recorder<'_>,
        matrix: &Matrix,
        (x, norm): (u64, Option<Prologue>),
        parts: &[Part],
        n: u32,
        activation: Option<u32>,
        reads: &[Span],
        writes: &[Span],
    ) -> Result<()> {
        let cols = n.next_power_of_two();
        let (eps, weight) = match norm {
            Some(norm) => (norm.eps, self.exe.matrix(norm.weight)?.address()),
            None => (0.0, 0),
        };
        recorder.order(reads, writes);
        for part in parts {
            let is_pair = activation.is_some();
            let rows = match (cols, part.n_rows) {
                (1, 4096..) => 4,
                (1 | 2, 1024..) => 2,
                (4.., 1024..) => 2,
                _ => 1,
            };
            let kernel = matvec_kernel(
                recorder.gpu,
                matrix,
                [(1, rows), (2, cols), (3, u32::from(is_pair)), (5, u32::from(norm.is_some()))],
            );
            let activation = activation.unwrap_or(0);
            let call = Call {
                x,
                x_stride: matrix.n_in,
                n,
                norm: weight,
                activation,
                eps,
                ..Call::default()
            };
            let push = call.push(matrix, part);
            let groups = Groups::flat(u64::from(part.n_rows.div_ceil(rows)), 1)?;
            recorder.run(&kernel, &push, groups, &[], &[])?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "as above")]
    fn coopmat(
        &mut self,
        recorder: &mut Recorder<'_>,
        matrix: &Matrix,
        product: &Product,
        parts: &[Part],
        n: u32,
        reads: &[Span],
        writes: &[Span],
    ) -> Result<()> {
        let (half, stride, scales) =
            self.round_to_half(recorder, self.span(product.x, n)?, matrix.n_in, n)?;
        let region = self.places.half;
        let mut all_reads = reads.to_vec();
        all_reads.push(region);
        recorder.order(&all_reads, writes);
        for part in parts {
            // Tiles of 128 tokens where they fill the device, else smaller ones.
            let tiles = |tokens: u32| part.n_rows.div_ceil(128) * n.div_ceil(tokens);
            let tokens = match n {
                0..=32 => 32,
                33..=64 => 64,
                _ if tiles(128) < 200 => 64,
                _ => 128,
            };
            let kernel = coopmat_kernel(matrix, tokens, None);
            let part = Part { w2: scales, ..*part };
            let push = Call { x: half, x_stride: stride, n, ..Call::default() }.push(matrix, &part);
            let groups = [part.n_rows.div_ceil(128), n.div_ceil(tokens), 1];
            recorder.run(&kernel, &push, Groups::Are(groups), &[], &[])?;
        }
        Ok(())
    }

    /// Rounds `n` rows of `n_in` elements to f16, unless that is what the region holds; gives their address and stride, and that of their scales.
    pub(crate) fn round_to_half(
        &mut self,
        recorder: &mut Recorder<'_>,
        x: Span,
        n_in: u32,
        n: u32,
    ) -> Result<(u64, u32, u64)> {
        let stride = n_in.next_multiple_of(HALF_STEP);
        let (half, room) = self.places.half;
        let scales = half + 2 * u64::from(stride) * u64::from(n);
        let scales = scales.next_multiple_of(64);
        if scales + 4 * u64::from(n) > half + room {
            return Err(Error::invalid("activations in f16 do not fit their region"));
        }
        // Queries, keys and values are of one input, which is rounded once.
        if self.halved != Some((x, recorder.n_writes(x), n_in)) {
            let push =
                Push::new().u64(x.0).u64(half).u64(scales).u32(n_in).u32(n_in).u32(stride).u32(n);
            let kernel = Kernel::new(Shader::ToHalf, &[]);
            let groups = Groups::flat(n.into(), 1)?;
            recorder.run(&kernel, &push, groups, &[x], &[(half, room)])?;
            self.halved = Some((x, recorder.n_writes(x), n_in));
        }
        Ok((half, stride, scales))
    }
}

/// The kernel for few columns, with its constants 1, 2, 3 and 5, or others.
pub(crate) fn matvec_kernel<const N: usize>(
    gpu: &Gpu,
    matrix: &Matrix,
    constants: [(u32, u32); N],
) -> Kernel {
    let units = u64::from(matrix.n_in).div_ceil(matrix.format.unit());
    let threads = match units {
        0..=32 => 32,
        33..=64 => 64,
        65..=1024 => 128,
        _ => 256,
    }
    .max(gpu.physical.subgroup);
    let mut all = vec![
        (0, matrix.format as u32),
        (4, has_tail(matrix.n_in)),
        (20, threads),
        (21, threads.div_ceil(gpu.physical.subgroup_min).max(1)),
    ];
    all.extend(constants);
    all.extend(table_constants(matrix));
    Kernel::new(Shader::Matvec, &all)
}

/// The kernel for many columns in f32.
pub(crate) fn matmul_kernel(matrix: &Matrix, experts: Option<u32>) -> Kernel {
    let mut constants = vec![(0, matrix.format as u32), (4, has_tail(matrix.n_in))];
    constants.extend(table_constants(matrix));
    constants.extend(experts.map(|mode| (30, mode)));
    Kernel::new(Shader::Matmul, &constants)
}

/// The kernel for many columns by cooperative matrices.
pub(crate) fn coopmat_kernel(matrix: &Matrix, tokens: u32, experts: Option<u32>) -> Kernel {
    let mut constants = vec![(0, matrix.format as u32), (1, tokens)];
    constants.extend(table_constants(matrix));
    constants.extend(experts.map(|mode| (30, mode)));
    Kernel::new(Shader::MatmulCoopmat, &constants)
}

/// What the kernels of products are told beside the part.
#[derive(Clone, Copy, Default)]
pub(crate) struct Call {
    pub(crate) x: u64,
    pub(crate) x_stride: u32,
    /// Columns.
    pub(crate) n: u32,
    pub(crate) norm: u64,
    pub(crate) activation: u32,
    pub(crate) eps: f32,
    pub(crate) experts: Experts,
}

impl Call {
    /// The push constants that all three kernels share.
    pub(crate) fn push(&self, matrix: &Matrix, part: &Part) -> Push {
        let experts = &self.experts;
        // Rows that the grid goes over, and rows of y.
        let (n_rows, stride) = match experts.n_rows {
            0 => (part.n_rows, matrix.n_rows),
            n => (n, n),
        };
        Push::new()
            .u64(part.w)
            .u64(part.w2)
            .u64(self.x)
            .u64(part.y)
            .u64(part.bias)
            .u64(part.residual)
            .u64(self.norm)
            .u32(matrix.n_in)
            .u32(n_rows)
            .u32(matrix.row_bytes)
            .u32(self.x_stride)
            .u32(stride)
            .u32(self.n)
            .u32(self.activation)
            .f32(self.eps)
            .u64(experts.ids)
            .u64(experts.groups)
            .u64(experts.slots)
            .u32(part.first)
            .u32(part.n_rows)
            .u32(experts.n_expert)
            .u32(experts.sharing)
    }
}
