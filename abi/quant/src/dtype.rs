//! [`DType`]: the closed list of GGUF's element and block types, and the sizes of their rows.
//!
//! The list is closed because every type needs a decoder here: a type that nobody can decode is refused when a file
//! is opened, instead of later inside a kernel. The numbers are ggml's, since they are what files and the plugin
//! boundary carry. Numbers that ggml has retired (4, 5, 31 to 33, 36 to 38) stay unknown on purpose.

use crate::LayoutError;

/// One row of the type table; [`DType::info`] picks it by match, so a type without a row does not compile.
struct Info {
    name: &'static str,
    block_len: u16,
    block_bytes: u16,
    class: Class,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Class {
    Float,
    Int,
    Quant,
}

macro_rules! dtypes {
    ($( $(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal, $class:ident; )*) => {
        /// An element or block type of a tensor, with ggml's numeric id as discriminant.
        ///
        /// A tensor row of `n` elements is `n / block_len()` QuantBlocks of `block_bytes()` each, without padding.
        /// Plain element types are blocks of one element. All multi-byte fields are little endian.
        #[expect(non_camel_case_types, reason = "the variants carry the field's own names: Q4_K, IQ2_XXS")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum DType {
            $( $(#[$doc])* $variant = $id, )*
        }

        impl DType {
            /// Every type, in the order of the ids.
            pub const ALL: [DType; [$($id),*].len()] = [$( DType::$variant ),*];

            /// The type that has this ggml id, or `None` where the id is retired or unknown.
            pub const fn from_id(id: u32) -> Option<DType> {
                match id {
                    $( $id => Some(DType::$variant), )*
                    _ => None,
                }
            }

            const fn info(self) -> Info {
                match self {
                    $( DType::$variant => Info {
                        name: $name, block_len: $len, block_bytes: $bytes, class: Class::$class,
                    }, )*
                }
            }
        }
    };
}

dtypes! {
    /// IEEE 754 binary32.
    F32 = 0, "F32", 1, 4, Float;
    /// IEEE 754 binary16.
    F16 = 1, "F16", 1, 2, Float;
    /// 4-bit, symmetric, one f16 scale per 32.
    Q4_0 = 2, "Q4_0", 32, 18, Quant;
    /// 4-bit with an f16 scale and an f16 minimum per 32.
    Q4_1 = 3, "Q4_1", 32, 20, Quant;
    /// 5-bit, symmetric, one f16 scale per 32.
    Q5_0 = 6, "Q5_0", 32, 22, Quant;
    /// 5-bit with an f16 scale and an f16 minimum per 32.
    Q5_1 = 7, "Q5_1", 32, 24, Quant;
    /// 8-bit, symmetric, one f16 scale per 32.
    Q8_0 = 8, "Q8_0", 32, 34, Quant;
    /// Like [`DType::Q8_0`] with the scaled sum of the block; an activation format, not a weight format.
    Q8_1 = 9, "Q8_1", 32, 36, Quant;
    /// 2-bit k-quant: 16 sub-blocks of 16 with 4-bit scales and minima.
    Q2_K = 10, "Q2_K", 256, 84, Quant;
    /// 3-bit k-quant: 16 sub-blocks of 16 with 6-bit signed scales.
    Q3_K = 11, "Q3_K", 256, 110, Quant;
    /// 4-bit k-quant: 8 sub-blocks of 32 with 6-bit scales and minima.
    Q4_K = 12, "Q4_K", 256, 144, Quant;
    /// 5-bit k-quant: 8 sub-blocks of 32 with 6-bit scales and minima.
    Q5_K = 13, "Q5_K", 256, 176, Quant;
    /// 6-bit k-quant: 16 sub-blocks of 16 with 8-bit signed scales.
    Q6_K = 14, "Q6_K", 256, 210, Quant;
    /// 8-bit with an f32 scale and sums of 16; an activation format, not a weight format.
    Q8_K = 15, "Q8_K", 256, 292, Quant;
    /// 2.06 bits: grid of 256 rows of 8, 7-bit sign codes.
    IQ2_XXS = 16, "IQ2_XXS", 256, 66, Quant;
    /// 2.31 bits: grid of 512 rows of 8, 7-bit sign codes.
    IQ2_XS = 17, "IQ2_XS", 256, 74, Quant;
    /// 3.06 bits: grid of 256 rows of 4, 7-bit sign codes.
    IQ3_XXS = 18, "IQ3_XXS", 256, 98, Quant;
    /// 1.56 bits: ternary grid of 2048 rows of 8 with a shift per 32.
    IQ1_S = 19, "IQ1_S", 256, 50, Quant;
    /// 4-bit through a fixed non-linear table, one f16 scale per 32.
    IQ4_NL = 20, "IQ4_NL", 32, 18, Quant;
    /// 3.44 bits: grid of 512 rows of 4, explicit signs.
    IQ3_S = 21, "IQ3_S", 256, 110, Quant;
    /// 2.56 bits: grid of 1024 rows of 8, explicit signs.
    IQ2_S = 22, "IQ2_S", 256, 82, Quant;
    /// 4.25 bits: the table of [`DType::IQ4_NL`] with 6-bit scales per 32.
    IQ4_XS = 23, "IQ4_XS", 256, 136, Quant;
    /// Signed 8-bit integer.
    I8 = 24, "I8", 1, 1, Int;
    /// Signed 16-bit integer.
    I16 = 25, "I16", 1, 2, Int;
    /// Signed 32-bit integer.
    I32 = 26, "I32", 1, 4, Int;
    /// Signed 64-bit integer.
    I64 = 27, "I64", 1, 8, Int;
    /// IEEE 754 binary64.
    F64 = 28, "F64", 1, 8, Float;
    /// 1.75 bits: the grid of [`DType::IQ1_S`] with a shift per 8.
    IQ1_M = 29, "IQ1_M", 256, 56, Quant;
    /// bfloat16: the upper half of a binary32.
    BF16 = 30, "BF16", 1, 2, Float;
    /// Ternary, five digits per byte.
    TQ1_0 = 34, "TQ1_0", 256, 54, Quant;
    /// Ternary, two bits per element.
    TQ2_0 = 35, "TQ2_0", 256, 66, Quant;
    /// OCP microscaling FP4 (E2M1) with one E8M0 scale per 32.
    MXFP4 = 39, "MXFP4", 32, 17, Quant;
    /// FP4 (E2M1) with one unsigned E4M3 scale per 16.
    NVFP4 = 40, "NVFP4", 64, 36, Quant;
    /// One bit per element: plus or minus the f16 scale, per 128.
    Q1_0 = 41, "Q1_0", 128, 18, Quant;
    /// Two bits per element, one f16 scale per 64.
    Q2_0 = 42, "Q2_0", 64, 18, Quant;
}

impl DType {
    /// ggml's numeric id.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// GGUF's exact spelling, for example `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.info().name
    }

    /// The type that has this name; upper and lower case are equal.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name().eq_ignore_ascii_case(name))
    }

    /// Elements in one QuantBlock; 1 for plain element types.
    pub const fn block_len(self) -> usize {
        self.info().block_len as usize
    }

    /// Bytes of one QuantBlock.
    pub const fn block_bytes(self) -> usize {
        self.info().block_bytes as usize
    }

    /// Bytes of a row of `n_elements`.
    ///
    /// # Errors
    /// [`LayoutError::NotWholeBlocks`] when `n_elements` is not a multiple of [`DType::block_len`], and
    /// [`LayoutError::Overflow`] when the size does not fit in 64 bits.
    pub const fn row_bytes(self, n_elements: u64) -> Result<u64, LayoutError> {
        let block_len = self.block_len() as u64;
        if !n_elements.is_multiple_of(block_len) {
            return Err(LayoutError::NotWholeBlocks { dtype: self, n_elements, block_len });
        }
        match (n_elements / block_len).checked_mul(self.block_bytes() as u64) {
            Some(bytes) => Ok(bytes),
            None => Err(LayoutError::Overflow { dtype: self, n_elements }),
        }
    }

    /// Whether elements are packed in blocks with shared scales.
    pub const fn is_quantized(self) -> bool {
        matches!(self.info().class, Class::Quant)
    }

    /// Whether this is a plain floating point type: F64, F32, F16 or BF16.
    pub const fn is_float(self) -> bool {
        matches!(self.info().class, Class::Float)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = LayoutError;

    /// As [`DType::from_name`], with the list of names in the error.
    fn from_str(name: &str) -> Result<DType, LayoutError> {
        // The name may come from a hostile file: the error keeps no more of it than a reader needs.
        DType::from_name(name)
            .ok_or_else(|| LayoutError::UnknownName { name: name.chars().take(32).collect() })
    }
}
