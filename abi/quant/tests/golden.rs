//! Decoders and encoders against gguf-py's, bit for bit, and against values computed by hand.
//!
//! What a user would lose: weights that decode one bit off drift from every published result, and a wrong field offset
//! turns a model's answers into noise. Where the vectors come from is in `tests/data/README.md`.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a step that fails is a test that fails")]

use std::path::PathBuf;

use tegula_quant::{DType, dequantize, quantize};

fn data(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[track_caller]
fn check_decode(dtype: DType, src: &[u8], expected: &[f32]) {
    let mut got = vec![f32::NAN; expected.len()];
    dequantize(dtype, src, &mut got).unwrap();
    for (i, (got, want)) in got.iter().zip(expected).enumerate() {
        let block = i / dtype.block_len();
        assert!(
            got.to_bits() == want.to_bits(),
            "{dtype} block {block} element {}: {got:?} instead of {want:?}",
            i % dtype.block_len()
        );
    }
}

/// Types that gguf-py cannot decode; see `by_hand`.
const WITHOUT_FILE: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
    DType::Q8_1,
    DType::Q8_K,
    DType::Q1_0,
    DType::Q2_0,
];

#[test]
fn decoders_agree_with_gguf_py() {
    let mut checked = 0;
    for dtype in DType::ALL.into_iter().filter(|d| !WITHOUT_FILE.contains(d)) {
        let file = data(&format!("{}.bin", dtype.name().to_lowercase()));
        let n_blocks = file.len() / (dtype.block_bytes() + 4 * dtype.block_len());
        let (src, expected) = file.split_at(n_blocks * dtype.block_bytes());
        assert!(n_blocks >= 8, "{dtype}: too few blocks");
        check_decode(dtype, src, &f32s(expected));
        checked += 1;
    }
    assert_eq!(checked, DType::ALL.len() - WITHOUT_FILE.len());
}

#[test]
fn encoders_agree_with_gguf_py() {
    use DType::{BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
    for dtype in [F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1] {
        let file = data(&format!("{}.enc.bin", dtype.name().to_lowercase()));
        let (values, expected) = file.split_at(32 * 32 * 4);
        let mut got = vec![0; expected.len()];
        quantize(dtype, &f32s(values), &mut got).unwrap();
        let size = dtype.block_bytes() * 32 / dtype.block_len();
        for (row, (got, want)) in got.chunks(size).zip(expected.chunks(size)).enumerate() {
            assert_eq!(got, want, "{dtype} row {row}");
        }
    }
}

/// 1.5 as f16.
const ONE_AND_A_HALF: [u8; 2] = [0x00, 0x3e];

mod by_hand {
    use super::*;

    #[test]
    fn plain_elements() {
        check_decode(DType::F32, &(-0.1f32).to_le_bytes(), &[-0.1]);
        check_decode(DType::F64, &0.1f64.to_le_bytes(), &[0.1]);
        check_decode(DType::F64, &1e300f64.to_le_bytes(), &[f32::INFINITY]);
        check_decode(DType::I8, &[0x80, 0x7f], &[-128.0, 127.0]);
        check_decode(DType::I16, &[0x00, 0x80, 0xff, 0x7f], &[-32768.0, 32767.0]);
        check_decode(DType::I32, &16_777_217i32.to_le_bytes(), &[16_777_216.0]);
        check_decode(DType::I64, &i64::MIN.to_le_bytes(), &[-9_223_372_036_854_775_808.0]);
    }

    #[test]
    fn q8_1_skips_the_sum() {
        let mut block = [ONE_AND_A_HALF, [0xaa, 0xbb]].concat();
        block.extend((0..32).map(|i| (i - 16) as i8 as u8));
        let expected: Vec<f32> = (0..32).map(|i| 1.5 * (i - 16) as f32).collect();
        check_decode(DType::Q8_1, &block, &expected);
    }

    #[test]
    fn q8_k_has_an_f32_scale_and_skips_the_sums() {
        let mut block = 0.1f32.to_le_bytes().to_vec();
        block.extend(0..=255u8);
        block.extend([0xcc; 32]);
        let expected: Vec<f32> = (0..=255u8).map(|q| 0.1 * f32::from(q as i8)).collect();
        check_decode(DType::Q8_K, &block, &expected);
    }

    #[test]
    fn q1_0_is_the_sign_of_the_scale() {
        let mut block = ONE_AND_A_HALF.to_vec();
        block.extend([0b0000_0101; 16]);
        let expected: Vec<f32> =
            (0..128).map(|i| if i % 8 == 0 || i % 8 == 2 { 1.5 } else { -1.5 }).collect();
        check_decode(DType::Q1_0, &block, &expected);
    }

    #[test]
    fn q2_0_counts_from_minus_one() {
        let mut block = ONE_AND_A_HALF.to_vec();
        block.extend([0b11_10_01_00; 16]);
        let expected: Vec<f32> = (0..64).map(|i| [-1.5, 0.0, 1.5, 3.0][i % 4]).collect();
        check_decode(DType::Q2_0, &block, &expected);
    }
}
