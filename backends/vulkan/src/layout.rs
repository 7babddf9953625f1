//! How weights lie on the device: which form each type takes, and how many bytes a row of it has.
//!
//! Rows stand alone, so that a weight may be cut anywhere. A row is a plane of codes, then planes of what belongs to them, each padded to 16
//! bytes: neighbouring invocations read neighbouring 16 bytes, where GGUF's own blocks of 18 or 210 bytes are aligned to nothing.
//! `shaders/formats.glsl` reads what is written here.
//!
//! The types in wide use keep their bits. The rest is stored in one of two general forms, exactly: 4-bit codes into a table of 16 values of
//! the type with an f32 scale for each 16 elements (every codebook of the IQ types has at most 16 distinct values), or f32.

use tegula_sdk::quant::DType;
use tegula_sdk::{Error, Result};

/// The forms; their numbers are the shaders' `F_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[expect(missing_docs, reason = "the names are the types'; the planes stand in `planes`")]
pub enum Format {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
    Q8_0 = 3,
    /// Bytes with an f32 scale for each 32.
    Q8Wide = 4,
    Q4_0 = 5,
    Q4_1 = 6,
    Q5_0 = 7,
    Q5_1 = 8,
    Q4K = 9,
    Q5K = 10,
    Q6K = 11,
    /// 4-bit codes into a table, an f32 scale for each 16.
    Table = 12,
    /// 4-bit numbers, an f32 scale and minimum for each 16.
    Minimum = 13,
}

/// Layout numbers at the boundary are the form's number added to this, so that none is `LAYOUT_NATIVE`.
const LAYOUT_BASE: u32 = 0x100;

/// Where the planes of a row begin, and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planes {
    /// Second plane: high bits, or scales where there are none.
    pub(crate) second: usize,
    /// Third plane.
    pub(crate) third: usize,
    /// Fourth plane.
    pub(crate) fourth: usize,
    /// Bytes of the row.
    pub(crate) bytes: usize,
}

impl Format {
    /// The form of a type.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F64 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::Q8_0 => Self::Q8_0,
            DType::Q8_1 | DType::Q8_K => Self::Q8Wide,
            DType::Q4_0 => Self::Q4_0,
            DType::Q4_1 => Self::Q4_1,
            DType::Q5_0 => Self::Q5_0,
            DType::Q5_1 => Self::Q5_1,
            DType::Q4_K => Self::Q4K,
            DType::Q5_K => Self::Q5K,
            DType::Q6_K => Self::Q6K,
            DType::Q2_K => Self::Minimum,
            DType::Q3_K
            | DType::IQ2_XXS
            | DType::IQ2_XS
            | DType::IQ3_XXS
            | DType::IQ1_S
            | DType::IQ4_NL
            | DType::IQ3_S
            | DType::IQ2_S
            | DType::IQ4_XS
            | DType::IQ1_M
            | DType::TQ1_0
            | DType::TQ2_0
            | DType::MXFP4
            | DType::NVFP4
            | DType::Q1_0
            | DType::Q2_0 => Self::Table,
        }
    }

    /// The number of the layout at the boundary.
    pub fn layout(self) -> u32 {
        LAYOUT_BASE + self as u32
    }

    /// Elements in 16 bytes of the first plane.
    pub(crate) fn unit(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 8,
            Self::Q8_0 | Self::Q8Wide => 16,
            _ => 32,
        }
    }

    /// The planes of a row of `n_in` elements, a whole number of the type's blocks.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for rows of more than 2^31 bytes, which 32-bit offsets in a row would not reach.
    pub(crate) fn planes(self, n_in: u64) -> Result<Planes> {
        let too_long = || Error::unsupported(format!("rows of {n_in} elements"));
        if n_in > 1 << 28 {
            return Err(too_long());
        }
        let n = usize::try_from(n_in).map_err(|_| too_long())?;
        let pad = |bytes: usize| bytes.next_multiple_of(16);
        let (n32, n256) = (n / 32, n / 256);
        let sizes = match self {
            Self::F32 => [pad(4 * n), 0, 0, 0],
            Self::F16 | Self::Bf16 => [pad(2 * n), 0, 0, 0],
            Self::Q8_0 => [n, pad(2 * n32), 0, 0],
            Self::Q8Wide => [n, pad(4 * n32), 0, 0],
            Self::Q4_0 => [16 * n32, pad(2 * n32), 0, 0],
            Self::Q4_1 => [16 * n32, pad(4 * n32), 0, 0],
            Self::Q5_0 => [16 * n32, pad(4 * n32), pad(2 * n32), 0],
            Self::Q5_1 => [16 * n32, pad(4 * n32), pad(4 * n32), 0],
            Self::Q4K => [16 * n32, 16 * n256, 0, 0],
            Self::Q5K => [16 * n32, pad(4 * n32), 16 * n256, 0],
            Self::Q6K => [16 * n32, pad(8 * n32), pad(2 * n32), pad(2 * n256)],
            Self::Table => [16 * n32, pad(8 * n32), 0, 0],
            Self::Minimum => [16 * n32, 16 * n32, 0, 0],
        };
        let [first, second, third, fourth] = sizes;
        Ok(Planes {
            second: first,
            third: first + second,
            fourth: first + second + third,
            bytes: first + second + third + fourth,
        })
    }
}

/// The values that codes of [`Format::Table`] stand for.
pub(crate) fn table(dtype: DType) -> [i8; 16] {
    const NONLINEAR: [i8; 16] =
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
    let signed = |values: [i8; 8]| {
        let mut out = [0; 16];
        for (i, value) in values.into_iter().enumerate() {
            out[i] = value;
            out[8 + i] = -value;
        }
        out
    };
    match dtype {
        DType::IQ4_NL | DType::IQ4_XS => NONLINEAR,
        DType::MXFP4 | DType::NVFP4 => E2M1_DOUBLED,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => signed([8, 25, 43, 0, 0, 0, 0, 0]),
        DType::IQ3_XXS => signed([4, 12, 20, 28, 36, 44, 52, 62]),
        DType::IQ3_S => signed([1, 3, 5, 7, 9, 11, 13, 15]),
        // Eight times (-1, 0 or 1, and an eighth more or less).
        DType::IQ1_S | DType::IQ1_M => signed([1, 7, 9, 0, 0, 0, 0, 0]),
        _ => std::array::from_fn(|i| i as i8 - 8),
    }
}

/// The table as the four words that the shaders take.
pub(crate) fn table_words(dtype: DType) -> [u32; 4] {
    let table = table(dtype).map(|value| value as u8);
    std::array::from_fn(|i| {
        u32::from_le_bytes([table[4 * i], table[4 * i + 1], table[4 * i + 2], table[4 * i + 3]])
    })
}
