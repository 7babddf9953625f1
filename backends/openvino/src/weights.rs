//! GGUF's weights as OpenVINO constants that stay compressed.
//!
//! Most block types are `scale * q` or `scale * q + minimum` with a small integer `q`, and a scale for each group of 16 to 256
//! elements. Those become integer constants with f32 scales (a K-quant's scale is a product of two numbers, which f16 cannot hold)
//! and, where there is a minimum, f32 zero points `-minimum / scale`: `(q - zero) * scale` is the pattern that the plugins keep compressed.
//!
//! How the integers are found: [`tegula_quant`] decodes a copy of the block whose scales are replaced by 1 and whose minima by 0, so that
//! what comes out *is* `q`; scales and minima come out of copies whose codes are replaced by 1 and 0. So nothing of the layouts is decoded a
//! second time here, only the places of the fields are named ([`RECIPES`]).
//!
//! What is exact: integers, scales and minima. A zero point is a quotient rounded to f32, so an element is off by two roundings of its
//! minimum to f32 at most. Types without such a form (the lattice types) are decoded to f32, which is exact and large; [`Form::F32`] says so in the plan.

use crate::ov::Element;
use tegula_quant::{DType, block, dequantize_row_fn};
use tegula_sdk::{Error, Result};

/// A run of bytes that replaces a field: offset, and one byte for all of it or the bytes themselves.
type Patch = (usize, &'static [u8]);

/// Integers of a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    I4,
    U4,
    I8,
    U8,
}

impl Code {
    pub(crate) fn element(self) -> Element {
        match self {
            Self::I4 => Element::I4,
            Self::U4 => Element::U4,
            Self::I8 => Element::I8,
            Self::U8 => Element::U8,
        }
    }

    fn bits(self) -> u64 {
        match self {
            Self::I4 | Self::U4 => 4,
            Self::I8 | Self::U8 => 8,
        }
    }
}

/// Where scales come from.
#[derive(Debug)]
enum Scales {
    /// An f16 scale, and an f16 minimum if there is one, at these offsets; one group to a block.
    F16 { scale: usize, minimum: Option<usize> },
    /// From decoding copies: codes set to 1 and minima to 0; codes set to 0.
    Decoded { scale: &'static [Patch], minimum: Option<&'static [Patch]> },
}

/// How a block type becomes integers and scales.
#[derive(Debug)]
struct Recipe {
    dtype: DType,
    code: Code,
    group: usize,
    /// Sets scales to 1 and minima to 0.
    unit: &'static [Patch],
    scales: Scales,
}

/// 1 as f16.
const ONE: &[u8] = &[0x00, 0x3c];
/// 0 as f16.
const ZERO: &[u8] = &[0, 0];
/// Scales of 1 and minima of 0 of Q4_K and Q5_K.
const K_UNIT: &[u8] = &[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1];

macro_rules! f16 {
    ($m:ident) => {
        Scales::F16 { scale: block::$m::D, minimum: None }
    };
    ($m:ident, minimum) => {
        Scales::F16 { scale: block::$m::D, minimum: Some(block::$m::M) }
    };
}

const RECIPES: &[Recipe] = &[
    Recipe {
        dtype: DType::Q4_0,
        code: Code::I4,
        group: 32,
        unit: &[(block::q4_0::D, ONE)],
        scales: f16!(q4_0),
    },
    Recipe {
        dtype: DType::Q4_1,
        code: Code::U4,
        group: 32,
        unit: &[(block::q4_1::D, ONE), (block::q4_1::M, ZERO)],
        scales: f16!(q4_1, minimum),
    },
    Recipe {
        dtype: DType::Q5_0,
        code: Code::I8,
        group: 32,
        unit: &[(block::q5_0::D, ONE)],
        scales: f16!(q5_0),
    },
    Recipe {
        dtype: DType::Q5_1,
        code: Code::U8,
        group: 32,
        unit: &[(block::q5_1::D, ONE), (block::q5_1::M, ZERO)],
        scales: f16!(q5_1, minimum),
    },
    Recipe {
        dtype: DType::Q8_0,
        code: Code::I8,
        group: 32,
        unit: &[(block::q8_0::D, ONE)],
        scales: f16!(q8_0),
    },
    Recipe {
        dtype: DType::Q2_K,
        code: Code::U4,
        group: 16,
        unit: &[(block::q2_k::SCALES, &[1; 16]), (block::q2_k::D, ONE), (block::q2_k::DMIN, ZERO)],
        scales: Scales::Decoded {
            scale: &[(block::q2_k::DMIN, ZERO), (block::q2_k::QS, &[0x55; 64])],
            minimum: Some(&[(block::q2_k::QS, &[0; 64])]),
        },
    },
    Recipe {
        dtype: DType::Q3_K,
        code: Code::I4,
        group: 16,
        // 33 as a 6-bit scale, of which 32 is subtracted: low four bits 1, high two bits 2.
        unit: &[
            (block::q3_k::D, ONE),
            (
                block::q3_k::SCALES,
                &[0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0xaa, 0xaa, 0xaa, 0xaa],
            ),
        ],
        scales: Scales::Decoded {
            scale: &[(block::q3_k::HMASK, &[0xff; 32]), (block::q3_k::QS, &[0x55; 64])],
            minimum: None,
        },
    },
    Recipe {
        dtype: DType::Q4_K,
        code: Code::U4,
        group: 32,
        unit: &[(block::q4_k::D, ONE), (block::q4_k::DMIN, ZERO), (block::q4_k::SCALES, K_UNIT)],
        scales: Scales::Decoded {
            scale: &[(block::q4_k::DMIN, ZERO), (block::q4_k::QS, &[0x11; 128])],
            minimum: Some(&[(block::q4_k::QS, &[0; 128])]),
        },
    },
    Recipe {
        dtype: DType::Q5_K,
        code: Code::U8,
        group: 32,
        unit: &[(block::q5_k::D, ONE), (block::q5_k::DMIN, ZERO), (block::q5_k::SCALES, K_UNIT)],
        scales: Scales::Decoded {
            scale: &[
                (block::q5_k::DMIN, ZERO),
                (block::q5_k::QH, &[0; 32]),
                (block::q5_k::QS, &[0x11; 128]),
            ],
            minimum: Some(&[(block::q5_k::QH, &[0; 32]), (block::q5_k::QS, &[0; 128])]),
        },
    },
    Recipe {
        dtype: DType::Q6_K,
        code: Code::I8,
        group: 16,
        unit: &[(block::q6_k::D, ONE), (block::q6_k::SCALES, &[1; 16])],
        // 33, of which 32 is subtracted.
        scales: Scales::Decoded {
            scale: &[(block::q6_k::QL, &[0x11; 128]), (block::q6_k::QH, &[0xaa; 64])],
            minimum: None,
        },
    },
    Recipe {
        dtype: DType::IQ4_NL,
        code: Code::I8,
        group: 32,
        unit: &[(block::iq4_nl::D, ONE)],
        scales: f16!(iq4_nl),
    },
    Recipe {
        dtype: DType::IQ4_XS,
        code: Code::I8,
        group: 32,
        unit: &[
            (block::iq4_xs::D, ONE),
            (block::iq4_xs::SCALES_H, &[0xaa; 2]),
            (block::iq4_xs::SCALES_L, &[0x11; 4]),
        ],
        // Code 8 stands for 1.
        scales: Scales::Decoded { scale: &[(block::iq4_xs::QS, &[0x88; 128])], minimum: None },
    },
    Recipe {
        dtype: DType::MXFP4,
        code: Code::I8,
        group: 32,
        unit: &[(block::mxfp4::E, &[128])],
        scales: Scales::Decoded { scale: &[(block::mxfp4::QS, &[0x11; 16])], minimum: None },
    },
    Recipe {
        dtype: DType::NVFP4,
        code: Code::I8,
        group: 16,
        // 2 as E4M3: half of it multiplies.
        unit: &[(block::nvfp4::D, &[0x40; 4])],
        scales: Scales::Decoded { scale: &[(block::nvfp4::QS, &[0x11; 32])], minimum: None },
    },
    Recipe {
        dtype: DType::TQ2_0,
        code: Code::I4,
        group: 256,
        unit: &[(block::tq2_0::D, ONE)],
        scales: f16!(tq2_0),
    },
    Recipe {
        dtype: DType::TQ1_0,
        code: Code::I4,
        group: 256,
        unit: &[(block::tq1_0::D, ONE)],
        scales: f16!(tq1_0),
    },
];

/// Matrices of fewer rows become f32.
pub(crate) const ROWS_MIN: u64 = 4;

/// What a weight becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Its own bytes: F32, F16 or BF16.
    Plain(Element),
    /// Decoded to f32.
    F32,
    /// Integers in groups with scales, and zero points where `has_zero`.
    Grouped { code: Code, group: u64, has_zero: bool },
}

impl Form {
    /// The form of a matrix of `n_rows` rows. Few rows are not worth a kernel that decompresses.
    pub(crate) fn of(dtype: DType, n_rows: u64) -> Self {
        match dtype {
            _ if n_rows < ROWS_MIN && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) => {
                Self::F32
            }
            DType::F32 => Self::Plain(Element::F32),
            DType::F16 => Self::Plain(Element::F16),
            DType::BF16 => Self::Plain(Element::BF16),
            _ => recipe(dtype).map_or(Self::F32, |recipe| Self::Grouped {
                code: recipe.code,
                group: recipe.group as u64,
                has_zero: recipe.scales.has_minimum(),
            }),
        }
    }

    /// Bytes of the parts of `n_rows` rows of `n_in`: elements or integers, scales, zero points. `None` on overflow.
    pub(crate) fn parts(self, n_rows: u64, n_in: u64) -> Option<[u64; 3]> {
        let n = n_rows.checked_mul(n_in)?;
        Some(match self {
            Self::Plain(Element::F32) | Self::F32 => [n.checked_mul(4)?, 0, 0],
            Self::Plain(_) => [n.checked_mul(2)?, 0, 0],
            Self::Grouped { code, group, has_zero } => {
                let scales = (n / group).checked_mul(4)?;
                [n.checked_mul(code.bits())?.div_ceil(8), scales, if has_zero { scales } else { 0 }]
            }
        })
    }
}

impl Scales {
    fn has_minimum(&self) -> bool {
        match self {
            Self::F16 { minimum, .. } => minimum.is_some(),
            Self::Decoded { minimum, .. } => minimum.is_some(),
        }
    }
}

fn recipe(dtype: DType) -> Option<&'static Recipe> {
    RECIPES.iter().find(|recipe| recipe.dtype == dtype)
}

/// Converts whole rows. `src` are rows in GGUF's layout; the three parts have exactly the bytes that [`Form::parts`] tells.
///
/// # Errors
/// INVALID_ARGUMENT where lengths do not fit.
pub(crate) fn convert(form: Form, dtype: DType, src: &[u8], parts: [&mut [u8]; 3]) -> Result<()> {
    let [main, scales, zeros] = parts;
    let fault = || {
        Error::invalid(format!(
            "{} bytes of {} do not fill their constants",
            src.len(),
            dtype.name()
        ))
    };
    if let Form::Plain(_) = form {
        if main.len() != src.len() {
            return Err(fault());
        }
        main.copy_from_slice(src);
        return Ok(());
    }
    let n = src.len() / dtype.block_bytes() * dtype.block_len();
    let decode = dequantize_row_fn(dtype);
    let Some(recipe) = recipe(dtype).filter(|_| form != Form::F32) else {
        if main.len() != n * 4 {
            return Err(fault());
        }
        decode_bytes(decode, dtype, src, main);
        return Ok(());
    };
    let n_groups = n / recipe.group;
    let has_zero = recipe.scales.has_minimum();
    let codes = n * recipe.code.bits() as usize / 8;
    if main.len() != codes
        || scales.len() != n_groups * 4
        || zeros.len() != if has_zero { scales.len() } else { 0 }
    {
        return Err(fault());
    }
    let groups = dtype.block_len() / recipe.group;
    let code_bytes = codes / (src.len() / dtype.block_bytes()).max(1);
    let mut work = Work::new(dtype);
    let blocks = src.chunks_exact(dtype.block_bytes()).enumerate();
    for (i, block) in blocks {
        let main = &mut main[i * code_bytes..][..code_bytes];
        let at = i * groups * 4..(i + 1) * groups * 4;
        work.read(recipe, block);
        let zeros: &mut [u8] = if has_zero { &mut zeros[at.clone()] } else { &mut [] };
        work.write(recipe, main, &mut scales[at], zeros);
    }
    Ok(())
}

fn decode_bytes(decode: fn(&[u8], &mut [f32]), dtype: DType, src: &[u8], out: &mut [u8]) {
    let (len, bytes) = (dtype.block_len(), dtype.block_bytes());
    let mut row = vec![0.0f32; len];
    for (block, out) in src.chunks_exact(bytes).zip(out.chunks_exact_mut(len * 4)) {
        decode(block, &mut row);
        for (value, out) in row.iter().zip(out.chunks_exact_mut(4)) {
            out.copy_from_slice(&value.to_le_bytes());
        }
    }
}

/// One block at work.
struct Work {
    decode: fn(&[u8], &mut [f32]),
    copy: Vec<u8>,
    values: Vec<f32>,
    scales: Vec<f32>,
    minima: Vec<f32>,
}

impl Work {
    fn new(dtype: DType) -> Self {
        Self {
            decode: dequantize_row_fn(dtype),
            copy: vec![0; dtype.block_bytes()],
            values: vec![0.0; dtype.block_len()],
            scales: Vec::new(),
            minima: Vec::new(),
        }
    }

    /// Decodes a copy of the block with fields replaced.
    fn patched(&mut self, block: &[u8], patches: &[Patch]) {
        self.copy.copy_from_slice(block);
        for (at, bytes) in patches {
            self.copy[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        (self.decode)(&self.copy, &mut self.values);
    }

    /// Leaves scales, minima and, in `values`, the integers.
    fn read(&mut self, recipe: &Recipe, block: &[u8]) {
        let f16 = |at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        self.scales.clear();
        self.minima.clear();
        match recipe.scales {
            Scales::F16 { scale, minimum } => {
                self.scales.push(f16(scale));
                self.minima.extend(minimum.map(f16));
            }
            Scales::Decoded { scale, minimum } => {
                self.patched(block, scale);
                self.scales.extend(self.values.iter().step_by(recipe.group));
                if let Some(minimum) = minimum {
                    self.patched(block, minimum);
                    self.minima.extend(self.values.iter().step_by(recipe.group));
                }
            }
        }
        self.patched(block, recipe.unit);
    }

    fn write(&mut self, recipe: &Recipe, main: &mut [u8], scales: &mut [u8], zeros: &mut [u8]) {
        let groups = self.values.chunks_exact_mut(recipe.group).enumerate();
        for ((i, values), zero) in groups.zip(zeros.chunks_exact_mut(4)) {
            let (scale, minimum) = (self.scales[i], self.minima[i]);
            let mut quotient = -minimum / scale;
            if !quotient.is_finite() {
                // A scale of 0: every element is the minimum, which (1 - 0) * minimum gives too.
                values.fill(1.0);
                self.scales[i] = minimum;
                quotient = 0.0;
            }
            zero.copy_from_slice(&quotient.to_le_bytes());
        }
        for (scale, out) in self.scales.iter().zip(scales.chunks_exact_mut(4)) {
            out.copy_from_slice(&scale.to_le_bytes());
        }
        match recipe.code {
            Code::I8 | Code::U8 => {
                for (value, out) in self.values.iter().zip(main) {
                    *out = *value as i32 as u8;
                }
            }
            Code::I4 | Code::U4 => {
                for (pair, out) in self.values.chunks_exact(2).zip(main) {
                    *out = (pair[0] as i32 as u8 & 0x0f) | ((pair[1] as i32 as u8) << 4);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the plugin computes from the constants, in f64.
    fn decode(form: Form, main: &[u8], scales: &[u8], zeros: &[u8], i: usize) -> f64 {
        let f32_at = |bytes: &[u8], i: usize| {
            f64::from(f32::from_le_bytes(bytes[i * 4..i * 4 + 4].try_into().unwrap()))
        };
        let Form::Grouped { code, group, has_zero } = form else { return f32_at(main, i) };
        let nibble = || (main[i / 2] >> (i % 2 * 4)) & 0x0f;
        let q = match code {
            Code::I8 => f64::from(main[i] as i8),
            Code::U8 => f64::from(main[i]),
            Code::U4 => f64::from(nibble()),
            Code::I4 => f64::from((nibble() << 4) as i8 >> 4),
        };
        let g = i / group as usize;
        (q - if has_zero { f32_at(zeros, g) } else { 0.0 }) * f32_at(scales, g)
    }

    /// A constant that is not what the file says gives a model that talks nonsense, or slightly worse than it could.
    #[test]
    fn constants_are_what_the_file_says() {
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for dtype in DType::ALL {
            let form = Form::of(dtype, 64);
            if matches!(form, Form::Plain(_)) {
                continue;
            }
            let n_blocks = 64;
            let mut src: Vec<u8> = (0..n_blocks * dtype.block_bytes()).map(|_| random()).collect();
            let n = n_blocks * dtype.block_len();
            let mut want = vec![0.0f32; n];
            dequantize_row_fn(dtype)(&src, &mut want);
            // Random bits are also infinities and NaNs, which no model has.
            for (i, block) in src.chunks_exact_mut(dtype.block_bytes()).enumerate() {
                let values = &want[i * dtype.block_len()..(i + 1) * dtype.block_len()];
                if values.iter().any(|v| !v.is_finite() || v.abs() > 1e30) {
                    block.fill(0);
                }
            }
            dequantize_row_fn(dtype)(&src, &mut want);
            let sizes = form.parts(1, n as u64).unwrap().map(|size| size as usize);
            let [mut main, mut scales, mut zeros] = sizes.map(|size| vec![0u8; size]);
            convert(form, dtype, &src, [&mut main, &mut scales, &mut zeros]).unwrap();
            let group = match form {
                Form::Grouped { group, .. } => group as usize,
                _ => 1,
            };
            for (i, want) in want.iter().enumerate() {
                let got = decode(form, &main, &scales, &zeros, i);
                let want = f64::from(*want);
                let minimum = match zeros.chunks_exact(4).nth(i / group) {
                    Some(zero) => {
                        f64::from(f32::from_le_bytes(zero.try_into().unwrap()))
                            * decode(Form::F32, &scales, &[], &[], i / group)
                    }
                    None => 0.0,
                };
                let allowed = 1.3e-7 * (want.abs() + minimum.abs());
                assert!((got - want).abs() <= allowed, "{dtype} {i}: {got} for {want}");
            }
        }
    }
}
