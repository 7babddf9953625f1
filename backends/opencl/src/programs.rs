//! Programs: which sources and options each is made of, built once for a device, and kept on disk.
//!
//! Sources are cut by purpose, so that a model builds what it runs and no more. A binary on disk is named by a hash of everything it depends
//! on (platform, device, driver, source, options) and starts with a checksum: a file that is cut or changed, or that the
//! driver no longer takes, is built again. `TEGULA_OPENCL_CACHE` names another folder, or `off`.

use crate::cl::{Kernel, Program};
use crate::context::Shared;
use crate::facts::Facts;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tegula_sdk::Result;

/// The first bytes of a stored binary; changes with the format of the file.
const MAGIC: &[u8; 8] = b"TGLCLB01";
/// Bytes before the binary: magic and checksum.
const HEADER: usize = 8 + 32;

/// A program: its sources in order, and the macros they are compiled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    pub(crate) files: &'static [&'static str],
    /// Text made at run time, before the files: tables.
    pub(crate) prelude: String,
    /// `-D` options, in order.
    pub(crate) defines: Vec<(&'static str, u64)>,
}

impl Source {
    pub(crate) fn new(files: &'static [&'static str], defines: &[(&'static str, u64)]) -> Self {
        Self { files, prelude: String::new(), defines: defines.to_vec() }
    }

    fn text(&self) -> String {
        let mut text = self.prelude.clone();
        for file in self.files {
            text.push_str(file);
        }
        text
    }
}

/// The files.
pub(crate) mod file {
    pub(crate) const COMMON: &str = include_str!("kernels/common.cl");
    pub(crate) const ELEMENTWISE: &str = include_str!("kernels/elementwise.cl");
    pub(crate) const NORM: &str = include_str!("kernels/norm.cl");
    pub(crate) const ROPE: &str = include_str!("kernels/rope.cl");
    pub(crate) const RANK: &str = include_str!("kernels/rank.cl");
    pub(crate) const WEIGHTS: &str = include_str!("kernels/weights.cl");
    pub(crate) const EMBED: &str = include_str!("kernels/embed.cl");
    pub(crate) const EXPERTS: &str = include_str!("kernels/experts.cl");
    pub(crate) const ROUTER: &str = include_str!("kernels/router.cl");
    pub(crate) const STATE: &str = include_str!("kernels/state.cl");
    pub(crate) const TEAM: &str = include_str!("kernels/team.cl");
    pub(crate) const MATVEC_GPU: &str = include_str!("kernels/matvec_gpu.cl");
    pub(crate) const MATMUL_GPU: &str = include_str!("kernels/matmul_gpu.cl");
    pub(crate) const MATMUL_CPU: &str = include_str!("kernels/matmul_cpu.cl");
    pub(crate) const KV: &str = include_str!("kernels/kv.cl");
    pub(crate) const KV_STORE: &str = include_str!("kernels/kv_store.cl");
    pub(crate) const ATTENTION: &str = include_str!("kernels/attention.cl");
    pub(crate) const ATTENTION_CPU: &str = include_str!("kernels/attention_cpu.cl");
    pub(crate) const COMBINE: &str = include_str!("kernels/combine.cl");
}

/// The programs of an open device.
#[derive(Debug)]
pub(crate) struct Programs {
    built: Mutex<HashMap<Source, Arc<Program>>>,
    folder: Option<PathBuf>,
    /// Options that every program of the device has.
    options: String,
}

impl Programs {
    pub(crate) fn new(facts: &Facts) -> Self {
        let mut options = String::new();
        if facts.has_subgroups {
            options.push_str("-cl-std=CL3.0 -DSUBGROUPS=1 ");
        } else {
            options.push_str("-cl-std=CL1.2 ");
        }
        if facts.has_fp16 {
            options.push_str("-DFP16=1 ");
        }
        Self { built: Mutex::default(), folder: folder(), options }
    }

    /// A kernel with arguments of its own.
    pub(crate) fn kernel(&self, shared: &Shared, source: &Source, name: &str) -> Result<Kernel> {
        self.get(shared, source)?.kernel(name)
    }

    fn get(&self, shared: &Shared, source: &Source) -> Result<Arc<Program>> {
        // Held while building: two threads that want the same program build it once.
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = built.get(source) {
            return Ok(program.clone());
        }
        let program = Arc::new(self.make(shared, source)?);
        built.insert(source.clone(), program.clone());
        Ok(program)
    }

    fn make(&self, shared: &Shared, source: &Source) -> Result<Program> {
        let text = source.text();
        let mut options = self.options.clone();
        for (name, value) in &source.defines {
            options.push_str(&format!("-D{name}={value} "));
        }
        let mut hash = Sha256::new();
        for part in [shared.facts.build_key.as_bytes(), options.as_bytes(), text.as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{name}.bin")));
        if let Some(binary) = path.as_deref().and_then(load) {
            let program = shared.context.program_of_binary(shared.facts.id, &binary);
            let built = program.and_then(|program| {
                program.build(shared.facts.id, &options)?;
                Ok(program)
            });
            match built {
                Ok(program) => return Ok(program),
                Err(error) => log::debug!("a stored program is built again: {}", error.message),
            }
        }
        let begin = std::time::Instant::now();
        let program = shared.context.program(&text)?;
        program.build(shared.facts.id, &options)?;
        log::debug!("built in {:.2?}: {options}", begin.elapsed());
        if let Some(path) = path {
            // A cache that cannot be written costs time, nothing else.
            if let Err(error) = program.binary().map_err(|e| e.to_string()).and_then(|binary| {
                store(&path, &binary).map_err(|e| format!("{}: {e}", path.display()))
            }) {
                log::debug!("a built program is not kept: {error}");
            }
        }
        Ok(program)
    }
}

/// `$XDG_CACHE_HOME/tegula/opencl`, or that of `~/.cache`; `None` where neither variable is set or the cache is off.
fn folder() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("TEGULA_OPENCL_CACHE") {
        return (named != "off" && !named.is_empty()).then(|| named.into());
    }
    let absolute =
        |name: &str| Some(PathBuf::from(std::env::var_os(name)?)).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("tegula").join("opencl"))
}

/// A stored binary whose checksum holds.
fn load(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (header, binary) = bytes.split_at_checked(HEADER)?;
    let (magic, sum) = header.split_at_checked(MAGIC.len())?;
    let holds = magic == MAGIC && sum == Sha256::digest(binary).as_slice();
    if !holds {
        log::debug!("{} is damaged", path.display());
    }
    holds.then(|| binary.to_vec())
}

/// Writes beside the place and renames, so that nobody reads half of it.
fn store(path: &Path, binary: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let sum = Sha256::digest(binary);
    std::fs::write(&temporary, [&MAGIC[..], sum.as_slice(), binary].concat())?;
    std::fs::rename(&temporary, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// A damaged file must be built again, never be handed to a driver.
    #[test]
    fn stored_binaries_are_whole_or_nothing() {
        let folder = std::env::temp_dir().join(format!("tegula-opencl-{}", std::process::id()));
        let path = folder.join("a.bin");
        store(&path, b"binary").unwrap();
        assert_eq!(load(&path).unwrap(), b"binary");
        let whole = std::fs::read(&path).unwrap();
        for at in [0, 8, HEADER, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(load(&path), None, "byte {at}");
            std::fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(load(&path), None, "cut at {at}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
