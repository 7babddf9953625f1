//! Properties that hold for every type, every length and every byte.
//!
//! What a user would lose: a crafted file could stop the process, or a KV cache could lose more precision than its type
//! promises.

use proptest::prelude::*;
use tegula_quant::{DType, LayoutError, dequantize, dequantize_row_fn, quantize, quantize_row_fn};

fn any_dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(DType::ALL.to_vec())
}

/// A type that can be encoded.
fn encodable() -> impl Strategy<Value = DType> {
    let types: Vec<_> = DType::ALL.into_iter().filter(|d| quantize_row_fn(*d).is_some()).collect();
    proptest::sample::select(types)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whole blocks that both sides hold are written, and nothing else.
    #[test]
    fn decoding_never_panics_and_keeps_to_whole_blocks(
        dtype in any_dtype(),
        src in proptest::collection::vec(any::<u8>(), 0..900),
        n in 0usize..1100,
    ) {
        const UNTOUCHED: u32 = 0x7fc1_2345;
        let mut dst = vec![f32::from_bits(UNTOUCHED); n];
        dequantize_row_fn(dtype)(&src, &mut dst);
        let blocks = (src.len() / dtype.block_bytes()).min(n / dtype.block_len());
        let rest = &dst[blocks * dtype.block_len()..];
        prop_assert!(rest.iter().all(|v| v.to_bits() == UNTOUCHED));

        let expected = dtype.row_bytes(n as u64);
        let fits = expected == Ok(src.len() as u64);
        prop_assert_eq!(dequantize(dtype, &src, &mut dst).is_ok(), fits);
    }

    #[test]
    fn encoding_never_panics_and_keeps_to_whole_blocks(
        dtype in encodable(),
        src in proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..200),
        n in 0usize..900,
    ) {
        const UNTOUCHED: u8 = 0xa5;
        let mut dst = vec![UNTOUCHED; n];
        if let Some(encode) = quantize_row_fn(dtype) {
            encode(&src, &mut dst);
        }
        let blocks = (src.len() / dtype.block_len()).min(n / dtype.block_bytes());
        prop_assert!(dst[blocks * dtype.block_bytes()..].iter().all(|b| *b == UNTOUCHED));

        let fits = dtype.row_bytes(src.len() as u64) == Ok(n as u64);
        prop_assert_eq!(quantize(dtype, &src, &mut dst).is_ok(), fits);
    }

    /// The bound is half a step of the type's scale, plus what rounding the scale (and minimum) to f16 moves.
    #[test]
    fn round_trip_error_is_bounded(
        dtype in encodable(),
        values in proptest::collection::vec(-100.0f32..100.0, 32),
    ) {
        let mut bytes = vec![0; dtype.row_bytes(32).unwrap() as usize];
        let mut back = vec![0.0; 32];
        quantize(dtype, &values, &mut bytes).unwrap();
        dequantize(dtype, &bytes, &mut back).unwrap();

        let max = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let low = values.iter().copied().fold(f32::MAX, f32::min);
        let high = values.iter().copied().fold(f32::MIN, f32::max);
        // f16 keeps 11 bits; below its smallest normal the step is 2^-24, times the largest level.
        let f16_error = max / 2048.0 + 127.0 / 16_777_216.0;
        for (v, back) in values.iter().zip(&back) {
            let bound = match dtype {
                DType::F32 => 0.0,
                DType::F16 => v.abs() / 2048.0 + 1.0 / 33_554_432.0,
                DType::BF16 => v.abs() / 256.0,
                DType::Q8_0 => max / 127.0 * 0.5 + f16_error,
                // One extreme is exact, the opposite one has no level of its own: a whole step is lost there.
                DType::Q4_0 => max / 8.0 + f16_error,
                DType::Q5_0 => max / 16.0 + f16_error,
                DType::Q4_1 => (high - low) / 15.0 * 0.5 + 3.0 * f16_error,
                DType::Q5_1 => (high - low) / 31.0 * 0.5 + 3.0 * f16_error,
                other => panic!("{other}: state the bound of the new encoder"),
            };
            prop_assert!((v - back).abs() <= bound * 1.0001, "{dtype}: {v} became {back}, bound {bound}");
        }
    }

    /// Row sizes agree with long arithmetic, and refuse what does not fit.
    #[test]
    fn row_bytes_is_exact_or_refused(dtype in any_dtype(), n in any::<u64>(), small in 0u64..5000) {
        for n in [n, n - n % dtype.block_len() as u64, small] {
            let exact = u128::from(n) / dtype.block_len() as u128 * dtype.block_bytes() as u128;
            match dtype.row_bytes(n) {
                Ok(bytes) => prop_assert_eq!(u128::from(bytes), exact),
                Err(LayoutError::NotWholeBlocks { .. }) => prop_assert!(n % dtype.block_len() as u64 != 0),
                Err(LayoutError::Overflow { .. }) => prop_assert!(exact > u128::from(u64::MAX)),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }

    #[test]
    fn names_parse_in_any_case_and_others_are_refused(dtype in any_dtype(), noise in "\\PC{0,60}") {
        prop_assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        prop_assert_eq!(DType::from_name(&dtype.name().to_lowercase()), Some(dtype));
        prop_assert_eq!(noise.parse::<DType>().ok(), DType::from_name(&noise));
    }
}

/// A retired id that decoded as something else would read garbage as weights.
#[test]
fn ids_are_ggmls() {
    let known: Vec<u32> = (0..1000).filter(|id| DType::from_id(*id).is_some()).collect();
    let retired = [4, 5, 31, 32, 33, 36, 37, 38];
    let expected: Vec<u32> = (0..=42).filter(|id| !retired.contains(id)).collect();
    assert_eq!(known, expected);
    for dtype in DType::ALL {
        assert_eq!(DType::from_id(dtype.id()), Some(dtype));
    }
}
