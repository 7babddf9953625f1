//! Files made to break a reader. Each must be refused with the error that tells its user what is wrong, in under a
//! second; a panic, an abort or a huge allocation here is a host application taken down by a download.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at the first surprise")]

mod common;

use std::time::{Duration, Instant};

use common::{Raw, sample};
use tegula_gguf::{Gguf, GgufError, GgufFile, TensorProblem};

/// A file, the kind of error it must give, and a part of the message.
struct Case {
    name: &'static str,
    bytes: Vec<u8>,
    kind: fn(&GgufError) -> bool,
    says: &'static str,
}

fn check(case: &Case) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    std::fs::write(&path, &case.bytes).unwrap();
    let start = Instant::now();
    for error in [
        Gguf::open(&path).err(),
        Gguf::parse(&case.bytes, &path).err(),
        GgufFile::parse(&case.bytes, &path).err(),
    ] {
        let Some(error) = error else { panic!("{}: was accepted", case.name) };
        let message = error.to_string();
        assert!((case.kind)(&error), "{}: got {error:?}", case.name);
        assert!(message.contains(case.says), "{}: {message:?} lacks {:?}", case.name, case.says);
        assert!(message.starts_with(path.to_str().unwrap()), "{}: {message:?}", case.name);
        assert!(!message.contains(|c: char| c.is_control()), "{}: {message:?}", case.name);
        assert!(message.len() < 500 + path.as_os_str().len(), "{}: {message:?}", case.name);
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{} took {:?}", case.name, start.elapsed());
}

macro_rules! case {
    ($name:literal, $raw:expr, $kind:pat, $says:literal) => {
        Case { name: $name, bytes: $raw.0, kind: |e| matches!(e, $kind), says: $says }
    };
}

macro_rules! problem {
    ($problem:pat) => {
        GgufError::BadTensor { problem: $problem, .. }
    };
}

const U8: u32 = 0;
const U32: u32 = 4;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

fn raw(bytes: &[u8]) -> Raw {
    Raw(bytes.to_vec())
}

#[test]
fn other_files_are_named() {
    let safetensors = raw(&[16, 0, 0, 0, 0, 0, 0, 0]).bytes(b"{\"a\":1}");
    for case in [
        case!("empty", raw(b""), GgufError::Empty { .. }, "the file is empty"),
        case!("one byte", raw(b"x"), GgufError::NotGguf { .. }, "begins with \"x\""),
        case!("zip", raw(b"PK\x03\x04...."), GgufError::NotGguf { .. }, "zip file"),
        case!("safetensors", safetensors, GgufError::NotGguf { .. }, "safetensors"),
        case!("web page", raw(b" \n<!doctype html>"), GgufError::NotGguf { .. }, "web page"),
        case!("json", raw(b"{\"error\":1}"), GgufError::NotGguf { .. }, "JSON"),
        case!("LFS", raw(b"version https://git-lfs.g"), GgufError::NotGguf { .. }, "git lfs pull"),
        case!("ggjt", raw(b"tjgg\x03\0\0\0"), GgufError::NotGguf { .. }, "before GGUF"),
        case!("zeros", raw(&[0; 64]), GgufError::NotGguf { .. }, "unfinished"),
        case!("terminal", raw(b"\x1b[2J\x07"), GgufError::NotGguf { .. }, "\\x1b[2J"),
    ] {
        check(&case);
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let version = |n: u32| raw(b"GGUF").u32(n).bytes(&[0; 16]);
    for case in [
        case!("magic alone", raw(b"GGUF"), GgufError::Truncated { .. }, "the version at byte 4"),
        case!("half a magic", raw(b"GG"), GgufError::Truncated { .. }, "the magic at byte 0"),
        case!("version 0", version(0), GgufError::UnsupportedVersion { .. }, "version 0"),
        case!("version 1", version(1), GgufError::UnsupportedVersion { .. }, "August 2023"),
        case!("version 4", version(4), GgufError::UnsupportedVersion { version: 4, .. }, "newer"),
        case!(
            "big endian",
            version(3 << 24),
            GgufError::BigEndian { version: 3, .. },
            "big-endian"
        ),
        case!(
            "no counts",
            raw(b"GGUF").u32(3),
            GgufError::Truncated { .. },
            "the number of tensors at byte 8 needs 8 bytes, but only 0 are left"
        ),
        case!(
            "2^64 tensors",
            Raw::new(u64::MAX, 0),
            GgufError::Truncated { .. },
            "the number of tensors"
        ),
        case!(
            "2^64 keys",
            Raw::new(0, u64::MAX),
            GgufError::Truncated { .. },
            "the number of metadata keys"
        ),
        case!("tensors that are absent", Raw::new(1, 0), GgufError::Truncated { .. }, "33 bytes"),
        case!(
            "more tensors than allowed",
            Raw::new(70_000, 0).bytes(&vec![0; 70_000 * 33]),
            GgufError::LimitExceeded { .. },
            "asks for 70000 tensors; at most 65536 are allowed (n_tensors_max)"
        ),
        case!(
            "more keys than allowed",
            Raw::new(0, 20_000).bytes(&vec![0; 20_000 * 14]),
            GgufError::LimitExceeded { .. },
            "at most 16384 are allowed (n_kv_max)"
        ),
    ] {
        check(&case);
    }
}

#[test]
fn metadata_that_lies_is_refused() {
    let one = || Raw::new(0, 1);
    let depth_bomb = (0..200).fold(one().key("k", ARRAY), |raw, _| raw.u32(ARRAY).u64(1));
    let wide = one().array("k", ARRAY, 70_000);
    let wide = (0..70_000).fold(wide, |raw, _| raw.u32(U8).u64(0));
    let escape = "k\x1b]0;x\x07\n";
    for case in [
        case!("empty key", one().key("", U8).bytes(&[0; 9]), GgufError::BadName { .. }, "is empty"),
        case!(
            "key not UTF-8",
            one().string(b"\xff\xfe").u32(U8).bytes(&[0; 9]),
            GgufError::BadName { .. },
            "metadata key number 0 at byte 24 is not UTF-8"
        ),
        case!(
            "key too long",
            one().string(&[b'k'; 70_000]).u32(U8).bytes(&[0]),
            GgufError::LimitExceeded { .. },
            "at most 65535"
        ),
        case!(
            "key of 2^63 bytes",
            one().u64(1 << 63).bytes(&[0; 64]),
            GgufError::Truncated { .. },
            "9223372036854775808 bytes"
        ),
        case!(
            "string of 2^63 bytes",
            one().key("k", STRING).u64(1 << 63).bytes(b"abc"),
            GgufError::Truncated { needed: 0x8000_0000_0000_0000, left: 3, .. },
            "the value of the key \"k\""
        ),
        case!(
            "string of 2^64 - 1 bytes",
            one().key("k", STRING).u64(u64::MAX).bytes(b"abc"),
            GgufError::Truncated { .. },
            "the value"
        ),
        case!(
            "string over the cap",
            one().key("k", STRING).u64(17 << 20).bytes(&vec![b'x'; 17 << 20]),
            GgufError::LimitExceeded { .. },
            "(string_bytes_max)"
        ),
        case!(
            "unknown type",
            one().key("k", 13).u64(0),
            GgufError::UnknownValueType { id: 13, .. },
            "is type 13; GGUF has types 0 to 12"
        ),
        case!(
            "unknown element type of an empty array",
            one().array("k", 99, 0),
            GgufError::UnknownValueType { id: 99, .. },
            "the element type of the key \"k\""
        ),
        case!(
            "bool of 2",
            one().key("k", BOOL).bytes(&[2]),
            GgufError::BadBool { got: 2, .. },
            "value 2"
        ),
        case!(
            "bool of 7 in an array",
            one().array("k", BOOL, 3).bytes(&[1, 0, 7]),
            GgufError::BadBool { offset: 51, .. },
            "element 2 of the key \"k\" at byte 51"
        ),
        case!(
            "array of 2^61 u64",
            one().array("k", U64, 1 << 61).bytes(&[0; 64]),
            GgufError::Truncated { needed: 0x1_0000_0000_0000_0000, .. },
            "the length of the key \"k\""
        ),
        case!(
            "array of 2^62 strings",
            one().array("k", STRING, 1 << 62).bytes(&[0; 64]),
            GgufError::Truncated { .. },
            "the length"
        ),
        case!(
            "array over the cap",
            one().array("k", U8, 5 << 20).bytes(&vec![0; 5 << 20]),
            GgufError::LimitExceeded { .. },
            "(array_len_max)"
        ),
        case!(
            "string array with a hole",
            one().array("k", STRING, 2).string(b"a").u64(99).bytes(b"b"),
            GgufError::Truncated { .. },
            "element 1 of the key \"k\""
        ),
        case!("depth bomb", depth_bomb, GgufError::LimitExceeded { .. }, "(array_depth_max)"),
        case!("wide nesting", wide, GgufError::LimitExceeded { .. }, "(n_nested_arrays_max)"),
        case!(
            "duplicate key",
            Raw::new(0, 2).key("k", U8).bytes(&[1]).key("k", U8).bytes(&[2]),
            GgufError::DuplicateKey { first: 24, second: 38, .. },
            "\"k\" appears twice, at bytes 24 and 38"
        ),
        case!(
            "key that writes to the terminal",
            one().key(escape, 77).u64(0),
            GgufError::UnknownValueType { .. },
            "k\\u{1b}]0;x\\u{7}\\n"
        ),
    ] {
        check(&case);
    }
}

#[test]
fn alignments_that_cannot_be_are_refused() {
    let with = |n: u32| Raw::new(0, 1).key("general.alignment", U32).u32(n);
    for case in [
        case!("zero", with(0), GgufError::BadAlignment { got: 0, .. }, "general.alignment is 0"),
        case!("three", with(3), GgufError::BadAlignment { .. }, "power of two from 8 to 1048576"),
        case!("four", with(4), GgufError::BadAlignment { .. }, "is 4"),
        case!("2^31", with(1 << 31), GgufError::BadAlignment { .. }, "is 2147483648"),
        case!(
            "u64",
            Raw::new(0, 1).key("general.alignment", U64).u64(32),
            GgufError::WrongType { .. },
            "\"general.alignment\" holds a u64, but a u32 is needed"
        ),
        case!(
            "string",
            Raw::new(0, 1).key("general.alignment", STRING).string(b"32"),
            GgufError::WrongType { .. },
            "holds a string"
        ),
    ] {
        check(&case);
    }
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    const T_F32: u32 = 0;
    const T_Q4_0: u32 = 2;
    const T_Q4_K: u32 = 12;
    let one = |dims: &[u64], id, offset| Raw::new(1, 0).tensor("t", dims, id, offset).data(64);
    let big = 1u64 << 32;
    let two = |a: (&str, u64), b: (&str, u64)| {
        let raw = Raw::new(2, 0).tensor(a.0, &[16], T_F32, a.1);
        raw.tensor(b.0, &[16], T_F32, b.1).data(128)
    };
    let aligned_64 = Raw::new(1, 1).key("general.alignment", U32).u32(64);
    for case in [
        case!(
            "no dims",
            one(&[], T_F32, 0),
            problem!(TensorProblem::DimCount { got: 0 }),
            "1 to 4"
        ),
        case!(
            "five dims",
            one(&[1; 5], T_F32, 0),
            problem!(TensorProblem::DimCount { got: 5 }),
            "tensor \"t\" (entry at byte 24) has 5 dimensions"
        ),
        case!(
            "2^32 - 1 dims",
            Raw::new(1, 0).string(b"t").u32(u32::MAX).data(64),
            problem!(TensorProblem::DimCount { .. }),
            "4294967295 dimensions"
        ),
        case!(
            "zero dim",
            one(&[4, 0], T_F32, 0),
            problem!(TensorProblem::ZeroDim { dim: 1 }),
            "size 0 in dimension 1"
        ),
        case!(
            "zero row",
            one(&[0], T_Q4_0, 0),
            problem!(TensorProblem::ZeroDim { dim: 0 }),
            "dimension 0"
        ),
        case!(
            "product of 2^64 wraps to zero",
            one(&[big, big], T_F32, 0),
            problem!(TensorProblem::SizeOverflow { .. }),
            "[4294967296, 4294967296] of F32: the size does not fit in 64 bits"
        ),
        case!(
            "product of quantised rows wraps",
            one(&[big, big], T_Q4_0, 0),
            problem!(TensorProblem::SizeOverflow { .. }),
            "of Q4_0"
        ),
        case!(
            "outer product wraps",
            one(&[32, 1 << 31, 1 << 31, 4], T_Q4_0, 0),
            problem!(TensorProblem::SizeOverflow { .. }),
            "64 bits"
        ),
        case!(
            "bytes wrap, elements do not",
            one(&[1 << 62], T_F32, 0),
            problem!(TensorProblem::Layout(_)),
            "more bytes than 64 bits can count"
        ),
        case!(
            "elements wrap, bytes do not",
            one(&[1 << 40, 1 << 24], T_Q4_0, 0),
            problem!(TensorProblem::SizeOverflow { .. }),
            "64 bits"
        ),
        case!(
            "part of a QuantBlock",
            one(&[100, 2], T_Q4_K, 0),
            problem!(TensorProblem::Layout(_)),
            "100 elements"
        ),
        case!(
            "unknown type",
            one(&[4], 12345, 0),
            problem!(TensorProblem::UnknownDType { id: 12345 }),
            "tensor \"t\" (entry at byte 24) has the element type id 12345"
        ),
        case!(
            "retired type",
            one(&[32], 4, 0),
            problem!(TensorProblem::UnknownDType { id: 4 }),
            "type id 4"
        ),
        case!(
            "misaligned",
            one(&[4], T_F32, 4),
            problem!(TensorProblem::Misaligned { offset: 4, alignment: 32 }),
            "offset 4, which is not a multiple of the file's alignment 32"
        ),
        case!(
            "misaligned for the file's own alignment",
            aligned_64.tensor("t", &[4], T_F32, 32).data(128),
            problem!(TensorProblem::Misaligned { alignment: 64, .. }),
            "alignment 64"
        ),
        case!(
            "data after the end",
            one(&[64], T_F32, 0),
            problem!(TensorProblem::OutOfBounds { n_bytes: 256, .. }),
            "needs 256 bytes at data offset 0 (data begins at byte 64), but the file has 128 bytes"
        ),
        case!(
            "offset after the end",
            one(&[1], T_F32, 1 << 40),
            problem!(TensorProblem::OutOfBounds { .. }),
            "download is incomplete"
        ),
        case!(
            "offset wraps",
            one(&[1], T_F32, u64::MAX - 31),
            problem!(TensorProblem::OutOfBounds { .. }),
            "offset 18446744073709551584"
        ),
        case!(
            "offset plus size wraps into the file",
            one(&[1 << 61], T_F32, (1 << 63) + 32),
            problem!(TensorProblem::OutOfBounds { .. }),
            "the file has"
        ),
        case!(
            "duplicate tensor",
            two(("t", 0), ("t", 64)),
            GgufError::DuplicateTensor { .. },
            "\"t\" is already in"
        ),
        case!(
            "same place",
            two(("a", 0), ("b", 0)),
            GgufError::OverlappingTensors { .. },
            "\"a\" and \"b\" overlap: the first ends at data byte 64, the second begins at 0"
        ),
        case!(
            "partial overlap, in the other order",
            two(("a", 32), ("b", 0)),
            GgufError::OverlappingTensors { .. },
            "\"b\" and \"a\" overlap"
        ),
        case!(
            "empty name",
            Raw::new(1, 0).tensor("", &[1], 0, 0).data(64),
            GgufError::BadName { .. },
            "empty"
        ),
        case!(
            "long name",
            Raw::new(1, 0).tensor(&"n".repeat(300), &[1], 0, 0).data(64),
            GgufError::LimitExceeded { .. },
            "(tensor_name_bytes_max)"
        ),
    ] {
        check(&case);
    }
}

#[test]
fn a_huge_context_length_is_no_business_of_the_file_reader() {
    let raw = Raw::new(0, 1).key("llama.context_length", U32).u32((1 << 31) - 1);
    let gguf = Gguf::parse(&raw.0, "x.gguf").unwrap();
    assert_eq!(gguf.metadata().get_u32("llama.context_length").unwrap(), (1 << 31) - 1);
}

#[test]
fn paths_that_are_no_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let check = |path: &std::path::Path, says: &str| {
        let message = Gguf::open(path).unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
        assert!(message.starts_with(path.to_str().unwrap()), "{message}");
    };
    check(&folder.path().join("absent.gguf"), "cannot open: No such file or directory");
    check(folder.path(), "this is a directory, not a model file");
    #[cfg(unix)]
    {
        check(std::path::Path::new("/dev/zero"), "a device, pipe or socket");
        let own = folder.path().join("loop.gguf");
        std::os::unix::fs::symlink(&own, &own).unwrap();
        check(&own, "cannot open");
    }
}

/// A download that stops anywhere must be noticed when the file is opened, not when the model talks nonsense.
#[test]
fn every_cut_is_an_error() {
    let bytes = sample().to_bytes().unwrap();
    let whole = Gguf::parse(&bytes, "x.gguf").unwrap();
    let last = whole.tensors().iter().map(|t| whole.file_range(t).unwrap().1.end).max().unwrap();
    assert!(last as usize > bytes.len() - 32);
    for cut in 0..last as usize {
        let error = Gguf::parse(&bytes[..cut], "x.gguf").unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::Empty { .. }
                    | GgufError::Truncated { .. }
                    | problem!(TensorProblem::OutOfBounds { .. })
            ),
            "cut at {cut}: {error:?}"
        );
    }
}

/// No single damaged bit may crash the reader, and what is still accepted must be sound.
#[test]
fn every_bit_flip_is_survived() {
    let bytes = sample().to_bytes().unwrap();
    let header = GgufFile::parse(&bytes, "x.gguf").unwrap().header_bytes() as usize;
    let (mut accepted, mut refused) = (0, 0);
    for bit in 0..header * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        match Gguf::parse(&damaged, "x.gguf") {
            Ok(gguf) => {
                accepted += 1;
                for tensor in gguf.tensors() {
                    let (_, range) = gguf.file_range(tensor).unwrap();
                    assert!(range.end <= damaged.len() as u64 && !range.is_empty());
                }
            }
            Err(_) => refused += 1,
        }
    }
    assert!(accepted > 1000 && refused > 1000, "{accepted} accepted, {refused} refused");
}

/// The length a file had when it was opened may be untrue by the time it is read.
#[test]
fn a_file_that_shrinks_while_it_is_read_is_truncated() {
    let bytes = sample().to_bytes().unwrap();
    let path = std::path::Path::new("x.gguf");
    let limits = tegula_gguf::Limits::default();
    let error = GgufFile::read_from(&bytes[..200], path, bytes.len() as u64, &limits).unwrap_err();
    assert!(matches!(error, GgufError::Truncated { left: 0, .. }), "{error:?}");
}
