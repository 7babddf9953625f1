//! `tegula-synth`: what `cargo xtask synth` runs.

use anyhow::Result;
use clap::Parser;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Instant;
use tegula::{Quant, Shape};
use tegula_synth::{Options, write};

/// Writes a model file of random weights in the shape of a known model.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask synth", bin_name = "cargo xtask synth")]
struct Flags {
    /// The shape: a known one such as llama-3.2-3b (an unknown name lists them), or the path of a .json file.
    shape: String,
    /// Types of the weights: q4_k_m, q5_k_m, or one type such as q8_0, q4_0 or f16.
    #[arg(long = "type", value_name = "QUANT", default_value = "q4_k_m")]
    quant: Quant,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// A model file whose tokenizer is taken, filled up to the size of the vocabulary [default: tokens are bytes].
    #[arg(long, value_name = "GGUF")]
    tokenizer: Option<PathBuf>,
    /// The same seed gives the same file.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads [default: the cores].
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
}

fn main() -> Result<()> {
    let flags = Flags::parse();
    let options = Options {
        shape: Shape::find(&flags.shape)?,
        quant: flags.quant,
        tokenizer: flags.tokenizer,
        seed: flags.seed,
        n_threads: flags.threads,
    };
    let begin = Instant::now();
    let is_terminal = std::io::stderr().is_terminal();
    let written = write(&flags.output, &options, &|done, all| {
        // A line for about every 256 MiB: quick enough to be watched, slow enough to cost nothing.
        if is_terminal && (done >> 28) != ((done.saturating_sub(4 << 20)) >> 28) {
            eprint!("\r{:3} %", done * 100 / all.max(1));
        }
    })?;
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!(
        "\r{}: {} tensors, {:.2} GB in {seconds:.1} s ({:.2} GB/s)",
        flags.output.display(),
        written.n_tensors,
        written.bytes as f64 / 1e9,
        written.bytes as f64 / 1e9 / seconds.max(1e-9)
    );
    Ok(())
}
