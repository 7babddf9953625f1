//! `cargo xtask`: every chore there is.
//!
//! * **One door.** A laptop, a server of continuous integration and a newcomer run the same commands, so that "it passes
//!   there" and "it passes here" mean the same thing.
//! * **Rust only.** No shell script beside `.ci/run`, which only gets a fresh machine to its first `cargo`: the chores are
//!   compiled, linted and tested like the rest, and run wherever the project builds.
//! * **Nothing of ours is linked.** This crate depends on no other crate of the workspace, so the chores still run when
//!   the workspace does not build; what is built is built by calling `cargo`.

use clap::{Parser, Subcommand};
use std::process::ExitCode;

mod bench;
mod codegen;
mod demo;
mod machine;
mod models;
mod new_backend;
mod process;
mod source;
mod test;
mod tidy;

/// Every chore of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Flags {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Build everything a first token needs, fetch a small model, and run it.
    Demo(demo::Flags),
    /// Fetch the models that the demo and the tests use, and check their digests.
    Models(models::Flags),
    /// Run every check and every test; what continuous integration runs.
    Test(test::Flags),
    /// The same as `test`.
    Ci,
    /// Check what neither the compiler nor clippy can: layering, layout, licences, wording.
    Tidy,
    /// Compare speed with llama.cpp on this machine.
    Bench(bench::Flags),
    /// Write the files that are derived from others: the C header and the digest of the boundary.
    Codegen(codegen::Flags),
    /// Make a backend of your own outside of this repository, which builds and is right at once.
    NewBackend(new_backend::Flags),
}

fn main() -> ExitCode {
    let result = match Flags::parse().chore {
        Chore::Demo(flags) => demo::run(&flags),
        Chore::Models(flags) => models::run(&flags),
        Chore::Test(flags) => test::run(&flags),
        Chore::Ci => test::run(&test::Flags::default()),
        Chore::Tidy => tidy::run(),
        Chore::Bench(flags) => bench::run(&flags),
        Chore::Codegen(flags) => codegen::run(&flags),
        Chore::NewBackend(flags) => new_backend::run(&flags),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
