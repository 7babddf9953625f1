//! The Hugging Face hub: what a repository holds, and the bytes of its files.
//!
//! Two requests of its HTTP interface are all that is needed: `/api/models/REPO/revision/REV?blobs=true` lists files with sizes and
//! SHA-256, `/REPO/resolve/COMMIT/FILE` gives bytes, through a redirect to storage. A client of a few hundred lines over them knows its time
//! limits, checks what arrives and can say which of the hub's refusals was met. Everything the hub says is a stranger's text: names are checked
//! before they become paths, sizes bound what is read, messages lose their control characters.

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use std::io::Read;
use std::time::Duration;
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Repositories of tens of thousands of files list them in a few MiB.
const INFO_BYTES_MAX: u64 = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// A connection that brings nothing for so long is taken for dead.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// A client of one hub.
pub(crate) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RepoFile {
    /// Its path in the repository: relative, of plain parts, ending in .gguf.
    pub(crate) path: String,
    /// Bytes, where the hub tells.
    pub(crate) size: Option<u64>,
    /// Lower-case hex, where the hub tells: it does for what it keeps in large file storage.
    pub(crate) sha256: Option<String>,
}

impl RepoFile {
    /// The last part of the path.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }
}

/// A repository's GGUF files as of one commit.
#[derive(Debug)]
pub(crate) struct RepoInfo {
    /// What downloads name, so that all files are of one state.
    pub(crate) commit: String,
    pub(crate) files: Vec<RepoFile>,
}

#[derive(Deserialize)]
struct InfoJson {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<SiblingJson>,
}

#[derive(Deserialize)]
struct SiblingJson {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LfsJson>,
}

#[derive(Deserialize)]
struct LfsJson {
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

impl Hub {
    /// The hub of `HF_ENDPOINT`, with the token of `HF_TOKEN`.
    pub(crate) fn from_env() -> Result<Self> {
        let var = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let endpoint = endpoint.trim().trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            bail!("HF_ENDPOINT: `{endpoint}` is no URL; give one such as {DEFAULT_ENDPOINT}");
        }
        let agent = Agent::config_builder()
            .user_agent(concat!("tegula/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Repositories that were renamed answer with a redirect on the same host, which needs the token again; storage must not get it.
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(STALL_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .build()
            .into();
        Ok(Self { agent, endpoint, token: var("HF_TOKEN").map(|token| token.trim().to_owned()) })
    }

    /// The GGUF files of `repo` at `revision`: a branch, tag or commit.
    pub(crate) fn info(&self, repo: &str, revision: &str) -> Result<RepoInfo> {
        let path = format!("/api/models/{repo}/revision/{}?blobs=true", encode(revision, false));
        let mut response = self.get(&path, 0).map_err(|error| self.unreachable(&error))?;
        if !response.status().is_success() {
            return Err(self.refusal(&response, repo, &format!("revision {revision}")));
        }
        let mut text = Vec::new();
        let body = response.body_mut().as_reader().take(INFO_BYTES_MAX + 1);
        { body }.read_to_end(&mut text).with_context(|| format!("{}{path}", self.endpoint))?;
        if text.len() as u64 > INFO_BYTES_MAX {
            bail!("{}{path}: the answer is longer than {INFO_BYTES_MAX} bytes", self.endpoint);
        }
        let info: InfoJson = serde_json::from_slice(&text).with_context(|| {
            format!(
                "{}{path}: the answer is not the hub's JSON; is HF_ENDPOINT right?",
                self.endpoint
            )
        })?;
        Ok(read_info(info, revision))
    }

    /// Asks for a file from byte `from` on.
    pub(crate) fn file(
        &self,
        repo: &str,
        commit: &str,
        path: &str,
        from: u64,
    ) -> Result<Response<Body>, ureq::Error> {
        self.get(&format!("/{repo}/resolve/{}/{}", encode(commit, false), encode(path, true)), from)
    }

    fn get(&self, path: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(format!("{}{path}", self.endpoint));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call()
    }

    /// What to tell when there was no answer.
    pub(crate) fn unreachable(&self, error: &ureq::Error) -> anyhow::Error {
        anyhow!(
            "{} cannot be reached: {error}. Is there a network? HTTPS_PROXY names a proxy, HF_ENDPOINT another hub",
            self.endpoint
        )
    }

    /// What to tell when the answer was no.
    pub(crate) fn refusal(
        &self,
        response: &Response<Body>,
        repo: &str,
        what: &str,
    ) -> anyhow::Error {
        let endpoint = &self.endpoint;
        let code = header(response.headers(), "x-error-code").unwrap_or_default();
        let said = header(response.headers(), "x-error-message");
        let said = said.map(|text| format!(" (\"{text}\")")).unwrap_or_default();
        let gated = format!(
            "accept its terms on {endpoint}/{repo}, then set HF_TOKEN to a token with read access from {endpoint}/settings/tokens"
        );
        let status = response.status().as_u16();
        match (status, code.as_str(), &self.token) {
            (401 | 403, "GatedRepo", _) | (403, _, _) => {
                anyhow!("{repo} is gated: access is refused ({status}){said}; {gated}")
            }
            (401, _, None) => anyhow!(
                "{repo} does not exist, or is private or gated (401){said}. Check the name; if it is gated, {gated}"
            ),
            (401, _, Some(_)) => anyhow!(
                "the hub refuses the token in HF_TOKEN for {repo} (401){said}. Check the name; make a new token on {endpoint}/settings/tokens, or unset HF_TOKEN for a public model"
            ),
            (404, "RevisionNotFound" | "EntryNotFound", _) => {
                anyhow!("{repo} has no {what} (404){said}; see {endpoint}/{repo}/tree/main")
            }
            (404, _, _) => anyhow!("{repo}: not found on {endpoint} (404){said}; check the name"),
            (429, _, _) => anyhow!(
                "{endpoint} asks to slow down (429){said}; try again later, or set HF_TOKEN for a higher limit"
            ),
            (500.., _, _) => anyhow!("{endpoint} failed ({status}){said}; try again later"),
            _ => anyhow!("{endpoint} answers {status}{said} for {repo}, {what}"),
        }
    }
}

/// The GGUF files among those listed, except names that no honest repository has: those would leave the folder or hide in it.
fn read_info(info: InfoJson, revision: &str) -> RepoInfo {
    let hex = |text: &str, n: usize| text.len() == n && text.bytes().all(|b| b.is_ascii_hexdigit());
    let plain = |path: &str| {
        let odd = |c: char| c.is_control() || c == '\\';
        !path.contains(odd)
            && path.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
    };
    let files = info
        .siblings
        .into_iter()
        .filter(|file| file.rfilename.to_lowercase().ends_with(".gguf") && plain(&file.rfilename))
        .map(|file| {
            let (sha256, size) = file.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let sha256 = sha256.filter(|sum| hex(sum, 64)).map(|sum| sum.to_lowercase());
            RepoFile { path: file.rfilename, size: size.or(file.size), sha256 }
        })
        .collect();
    let commit = info.sha.filter(|sha| hex(sha, 40)).unwrap_or_else(|| revision.to_owned());
    RepoInfo { commit, files }
}

/// A header as text fit for a terminal.
pub(crate) fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    Some(text.chars().filter(|c| !c.is_control()).take(300).collect())
}

/// Percent-encodes what may not stand in a URL's path.
fn encode(text: &str, slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if slashes => out.push('/'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository could write outside the folder of models, or its files would be missed.
    #[test]
    fn only_plain_gguf_paths_are_listed() {
        let check = |path: &str, listed: bool| {
            let json = serde_json::json!({"siblings": [{"rfilename": path}]});
            let info = read_info(serde_json::from_value(json).unwrap(), "main");
            assert_eq!(info.files.len(), usize::from(listed), "{path}");
            assert_eq!(info.commit, "main");
        };
        check("a.gguf", true);
        check("Q4_K_M/a b-é.GGUF", true);
        check("README.md", false);
        check("../a.gguf", false);
        check("x/../../a.gguf", false);
        check("/etc/a.gguf", false);
        check("x//a.gguf", false);
        check(".bashrc.gguf", false);
        check("a\u{1b}[2J.gguf", false);
        check("..\\a.gguf", false);
    }

    #[test]
    fn urls_keep_odd_names_apart_from_their_syntax() {
        assert_eq!(encode("Q4/a b#1?.gguf", true), "Q4/a%20b%231%3F.gguf");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
