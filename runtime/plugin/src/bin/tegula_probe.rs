//! A program that tries a plugin and does nothing else, for hosts that link the core and have no command beside it: it is
//! found from the core's own file and started by the core, as `tegula-probe __probe PLUGIN`. See `tegula_plugin::probe`.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;
use tegula_plugin::probe::{PROBE_ARGUMENT, run_child};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [word, plugin] if word == PROBE_ARGUMENT => {
            run_child(Path::new(plugin));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!(
                "tegula-probe is started by programs that use Tegula, to try a plugin in a process of its own"
            );
            ExitCode::from(2)
        }
    }
}
