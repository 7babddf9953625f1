//! Any bytes as a GGUF file. `cargo +nightly fuzz run gguf_open`, from `models/gguf`.

#![no_main]

#[path = "../exercise.rs"]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::exercise(bytes);
});
