//! Headers without data: a model is sized before anyone has fetched it, and must be sized as its file would be.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use tegula_gguf::{DType, Gguf, GgufError, GgufWriter};

const SHAPES: [(&str, &[u64], DType); 3] =
    [("a", &[256, 3], DType::Q4_K), ("b", &[5], DType::F32), ("c", &[32, 7], DType::Q8_0)];

fn writer(with_data: bool) -> GgufWriter<'static> {
    let mut writer = GgufWriter::new().meta("general.architecture", "x").alignment(64);
    for (name, dims, dtype) in SHAPES {
        let rows = dims.get(1).copied().unwrap_or(1);
        let n = dtype.row_bytes(dims[0]).unwrap() * rows;
        writer = if with_data {
            writer.tensor(name, dims, dtype, vec![0u8; n as usize])
        } else {
            writer.tensor_shape(name, dims, dtype)
        };
    }
    writer
}

#[test]
fn a_header_says_what_the_file_would() {
    let bytes = writer(true).to_bytes().unwrap();
    let (header, file_len) = writer(false).to_header().unwrap();
    assert_eq!(file_len, bytes.len() as u64);
    assert_eq!(header, bytes[..header.len()]);
    assert_eq!(writer(true).to_header().unwrap(), (header.clone(), file_len));
    let whole = Gguf::parse(&bytes, "x.gguf").unwrap();
    let gguf = Gguf::from_header(&header, "x.gguf", file_len).unwrap();
    assert_eq!(gguf.tensors(), whole.tensors());
    for tensor in gguf.tensors() {
        assert_eq!(gguf.file_range(tensor), whole.file_range(tensor));
    }
}

/// What has no data must not become a file, and a length that the tensors do not fit must not be believed.
#[test]
fn headers_are_no_files() {
    assert!(matches!(writer(false).to_bytes(), Err(GgufError::BadTensor { .. })));
    let (header, file_len) = writer(false).to_header().unwrap();
    assert!(Gguf::parse(&header, "x.gguf").is_err());
    assert!(Gguf::from_header(&header, "x.gguf", file_len / 2).is_err());
    // 2^62 bytes each: five of them pass 2^64.
    let huge = ["a", "b", "c", "d", "e"].into_iter().fold(GgufWriter::new(), |writer, name| {
        writer.tensor_shape(name, &[1 << 20, 1 << 40], DType::F32)
    });
    let huge = huge.to_header();
    assert!(huge.and_then(|(header, len)| Gguf::from_header(&header, "x.gguf", len)).is_err());
}
