//! Encode speed on natural text and code: `encode_speed MODEL.gguf TEXT...`
//!
//! Prints MB/s of the best of several runs, text by text.
#![expect(clippy::print_stdout, reason = "a program for people")]

use std::time::{Duration, Instant};

use tegula_tokenizer::{EncodeOptions, Tokenizer, Vocab};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: encode_speed MODEL.gguf TEXT...")?;
    let start = Instant::now();
    let file = tegula_gguf::GgufFile::open(&model)?;
    let read = start.elapsed();
    let tokenizer = Tokenizer::new(&Vocab::from_gguf(file.metadata())?)?;
    println!("{model}: file read in {read:?}, tokenizer built in {:?}", start.elapsed() - read);
    for path in args {
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        let options = EncodeOptions { add_special: false, parse_special: true };
        let mut best = Duration::MAX;
        let mut n_tokens = 0;
        for _ in 0..5 {
            let start = Instant::now();
            n_tokens = tokenizer.encode(&text, options).len();
            best = best.min(start.elapsed());
        }
        let speed = text.len() as f64 / best.as_secs_f64() / 1e6;
        println!("  {path}: {} bytes, {n_tokens} tokens, {speed:.1} MB/s", text.len());
    }
    Ok(())
}
