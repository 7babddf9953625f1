//! Running a command and seeing how it ended, how long it took and what it wrote.

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How a command ended.
#[derive(Debug)]
pub struct Finished {
    /// The exit code; a signal is the failure of a test, whatever it expects.
    pub code: i32,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// How long it ran.
    pub time: Duration,
}

/// Runs a command that reads nothing.
pub fn run(command: &mut Command) -> Finished {
    run_with_stdin(command, b"")
}

/// Runs a command with this standard input.
pub fn run_with_stdin(command: &mut Command, input: &[u8]) -> Finished {
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    // A command that fails before it reads closes the pipe, which is its right.
    let _ = child.stdin.take().expect("a pipe").write_all(input);
    finish(child, start)
}

/// Waits for the end of a command that was started at `start` with both outputs piped.
pub fn finish(child: Child, start: Instant) -> Finished {
    let out = child.wait_with_output().expect("the command's output");
    let time = start.elapsed();
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    if let Some(signal) = out.status.signal() {
        panic!("the command died of signal {signal}:\n{stderr}");
    }
    let code = out.status.code().expect("an exit code");
    assert_ne!(code, 101, "the command panicked:\n{stderr}");
    assert!(!stderr.contains("panicked at"), "the command panicked:\n{stderr}");
    let stdout = String::from_utf8(out.stdout).expect("stdout is UTF-8");
    Finished { code, stdout, stderr, time }
}

/// The `tegula` command with at most `data_bytes` of memory of its own: the heap, stacks and everything else that is
/// neither shared nor mapped from a file. An allocation beyond aborts it. That is certain, where a look at a process's
/// resident memory comes early or late; and it is more than what becomes resident.
pub fn limited(data_bytes: u64, args: &[&str]) -> Command {
    let mut command = crate::command("sh");
    // Drivers of other backends take memory of their own, and end the process where they get none.
    command.env("OCL_ICD_VENDORS", "/nonexistent");
    command.arg("-c").arg(format!("ulimit -d {} && exec \"$@\"", data_bytes / 1024)).arg("sh");
    command.arg(crate::target_dir().join("tegula")).args(args);
    command
}

/// The greatest resident memory of this process so far, in bytes.
pub fn resident_peak() -> u64 {
    status("VmHWM:")
}

/// The resident memory of this process, in bytes.
pub fn resident() -> u64 {
    status("VmRSS:")
}

fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this process's status");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
    kib * 1024
}
