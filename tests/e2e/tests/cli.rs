//! The command as scripts and people meet it: exit codes, what goes to which stream, what an error says.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tegula_e2e::{
    BACKENDS, Finished, TinyLlama, finish, golden, ids, model_file, run, run_with_stdin,
    target_dir, tegula,
};

/// A folder with a model and the files that are no models.
struct Folder {
    dir: tempfile::TempDir,
    model: String,
}

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}[assistant]{% endif %}{{ extra_text }}";
        let writer = TinyLlama { context_length: 1 << 20, ..TinyLlama::default() }.writer();
        let bytes = writer.meta("tokenizer.chat_template", template).to_bytes().unwrap();
        let path = dir.path().join("tiny.gguf");
        fs::write(&path, &bytes).unwrap();
        fs::write(dir.path().join("truncated.gguf"), &bytes[..bytes.len() - 1]).unwrap();
        fs::write(dir.path().join("empty.gguf"), b"").unwrap();
        fs::write(dir.path().join("text.gguf"), b"This is not a model.\n").unwrap();
        fs::write(dir.path().join("broken.json"), b"[{").unwrap();
        fs::write(dir.path().join("number.json"), b"7").unwrap();
        fs::write(dir.path().join("object.json"), b"{}").unwrap();
        Self { model: path.to_str().unwrap().to_owned(), dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `tegula` in this folder; `MODEL` stands for the model.
    fn run(&self, args: &[&str]) -> Finished {
        run(&mut self.command(args))
    }

    fn command(&self, args: &[&str]) -> Command {
        let args = args.iter().map(|arg| if *arg == "MODEL" { self.model.as_str() } else { *arg });
        let mut command = tegula(args);
        command.current_dir(self.dir.path());
        command
    }
}

fn parse(out: &Finished) -> Value {
    assert_eq!(out.code, 0, "{}", out.stderr);
    serde_json::from_str(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", out.stdout))
}

/// Wrong usage ends with 2, a failure with 1, and the message names what was given and what to do.
#[test]
fn bad_input_is_told_apart_and_explained() {
    let folder = Folder::new();
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&[], 2, &["Usage"]),
        (&["fly"], 2, &["fly"]),
        (&["run"], 2, &["MODEL"]),
        (&["run", "MODEL"], 2, &["--prompt"]),
        (&["run", "MODEL", "-p", "a", "-f", "b"], 2, &["--file"]),
        (&["run", "MODEL", "-p", "a", "-n", "many"], 2, &["many", "--predict"]),
        (&["run", "MODEL", "-p", "a", "-c", "0"], 2, &["0", "--ctx"]),
        (&["run", "MODEL", "-p", "a", "-c", "4294967296"], 2, &["4294967296"]),
        (&["run", "MODEL", "-p", "a", "--ubatch", "0"], 2, &["--ubatch"]),
        (&["run", "MODEL", "-p", "a", "-t", "0"], 2, &["--threads"]),
        (&["run", "MODEL", "-p", "a", "--kv-type", "q5_k"], 2, &["q5_k", "q8_0"]),
        (&["run", "MODEL", "-p", "a", "--top-p", "2"], 1, &["--top-p", "at most 1"]),
        (&["run", "MODEL", "-p", "a", "--temperature", "nan"], 1, &["--temperature"]),
        (&["run", "MODEL", "-p", "a", "--temperature", "warm"], 2, &["warm"]),
        (&["run", "MODEL", "-f", "missing.txt"], 1, &["missing.txt"]),
        (&["run", "MODEL", "-p", "a", "--device", "gpu9"], 1, &["gpu9", "cpu:0"]),
        (&["run", "MODEL", "-p", "a", "--device", ""], 1, &["empty", "cpu:0"]),
        (&["run", "MODEL", "-p", "a", "--device", "cpu,"], 1, &["cpu,", "empty", "cpu:0"]),
        (&["run", "MODEL", "-p", "a", "--device", "cpu:7"], 1, &["cpu:7", "cpu:0"]),
        (&["run", "MODEL", "-p", "a", "--device", "cpu,!cpu"], 1, &["no device is left"]),
        (&["run", "missing.gguf", "-p", "a"], 1, &["missing.gguf"]),
        (&["run", ".", "-p", "a"], 1, &["director"]),
        (&["run", "empty.gguf", "-p", "a"], 1, &["empty.gguf", "the file is empty"]),
        (&["run", "text.gguf", "-p", "a"], 1, &["text.gguf", "GGUF"]),
        (&["run", "truncated.gguf", "-p", "a"], 1, &["truncated.gguf", "bytes"]),
        (&["inspect", "text.gguf"], 1, &["text.gguf", "GGUF"]),
        (&["plan", "truncated.gguf"], 1, &["truncated.gguf"]),
        (&["tokenize", "missing.gguf"], 1, &["missing.gguf"]),
        (&["template", "MODEL", "missing.json"], 1, &["missing.json"]),
        (&["template", "MODEL", "broken.json"], 1, &["broken.json", "JSON"]),
        (&["template", "MODEL", "number.json"], 1, &["number.json", "messages"]),
        (&["template", "MODEL", "object.json"], 1, &["object.json", "messages"]),
        (&["logits", "MODEL"], 2, &["--ids"]),
        (&["logits", "MODEL", "--ids", "1,two"], 2, &["two"]),
        (&["logits", "MODEL", "--ids", "1,258"], 1, &["258", "vocabulary"]),
        (&["logits", "MODEL", "--ids", "1,2,3", "-c", "2"], 1, &["2 tokens", "-c"]),
        (&["run", "MODEL", "-p", "abcdefgh", "-c", "4"], 1, &["4 tokens", "-c"]),
        (&["bench", "MODEL", "-p", "0", "-n", "0"], 1, &["nothing to measure", "-p"]),
        (&["bench", "MODEL", "-p", "8", "-n", "2", "-c", "7"], 1, &["8 tokens", "-c 8"]),
        (&["bench", "MODEL", "-d", "4294967295"], 1, &["2^32"]),
        (&["bench", "MODEL", "-d", "4294000000", "-c", "64"], 1, &["4294000512", "64"]),
        (&["bench", "MODEL", "-r", "0"], 2, &["--repeat"]),
        (&["run", "MODEL", "-p", "a", "-c", "4294967295"], 1, &["4294967295", "-c"]),
    ];
    for (args, code, needles) in cases {
        let out = folder.run(args);
        assert_eq!(out.code, *code, "{args:?}: {}", out.stderr);
        assert_eq!(out.stdout, "", "{args:?} wrote to stdout");
        for needle in *needles {
            assert!(
                out.stderr.contains(needle),
                "{args:?} does not say `{needle}`: {}",
                out.stderr
            );
        }
    }
}

#[test]
fn bad_environment_is_explained() {
    let folder = Folder::new();
    for (name, value, needles) in [
        ("TEGULA_DEVICE", "", &["empty", "cpu:0"][..]),
        ("TEGULA_DEVICE", "cpu,,reference", &["empty", "cpu:0"]),
        ("TEGULA_DEVICE", "warp", &["warp", "cpu:0"]),
        ("TEGULA_MAX_BUFFER", "big", &["TEGULA_MAX_BUFFER", "big"]),
        ("TEGULA_MEMORY_LIMIT", "1000", &["TEGULA_MEMORY_LIMIT", "1000 bytes"]),
    ] {
        let out = run(folder.command(&["run", "MODEL", "-p", "a", "-n", "1"]).env(name, value));
        assert_eq!(out.code, 1, "{name}={value}: {}", out.stderr);
        assert_eq!(out.stdout, "");
        for needle in needles {
            assert!(out.stderr.contains(needle), "{name}={value}, `{needle}`: {}", out.stderr);
        }
    }
    // The option wins over the variable.
    let mut command = folder.command(&["run", "MODEL", "-p", "a", "-n", "1", "--device", "cpu"]);
    let out = run(command.env("TEGULA_DEVICE", "warp"));
    assert_eq!(out.code, 0, "{}", out.stderr);
}

/// A script that reads stdout gets the generated text and one newline, or one JSON value.
#[test]
fn only_what_was_asked_for_is_on_stdout() {
    let folder = Folder::new();
    for device in BACKENDS {
        let args = ["run", "MODEL", "-p", "abc", "-n", "12", "--temperature", "0", "-c", "256"];
        let args = [&args[..], &["--device", device]].concat();
        let text = folder.run(&args);
        assert_eq!(text.code, 0, "{}", text.stderr);
        assert!(text.stderr.contains("t/s"), "timings are on stderr: {}", text.stderr);
        let report = parse(&folder.run(&[&args[..], &["--json"]].concat()));
        let generation = &report["generation"];
        assert_eq!(text.stdout, format!("{}\n", generation["text"].as_str().unwrap()));
        assert_eq!(report["device"], format!("{device}:0"));
        assert_eq!(report["prompt_tokens"], json!([256, 97, 98, 99]));
        assert_eq!(generation["tokens"].as_array().unwrap().len(), 12);
        assert_eq!(generation["stop"], "length");
        let quiet = folder.run(&[&args[..], &["-q"]].concat());
        assert_eq!((quiet.stdout, quiet.stderr.as_str()), (text.stdout, ""));
    }
}

/// The end of the context ends the text, which is no failure.
#[test]
fn a_full_context_ends_the_text() {
    let folder = Folder::new();
    let args = ["run", "MODEL", "-p", "abc", "-c", "16", "--ignore-eos", "--json"];
    let report = parse(&folder.run(&args));
    assert_eq!(report["generation"]["stop"], "context_full");
    // 16 places hold the prompt's 4 tokens and 12 generated ones; the 13th is chosen from their logits.
    assert_eq!(report["generation"]["tokens"].as_array().unwrap().len(), 13);
}

#[test]
fn tokenize_and_back() {
    let folder = Folder::new();
    let tokenize = |args: &[&str], input: &[u8]| {
        let args = [&["tokenize", "MODEL"], args].concat();
        run_with_stdin(&mut folder.command(&args), input)
    };
    assert_eq!(tokenize(&[], b"ab").stdout, "256 97 98\n");
    assert_eq!(tokenize(&["--json"], b"ab").stdout, "[256,97,98]\n");
    assert_eq!(tokenize(&["--no-special", "--json"], b"ab").stdout, "[97,98]\n");
    assert_eq!(tokenize(&["--json"], b"a<eos>").stdout, "[256,97,257]\n");
    let plain = ids(&parse(&tokenize(&["--no-parse-special", "--json"], b"a<eos>")));
    assert_eq!(plain, [256, 97, 60, 101, 111, 115, 62]);
    assert_eq!(tokenize(&["--no-special", "--json"], b"").stdout, "[]\n");

    let text = "Grüße, 世界! 🌍\n\ttabs  and spaces ";
    for json in [&[][..], &["--json"]] {
        let encoded = tokenize(&[&["--no-special"], json].concat(), text.as_bytes());
        let decode = [&["--decode", "--no-special"], json].concat();
        let decoded = tokenize(&decode, encoded.stdout.as_bytes());
        assert_eq!((decoded.code, decoded.stdout.as_str()), (0, text), "{}", decoded.stderr);
    }
    for (args, input, needle) in [
        (&["--decode"][..], &b"1 x"[..], "`x`"),
        (&["--decode"], b"99999", "99999"),
        (&[], b"\xff\xfe", "UTF-8"),
    ] {
        let out = tokenize(args, input);
        assert_eq!((out.code, out.stdout.as_str()), (1, ""), "{args:?}");
        assert!(out.stderr.contains(needle), "{args:?}: {}", out.stderr);
    }
}

#[test]
fn templates_take_arrays_and_objects() {
    let folder = Folder::new();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let object = json!({"messages": messages, "extra_text": "!", "add_generation_prompt": false});
    for (value, args, expected) in [
        (&messages, &[][..], "[user] Hi\n[assistant]"),
        (&messages, &["--no-generation-prompt"], "[user] Hi\n"),
        (&object, &[], "[user] Hi\n!"),
    ] {
        let args = [&["template", "MODEL", "-"], args].concat();
        let out = run_with_stdin(&mut folder.command(&args), value.to_string().as_bytes());
        assert_eq!((out.code, out.stdout.as_str()), (0, expected), "{}", out.stderr);
    }
}

/// The template of a real model renders as its authors' library renders it.
#[test]
fn templates_agree_with_golden_ones() {
    let Some(chat) = golden("chat") else { return };
    let Some(model) = model_file("SmolLM2-135M-Instruct.Q4_1.gguf") else { return };
    let cases = tegula_e2e::json(chat.join("cases.json"));
    let expected = tegula_e2e::json(chat.join("expected/gguf-smollm2-135m-instruct.json"));
    let mut n = 0;
    for (name, case) in cases["cases"].as_object().unwrap() {
        let Some(expected) = expected["results"][name]["expected"].as_str() else { continue };
        let mut input = case.as_object().unwrap().clone();
        if let Some(Value::Object(extra)) = input.remove("extra") {
            input.extend(extra);
        }
        let args = ["template", model.to_str().unwrap(), "-"];
        let out = run_with_stdin(&mut tegula(args), Value::Object(input).to_string().as_bytes());
        assert_eq!((out.code, out.stdout.as_str()), (0, expected), "{name}: {}", out.stderr);
        n += 1;
    }
    assert!(n > 5, "{n} cases");
}

#[test]
fn logits_have_the_promised_shape() {
    let folder = Folder::new();
    let args = ["logits", "MODEL", "--ids", "256,97,98", "--json", "-c", "64", "--top", "5"];
    let all = parse(&folder.run(&args));
    let positions = all["positions"].as_array().unwrap();
    assert_eq!(positions.len(), 3);
    for (i, position) in positions.iter().enumerate() {
        assert_eq!(position["pos"], i);
        let sum = position["logsumexp"].as_f64().unwrap();
        let top: Vec<(u64, f64)> = serde_json::from_value(position["top"].clone()).unwrap();
        assert_eq!(top.len(), 5);
        assert!(top.is_sorted_by(|a, b| a.1 >= b.1) && top[0].1 < sum, "{position}");
    }
    let close = |a: &Value, b: &Value| {
        assert_eq!(a["pos"], b["pos"]);
        let [a, b] = [a, b].map(|p| p["logsumexp"].as_f64().unwrap());
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    };
    let last = parse(&folder.run(&[&args[..], &["--last"]].concat()));
    assert_eq!(last["positions"].as_array().unwrap().len(), 1);
    close(&last["positions"][0], &positions[2]);
    let one_by_one = parse(&folder.run(&[&args[..], &["--one-by-one"]].concat()));
    let one_by_one = one_by_one["positions"].as_array().unwrap();
    assert_eq!(one_by_one.len(), 3);
    one_by_one.iter().zip(positions).for_each(|(a, b)| close(a, b));
}

#[test]
fn reports_are_json() {
    let folder = Folder::new();
    let inspect = parse(&folder.run(&["inspect", "MODEL", "--json"]));
    assert_eq!(inspect["metadata"]["general.architecture"], "llama");
    let tensors = inspect["tensors"].as_array().unwrap();
    let embedding = tensors.iter().find(|t| t["name"] == "token_embd.weight").unwrap();
    assert_eq!(embedding["dims"], json!([64, 258]));
    assert_eq!(embedding["bytes"], 64 * 258 * 4);

    let plan = parse(&folder.run(&["plan", "MODEL", "--json", "--device", "cpu", "-c", "256"]));
    assert_eq!(plan["context"]["n_ctx"], 256);
    assert_eq!(plan["devices"][0]["id"], "cpu:0");
    let chunks = plan["devices"][0]["heaps"][0]["chunks"].as_array().unwrap();
    let tensors_of = |chunk: &Value| chunk["tiles"].as_array().cloned().unwrap_or_default();
    assert!(chunks.iter().flat_map(tensors_of).any(|tile| tile["tensor"] == "token_embd.weight"));

    // Scripts read cases by their place: a missing one would shift a speed to another's name.
    let args = ["bench", "MODEL", "-p", "8,3", "-n", "2", "-d", "0,40", "-r", "2", "--json"];
    let bench = parse(&folder.run(&args));
    let cases = bench["cases"].as_array().unwrap();
    let names: Vec<Value> =
        cases.iter().map(|case| json!([case["kind"], case["n_tokens"], case["depth"]])).collect();
    let at = |depth: u32| {
        [json!(["prompt", 8, depth]), json!(["prompt", 3, depth]), json!(["generate", 2, depth])]
    };
    assert_eq!(names, [at(0), at(40)].concat());
    for case in cases {
        let samples = case["samples"].as_array().unwrap();
        let number = |name: &str| case[name].as_f64().unwrap();
        assert!(samples.len() == 2 && number("first") > 0.0, "{case}");
        let (min, median, max) = (number("min"), number("median"), number("max"));
        assert!(0.0 < min && min <= median && median <= max, "{case}");
    }

    let devices = folder.run(&["devices", "--json"]);
    let text = parse(&devices).to_string();
    assert!(text.contains("cpu") && text.contains("reference"), "{text}");
    for args in [&["devices"][..], &["plan", "MODEL"], &["inspect", "MODEL"]] {
        let out = folder.run(args);
        assert!(out.code == 0 && !out.stdout.is_empty(), "{args:?}: {}", out.stderr);
    }
}

fn spawn(command: &mut Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Somebody who stops a long answer keeps it, and a script sees success.
#[test]
fn ctrl_c_ends_a_generation_and_keeps_the_text() {
    let folder = Folder::new();
    let start = Instant::now();
    let mut child = spawn(&mut folder.command(&["run", "MODEL", "-p", "abc", "--ignore-eos"]));
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 64];
    stdout.read_exact(&mut first).unwrap();
    let kill = Command::new("sh").arg("-c").arg(format!("kill -INT {}", child.id())).status();
    assert!(kill.unwrap().success());
    // Reading on, as a terminal does; otherwise the full pipe would stop the command before it sees the signal.
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let out = finish(child, start);
    assert_eq!(out.code, 0, "{}", out.stderr);
    assert_eq!(rest.last(), Some(&b'\n'));
    assert!(out.stderr.contains("t/s"), "{}", out.stderr);
}

/// `tegula run ... | head -c 10` is a success, for every command that writes.
#[test]
fn a_closed_pipe_is_no_failure() {
    let folder = Folder::new();
    for args in [
        &["run", "MODEL", "-p", "abc", "--ignore-eos"][..],
        &["inspect", "MODEL", "--full"],
        &["plan", "MODEL", "--json"],
        &["devices", "--json"],
    ] {
        let start = Instant::now();
        let mut child = spawn(&mut folder.command(args));
        let mut first = [0; 10];
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut first).unwrap();
        drop(stdout);
        let out = finish(child, start);
        assert_eq!(out.code, 0, "{args:?}: {}", out.stderr);
        assert!(!out.stderr.contains("error"), "{args:?}: {}", out.stderr);
    }
}

/// Backends are found from the program's own file, wherever one stands and whatever link led to it.
#[test]
fn backends_are_found_from_any_folder_and_through_links() {
    let folder = Folder::new();
    let backends = |command: &mut Command| {
        let report = parse(&run(command.args(["devices", "--json"])));
        let mut report = report.to_string();
        // Free memory differs from moment to moment.
        report.retain(|c| !c.is_ascii_digit());
        report
    };
    let program = target_dir().join("tegula");
    let link = folder.path("linked-tegula");
    std::os::unix::fs::symlink(&program, &link).unwrap();
    let expected = backends(&mut tegula_e2e::command(&program));
    assert!(expected.contains("cpu"), "{expected}");
    for (program, cwd) in
        [(&program, "/"), (&link, "/"), (&link, folder.model.trim_end_matches("/tiny.gguf"))]
    {
        let mut command = tegula_e2e::command(program);
        assert_eq!(backends(command.current_dir(cwd)), expected, "{} in {cwd}", program.display());
    }
}

/// A damaged or hostile file costs a moment and little memory, and is refused in words.
#[test]
fn hostile_files_are_refused_cheaply() {
    let folder = Folder::new();
    let bytes = fs::read(&folder.model).unwrap();
    let begin = tensor_table_begin(&bytes);
    let mut files: Vec<(String, Vec<u8>)> = Vec::new();
    for i in 0..8 {
        let len = begin * i / 6 + 3;
        files.push((format!("truncated to {len} bytes"), bytes[..len].to_vec()));
    }
    // Counts of tensors and keys, and the length of the first key: byte 7 of each makes them 2^56 and more.
    for at in [4, 8, 15, 16, 23, 24, 31] {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x55;
        files.push((format!("byte {at} flipped"), bytes));
    }
    for dims in [[1u64 << 32, 1 << 32], [1 << 62, 2], [u64::MAX, u64::MAX], [64, 1 << 40], [0, 0]] {
        let mut bytes = bytes.clone();
        // The first tensor is `token_embd.weight`: length of the name, name, number of dimensions, dimensions.
        let at = begin + 8 + "token_embd.weight".len() + 4;
        bytes[at..at + 8].copy_from_slice(&dims[0].to_le_bytes());
        bytes[at + 8..at + 16].copy_from_slice(&dims[1].to_le_bytes());
        files.push((format!("dimensions {dims:?}"), bytes));
    }
    for (what, bytes) in files {
        let path = folder.path("hostile.gguf");
        fs::write(&path, bytes).unwrap();
        for args in
            [&["run", "PATH", "-p", "a", "-n", "1"][..], &["inspect", "PATH"], &["plan", "PATH"]]
        {
            check_refused(&path, args, &what);
        }
    }
}

fn check_refused(path: &Path, args: &[&str], what: &str) {
    let args: Vec<&str> =
        args.iter().map(|arg| if *arg == "PATH" { path.to_str().unwrap() } else { *arg }).collect();
    let out = run(&mut tegula_e2e::limited(50 << 20, &args));
    assert_eq!(out.code, 1, "{what}, {}: {}", args[0], out.stderr);
    assert_eq!(out.stdout, "", "{what}, {}", args[0]);
    assert!(out.stderr.contains("hostile.gguf"), "{what}, {}: {}", args[0], out.stderr);
    assert!(out.time < Duration::from_secs(1), "{what}, {}: {:?}", args[0], out.time);
}

/// Where the table of tensors begins: at the length of the first tensor's name.
fn tensor_table_begin(bytes: &[u8]) -> usize {
    let name = b"token_embd.weight";
    bytes.windows(name.len()).position(|window| window == name).unwrap() - 8
}
