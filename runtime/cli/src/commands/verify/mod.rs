//! `tegula verify`: whether a plugin keeps every promise of the boundary, for its author and for whoever is about to install it.
//!
//! * **The suite runs in a process of its own**, this program once more. A plugin that is not right yet crashes, hangs or ends the
//!   process, and which call that was is what its author needs to know.
//! * **What the plugin says it cannot do is believed**, and listed. What it says it can do must be right.
//! * **The oracle is found by a property, not by a name**: see `suite`.

mod line;
mod report;
mod select;
mod suite;

use crate::args::VerifyArgs;
use crate::output;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use line::Line;
use report::Report;
use select::Selection;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let selection = Selection::of(&args.only)?;
    if args.in_process {
        return suite::run(args, &selection);
    }
    if !args.plugin.is_file() {
        bail!("{} is no file; give the path of the plugin's shared object", args.plugin.display());
    }
    let begin = Instant::now();
    let mut report = Report::default();
    let ended = watch(args, &mut report)?;
    report.close(ended, begin.elapsed());
    if args.json { output::print_json(&report) } else { output::print(&report.text()) }?;
    match report.n_faults() {
        0 => Ok(()),
        1 => bail!("{}: 1 fault", args.plugin.display()),
        n => bail!("{}: {n} faults", args.plugin.display()),
    }
}

/// Runs the suite in a child process. Tells how that ended, if it did not come to its end.
fn watch(args: &VerifyArgs, report: &mut Report) -> Result<Option<String>> {
    let mut child = start(args)?;
    let lines = child.stdout.take().map(read_lines).context("the suite has no output")?;
    let bar = progress();
    let limit = Duration::from_secs(args.timeout.into());
    let (mut during, mut is_done) = (String::from("the start"), false);
    let hung = loop {
        match lines.recv_timeout(limit) {
            Ok(Line::Begin { case }) => {
                bar.set_message(case.clone());
                during = case;
            }
            Ok(Line::Done) => is_done = true,
            Ok(line) => report.add(line),
            Err(RecvTimeoutError::Disconnected) => break false,
            Err(RecvTimeoutError::Timeout) => break true,
        }
    };
    bar.finish_and_clear();
    if hung {
        // It may have ended by itself just now.
        drop(child.kill());
        child.wait()?;
        return Ok(Some(format!(
            "the plugin did not come back for {} s during {during}",
            args.timeout
        )));
    }
    let status = child.wait()?;
    if is_done && status.success() {
        return Ok(None);
    }
    let during = if is_done { "the end of the process" } else { &during };
    Ok(Some(format!("the plugin ended the process: {} during {during}", how(status))))
}

/// This program once more, for the suite alone.
fn start(args: &VerifyArgs) -> Result<Child> {
    let program = std::env::current_exe().context("this program's own file is not known")?;
    let mut words: Vec<OsString> = vec!["verify".into(), "--in-process".into()];
    for only in &args.only {
        words.extend(["--only".into(), only.into()]);
    }
    if let Some(oracle) = &args.oracle {
        words.extend(["--oracle".into(), oracle.into()]);
    }
    if let Some(device) = args.device {
        words.extend(["--device".into(), device.to_string().into()]);
    }
    words.extend(["--".into(), args.plugin.clone().into()]);
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped());
    // Failures are the report's to tell; a log beside it would tell them twice, and allocations that must fail would alarm.
    if std::env::var_os("RUST_LOG").is_none() {
        command.env("RUST_LOG", "off");
    }
    command.spawn().context("the suite cannot be started")
}

/// Messages as they come. What the plugin prints goes to stderr.
fn read_lines(pipe: ChildStdout) -> Receiver<Line> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        // A pipe that fails ends like one that is closed: the status of the process tells why.
        for bytes in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let (words, line) = line::read(&bytes);
            if !words.is_empty() {
                let mut err = std::io::stderr().lock();
                drop(err.write_all(words).and_then(|()| err.write_all(b"\n")));
            }
            if let Some(line) = line
                && sender.send(line).is_err()
            {
                return;
            }
        }
    });
    receiver
}

fn progress() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner());
    ProgressBar::new_spinner().with_style(style)
}

fn how(status: ExitStatus) -> String {
    let Some(signal) = status.signal() else {
        return status
            .code()
            .map_or_else(|| status.to_string(), |code| format!("exit code {code}"));
    };
    let name = match signal {
        4 => " (SIGILL, an instruction that this processor lacks)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL, such as for want of memory)",
        11 => " (SIGSEGV, an access to memory that is not there)",
        _ => "",
    };
    format!("signal {signal}{name}")
}
