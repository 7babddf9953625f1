//! Plugins that crash, hang, exit or fail while they are loaded or asked for their devices: the user loses one backend and reads one line,
//! never the process. And what is remembered of those that passed, since a try costs time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tegula::{Isolation, IsolationOptions, RegistryOptions, Runtime, RuntimeOptions};
use tegula_plugin::{ProbeEnd, ProbeStage, SkipReason};
use test_tegula_fake::*;

/// A program that was built with the tests; building it is the business of a build of the workspace.
fn program(name: &str) -> Option<PathBuf> {
    let found = built_plugin(name).ok();
    if found.is_none() {
        eprintln!("SKIPPED: no `{name}` beside the tests; build the workspace");
    }
    found
}

/// The command over a folder of plugins, with a cache of its own.
struct Host {
    command: PathBuf,
    dir: tempfile::TempDir,
}

impl Host {
    fn new() -> Option<Self> {
        program("libtegula_cpu.so")?;
        Some(Self { command: program("tegula")?, dir: tempfile::tempdir().unwrap() })
    }

    fn plugins(&self) -> PathBuf {
        self.dir.path().join("plugins")
    }

    fn install(&self, id: &str, fault: Option<Fault>) -> Installed {
        let fake = Fake::new().id(id).device(DeviceConfig::gpu("A", GIB));
        let fake = fault.into_iter().fold(fake, Fake::fault);
        fake.install(&self.plugins()).unwrap()
    }

    fn run(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        Command::new(&self.command)
            .args(args)
            .current_dir(self.dir.path())
            .env("TEGULA_BACKEND_PATH", self.plugins())
            .env("XDG_CACHE_HOME", self.dir.path().join("cache"))
            .env_remove("RUST_LOG")
            .env_remove("TEGULA_DEVICE")
            .env_remove("TEGULA_ISOLATION")
            .env_remove("TEGULA_PROBE_TIMEOUT")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    fn devices(&self, variables: &[(&str, &str)]) -> Value {
        let output = self.run(&["devices", "--json"], variables);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Which plugins a start of the command tries, by file name.
    fn tried(&self, variables: &[(&str, &str)]) -> Vec<String> {
        let log = ("RUST_LOG", "tegula::isolation=debug");
        let output = self.run(&["devices"], &[variables, &[log]].concat());
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once(": tried in "));
        let name = |path: &str| path.rsplit_once('/').unwrap().1.to_owned();
        lines.map(|(path, _)| name(path)).filter(|name| !is_own(name)).collect()
    }
}

/// Of the project's backends: found beside the command in a folder of builds, where they may change at any time.
fn is_own(name: &str) -> bool {
    built_plugin(name).is_ok()
}

fn backends(report: &Value) -> Vec<&str> {
    report["backends"].as_array().unwrap().iter().map(|b| b["id"].as_str().unwrap()).collect()
}

/// The entry of a skipped plugin.
fn skipped<'a>(report: &'a Value, fake: &Installed) -> &'a Value {
    let path = fake.plugin.canonicalize().unwrap();
    let all = report["skipped"].as_array().unwrap();
    all.iter().find(|s| s["path"].as_str() == path.to_str()).unwrap_or_else(|| panic!("{report:#}"))
}

/// However a plugin takes its process down, `tegula devices` ends well, lists the others, and says what happened in text and in JSON.
#[test]
fn a_bad_plugin_costs_one_line() {
    let Some(host) = Host::new() else { return };
    let hang = || FaultKind::Hang { seconds: 60.0 };
    let exit = |code| FaultKind::Exit { code };
    let good = host.install("good", None);
    for (at, kind, how, stage) in [
        (Point::Negotiate, FaultKind::Crash, "signal 11", "negotiate"),
        (Point::Negotiate, exit(1), "exit 1", "negotiate"),
        (Point::Open, FaultKind::Abort, "signal 6", "devices"),
        (Point::Open, exit(0), "exit 0", "devices"),
        (Point::DeviceCount, hang(), "timed out after 1 s", "devices"),
        (Point::DeviceInfo, FaultKind::Crash, "signal 11", "devices"),
        (Point::DeviceInfo, exit(3), "exit 3", "devices"),
        (Point::HeapInfo, FaultKind::Abort, "signal 6", "devices"),
        (Point::BufferTypeInfo, FaultKind::Crash, "signal 11", "devices"),
        (Point::Negotiate, hang(), "timed out after 1 s", "negotiate"),
    ] {
        let what = format!("{kind:?} at {at:?}");
        let bad = host.install("bad", Some(Fault::new(at, kind).always()));
        let begin = Instant::now();
        let limit = ("TEGULA_PROBE_TIMEOUT", "1");
        let report = host.devices(&[limit]);
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        let ids = backends(&report);
        assert!(ids.contains(&"good") && ids.contains(&"cpu") && !ids.contains(&"bad"), "{ids:?}");
        let entry = skipped(&report, &bad);
        let reason = entry["reason"].as_str().unwrap();
        assert!(reason.starts_with(&format!("failed probe ({how})")), "{what}: {reason}");
        assert_eq!(entry["probe"]["stage"], stage, "{what}");
        let number = how.rsplit(' ').find_map(|word| word.parse::<u64>().ok()).unwrap();
        let field = ["signal", "exit", "timed"].into_iter().find(|f| how.starts_with(f)).unwrap();
        let field = if field == "timed" { "timed_out_s" } else { field };
        assert_eq!(entry["probe"][field], number, "{what}: {entry}");

        let output = host.run(&["devices"], &[limit]);
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().filter(|line| line.contains("failed probe (")).count();
        assert!(output.status.success() && lines == 1, "{what}: {text}");
        assert!(text.contains("TEGULA_ISOLATION=off"), "what to do is not said: {text}");
        assert!(output.stderr.is_empty(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(good.plugin.is_file());
}

/// A model runs on the processor, with exit code 0, one line about the backend that is missing and one about what is used instead.
#[test]
fn a_model_runs_without_the_bad_plugin() {
    let Some(host) = Host::new() else { return };
    let Some(model) = common::model_file() else { return };
    host.install("bad", Some(Fault::new(Point::DeviceInfo, FaultKind::Crash)));
    let args = ["run", model.to_str().unwrap(), "-p", "a", "-n", "3", "--temp", "0", "-q"];
    let output = host.run(&args, &[]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let said = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
    assert_eq!(said("failed probe (signal 11)"), 1, "{text}");
    assert_eq!(said("the model runs on cpu:0"), 1, "{text}");
    // The backend that is named is not there, which is no reason to take another.
    let output = host.run(&[&args[..], &["--device", "bad:0"]].concat(), &[]);
    assert_eq!(output.status.code(), Some(1));
    // Without isolation the plugin takes the process along: so it is documented.
    let output = host.run(&args, &[("TEGULA_ISOLATION", "off")]);
    assert_eq!(output.status.signal(), Some(11));
}

/// A plugin that passed is not tried at every start; it is when its file, its settings or the environment of its driver changed, or when the
/// operator wants it.
#[test]
fn what_passed_is_remembered_until_something_changes() {
    let Some(host) = Host::new() else { return };
    let fake = host.install("good", None);
    let (tried, none) = (vec!["libtegula_good.so".to_owned()], Vec::<String>::new());
    assert_eq!(host.tried(&[]), tried, "the first time");
    assert_eq!(host.tried(&[]), none, "nothing changed");
    assert_eq!(
        host.tried(&[("TEGULA_DEVICE", "cpu"), ("COLUMNS", "80")]),
        none,
        "no driver reads it"
    );
    assert_eq!(host.tried(&[("TEGULA_ISOLATION", "child")]), tried, "the operator wants it");
    assert_eq!(host.tried(&[("SOME_DRIVER_LAYER", "on")]), tried, "a variable that is not ours");
    assert_eq!(host.tried(&[]), none, "back to what is known");
    let settings = Fake::new().id("good").device(DeviceConfig::gpu("B", GIB));
    settings.install(&host.plugins()).unwrap();
    assert_eq!(host.tried(&[]), tried, "its settings changed");
    std::fs::write(&fake.plugin, std::fs::read(&fake.plugin).unwrap()).unwrap();
    assert_eq!(host.tried(&[]), tried, "its file was written again");
    assert_eq!(host.tried(&[("TEGULA_ISOLATION", "off")]), none, "nothing is tried");
    // Damage is no verdict.
    std::fs::write(host.dir.path().join("cache/tegula/probed.json"), "{").unwrap();
    assert_eq!(host.tried(&[]), tried, "the file was damaged");
    // Without a place to remember it, it is tried each time.
    let nowhere = [("XDG_CACHE_HOME", "relative"), ("HOME", "")];
    assert_eq!(host.tried(&nowhere), tried);
    assert_eq!(host.tried(&nowhere), tried);
}

/// A good plugin that turns bad, as by an update of its driver, is found out; one that is repaired is used at the next start.
#[test]
fn no_verdict_outlives_its_reason() {
    let Some(host) = Host::new() else { return };
    let is_used = |id: &str| backends(&host.devices(&[])).contains(&id);
    host.install("x", None);
    assert!(is_used("x"));
    host.install("x", Some(Fault::new(Point::Open, FaultKind::Abort)));
    assert!(!is_used("x"), "what was known hid the crash");
    assert!(!is_used("x"));
    host.install("x", None);
    assert!(is_used("x"), "the repair is not seen");
}

/// A hang costs its seconds once in two minutes, not at every start, and is told with its age; the operator can try again at once.
#[test]
fn a_hang_is_remembered_briefly() {
    let Some(host) = Host::new() else { return };
    let hang = Fault::new(Point::Open, FaultKind::Hang { seconds: 60.0 });
    let bad = host.install("bad", Some(hang));
    let reason = |variables: &[(&str, &str)]| {
        let report = host.devices(variables);
        skipped(&report, &bad)["reason"].as_str().unwrap().to_owned()
    };
    let limit = ("TEGULA_PROBE_TIMEOUT", "2");
    assert!(!reason(&[limit]).contains("ago"));
    let begin = Instant::now();
    let again = reason(&[limit]);
    assert!(
        again.starts_with("failed probe (timed out after 2 s)") && again.contains("s ago"),
        "{again}"
    );
    assert!(begin.elapsed() < Duration::from_secs(2), "it was waited for again");
    let begin = Instant::now();
    assert!(!reason(&[limit, ("TEGULA_ISOLATION", "child")]).contains("ago"));
    assert!(begin.elapsed() >= Duration::from_secs(2));
}

/// A variable that means nothing is refused: an operator who mistypes it must not get the opposite.
#[test]
fn variables_are_read_or_refused() {
    let Some(host) = Host::new() else { return };
    for (name, value) in [
        ("TEGULA_ISOLATION", "of"),
        ("TEGULA_ISOLATION", ""),
        ("TEGULA_PROBE_TIMEOUT", "0"),
        ("TEGULA_PROBE_TIMEOUT", "soon"),
    ] {
        let output = host.run(&["devices"], &[(name, value)]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {text}");
        assert!(text.contains(name) && text.contains(value), "{text}");
    }
}

/// What a host that links the core does, in a process of its own with a cache of its own: see [`hosts`].
#[test]
fn host_child() {
    let Some(plugin) = std::env::var_os("TEGULA_TEST_PLUGIN") else { return };
    let helper = PathBuf::from(std::env::var_os("TEGULA_TEST_HELPER").unwrap());
    let mode = match std::env::var("TEGULA_TEST_MODE").unwrap().as_str() {
        "child" => Isolation::Child(helper),
        "always" => Isolation::Always(helper),
        _ => Isolation::Auto,
    };
    let registry = RegistryOptions { explicit: vec![plugin.into()], standard: false };
    let isolation = IsolationOptions { mode, limit: Duration::from_secs(2) };
    let begin = Instant::now();
    let runtime = Runtime::new(&RuntimeOptions { registry, isolation, ..Default::default() });
    let took = begin.elapsed();
    let registry = runtime.registry();
    match registry.skipped.first().map(|skipped| &skipped.reason) {
        Some(SkipReason::Probe(failure)) => {
            let tried = !matches!(failure.end, ProbeEnd::NotTried(_));
            assert!(tried || failure.stage == ProbeStage::Start);
            println!("<{failure}>");
        }
        Some(reason) => println!("<refused: {reason}>"),
        None => println!("<opened {}>", registry.backends.len()),
    }
    assert!(took < Duration::from_secs(15), "{took:?}");
}

/// Starts a host; gives what it met.
fn host(plugin: &Path, helper: &Path, mode: &str, variables: &[(&str, &str)]) -> String {
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["host_child", "--exact", "--nocapture"])
        .env("TEGULA_TEST_PLUGIN", plugin)
        .env("TEGULA_TEST_HELPER", helper)
        .env("TEGULA_TEST_MODE", mode)
        .env("XDG_CACHE_HOME", cache.path())
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return format!("{:?} {:?}", output.status.signal(), output.status.code());
    }
    let found = text.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
    found.unwrap_or_else(|| panic!("{text}")).0.to_owned()
}

/// A host that links the core uses a helper: the command and `tegula-probe` do the same. What is no helper protects nothing and costs
/// nothing; `Always` refuses instead.
#[test]
fn hosts() {
    let (Some(probe), Some(command)) = (program("tegula-probe"), program("tegula")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let bad = Fake::new().id("bad").fault(Fault::new(Point::Open, FaultKind::Crash));
    let bad = bad.install(dir.path()).unwrap().plugin;
    let good = Fake::new().id("good").install(dir.path()).unwrap().plugin;
    let crashed = "failed probe (signal 11) while it listed its devices";
    let (none, other) = (Path::new("/nowhere/tegula-probe"), Path::new("/bin/true"));
    for (plugin, helper, mode, expected) in [
        (&bad, &*probe, "child", crashed),
        (&bad, &*command, "child", crashed),
        (&bad, &*probe, "always", crashed),
        (&good, &*probe, "child", "opened 1"),
        (&good, &*command, "always", "opened 1"),
        (&good, none, "child", "opened 1"),
        (&good, other, "child", "opened 1"),
        (&good, none, "always", "failed probe (not tried: /nowhere/tegula-probe: No such file"),
        (&good, other, "always", "failed probe (not tried: /bin/true is no probe of plugins"),
        // No helper lies beside a test: opened as it is, which is documented to end the process.
        (&bad, none, "auto", "Some(11) None"),
        (&bad, none, "child", "Some(11) None"),
    ] {
        let met = host(plugin, helper, mode, &[]);
        assert!(met.starts_with(expected), "{} {mode}: {met}", helper.display());
    }
    // A program that is taken for a helper and is a host itself starts no further one.
    let inside = host(&good, &command, "always", &[("TEGULA_PROBE_CHILD", "1")]);
    assert_eq!(inside, "opened 1");
}

/// What happens outside of the table: in the dynamic linker, after the end of `main`, in the plugin's own processes and on its output.
#[test]
fn what_libraries_do_by_themselves() {
    let Some(probe) = program("tegula-probe") else { return };
    let on_load = |code: &str| format!("__attribute__((constructor)) void f(void) {{ {code} }}");
    // As the host does when it opens what passed; the misdeeds are the probe's alone.
    let refused = "refused: speaks revisions 0..=0";
    let in_probe =
        |code: &str| on_load(&format!("if (getenv(\"TEGULA_PROBE_CHILD\")) {{ {code} }}"));
    for (code, expected) in [
        (on_load("abort();"), "failed probe (signal 6) while it was loaded"),
        (on_load("exit(1);"), "failed probe (exit 1) while it was loaded"),
        (on_load("_exit(0);"), "failed probe (exit 0) while it was loaded"),
        (on_load("for (;;) pause();"), "failed probe (timed out after 2 s) while it was loaded"),
        (on_load("for (;;) puts(\"noise noise noise\");"), "failed probe (timed out after 2 s)"),
        (
            on_load("fputs(\"driver: no such card\\n\", stderr); abort();"),
            "failed probe (signal 6) while it was loaded; it said: driver: no such card",
        ),
        (
            "__attribute__((destructor)) void f(void) { abort(); }".into(),
            "failed probe (signal 6) while it",
        ),
        // A driver's exit handler, of a library that is not unloaded.
        (on_load("atexit(abort);"), "failed probe (signal 6)"),
        // A process left behind keeps the pipe open, and one that closes its output still passes.
        (in_probe("if (fork() == 0) { sleep(30); _exit(0); }"), refused),
        (in_probe("close(1); close(2);"), refused),
        (in_probe("printf(\"no end of line\"); fflush(stdout);"), refused),
        (in_probe("close(0); open(\"/dev/null\", O_RDONLY);"), refused),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let plugin = common::compile(dir.path(), &code);
        let begin = Instant::now();
        let met = host(&plugin, &probe, "child", &[]);
        assert!(met.starts_with(expected), "{code}: {met}");
        assert!(begin.elapsed() < Duration::from_secs(15), "{code}: {:?}", begin.elapsed());
    }
}

/// A host that is killed while a driver hangs leaves no process behind.
#[test]
fn a_probe_ends_with_its_parent() {
    let Some(probe) = program("tegula-probe") else { return };
    let dir = tempfile::tempdir().unwrap();
    let hang = Fault::new(Point::Open, FaultKind::Hang { seconds: 60.0 });
    let fake = Fake::new().fault(hang).install(dir.path()).unwrap();
    let mut child = Command::new(probe)
        .arg("__probe")
        .arg(&fake.plugin)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it did not hang");
    // The kernel does the same when a process ends, however it ends.
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(125));
}
