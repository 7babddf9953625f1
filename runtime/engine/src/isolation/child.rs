//! Starting a probe, watching it, and ending it in time.
//!
//! Everything that the child and the driver in it print goes into one pipe, so that it does not mix with the host's output, and
//! one thread reads it, so that a full pipe stops nobody. The wait is for the process, not for the pipe: a driver may leave a process of its
//! own behind that keeps the pipe open for ever.

use std::io::{PipeReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tegula_plugin::probe::{CHILD_VARIABLE, Mark, PROBE_ARGUMENT};
use tegula_plugin::{ProbeEnd, ProbeFailure, ProbeStage};

/// Output beyond this is not read into memory.
const MAX_OUTPUT: usize = 1 << 20;
/// Characters of a driver's last words that are shown.
const MAX_SAID: usize = 200;
/// How long a killed child is waited for: one that hangs inside of the kernel does not die.
const KILL_WAIT: Duration = Duration::from_secs(1);
/// How long the output of a child that ended is waited for.
const OUTPUT_WAIT: Duration = Duration::from_millis(200);

/// What became of a probe.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It came to its end.
    Passed {
        /// Files whose code was mapped while the driver was open.
        mapped: Vec<PathBuf>,
    },
    /// It did not.
    Failed(ProbeFailure),
    /// It was not one: the program cannot be started, or does something else.
    NoChild(String),
}

/// Lets `program` try `plugin`, for no longer than `limit`.
pub(super) fn run(program: &Path, plugin: &Path, limit: Duration) -> Outcome {
    let began = Instant::now();
    let start = || -> std::io::Result<(Child, PipeReader)> {
        let (reader, writer) = std::io::pipe()?;
        let mut command = Command::new(program);
        command
            .arg0("tegula-probe")
            .arg(PROBE_ARGUMENT)
            .arg(plugin)
            .env(CHILD_VARIABLE, "1")
            .stdin(Stdio::piped())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "off");
        }
        // The command goes at the end of this block, and with it this side's ends of the pipe for writing.
        Ok((command.spawn()?, reader))
    };
    let (mut child, reader) = match start() {
        Ok(started) => started,
        Err(error) => return Outcome::NoChild(format!("{}: {error}", program.display())),
    };
    // Held open until the child is gone: its end would tell the child that its parent is.
    let stdin = child.stdin.take();
    let mut output = Output::of(reader);
    let status = wait(&mut child, began + limit, &mut output);
    let outcome = match status {
        Ok(Some(status)) => {
            output.drain(OUTPUT_WAIT);
            output.log(plugin);
            judge(&output, Some(status), limit, program)
        }
        Ok(None) => {
            end(child);
            output.drain(Duration::ZERO);
            output.log(plugin);
            judge(&output, None, limit, program)
        }
        Err(error) => Outcome::NoChild(format!("{}: {error}", program.display())),
    };
    drop(stdin);
    outcome
}

/// Waits for the process; `None` if it is still there at the deadline.
fn wait(
    child: &mut Child,
    deadline: Instant,
    output: &mut Output,
) -> std::io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        // Output, or its end, is a sign that something happened.
        if !output.read(pause.min(left)) {
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

/// Ends the child. One that does not die is left to a thread that waits for it: the host goes on.
fn end(mut child: Child) {
    // It may have ended by itself just now.
    drop(child.kill());
    let deadline = Instant::now() + KILL_WAIT;
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    log::warn!("process {} hangs inside of its driver and cannot be ended", child.id());
    std::thread::spawn(move || child.wait());
}

/// What the child printed, as it comes.
struct Output {
    pieces: Receiver<Vec<u8>>,
    bytes: Vec<u8>,
    is_closed: bool,
}

impl Output {
    fn of(mut pipe: PipeReader) -> Self {
        let (sender, pieces) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = pipe.read(&mut buffer) {
                let piece = buffer.get(..n).unwrap_or_default();
                if sender.send(piece.to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { pieces, bytes: Vec::new(), is_closed: false }
    }

    /// Takes what comes within `time`; whether something did.
    fn read(&mut self, time: Duration) -> bool {
        if self.is_closed {
            std::thread::sleep(time);
            return false;
        }
        match self.pieces.recv_timeout(time) {
            Ok(piece) => {
                let room = MAX_OUTPUT.saturating_sub(self.bytes.len());
                self.bytes.extend(piece.into_iter().take(room));
                true
            }
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => {
                self.is_closed = true;
                false
            }
        }
    }

    /// Takes the rest.
    fn drain(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while !self.is_closed
            && (self.read(deadline.saturating_duration_since(Instant::now()))
                || Instant::now() < deadline)
        {}
    }

    fn lines(&self) -> impl Iterator<Item = std::borrow::Cow<'_, str>> {
        self.bytes.split(|b| *b == b'\n').map(String::from_utf8_lossy)
    }

    fn log(&self, plugin: &Path) {
        if !log::log_enabled!(log::Level::Debug) {
            return;
        }
        for line in self.lines().filter(|line| !line.is_empty() && Mark::read(line).is_none()) {
            log::debug!("{}: when tried: {}", plugin.display(), one_line(&line));
        }
    }
}

/// Without control characters, and no longer than is shown.
fn one_line(text: &str) -> String {
    let plain = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(MAX_SAID).collect()
}

/// What the output and the status, if it ended in time, mean together.
fn judge(output: &Output, status: Option<ExitStatus>, limit: Duration, program: &Path) -> Outcome {
    let (mut stage, mut said, mut mapped) = (None, None, Vec::new());
    for line in output.lines() {
        match Mark::read(&line) {
            Some(Mark::Stage(next)) => stage = Some(next),
            Some(Mark::Mapped(path)) => mapped.push(PathBuf::from(path)),
            Some(_) => {}
            None if line.trim().is_empty() => {}
            None => said = Some(one_line(&line)),
        }
    }
    let Some(stage) = stage else {
        let said = said.map(|said| format!(": {said}")).unwrap_or_default();
        return Outcome::NoChild(format!("{} is no probe of plugins{said}", program.display()));
    };
    let end = match status {
        None => ProbeEnd::TimedOut(limit),
        Some(status) => match (status.signal(), status.code()) {
            (Some(signal), _) => ProbeEnd::Signal(signal),
            // Success at another place than the end is a plugin that calls exit(0).
            (_, Some(0)) if stage == ProbeStage::Exit => return Outcome::Passed { mapped },
            (_, code) => ProbeEnd::Exit(code.unwrap_or(-1)),
        },
    };
    let mut failure = ProbeFailure::new(end, stage);
    failure.said = said;
    Outcome::Failed(failure)
}
