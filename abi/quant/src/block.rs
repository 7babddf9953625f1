//! Byte layout of every QuantBlock: one module per type, one constant per field.
//!
//! A constant is the byte offset of its field inside the block. The fields of a module are listed in order and cover
//! the block without a gap; that is asserted at compile time, against the size in [`crate::DType`]. Multi-byte fields
//! are little endian. A bit named "bit `i`" is the bit of value `1 << i`; a "low nibble" is bits 0 to 3.
//!
//! The layouts are ggml's (`ggml-common.h`), restated here so that kernels need no other document. Decoders use these
//! constants themselves, so the documentation cannot drift from the code.

macro_rules! layouts {
    ($( $(#[$doc:meta])* $name:ident = $dtype:ident {
        $( $(#[$field_doc:meta])* $field:ident: $offset:literal + $size:literal; )*
    } )*) => { $(
        $(#[$doc])*
        pub mod $name {
            use crate::DType;

            /// Elements in one block.
            pub const LEN: usize = DType::$dtype.block_len();
            /// Bytes of one block.
            pub const BYTES: usize = DType::$dtype.block_bytes();
            $(
                $(#[$field_doc])*
                #[doc = concat!("\n\nOffset ", $offset, ", ", $size, " bytes.")]
                pub const $field: usize = $offset;
            )*
            const _: () = super::assert_covers(&[$(($offset, $size)),*], BYTES);
        }
    )* };
}

/// Fails the build unless the fields follow each other without a gap and fill the block.
const fn assert_covers(fields: &[(usize, usize)], bytes: usize) {
    let mut end = 0;
    let mut i = 0;
    while i < fields.len() {
        assert!(fields[i].0 == end, "a field does not start where the one before it ends");
        end += fields[i].1;
        i += 1;
    }
    assert!(end == bytes, "the fields do not fill the block");
}

layouts! {
    /// `x[i] = d * (q[i] - 8)`.
    q4_0 = Q4_0 {
        /// Scale, f16.
        D: 0 + 2;
        /// Byte `j`: element `j` in the low nibble, element `j + 16` in the high nibble.
        QS: 2 + 16;
    }
    /// `x[i] = d * q[i] + m`.
    q4_1 = Q4_1 {
        /// Scale, f16.
        D: 0 + 2;
        /// Minimum, f16.
        M: 2 + 2;
        /// Nibbles as in [`super::q4_0::QS`].
        QS: 4 + 16;
    }
    /// `x[i] = d * (q[i] - 16)`, `q` of 5 bits.
    q5_0 = Q5_0 {
        /// Scale, f16.
        D: 0 + 2;
        /// Bit `i` of this u32 is the fifth bit of element `i`.
        QH: 2 + 4;
        /// Low 4 bits, as in [`super::q4_0::QS`].
        QS: 6 + 16;
    }
    /// `x[i] = d * q[i] + m`, `q` of 5 bits.
    q5_1 = Q5_1 {
        /// Scale, f16.
        D: 0 + 2;
        /// Minimum, f16.
        M: 2 + 2;
        /// Bit `i` of this u32 is the fifth bit of element `i`.
        QH: 4 + 4;
        /// Low 4 bits, as in [`super::q4_0::QS`].
        QS: 8 + 16;
    }
    /// `x[i] = d * q[i]`.
    q8_0 = Q8_0 {
        /// Scale, f16.
        D: 0 + 2;
        /// One i8 per element.
        QS: 2 + 32;
    }
    /// `x[i] = d * q[i]`; `s` saves a sum in dot products with types that have a minimum.
    q8_1 = Q8_1 {
        /// Scale, f16.
        D: 0 + 2;
        /// `d * (q[0] + ... + q[31])`, f16; decoding ignores it.
        S: 2 + 2;
        /// One i8 per element.
        QS: 4 + 32;
    }
    /// `x = d * (sc & 15) * q - dmin * (sc >> 4)`, one `sc` per 16 elements.
    q2_k = Q2_K {
        /// One byte per 16 elements: scale in the low nibble, minimum in the high nibble.
        SCALES: 0 + 16;
        /// Byte `32 n + l` holds elements `128 n + 32 j + l` at bits `2 j`, for `j` in 0..4.
        QS: 16 + 64;
        /// Scale of the scales, f16.
        D: 80 + 2;
        /// Scale of the minima, f16.
        DMIN: 82 + 2;
    }
    /// `x = d * (sc - 32) * (q - 4 * !h)`, one `sc` per 16 elements; `h` is the element's bit in the mask.
    q3_k = Q3_K {
        /// Byte `l`, bit `k` is the mask bit of element `32 k + l`; a set bit means nothing is subtracted.
        HMASK: 0 + 32;
        /// Low 2 bits, as in [`super::q2_k::QS`].
        QS: 32 + 64;
        /// 16 scales of 6 bits. Low 4 bits of scale `i`: byte `i % 8`, low nibble for `i < 8`, else high nibble. High
        /// 2 bits: byte `8 + i % 4`, at bits `2 * (i / 4)`.
        SCALES: 96 + 12;
        /// Scale of the scales, f16.
        D: 108 + 2;
    }
    /// `x = d * sc * q - dmin * m`, one `sc` and `m` per 32 elements.
    q4_k = Q4_K {
        /// Scale of the scales, f16.
        D: 0 + 2;
        /// Scale of the minima, f16.
        DMIN: 2 + 2;
        /// 8 scales and 8 minima of 6 bits. For `i < 4`: scale is bits 0..6 of byte `i`, minimum is bits 0..6 of byte
        /// `4 + i`. For `i >= 4`: byte `4 + i` has the low 4 bits (scale in the low nibble, minimum in the high), and
        /// the high 2 bits are bits 6..8 of byte `i - 4` (scale) and of byte `i` (minimum).
        SCALES: 4 + 12;
        /// Byte `32 n + l`: element `64 n + l` in the low nibble, element `64 n + 32 + l` in the high nibble.
        QS: 16 + 128;
    }
    /// As [`q4_k`], `q` of 5 bits.
    q5_k = Q5_K {
        /// Scale of the scales, f16.
        D: 0 + 2;
        /// Scale of the minima, f16.
        DMIN: 2 + 2;
        /// As [`super::q4_k::SCALES`].
        SCALES: 4 + 12;
        /// Byte `l`, bit `k` is the fifth bit of element `32 k + l`.
        QH: 16 + 32;
        /// Low 4 bits, as in [`super::q4_k::QS`].
        QS: 48 + 128;
    }
    /// `x = d * sc * (q - 32)`, `q` of 6 bits, one `sc` per 16 elements.
    q6_k = Q6_K {
        /// Low 4 bits: byte `64 n + l` holds element `128 n + l` (low nibble) and `128 n + 64 + l` (high nibble).
        QL: 0 + 128;
        /// High 2 bits: byte `32 n + l` holds elements `128 n + 32 j + l` at bits `2 j`.
        QH: 128 + 64;
        /// One i8 per 16 elements.
        SCALES: 192 + 16;
        /// Scale of the scales, f16.
        D: 208 + 2;
    }
    /// `x[i] = d * q[i]`.
    q8_k = Q8_K {
        /// Scale, f32 (not f16).
        D: 0 + 4;
        /// One i8 per element.
        QS: 4 + 256;
        /// Sum of `q` over each 16 elements, i16; decoding ignores it.
        BSUMS: 260 + 32;
    }
    /// `x = d * (0.5 + sc) / 4 * grid * sign`, one `sc` per 32 elements, grid rows of 8.
    iq2_xxs = IQ2_XXS {
        /// Scale, f16.
        D: 0 + 2;
        /// Per 32 elements 8 bytes: 4 row indices of 8 bits, then a u32 with 4 sign codes of 7 bits and, on top, `sc`
        /// of 4 bits.
        QS: 2 + 64;
    }
    /// As [`iq2_xxs`], one `sc` per 16 elements.
    iq2_xs = IQ2_XS {
        /// Scale, f16.
        D: 0 + 2;
        /// One u16 per 8 elements: 9 bits of row index, 7 bits of sign code.
        QS: 2 + 64;
        /// One nibble per 16 elements, low nibble first.
        SCALES: 66 + 8;
    }
    /// As [`iq2_xs`], explicit signs.
    iq2_s = IQ2_S {
        /// Scale, f16.
        D: 0 + 2;
        /// Low 8 bits of the row index, one byte per 8 elements.
        QS: 2 + 32;
        /// One bit per element, set for minus.
        SIGNS: 34 + 32;
        /// High 2 bits of the row index: byte per 32 elements, row `k` at bits `2 k`.
        QH: 66 + 8;
        /// One nibble per 16 elements, low nibble first.
        SCALES: 74 + 8;
    }
    /// `x = d * (0.5 + sc) / 2 * grid * sign`, one `sc` per 32 elements, grid rows of 4.
    iq3_xxs = IQ3_XXS {
        /// Scale, f16.
        D: 0 + 2;
        /// Row indices, one byte per 4 elements.
        QS: 2 + 64;
        /// One u32 per 32 elements: 4 sign codes of 7 bits and, on top, `sc` of 4 bits.
        SCALES_AND_SIGNS: 66 + 32;
    }
    /// `x = d * (1 + 2 sc) * grid * sign`, one `sc` per 32 elements, grid rows of 4.
    iq3_s = IQ3_S {
        /// Scale, f16.
        D: 0 + 2;
        /// Low 8 bits of the row index, one byte per 4 elements.
        QS: 2 + 64;
        /// High bit of the row index: byte per 32 elements, row `k` at bit `k`.
        QH: 66 + 8;
        /// One bit per element, set for minus.
        SIGNS: 74 + 32;
        /// One nibble per 32 elements, low nibble first.
        SCALES: 106 + 4;
    }
    /// `x = d * (2 sc + 1) * (grid + delta)`, grid rows of 8 over -1, 0, 1; `delta` is plus or minus 1/8.
    iq1_s = IQ1_S {
        /// Scale, f16.
        D: 0 + 2;
        /// Low 8 bits of the row index, one byte per 8 elements.
        QS: 2 + 32;
        /// One u16 per 32 elements: 4 times 3 high bits of the row index, `sc` of 3 bits, and a bit set for
        /// a negative `delta`.
        QH: 34 + 16;
    }
    /// As [`iq1_s`], with `sc` per 16 and `delta` per 8 elements.
    iq1_m = IQ1_M {
        /// Low 8 bits of the row index, one byte per 8 elements.
        QS: 0 + 32;
        /// One nibble per 8 elements, low nibble first: 3 high bits of the row index, and a bit set for a negative
        /// `delta`.
        QH: 32 + 16;
        /// Four u16, each with 4 times `sc` of 3 bits; the top nibbles, lowest first, are the f16 scale `d`.
        SCALES: 48 + 8;
    }
    /// `x = d * table[q]`.
    iq4_nl = IQ4_NL {
        /// Scale, f16.
        D: 0 + 2;
        /// Nibbles as in [`super::q4_0::QS`].
        QS: 2 + 16;
    }
    /// `x = d * (sc - 32) * table[q]`, one `sc` per 32 elements.
    iq4_xs = IQ4_XS {
        /// Scale, f16.
        D: 0 + 2;
        /// High 2 bits of the scales: scale `k` at bits `2 k` of this u16.
        SCALES_H: 2 + 2;
        /// Low 4 bits of the scales, one nibble per 32 elements, low nibble first.
        SCALES_L: 4 + 4;
        /// Per 32 elements 16 bytes, nibbles as in [`super::q4_0::QS`].
        QS: 8 + 128;
    }
    /// `x = d * (t - 1)`, `t` in 0..3.
    tq1_0 = TQ1_0 {
        /// Five base-3 digits per byte, first digit most significant, as the fraction `byte / 256` rounded up. Bytes
        /// 0..32 hold elements `32 n + m`, bytes 32..48 hold elements `160 + 16 n + m`, for digit `n` of byte `m`.
        QS: 0 + 48;
        /// Four digits per byte: elements `240 + 4 n + m`.
        QH: 48 + 4;
        /// Scale, f16.
        D: 52 + 2;
    }
    /// `x = d * (q - 1)`.
    tq2_0 = TQ2_0 {
        /// 2 bits per element, as in [`super::q2_k::QS`].
        QS: 0 + 64;
        /// Scale, f16.
        D: 64 + 2;
    }
    /// `x = 2^(e - 128) * table[q]`, the table being E2M1 doubled.
    mxfp4 = MXFP4 {
        /// Exponent, E8M0.
        E: 0 + 1;
        /// Nibbles as in [`super::q4_0::QS`].
        QS: 1 + 16;
    }
    /// `x = d / 2 * table[q]`, one `d` per 16 elements, the table being E2M1 doubled.
    nvfp4 = NVFP4 {
        /// One unsigned E4M3 per 16 elements.
        D: 0 + 4;
        /// Per 16 elements 8 bytes: byte `j` has element `j` in the low nibble, element `j + 8` in the high nibble.
        QS: 4 + 32;
    }
    /// `x = d` where the bit is set, else `-d`.
    q1_0 = Q1_0 {
        /// Scale, f16.
        D: 0 + 2;
        /// Element `i` is bit `i % 8` of byte `i / 8`.
        QS: 2 + 16;
    }
    /// `x = d * (q - 1)`.
    q2_0 = Q2_0 {
        /// Scale, f16.
        D: 0 + 2;
        /// Element `i` is at bits `2 * (i % 4)` of byte `i / 4`.
        QS: 2 + 16;
    }
}
