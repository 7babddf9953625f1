//! The compiler of the Vulkan backend's shaders, `glslc`.
//!
//! The fast shaders need cooperative matrices and integer dot products in GLSL, which Debian 12's glslc does not know. The one of
//! Debian 13 does, so where the system's is too old, that release's packages are unpacked into the cache folder with the C library
//! they were built for, and a small script starts the program through that library's own loader. apt does the fetching, with
//! lists of its own below the cache folder: signatures are checked, the system's lists and packages stay as they are, and
//! root is not needed.

use crate::models::cache;
use crate::process;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const RELEASE: &str = "trixie";
const PACKAGES: [&str; 5] = ["glslc", "libshaderc1", "libc6", "libstdc++6", "libgcc-s1"];

/// Compiles only where both extensions are known.
const PROBE: &str = "#version 460
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_integer_dot_product : require
#extension GL_KHR_memory_scope_semantics : require
void main() {}
";

/// Makes sure that the build finds a glslc that knows everything the shaders use.
///
/// # Errors
/// None is installed and none can be fetched; what to install is said.
pub(super) fn provide() -> Result<()> {
    let installed = std::env::var_os("TEGULA_GLSLC").map_or_else(|| "glslc".into(), PathBuf::from);
    let fetched = cache()?.join("tools/glslc/glslc");
    if knows_all(&installed) || knows_all(&fetched) {
        return Ok(());
    }
    let folder = cache()?.join("tools");
    match fetch(&folder) {
        Ok(()) if knows_all(&fetched) => Ok(()),
        result => {
            let why = result.err().map_or_else(
                || "the one that was fetched does not run here".into(),
                |error| format!("{error:#}"),
            );
            if process::succeeds(&installed.to_string_lossy(), &["--version"]) {
                eprintln!(
                    "warning: this glslc lacks cooperative matrices or integer dot products, so the Vulkan backend is built without \
                     them; a newer one could not be fetched: {why}"
                );
                return Ok(());
            }
            bail!(
                "no shader compiler: install glslc (Debian: apt-get install glslc); fetching one failed: {why}"
            )
        }
    }
}

/// Whether a compiler runs and takes the probe.
fn knows_all(glslc: &Path) -> bool {
    let compile = || -> Result<bool> {
        let mut child = Command::new(glslc)
            .args(["-fshader-stage=compute", "--target-env=vulkan1.2", "-o", "/dev/null", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        if let Some(mut input) = child.stdin.take() {
            std::io::Write::write_all(&mut input, PROBE.as_bytes())?;
        }
        Ok(child.wait()?.success())
    };
    compile().unwrap_or(false)
}

/// Fetches the packages and puts `glslc/` below `folder`, whole or not at all.
fn fetch(folder: &Path) -> Result<()> {
    println!("fetching a newer glslc into {}", folder.display());
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let scratch = folder.join("glslc.part");
    let _ = fs::remove_dir_all(&scratch);
    fs::create_dir_all(scratch.join("lists/partial"))?;
    let apt = Apt::new(&scratch)?;
    apt.run(&["update", "--quiet"])?;
    apt.run(&[&["download"], &PACKAGES[..]].concat())?;
    for entry in fs::read_dir(&scratch)?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "deb") {
            process::run(
                process::clean("dpkg").arg("-x").arg(entry.path()).arg(scratch.join("unpacked")),
            )?;
        }
    }
    write_starter(&scratch)?;
    let whole = folder.join("glslc");
    let _ = fs::remove_dir_all(&whole);
    fs::create_dir_all(&whole)?;
    fs::rename(scratch.join("unpacked"), whole.join("unpacked"))?;
    fs::rename(scratch.join("glslc"), whole.join("glslc"))?;
    Ok(fs::remove_dir_all(&scratch)?)
}

/// The program needs its own C library, and its own loader to find it.
fn write_starter(scratch: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let libraries = fs::read_dir(scratch.join("unpacked/usr/lib"))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.ends_with("-linux-gnu"))
        .context("the packages hold no library folder")?;
    let loader = fs::read_dir(scratch.join("unpacked/usr/lib").join(&libraries))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .find(|name| name.starts_with("ld-linux"))
        .context("the packages hold no loader")?;
    let script = format!(
        "#!/bin/sh\nroot=$(dirname \"$0\")/unpacked/usr\nexec \"$root/lib/{libraries}/{loader}\" --library-path \"$root/lib/{libraries}\" \
         \"$root/bin/glslc\" \"$@\"\n"
    );
    let path = scratch.join("glslc");
    fs::write(&path, script)?;
    Ok(fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?)
}

/// apt-get with sources and lists of its own.
struct Apt<'a> {
    scratch: &'a Path,
    options: Vec<String>,
}

impl<'a> Apt<'a> {
    /// Takes the mirror that this system uses, with the newer release's name.
    fn new(scratch: &'a Path) -> Result<Self> {
        let sites = process::clean("apt-get")
            .args(["indextargets", "--format", "$(SITE) $(ORIGIN) $(CODENAME)"])
            .output()
            .context("apt-get is not here")?;
        let text = String::from_utf8_lossy(&sites.stdout).into_owned();
        let site =
            mirror(&text).context("apt knows no Debian mirror; `apt-get update` may help")?;
        let keyring = "/usr/share/keyrings/debian-archive-keyring.gpg";
        fs::write(
            scratch.join("sources.list"),
            format!("deb [signed-by={keyring}] {site} {RELEASE} main\n"),
        )?;
        let at = |name: &str| scratch.join(name).display().to_string();
        let options = vec![
            format!("-oDir::Etc::SourceList={}", at("sources.list")),
            "-oDir::Etc::SourceParts=/nonexistent".into(),
            format!("-oDir::State::Lists={}", at("lists")),
            format!("-oDir::Cache={}", at("cache")),
            // The user `_apt` may not write into this folder.
            "-oAPT::Sandbox::User=root".into(),
        ];
        Ok(Self { scratch, options })
    }

    fn run(&self, args: &[&str]) -> Result<()> {
        let mut command = process::clean("apt-get");
        command.args(&self.options).args(args).current_dir(self.scratch).stdout(Stdio::null());
        process::run(&mut command)
    }
}

/// The first site that serves a Debian release itself, not its security or backported updates.
fn mirror(targets: &str) -> Option<&str> {
    targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (site, origin, codename) = (words.next()?, words.next()?, words.next()?);
        (origin == "Debian" && !codename.contains('-')).then_some(site)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_one_of_the_release_itself() {
        let check = |targets: &str, expected: Option<&str>| assert_eq!(mirror(targets), expected);
        check("", None);
        check(
            "http://m/security Debian bookworm-security\nhttp://m/debian Debian bookworm\n",
            Some("http://m/debian"),
        );
        check("http://other/ubuntu Ubuntu noble\n", None);
    }

    #[test]
    fn what_is_no_compiler_knows_nothing() {
        assert!(!knows_all(Path::new("/no/such/glslc")));
        assert!(!knows_all(Path::new("/bin/false")));
    }
}
