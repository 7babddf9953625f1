//! How far a backend may be from the oracle, for each op, and why.
//!
//! The measure is the normalised mean square error: the sum of squared differences over the sum of squares of what is right. It does not
//! depend on the scale of the data, and one element that is wholly wrong among ten thousand still gives 1e-4. With errors of
//! relative size `e` it is about `e * e`; a rounding to f32 is `e = 3e-8`, which gives 1e-15.
//!
//! Products with weights of block types are measured by their terms instead ([`crate::Rounded`]), because a backend may round activations to
//! 16 bits, in runs of 32 with a scale that is a power of two. A step is then at most 2^-14 of the run's greatest activation `a`, since 15
//! bits hold the magnitude, and an error is spread evenly over a step: its expected square is at most `(2^-14 a)^2 / 12`. Errors of
//! different activations are independent, so the squared error of a result is expected to be at most `2^-28 / 12 = 3.1e-10` of the sum of
//! `a^2 w^2` over its weights `w`, whatever the result is itself. The sums in f32 add the 1e-11 of any product. How far chance may take
//! a few results above the expectation is [`crate::Rounded`]'s too: 45 times for one token, 2.6 times for 64. A fault is far beyond
//! that: activations of 12 bits give 8e-8, of 8 bits 2e-5, one result in ten thousand that is missing gives 3e-5.

use tegula_plugin::DeviceKind;
use tegula_program::{DType, Program};

/// The error allowed to an op.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// The op, and what of it.
    pub what: &'static str,
    /// Normalised mean square error; 0 asks for the same numbers.
    pub nmse: f64,
    /// Where the number comes from.
    pub reason: &'static str,
}

macro_rules! bounds {
    ($($name:ident: $what:literal, $nmse:expr, $reason:literal;)*) => {
        $(pub(crate) const $name: &Bound = &Bound { what: $what, nmse: $nmse, reason: $reason };)*
        /// All bounds.
        pub const BOUNDS: &[&Bound] = &[$($name),*];
    };
}

bounds! {
    COPY: "slice, slice_groups, concat, concat_groups, gather_rows, argmax, top_k", 0.0,
        "elements are moved and compared, nothing is computed";
    EMBED: "embed", 1e-13,
        "a decoded element is one or two products and a sum, each rounded to f32 once";
    MATMUL: "matmul and matmul_experts with plain weights, combine_experts", 1e-11,
        "weights are decoded exactly and nothing is rounded below f32: a sum of n terms is off by about sqrt(n) roundings, 2e-6 of its terms' magnitude at n = 1024";
    MATMUL_BLOCKS: "matmul and matmul_experts with weights of a block type", 3.2e-10,
        "as matmul, but activations may be rounded to 16 bits in runs of 32: 2^-28 / 12 of their terms, more where tokens are few; see the file's head";
    NORM: "rms_norm, layer_norm, l2_norm", 1e-12,
        "a sum of squares in f32, a root and two products; the data have no great mean, so that little cancels in a layer norm";
    ROPE: "rope", 1e-12,
        "cosines and sines are rounded to f32 once, from angles that are exact to 1e-8 at position 100,000: an angle kept in f32 would be off by 4e-3 there";
    ELEMENTWISE: "add, mul, scale", 1e-14,
        "one rounding";
    ACTIVATION: "unary, glu, glu_clamped, softcap, router_topk, router_topk_grouped", 1e-12,
        "exponentials and hyperbolic tangents to a few units in the last place";
    ATTENTION: "attention", 1e-10,
        "scores are dot products in f32 whose error the exponential turns into a relative one, at most 30 times as great for the scores used here; stored keys and values are read exactly";
    CONV: "conv_state", 1e-12,
        "a few products and sums in f32, twice over; the state is stored as it is";
    DELTA: "gated_delta", 1e-10,
        "dot products in f32, whose error stays in the state and fades with its decay; forms that compute several tokens at once add in another order";
    CHAIN: "several ops in a row", 1e-9,
        "a few of the above one after the other";
    CHAIN_BLOCKS: "several ops in a row, with weights of a block type", 2e-7,
        "the products of a layer, whose activations may be rounded to 16 bits, add 2.4e-9 of the squares of even data; each later gated unit, whose two factors are both off, makes up to four times as much of it in squares, which the residual sum dilutes: 80 times over nine layers. Activations of 8 bits are beyond 1e-4";
    MATMUL_HALF: "matmul and matmul_experts on a GPU, with weights below f32", 2e-7,
        "both operands may be rounded to f16, as units for matrices take them: a rounding to 11 bits is off by 2e-4 of an element in the mean, 4.3e-8 of the squares, both operands' 8.6e-8, twice that where results are few. An accumulation in f16 is beyond 1e-6";
    CHAIN_HALF: "several ops in a row on a GPU, with weights below f32", 7e-6,
        "the products' 8.6e-8, made 80 times as much over nine layers as in a chain of a processor's";
}

/// What is allowed on a device: GPUs have units that multiply matrices of f16, which everything on them uses, and which cost prompts a tenth of
/// the time. Processors have none, and are held to f32 or to 16 bits.
pub(crate) fn on_device(
    bound: &'static Bound,
    kind: DeviceKind,
    program: &Program,
) -> &'static Bound {
    let is_gpu = kind == DeviceKind::DISCRETE || kind == DeviceKind::INTEGRATED;
    let is_narrow = program.weights().any(|(_, weight)| weight.dtype != DType::F32);
    match bound {
        _ if !is_gpu || !is_narrow => bound,
        bound if bound == MATMUL || bound == MATMUL_BLOCKS => MATMUL_HALF,
        bound if bound == CHAIN || bound == CHAIN_BLOCKS => CHAIN_HALF,
        bound => bound,
    }
}

/// How far a stored row may be from the oracle's, as a part of its greatest magnitude: backends may round a tie, or a quotient
/// beside one, to the other side.
pub(crate) fn stored_step(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1.0 / 1024.0,
        DType::BF16 => 1.0 / 128.0,
        DType::Q8_0 => 1.01 / 127.0,
        DType::Q4_0 => 1.01 / 8.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bound without a reason is a number that somebody once found to pass.
    #[test]
    fn every_bound_has_its_reason() {
        for bound in BOUNDS {
            assert!(bound.reason.len() > 10 && bound.nmse < 1e-5, "{bound:?}");
        }
    }
}
