//! The layout of rows: planes that aligned loads can fetch.
//!
//! A GGUF block of 18 or 34 bytes is never aligned. So at upload the quants of each 32 elements (a group) go to one plane of the row, where
//! they are 8, 16 or 32 aligned bytes, and high bits and scales to planes after it, each padded to 16 bytes. Nothing is rounded: quants, scales and minima
//! are the file's. Rows stay independent, so that a tensor can be split anywhere. `kernels/weights.cl` reads this.
//!
//! Types that no model computes with (integers, F64, Q8_K) become f32 as their decoder gives them. Types with codebooks stay in GGUF's blocks.

use tegula_quant::DType;
use tegula_sdk::{Error, Result, Weight};

/// Layout numbers of this backend begin here; see [`Layout::number`].
pub(crate) const LAYOUT_FIRST: u32 = 0x0c1_0000;
/// A row's elements and a tensor's rows are counted in 32 bits by kernels.
const COUNT_MAX: u64 = 1 << 30;
/// Elements of a group.
pub(crate) const GROUP: u64 = 32;

/// How rows lie; the numbers are those of `kernels/weights.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[expect(non_camel_case_types, reason = "the field's own names of types")]
pub(crate) enum Layout {
    F32 = 0,
    F16 = 1,
    BF16 = 2,
    Q4_0 = 3,
    Q4_1 = 4,
    Q5_0 = 5,
    Q5_1 = 6,
    Q8_0 = 7,
    Q2_K = 8,
    Q3_K = 9,
    Q4_K = 10,
    Q5_K = 11,
    Q6_K = 12,
    IQ4_NL = 13,
    IQ4_XS = 14,
    MXFP4 = 15,
    NVFP4 = 16,
    Ternary = 17,
    Q2_0 = 18,
    Q1_0 = 19,
    IQ1_S = 20,
    IQ1_M = 21,
    IQ2_XXS = 22,
    IQ2_XS = 23,
    IQ2_S = 24,
    IQ3_XXS = 25,
    IQ3_S = 26,
}

/// Bytes of a plane: so many for so many groups.
type Plane = (u64, u64);

impl Layout {
    /// The layout of a type.
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32
            | DType::F64
            | DType::I8
            | DType::I16
            | DType::I32
            | DType::I64
            | DType::Q8_K => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::BF16,
            DType::Q4_0 => Self::Q4_0,
            DType::Q4_1 => Self::Q4_1,
            DType::Q5_0 => Self::Q5_0,
            DType::Q5_1 => Self::Q5_1,
            DType::Q8_0 | DType::Q8_1 => Self::Q8_0,
            DType::Q2_K => Self::Q2_K,
            DType::Q3_K => Self::Q3_K,
            DType::Q4_K => Self::Q4_K,
            DType::Q5_K => Self::Q5_K,
            DType::Q6_K => Self::Q6_K,
            DType::IQ4_NL => Self::IQ4_NL,
            DType::IQ4_XS => Self::IQ4_XS,
            DType::MXFP4 => Self::MXFP4,
            DType::NVFP4 => Self::NVFP4,
            DType::TQ1_0 | DType::TQ2_0 => Self::Ternary,
            DType::Q2_0 => Self::Q2_0,
            DType::Q1_0 => Self::Q1_0,
            DType::IQ1_S => Self::IQ1_S,
            DType::IQ1_M => Self::IQ1_M,
            DType::IQ2_XXS => Self::IQ2_XXS,
            DType::IQ2_XS => Self::IQ2_XS,
            DType::IQ2_S => Self::IQ2_S,
            DType::IQ3_XXS => Self::IQ3_XXS,
            DType::IQ3_S => Self::IQ3_S,
        }
    }

    /// Its number at the boundary.
    pub(crate) fn number(self) -> u32 {
        LAYOUT_FIRST + self as u32
    }

    /// The planes of a row; empty for rows in GGUF's blocks.
    fn planes(self) -> &'static [Plane] {
        match self {
            Self::F32 => &[(128, 1)],
            Self::F16 | Self::BF16 => &[(64, 1)],
            Self::Q4_0 | Self::IQ4_NL => &[(16, 1), (2, 1)],
            Self::Q4_1 => &[(16, 1), (4, 1)],
            Self::Q5_0 => &[(16, 1), (4, 1), (2, 1)],
            Self::Q5_1 => &[(16, 1), (4, 1), (4, 1)],
            Self::Q8_0 => &[(32, 1), (2, 1)],
            Self::Q2_K => &[(8, 1), (2, 1), (4, 8)],
            Self::Q3_K => &[(8, 1), (4, 1), (2, 1), (2, 8)],
            Self::Q4_K => &[(16, 1), (2, 1), (4, 8)],
            Self::Q5_K => &[(16, 1), (4, 1), (2, 1), (4, 8)],
            Self::Q6_K => &[(16, 1), (8, 1), (2, 1), (2, 8)],
            Self::IQ4_XS => &[(16, 1), (1, 1), (2, 8)],
            Self::MXFP4 => &[(16, 1), (1, 1)],
            Self::NVFP4 => &[(16, 1), (2, 1)],
            Self::Ternary => &[(8, 1), (2, 8)],
            Self::Q2_0 => &[(8, 1), (2, 2)],
            Self::Q1_0 => &[(4, 1), (2, 4)],
            _ => &[],
        }
    }
}

/// The shape of a weight's rows in its layout.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
    pub(crate) n_in: u64,
    /// Groups of a row, the last one filled up with zeros.
    pub(crate) groups: u64,
    /// Bytes of a row.
    pub(crate) stride: u64,
    /// First byte of each plane.
    pub(crate) offsets: Vec<usize>,
}

impl Rows {
    pub(crate) fn new(dtype: DType, n_in: u64, n_rows: u64) -> Result<Self> {
        let native = dtype.row_bytes(n_in)?;
        if n_in > COUNT_MAX || n_rows > COUNT_MAX {
            return Err(Error::unsupported(format!(
                "a weight of {n_rows} rows of {n_in}, {COUNT_MAX} are possible"
            )));
        }
        let layout = Layout::of(dtype);
        let groups = n_in.div_ceil(GROUP);
        let planes = layout.planes();
        let mut offsets = Vec::with_capacity(planes.len());
        let mut stride = 0u64;
        for (bytes, per) in planes {
            offsets.push(usize::try_from(stride).unwrap_or(usize::MAX));
            stride += (groups * bytes).div_ceil(*per).next_multiple_of(16);
        }
        if planes.is_empty() {
            stride = native.next_multiple_of(16);
        }
        // Kernels count bytes of a row in 32 bits.
        if stride > u64::from(u32::MAX) {
            return Err(Error::unsupported(format!("a weight with rows of {stride} bytes")));
        }
        Ok(Self { layout, dtype, n_in, groups, stride, offsets })
    }

    pub(crate) fn of(weight: &Weight) -> Result<Self> {
        Self::new(weight.dtype, weight.n_in, weight.n_rows)
    }
}
