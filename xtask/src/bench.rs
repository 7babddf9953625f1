//! `cargo xtask bench`: speed beside llama.cpp, from nothing.
//!
//! The peer is the PyPI package `llama-cpp-python`, built for this machine into a virtual environment in the cache folder; the comparison itself is
//! `tests/bench/side_by_side.py`, which runs in that environment's interpreter.

use crate::{models, process};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const PEER: &str = "llama-cpp-python==0.3.36";
/// Fails unless that version is there: ratios to another one would be told as ratios to this.
const PROBE: &str = "import llama_cpp; assert llama_cpp.__version__ == '0.3.36'";

/// What to compare.
#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Beside llama.cpp; there is nothing else to compare with yet
    #[arg(long, required = true)]
    peer: bool,
    /// GGUF file [default: the demo's model]
    model: Option<PathBuf>,
    /// Few pairs and few tokens: under ten minutes, once the peer is built
    #[arg(long)]
    quick: bool,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// Passed on to tests/bench/side_by_side.py, such as -- --depth 0,4096 --busy 1
    #[arg(last = true)]
    rest: Vec<String>,
}

pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let model = flags.model.clone().map_or_else(models::ensure_demo, Ok)?;
    if !model.is_file() {
        bail!("{}: no such file", model.display());
    }
    let python = peer(&models::cache()?.join("peer"))?;
    process::run(&mut process::cargo([
        "build",
        "--release",
        "-p",
        "tegula-cli",
        "-p",
        "tegula-cpu",
    ]))?;
    let mut compare = process::clean(python);
    compare.arg(process::root().join("tests/bench/side_by_side.py")).arg(model);
    if flags.quick {
        compare.args(["--pairs", "5", "--prompt", "128", "--generate", "32"]);
    }
    if flags.json {
        compare.arg("--json");
    }
    process::run(compare.args(&flags.rest))?;
    Ok(ExitCode::SUCCESS)
}

/// The interpreter of the peer's environment; made and built where it is not there yet.
fn peer(folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    let is_there = |python: &Path| process::succeeds(&python.to_string_lossy(), &["-c", PROBE]);
    if is_there(&python) {
        return Ok(python);
    }
    // Not on stdout, which is for --json.
    eprintln!("building {PEER} into {}: this takes some minutes", folder.display());
    process::run(process::clean("python3").args(["-m", "venv"]).arg(folder))
        .context("Debian: apt-get install python3-venv")?;
    process::run(
        process::clean(&python)
            .args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"])
            .args(["--no-binary", "llama-cpp-python", PEER])
            .env("CMAKE_ARGS", "-DGGML_NATIVE=ON")
            .envs(["CFLAGS", "CXXFLAGS"].map(|name| (name, flags()))),
    )?;
    if !is_there(&python) {
        bail!("{PEER} was installed into {}, but cannot be imported", folder.display());
    }
    Ok(python)
}

/// Compiler flags of the peer. Its code for AMX dies of an illegal instruction when gcc 12 builds it: that compiler does not see that the
/// configuration of tiles is read from memory.
fn flags() -> &'static str {
    if cfg!(target_arch = "x86_64") { "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" } else { "" }
}
