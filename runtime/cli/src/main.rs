//! The `tegula` command: run, chat, look at devices, plans and models, and check every step against a reference.
//!
//! Only what was asked for goes to stdout (generated text, tables, JSON); logs, progress and timings go to stderr. The exit code is
//! 0 for success, 1 for a failure and 2 for wrong usage; Ctrl-C ends a generation early, which is a success.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod download;
mod hub;
mod models;
mod output;
mod score;
mod table;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let filter = match cli.command {
        // Its own list tells what was skipped.
        Command::Devices(_) => "warn,tegula_plugin::registry=off",
        _ => "warn",
    };
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(filter))
        .format_timestamp(None)
        .init();
    let result = match &cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Verify(args) => commands::verify::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Pull(args) => commands::pull::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Tokenize(args) => commands::tokenize::run(args),
        Command::Template(args) => commands::template::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Kl(args) => commands::kl::run(args),
        Command::Quantize(args) => commands::quantize::run(args),
        Command::Probe { plugin } => {
            tegula_plugin::probe::run_child(plugin);
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", output::explain(&error));
            ExitCode::FAILURE
        }
    }
}
