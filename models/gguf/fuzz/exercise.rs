//! What the fuzz target and the smoke test do with any bytes: open them, and use everything that opening promises.

use tegula_gguf::{Gguf, GgufFile};

/// Whether `bytes` are a file that opens. Panics where a promise is broken; that is the finding.
pub(crate) fn exercise(bytes: &[u8]) -> bool {
    let file = match GgufFile::parse(bytes, "fuzz.gguf") {
        Ok(file) => file,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.gguf: ") && !message.contains('\n'), "{message}");
            return false;
        }
    };
    for (key, value) in file.metadata().iter() {
        assert!(file.metadata().get(key).is_some(), "{key} is listed and not found");
        let _shown = value.to_string();
        let _converted = file.metadata().opt_u32s(key);
        let _converted = file.metadata().opt_f32s(key);
        let _broadcast = file.metadata().optional_per_layer::<i64>(key, 4);
        if let Ok(Some(strings)) = file.metadata().opt_strings(key) {
            assert_eq!(strings.iter().count(), strings.len());
            assert!(!strings.is_utf8() || (0..strings.len()).all(|i| strings.text(i).is_some()));
        }
    }
    if let Ok(gguf) = Gguf::parse(bytes, "fuzz.gguf") {
        check_tensors(&gguf, bytes.len() as u64);
        let _facts = gguf.summary().map(|summary| summary.to_string());
    }
    true
}

fn check_tensors(gguf: &Gguf, file_len: u64) {
    let mut ranges = Vec::new();
    for tensor in gguf.tensors() {
        assert_eq!(gguf.tensor(tensor.name()), Some(tensor));
        assert!((1..=4).contains(&tensor.dims().len()) && !tensor.dims().contains(&0));
        let Some((shard, range)) = gguf.file_range(tensor) else { unreachable!("no range") };
        assert!(range.end <= file_len && range.end - range.start == tensor.n_bytes());
        assert_eq!(range.start % u64::from(shard.alignment), 0);
        ranges.push((range.start, range.end));
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].1 <= pair[1].0, "tensors overlap");
    }
}
