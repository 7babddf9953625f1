//! `cargo xtask synth`: model files of random weights in the real shapes of known models.
//!
//! The work is done by a program of its own (`tests/synth`), because this crate links nothing of ours; here it is built, optimised, and started.

use crate::process;
use anyhow::Result;
use std::ffi::OsString;
use std::process::ExitCode;

/// What is passed on; `cargo xtask synth -- --help` tells the options.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Flags {
    /// A shape such as llama-3.2-3b, `--type` QUANT, `-o` FILE, `--tokenizer` GGUF, `--seed` N.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    args: Vec<OsString>,
}

/// Builds the program and runs it in the folder that this was started in.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    process::run(&mut process::cargo(["build", "--release", "--quiet", "-p", "tegula-synth"]))?;
    let mut synth = process::clean(process::target_folder()?.join("release/tegula-synth"));
    process::run(synth.args(&flags.args))?;
    Ok(ExitCode::SUCCESS)
}
