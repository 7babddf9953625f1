//! What is written is what is read, for every value type, version and alignment; tools that rewrite a model must not
//! change it.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::borrow::Cow;

use common::sample;
use proptest::prelude::*;
use tegula_gguf::{Array, DType, Gguf, GgufError, GgufWriter, StringArray, TensorProblem, Value};

/// Writes a parsed model again.
fn rewrite(gguf: &Gguf, data: &[u8]) -> Vec<u8> {
    let mut writer = GgufWriter::new().version(gguf.shards()[0].version);
    for (key, value) in gguf.metadata().iter() {
        writer = writer.meta(key, value.clone());
    }
    for tensor in gguf.tensors() {
        let (_, range) = gguf.file_range(tensor).unwrap();
        let bytes = &data[range.start as usize..range.end as usize];
        writer = writer.tensor(tensor.name(), tensor.dims(), tensor.dtype(), bytes);
    }
    writer.to_bytes().unwrap()
}

#[test]
fn the_sample_survives() {
    for writer in [
        sample(),
        sample().version(2),
        sample().alignment(8),
        sample().alignment(4096),
        GgufWriter::new(),
    ] {
        let bytes = writer.to_bytes().unwrap();
        assert_eq!(bytes, writer.to_bytes().unwrap(), "output must not vary");
        let gguf = Gguf::parse(&bytes, "x.gguf").unwrap();
        assert_eq!(rewrite(&gguf, &bytes), bytes);

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.gguf");
        writer.write_to(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        let opened = Gguf::open(&path).unwrap();
        for tensor in opened.tensors() {
            let (shard, range) = opened.file_range(tensor).unwrap();
            assert_eq!(range.start % u64::from(shard.alignment), 0, "{}", tensor.name());
            let expected = &bytes[range.start as usize..range.end as usize];
            assert_eq!(opened.read_tensor(tensor).unwrap(), expected, "{}", tensor.name());
        }
    }
}

#[test]
fn values_read_as_the_types_that_hold_them() {
    let bytes = sample().to_bytes().unwrap();
    let gguf = Gguf::parse(&bytes, "x.gguf").unwrap();
    let meta = gguf.metadata();
    assert_eq!(meta.get_str("general.architecture").unwrap(), "llama");
    // A u64 in the file, asked for as each width that holds 4096.
    assert_eq!(meta.get_u32("llama.context_length").unwrap(), 4096);
    assert_eq!(meta.get_i32("llama.context_length").unwrap(), 4096);
    assert_eq!(meta.required::<u16>("llama.context_length").unwrap(), 4096);
    assert!(meta.required::<u8>("llama.context_length").is_err());
    assert_eq!(meta.get_i64("v.i64").unwrap(), i64::MIN);
    assert_eq!(meta.get_f64("llama.rope.freq_base").unwrap(), 10000.0);
    assert!(meta.get_bool("v.bool").unwrap());
    assert_eq!(meta.opt_u32("no.such").unwrap(), None);
    assert!(matches!(meta.get_i32s("v.i32s").unwrap(), Cow::Borrowed([1, 3, -1])));
    assert_eq!(meta.get_bools("v.bools").unwrap(), [true, false].as_slice());
    let head_count = |key| meta.optional_per_layer::<u32>(key, 2).unwrap();
    assert_eq!(head_count("llama.attention.head_count_kv"), Some(vec![4, 2]));
    assert_eq!(head_count("llama.block_count"), Some(vec![2, 2]));
    assert_eq!(head_count("no.such"), None);

    let tokens = meta.get_strings("tokenizer.ggml.tokens").unwrap();
    assert!(tokens.is_utf8());
    assert_eq!(tokens.iter().collect::<Vec<_>>(), [&b"<s>"[..], b"", "\u{2581}the".as_bytes()]);
    assert_eq!((tokens.text(2), tokens.text(3)), (Some("\u{2581}the"), None));
    let raw = meta.get_strings("v.raw").unwrap();
    assert!(!raw.is_utf8());
    assert_eq!((raw.get(0), raw.text(0), raw.text(1)), (Some(&b"\xff"[..]), None, Some("ok")));
}

#[test]
fn a_value_of_another_type_names_both_types() {
    let bytes = sample().to_bytes().unwrap();
    let gguf = Gguf::parse(&bytes, "dir/x.gguf").unwrap();
    let meta = gguf.metadata();
    let check = |error: GgufError, says: &str| {
        let message = error.to_string();
        assert!(message.starts_with("dir/x.gguf: ") && message.contains(says), "{message}");
    };
    check(meta.get_u32("no.such").unwrap_err(), "no key \"no.such\" (a u32 is needed)");
    check(meta.get_u32("general.name").unwrap_err(), "holds a string, but a u32 is needed");
    check(meta.get_u32("v.i32").unwrap_err(), "holds an i32 -70000, which is not a u32");
    check(meta.get_u32("v.bool").unwrap_err(), "holds a bool, but a u32 is needed");
    check(meta.get_f32("v.u8").unwrap_err(), "holds a u8, but an f32 is needed");
    check(meta.get_f32("v.f64").unwrap_err(), "which is not an f32");
    check(meta.opt_bool("v.u8").unwrap_err(), "holds a u8, but a bool is needed");
    check(meta.get_u32s("v.i32s").unwrap_err(), "[1, 3, -1], which is not an array of u32");
    check(
        meta.get_strings("v.i32s").unwrap_err(),
        "holds an array of i32, but an array of strings",
    );
    check(
        meta.optional_per_layer::<u32>("llama.attention.head_count_kv", 3).unwrap_err(),
        "holds 2 elements, but 3 are needed",
    );
    check(gguf.required_tensor("no.weight").unwrap_err(), "no tensor \"no.weight\"");
}

/// Two halves of one character are not text, though together they are.
#[test]
fn a_character_cut_in_two_is_not_utf8() {
    let split = StringArray::from_strings([&b"\xe2\x96"[..], b"\x81"]).unwrap();
    assert!(!split.is_utf8());
    assert_eq!((split.text(0), split.get(1)), (None, Some(&b"\x81"[..])));
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let check = |writer: GgufWriter<'_>, expected: fn(&GgufError) -> bool| {
        let error = writer.to_bytes().unwrap_err();
        assert!(expected(&error), "{error:?}");
    };
    let tensor = |dims: &[u64], dtype, n| GgufWriter::new().tensor("t", dims, dtype, vec![0; n]);
    check(sample().meta("general.name", 1u8), |e| matches!(e, GgufError::DuplicateKey { .. }));
    check(sample().meta("", 1u8), |e| matches!(e, GgufError::BadName { .. }));
    check(sample().alignment(3), |e| matches!(e, GgufError::BadAlignment { .. }));
    check(sample().tensor("output_norm.weight", &[1], DType::F32, vec![0; 4]), |e| {
        matches!(e, GgufError::DuplicateTensor { .. })
    });
    check(tensor(&[1 << 32, 1 << 32], DType::F32, 0), |e| {
        matches!(e, GgufError::BadTensor { problem: TensorProblem::SizeOverflow { .. }, .. })
    });
    check(tensor(&[33], DType::Q8_0, 34), |e| {
        matches!(e, GgufError::BadTensor { problem: TensorProblem::Layout(_), .. })
    });
    check(tensor(&[4], DType::F32, 15), |e| {
        let length = TensorProblem::DataLength { got: 15, n_bytes: 16 };
        matches!(e, GgufError::BadTensor { problem, .. } if *problem == length)
    });
}

#[test]
fn the_summary_counts() {
    let bytes = sample().to_bytes().unwrap();
    let summary = Gguf::parse(&bytes, "x.gguf").unwrap().summary().unwrap();
    assert_eq!(summary.architecture.as_deref(), Some("llama"));
    assert_eq!((summary.n_layer, summary.n_ctx_train), (Some(2), Some(4096)));
    assert_eq!((summary.n_vocab, summary.n_params), (Some(3), 96 + 512 + 12 + 5));
    assert_eq!(
        (summary.tensor_bytes, summary.file_bytes),
        (102 + 288 + 24 + 20, bytes.len() as u64)
    );
    let dtypes: Vec<_> = summary.dtypes.iter().map(|s| (s.dtype, s.n_tensors, s.n_bytes)).collect();
    let expected =
        [(DType::Q4_K, 1, 288), (DType::Q8_0, 1, 102), (DType::F16, 1, 24), (DType::F32, 1, 20)];
    assert_eq!(dtypes, expected);
    assert!(summary.to_string().contains("parameters    625 in 4 tensors"), "{summary}");
}

fn any_array(depth: u32) -> BoxedStrategy<Array> {
    let scalars = prop_oneof![
        any::<Vec<u8>>().prop_map(Array::U8),
        any::<Vec<i16>>().prop_map(Array::I16),
        any::<Vec<u32>>().prop_map(Array::U32),
        any::<Vec<bool>>().prop_map(Array::Bool),
        any::<Vec<i64>>().prop_map(Array::I64),
        prop::collection::vec(any::<Vec<u8>>(), 0..8)
            .prop_map(|strings| Array::String(StringArray::from_strings(strings).unwrap())),
    ];
    if depth == 0 {
        return scalars.boxed();
    }
    let inner = prop::collection::vec(any_array(depth - 1), 0..4).prop_map(Array::Array);
    prop_oneof![scalars, inner].boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_metadata_survives(
        values in prop::collection::vec(prop_oneof![
            any_array(3).prop_map(Value::Array),
            any::<Vec<u8>>().prop_map(|bytes| Value::String(bytes.into())),
            any::<u64>().prop_map(Value::U64),
        ], 0..8),
    ) {
        let mut writer = GgufWriter::new();
        for (index, value) in values.iter().enumerate() {
            writer = writer.meta(format!("key.{index}"), value.clone());
        }
        let bytes = writer.to_bytes().unwrap();
        let gguf = Gguf::parse(&bytes, "x.gguf").unwrap();
        let read: Vec<Value> = gguf.metadata().iter().map(|(_, value)| value.clone()).collect();
        prop_assert_eq!(read, values);
    }
}
