//! `tegula pull` against a hub of this machine that also behaves badly: what a user has on disk afterwards, and what is said.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

/// How a hub treats requests for files.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    /// Through a redirect, with ranges, as the real one.
    Good,
    /// Closes the connection after this many bytes of each answer.
    DropsAfter(usize),
    /// Gives the whole file whatever range is asked for, and drops the first answer.
    IgnoresRanges,
    /// Flips a bit.
    Corrupts,
    /// Sends more than it announced.
    SendsMore,
    /// This status and error code for everything.
    Refuses(u16, &'static str),
    /// A page instead of JSON.
    Portal,
}

/// A hub with one repository, `owner/repo`.
struct MockHub {
    endpoint: String,
    requests: Arc<Mutex<Vec<String>>>,
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl MockHub {
    fn new(files: &[(&str, Vec<u8>)], manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let files: Vec<(String, Vec<u8>)> =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let request = read_request(&stream);
                let n = {
                    let mut seen = seen.lock().unwrap();
                    seen.push(request.clone());
                    seen.len()
                };
                // The client may close first; that is what some of these tests are about.
                let _ = answer(&mut stream, &request, &files, manner, n);
            }
        });
        Self { endpoint, requests }
    }

    fn pull(&self, folder: &Path, args: &[&str], token: Option<&str>) -> Output {
        pull(&self.endpoint, folder, args, token)
    }
}

fn pull(endpoint: &str, folder: &Path, args: &[&str], token: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tegula"));
    command.arg("pull").args(args).env("HF_ENDPOINT", endpoint).env("TEGULA_MODELS", folder);
    command.env("NO_PROXY", "127.0.0.1").env_remove("HF_TOKEN").env("RUST_LOG", "error");
    if let Some(token) = token {
        command.env("HF_TOKEN", token);
    }
    command.output().unwrap()
}

/// The request line and headers.
fn read_request(stream: &TcpStream) -> String {
    let lines = BufReader::new(stream).lines().map(Result::unwrap);
    lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

fn answer(
    stream: &mut TcpStream,
    request: &str,
    files: &[(String, Vec<u8>)],
    manner: Manner,
    n_request: usize,
) -> std::io::Result<()> {
    let target = request.split(' ').nth(1).unwrap();
    if let Manner::Refuses(status, code) = manner {
        let head = format!(
            "HTTP/1.1 {status} No\r\nX-Error-Code: {code}\r\nX-Error-Message: told why\r\n"
        );
        return write!(stream, "{head}Content-Length: 0\r\nConnection: close\r\n\r\n");
    }
    if manner == Manner::Portal {
        let page = "<html>log in</html>";
        let length = page.len();
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{page}"
        );
    }
    if target.starts_with("/api/models/owner/repo/revision/") {
        let siblings: Vec<_> = files
            .iter()
            .map(|(name, bytes)| {
                serde_json::json!({
                    "rfilename": name, "size": bytes.len(),
                    "lfs": {"sha256": sum(bytes), "size": bytes.len(), "pointerSize": 134},
                })
            })
            .collect();
        let json = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        let length = json.len();
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{json}"
        );
    }
    if let Some(path) = target.strip_prefix(&format!("/owner/repo/resolve/{COMMIT}/")) {
        return write!(
            stream,
            "HTTP/1.1 302 Found\r\nLocation: /storage/{path}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    let file = target.strip_prefix("/storage/").and_then(|path| files.iter().find(|f| f.0 == path));
    let Some((_, bytes)) = file else {
        return write!(stream, "HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let range = request
        .lines()
        .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let from = range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap());
    send(stream, bytes.clone(), from, manner, n_request)
}

fn send(
    stream: &mut TcpStream,
    mut bytes: Vec<u8>,
    from: usize,
    manner: Manner,
    n_request: usize,
) -> std::io::Result<()> {
    let from = if manner == Manner::IgnoresRanges { 0 } else { from };
    match manner {
        Manner::Corrupts => *bytes.last_mut().unwrap() ^= 1,
        Manner::SendsMore => bytes.extend_from_slice(&[0; 1 << 20]),
        _ => {}
    }
    let (length, total) = (bytes.len() - from, bytes.len());
    let status = match from {
        0 => "200 OK".to_owned(),
        _ => format!("206 Partial Content\r\nContent-Range: bytes {from}-{}/{total}", total - 1),
    };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n")?;
    let end = match manner {
        Manner::DropsAfter(n) => (from + n).min(total),
        // The first request is for the list, the second for the redirect, the third the first for bytes.
        Manner::IgnoresRanges if n_request == 3 => total / 2,
        _ => total,
    };
    stream.write_all(&bytes[from..end])
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn content(seed: u8, len: usize) -> Vec<u8> {
    let body = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed));
    b"GGUF".iter().copied().chain(body).collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).map(|dir| dir.map(|e| e.unwrap()).collect::<Vec<_>>());
    let mut names: Vec<String> =
        entries.unwrap_or_default().iter().map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Pulls and compares what is in the folder afterwards, and what was said.
#[track_caller]
fn check(hub: &MockHub, folder: &Path, args: &[&str], expected: Result<&[&str], &str>) {
    let output = hub.pull(folder, args, None);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match expected {
        Ok(files) => {
            assert!(output.status.success(), "{args:?}: {said}");
            assert_eq!(names(folder), files, "{args:?}");
            let printed = String::from_utf8(output.stdout).unwrap();
            assert!(Path::new(printed.trim()).is_file(), "{printed}");
        }
        Err(part) => {
            assert!(!output.status.success(), "{args:?} succeeds");
            assert!(said.contains(part), "{args:?}: {said}");
            assert_eq!(output.stdout, b"");
        }
    }
}

/// The model asked for would not be found, a wrong one taken, or half of a split one.
#[test]
fn the_model_asked_for_arrives() {
    let files = [
        ("README.md", b"hello".to_vec()),
        ("m.Q4_K.gguf", content(1, 1000)),
        ("m.Q4_K_M.gguf", content(2, 1000)),
        ("mmproj-m.Q4_K_M.gguf", content(3, 1000)),
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", content(4, 700_000)),
        ("Q8_0/m-Q8_0-00002-of-00002.gguf", content(5, 10)),
        ("b-00001-of-00002.gguf", content(6, 10)),
    ];
    let hub = MockHub::new(&files, Manner::Good);
    let get = |args: &[&str], expected: Result<&[&str], &str>| {
        let folder = tempfile::tempdir().unwrap();
        check(&hub, &folder.path().join("new/models"), args, expected);
        folder
    };
    let shards = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
    get(&["owner/repo:q4_k"], Ok(&["m.Q4_K.gguf"]));
    let folder = get(&["owner/repo:Q4_K_M"], Ok(&["m.Q4_K_M.gguf"]));
    assert_eq!(std::fs::read(folder.path().join("new/models/m.Q4_K_M.gguf")).unwrap(), files[2].1);
    get(&["hf.co/owner/repo/mmproj-m.Q4_K_M.gguf"], Ok(&["mmproj-m.Q4_K_M.gguf"]));
    get(&["owner/repo:Q8_0"], Ok(&shards));
    get(&["owner/repo/Q8_0/m-Q8_0-00002-of-00002.gguf"], Ok(&shards));
    get(
        &["owner/repo"],
        Err("choose with :QUANT or /FILE.gguf:\n  Q8_0/m-Q8_0.gguf  683.61 KiB in 2 shards\n"),
    );
    get(&["owner/repo:Q2_K"], Err("m.Q4_K_M.gguf"));
    get(&["owner/repo/b-00001-of-00002.gguf"], Err("1 of its 2 shards"));
    get(&["repo"], Err("OWNER/REPO:QUANT"));
    get(&["owner/../x"], Err("no name of an owner or repository"));
    get(&["owner/repo/README.md"], Err("neither :QUANT nor /FILE.gguf"));
}

/// A lost connection would cost everything so far, or splice two answers wrongly.
#[test]
fn broken_downloads_are_taken_up_again() {
    let bytes = content(7, 900_000);
    let files = [("m.gguf", bytes.clone())];
    for manner in [Manner::DropsAfter(400_000), Manner::IgnoresRanges] {
        let folder = tempfile::tempdir().unwrap();
        let hub = MockHub::new(&files, manner);
        check(&hub, folder.path(), &["owner/repo"], Ok(&["m.gguf"]));
        assert_eq!(std::fs::read(folder.path().join("m.gguf")).unwrap(), bytes);
    }
    // A connection that never brings anything: given up, the part of an earlier run kept, the next run needs only the rest.
    let folder = tempfile::tempdir().unwrap();
    let part = format!(".m.gguf.{}.part", &sum(&bytes)[..16]);
    std::fs::write(folder.path().join(&part), &bytes[..500_000]).unwrap();
    let dead = MockHub::new(&files, Manner::DropsAfter(0));
    check(&dead, folder.path(), &["owner/repo"], Err("the same command continues it"));
    assert_eq!(names(folder.path()), std::slice::from_ref(&part));
    let hub = MockHub::new(&files, Manner::Good);
    check(&hub, folder.path(), &["owner/repo"], Ok(&["m.gguf"]));
    assert_eq!(std::fs::read(folder.path().join("m.gguf")).unwrap(), bytes);
    assert!(
        hub.requests
            .lock()
            .unwrap()
            .iter()
            .any(|r| r.to_lowercase().contains("range: bytes=500000-"))
    );
    // A complete part needs no more bytes, a damaged one is found out.
    std::fs::rename(folder.path().join("m.gguf"), folder.path().join(&part)).unwrap();
    check(&hub, folder.path(), &["owner/repo"], Ok(&["m.gguf"]));
    let mut damaged = bytes.clone();
    damaged[100] ^= 1;
    std::fs::remove_file(folder.path().join("m.gguf")).unwrap();
    std::fs::write(folder.path().join(&part), &damaged[..500_000]).unwrap();
    check(&hub, folder.path(), &["owner/repo"], Err("it was deleted. Pull again"));
    check(&hub, folder.path(), &["owner/repo"], Ok(&["m.gguf"]));
}

/// Bytes that the hub did not vouch for would be run as a model.
#[test]
fn wrong_bytes_never_get_the_name() {
    for (manner, said) in [
        (Manner::Corrupts, "what arrived has the SHA-256"),
        (Manner::SendsMore, "more than the 5004 bytes that the hub announced"),
        (Manner::Portal, "the answer is not the hub's JSON"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let hub = MockHub::new(&[("m.gguf", content(1, 5000))], manner);
        check(&hub, folder.path(), &["owner/repo"], Err(said));
        assert_eq!(names(folder.path()), [""; 0]);
    }
    let folder = tempfile::tempdir().unwrap();
    let hub = MockHub::new(&[("m.gguf", b"<html>".to_vec())], Manner::Good);
    check(&hub, folder.path(), &["owner/repo"], Err("no GGUF file"));
}

/// A model of the user would be lost to another of the same name, or downloaded twice.
#[test]
fn files_that_are_there_are_respected() {
    let folder = tempfile::tempdir().unwrap();
    let hub = MockHub::new(&[("m.gguf", content(1, 5000))], Manner::Good);
    let target = folder.path().join("m.gguf");
    std::fs::write(&target, content(2, 5000)).unwrap();
    check(&hub, folder.path(), &["owner/repo"], Err("replace it with --force"));
    assert_eq!(std::fs::read(&target).unwrap(), content(2, 5000));
    check(&hub, folder.path(), &["owner/repo", "--force"], Ok(&["m.gguf"]));
    assert_eq!(std::fs::read(&target).unwrap(), content(1, 5000));
    let before = hub.requests.lock().unwrap().len();
    check(&hub, folder.path(), &["owner/repo"], Ok(&["m.gguf"]));
    assert_eq!(hub.requests.lock().unwrap().len(), before + 1, "only the list is asked for");
    // Another process at work.
    std::fs::remove_file(&target).unwrap();
    let part = format!(".m.gguf.{}.part", &sum(&content(1, 5000))[..16]);
    let file = std::fs::File::create(folder.path().join(part)).unwrap();
    file.try_lock().unwrap();
    check(&hub, folder.path(), &["owner/repo"], Err("another process is downloading it"));
}

/// Users would not know what to do about a refusal.
#[test]
fn refusals_say_what_to_do() {
    for (status, code, token, said) in [
        (401, "", None, "does not exist, or is private or gated"),
        (401, "", Some("hf_x"), "refuses the token in HF_TOKEN"),
        (401, "GatedRepo", None, "accept its terms on http://127.0.0.1"),
        (403, "GatedRepo", Some("hf_x"), "accept its terms on http://127.0.0.1"),
        (404, "RepoNotFound", None, "check the name"),
        (404, "RevisionNotFound", None, "has no revision main"),
        (429, "", None, "try again later"),
        (500, "", None, "try again later"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let hub = MockHub::new(&[], Manner::Refuses(status, code));
        let output = hub.pull(folder.path(), &["owner/repo"], token);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        assert!(stderr.contains(said) && stderr.contains("told why"), "{status} {code}: {stderr}");
        let sent =
            hub.requests.lock().unwrap()[0].to_lowercase().contains("authorization: bearer hf_x");
        assert_eq!(sent, token.is_some());
    }
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (endpoint, said) in [
        (format!("http://{unused}"), "Is there a network?"),
        ("http://no-such-host.invalid".to_owned(), "Is there a network?"),
        ("huggingface.co".to_owned(), "HF_ENDPOINT: `huggingface.co` is no URL"),
    ] {
        let output = pull(&endpoint, folder.path(), &["owner/repo"], None);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(said), "{endpoint}: {stderr}");
    }
}
