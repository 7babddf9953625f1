//! Choosing devices as users do it: by what `tegula devices` prints, through the flag and the variable, with the same hardware under two
//! backends, and with every mistake that people make.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

mod common;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tegula::{RegistryOptions, Runtime, RuntimeOptions};
use test_tegula_fake::*;

const UUID: &str = "00112233-4455-6677-8899-aabbccddeeff";

/// The command over a folder of fakes.
struct User {
    command: PathBuf,
    dir: tempfile::TempDir,
}

impl User {
    fn new(fakes: impl IntoIterator<Item = Fake>) -> Option<Self> {
        let Ok(command) = built_plugin("tegula") else {
            eprintln!("SKIPPED: no `tegula` beside the tests; build the workspace");
            return None;
        };
        let dir = tempfile::tempdir().unwrap();
        for fake in fakes {
            fake.install(&dir.path().join("plugins")).unwrap();
        }
        Some(Self { command, dir })
    }

    fn run(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        Command::new(&self.command)
            .args(args)
            .env("TEGULA_BACKEND_PATH", self.dir.path().join("plugins"))
            .env("XDG_CACHE_HOME", self.dir.path().join("cache"))
            .env_remove("RUST_LOG")
            .env_remove("TEGULA_DEVICE")
            .env_remove("TEGULA_ISOLATION")
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    fn json(&self, args: &[&str], variables: &[(&str, &str)]) -> Value {
        let output = self.run(&[args, &["--json"]].concat(), variables);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?} {variables:?}: {said}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn devices(&self) -> Vec<Value> {
        devices(&self.json(&["devices"], &[]))
    }

    /// What is taken under the variable or, with `flag`, the option; in order, and only of this test's backends.
    fn taken(&self, selector: &str, flag: bool) -> Vec<String> {
        let report = match flag {
            true => self.json(&["devices", "--why", "--device", selector], &[]),
            false => self.json(&["devices", "--why"], &[("TEGULA_DEVICE", selector)]),
        };
        taken(&report)
    }
}

fn devices(report: &Value) -> Vec<Value> {
    let backends = report["backends"].as_array().unwrap();
    backends.iter().flat_map(|backend| backend["devices"].as_array().unwrap().clone()).collect()
}

/// What the selector in force takes; it is the last that is explained.
fn taken(report: &Value) -> Vec<String> {
    let mut all: Vec<(u64, String)> = devices(report)
        .iter()
        .filter_map(|device| {
            let place = device["why"].as_array().unwrap().last().unwrap()["place"].as_u64()?;
            Some((place, device["id"].as_str().unwrap().to_owned()))
        })
        .collect();
    all.sort();
    all.into_iter().map(|(_, id)| id).collect()
}

/// The project's own backends lie beside the command, and are not what these tests are about.
fn fakes(ids: Vec<String>) -> Vec<String> {
    ids.into_iter().filter(|id| ["x:", "y:"].iter().any(|fake| id.starts_with(fake))).collect()
}

fn card(name: &str, rank: u32) -> DeviceConfig {
    DeviceConfig::gpu(name, GIB).with(|d| {
        (d.uuid, d.rank, d.driver) = (Some(UUID.into()), rank, format!("driver of {name}"));
    })
}

/// `x` has a card, an integrated GPU and another card; `y` has the first card once more.
fn two_backends() -> [Fake; 2] {
    let slot = |d: &mut DeviceConfig| d.pci = Some("0000:0A:00.0".into());
    let x = Fake::new().id("x").device(card("A", 50)).device(DeviceConfig::integrated("B", GIB));
    let x = x.device(DeviceConfig::gpu("C", GIB).with(slot));
    [x, Fake::new().id("y").device(card("A again", 90))]
}

/// Every id that `tegula devices` prints, in text and in JSON, selects that device and no other, through the flag and through the variable.
#[test]
fn every_printed_id_selects_its_device() {
    let Some(user) = User::new(two_backends()) else { return };
    let text = String::from_utf8(user.run(&["devices"], &[]).stdout).unwrap();
    let listed = user.devices();
    assert!(listed.len() >= 4);
    for device in &listed {
        let id = device["id"].as_str().unwrap();
        assert!(text.lines().any(|line| line.starts_with(&format!("  {id}  "))), "{id}: {text}");
        for flag in [true, false] {
            assert_eq!(user.taken(id, flag), [id], "flag {flag}");
        }
        // Where the driver says what it is, that names it too: the hardware once, whichever backends have it.
        let stable = device["stable_id"].as_str().unwrap();
        let expected = if stable == format!("uuid:{UUID}") { "y:0" } else { id };
        for flag in [true, false] {
            assert_eq!(user.taken(stable, flag), [expected], "{stable}");
        }
        // What is explained is what is used.
        let plan = ["plan", "--shapes", "gemma-3-270m", "-c", "64", "--device", id];
        let plan = user.json(&plan, &[("TEGULA_MEMORY_LIMIT", "8G")]);
        assert_eq!(plan["devices"][0]["id"], id);
        assert_eq!(plan["devices"].as_array().unwrap().len(), 1, "{plan}");
    }
    let stable: Vec<_> = listed.iter().map(|d| d["stable_id"].as_str().unwrap()).collect();
    assert!(stable.contains(&"pci:0000:0a:00.0") && stable.contains(&"x:1"), "{stable:?}");
}

/// One card under two backends is used once and hidden in both, by whichever name; and the variables by which vendors hide devices from their own
/// drivers change nothing here.
#[test]
fn the_same_card_under_two_backends() {
    let Some(user) = User::new(two_backends()) else { return };
    let uuid = format!("uuid:{UUID}");
    for (selector, expected) in [
        ("auto", &["y:0", "x:2"][..]),
        ("!y:0", &["x:2"]),
        ("!x:0", &["x:2"]),
        (&format!("!{uuid}"), &["x:2"]),
        ("!name:A", &["x:2"]),
        ("!x:2", &["y:0"]),
        ("!x:0,!x:2", &["x:1"]),
        ("!pci:0a:00.0", &["y:0"]),
        ("x:0", &["x:0"]),
        (&uuid, &["y:0"]),
        ("x,y", &["x:0", "x:1", "x:2", "y:0"]),
    ] {
        for flag in [true, false] {
            assert_eq!(fakes(user.taken(selector, flag)), expected, "{selector}");
        }
    }
    let plain = user.json(&["devices", "--why"], &[]);
    for variable in [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "1"),
        ("HIP_VISIBLE_DEVICES", "-1"),
        ("ROCR_VISIBLE_DEVICES", "-1"),
        ("GGML_VK_VISIBLE_DEVICES", "7"),
        ("ONEAPI_DEVICE_SELECTOR", "level_zero:gpu:0"),
        ("ZE_AFFINITY_MASK", "3"),
    ] {
        assert_eq!(
            taken(&user.json(&["devices", "--why"], &[variable])),
            taken(&plain),
            "{variable:?}"
        );
    }
}

/// What the vendor's driver reads in its variable is what the user wrote, in this process and in the one that tries a plugin.
#[test]
fn variables_of_vendors_pass_through() {
    let Some(user) = User::new([]) else { return };
    let code = "__attribute__((constructor)) static void f(void) {\n\
        const char *path = getenv(\"SEEN\"), *value = getenv(\"CUDA_VISIBLE_DEVICES\");\n\
        FILE *out = path ? fopen(path, \"a\") : NULL;\n\
        if (out) { fprintf(out, \"%s\\n\", value ? value : \"(unset)\"); fclose(out); } }";
    let plugins = user.dir.path().join("plugins");
    std::fs::create_dir_all(&plugins).unwrap();
    common::compile(&plugins, code);
    for value in ["0,1", "-1", ""] {
        let seen = user.dir.path().join(format!("seen {value}"));
        let variables = [("CUDA_VISIBLE_DEVICES", value), ("SEEN", seen.to_str().unwrap())];
        user.json(&["devices", "--device", "!cpu"], &variables);
        let seen = std::fs::read_to_string(seen).unwrap();
        assert_eq!(seen.lines().collect::<Vec<_>>(), [value, value]);
    }
}

/// A selector that is wrong in any way is refused, with every device that could be meant, by exit code 1 and without any output that a script
/// could take for an answer; never is another device taken in its place.
#[test]
fn wrong_selectors_are_refused_with_the_list() {
    let Some(user) = User::new(two_backends()) else { return };
    let ids: Vec<String> =
        user.devices().iter().map(|device| device["id"].as_str().unwrap().to_owned()).collect();
    for selector in [
        "",
        " ",
        ",",
        "x:0,",
        ",x:0",
        "x:0,,y:0",
        "-1",
        "0",
        "0,foo,1",
        "foo",
        "x:9",
        "x:-1",
        "x:00000000009",
        "x:",
        "x:fast",
        "x:0x0",
        "X:0",
        "!",
        "!!x:0",
        "!foo",
        "auto,foo",
        "gpu",
        "level_zero:gpu:0",
        "uuid:",
        "uuid:ffff",
        "pci:0000:7f:00.0",
        "pci:rubbish",
        "name:nothing*",
        "x:0 y:0",
        "x:0;y:0",
        "x,!x",
        "\u{2013}1",
    ] {
        for flag in [true, false] {
            let shapes = ["plan", "--shapes", "gemma-3-270m", "-c", "64", "--json"];
            let output = match flag {
                true => user.run(&[&shapes[..], &["--device", selector]].concat(), &[]),
                false => user.run(&shapes, &[("TEGULA_DEVICE", selector)]),
            };
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{selector:?} {flag}: {said}");
            assert!(output.stdout.is_empty(), "{selector:?}");
            for id in &ids {
                assert!(
                    said.contains(&format!("  {id} (")),
                    "{selector:?}: {id} is not named: {said}"
                );
            }
        }
    }
    // Bytes that are no text are no device either.
    use std::os::unix::ffi::OsStrExt as _;
    let mut command = Command::new(&user.command);
    command.args(["devices", "--why"]).env("TEGULA_DEVICE", std::ffi::OsStr::from_bytes(b"\xff"));
    command.env("XDG_CACHE_HOME", user.dir.path());
    assert_eq!(command.output().unwrap().status.code(), Some(1));
}

/// The rule by which devices are taken is printed, and for each device that is not, why: an integrated GPU is listed and left out beside a
/// discrete one, and taken where it is the best there is.
#[test]
fn the_policy_is_told() {
    let Some(user) = User::new(two_backends()) else { return };
    let why = |args: &[&str]| {
        String::from_utf8(user.run(&[&["devices", "--why"], args].concat(), &[]).stdout).unwrap()
    };
    let text = why(&[]);
    let line = |words: &[&str], text: &str| {
        let found = text.lines().any(|line| words.iter().all(|word| line.contains(word)));
        assert!(found, "no line with {words:?} in:\n{text}");
    };
    line(&["what auto takes, in this order"], &text);
    line(&["1  discrete GPUs", "y:0, x:2"], &text);
    line(&["2  integrated GPUs", "-", "if there is no discrete one"], &text);
    line(&["4  processors"], &text);
    line(
        &["x:1", "integrated", "listed, not selected by default: integrated, and y:0 is discrete"],
        &text,
    );
    line(&["x:0", "not taken: the same hardware as y:0, which is preferred"], &text);
    let text = why(&["--device", "!x:0,!x:2"]);
    line(&["selector !x:0,!x:2 of --device"], &text);
    line(&["1 ", "x:1", "taken"], &text);
    line(&["y:0", "the same hardware as x:0, which `!x:0` excludes"], &text);
    let report = user.json(&["devices", "--why"], &[]);
    assert_eq!(report["policy"][0]["devices"], serde_json::json!(["y:0", "x:2"]));
    assert_eq!(report["policy"][1]["when"], "if there is no discrete one");
}

/// Two backends of two devices each, asked in every order and from two threads: each device states its own limit, which is nobody's default.
#[test]
fn figures_belong_to_their_device() {
    let dir = tempfile::tempdir().unwrap();
    let caps = [32 * MIB, 256 * MIB, 48 * MIB, 96 * MIB];
    let device = |i: usize| DeviceConfig::gpu("A", GIB).max_size(caps[i]);
    let fake = |id, i| Fake::new().id(id).device(device(i)).device(device(i + 1));
    let plugins: Vec<PathBuf> =
        [fake("x", 0), fake("y", 2)].map(|fake| fake.install(dir.path()).unwrap().plugin).into();
    let ids = ["x:0", "x:1", "y:0", "y:1"];
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        for explicit in [plugins.clone(), plugins.iter().rev().cloned().collect()] {
            let registry = RegistryOptions { explicit, standard: false };
            let runtime = Runtime::new(&RuntimeOptions { registry, ..Default::default() });
            let ask = |i: usize| {
                let entry = runtime.select(Some(ids[i])).unwrap().remove(0);
                let opened = runtime.open_device(&entry, 0).unwrap();
                let stated = [&entry.info, opened.info()].map(|d| d.buffer_types[0].max_size.get());
                assert_eq!(stated, [Some(caps[i]); 2], "{}", ids[i]);
            };
            order.into_iter().for_each(ask);
            std::thread::scope(|scope| {
                for i in order {
                    scope.spawn(move || (0..20).for_each(|_| ask(i)));
                }
            });
        }
    }
}

/// A plugin in the folder where the user stands is nobody's choice: it is neither opened nor tried.
#[test]
fn the_working_directory_is_not_searched() {
    let Some(user) = User::new([]) else { return };
    let here = tempfile::tempdir().unwrap();
    let seen = here.path().join("seen");
    let code = format!(
        "__attribute__((constructor)) static void f(void) {{ FILE *out = fopen(\"{}\", \"a\"); fclose(out); }}",
        seen.display()
    );
    common::compile(here.path(), &code);
    for path in ["", ".", ":", "./", "::."] {
        let mut command = Command::new(&user.command);
        command.args(["devices", "--json"]).current_dir(here.path());
        command.env("TEGULA_BACKEND_PATH", path).env("XDG_CACHE_HOME", user.dir.path());
        assert!(command.output().unwrap().status.success());
        assert!(!Path::new(&seen).exists(), "{path:?} let it run");
    }
}
