//! The driver's pipeline cache in a file of the user's cache folder, one for each device and driver.
//!
//! A file is used only if its checksum holds and its header names this very device and driver: drivers have crashed on less. Whatever
//! is wrong with it is said at debug level and the file is written anew.

use crate::physical::Physical;
use std::io::Write;
use std::path::PathBuf;

const MAGIC: &[u8; 8] = b"tglvkpc1";
/// More than any driver's cache of a few hundred kernels.
const BYTES_MAX: u64 = 256 << 20;

fn path(physical: &Physical) -> Option<PathBuf> {
    // A relative path would put the file wherever the process happens to be.
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    let uuid: String = physical.cache_uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!(
        "vulkan-{:04x}-{:04x}-{:08x}-{uuid}.bin",
        physical.vendor_id, physical.device_id, physical.driver_version
    );
    Some(base.join("tegula").join("pipelines").join(name))
}

/// FNV-1a over words: enough to see a torn or damaged file.
fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let step =
        |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    let hash = words
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, word| step(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(hash ^ bytes.len() as u64, |hash, byte| step(hash, u64::from(*byte)))
}

/// The cache's bytes, if there are any that may be used.
pub(crate) fn read(physical: &Physical) -> Option<Vec<u8>> {
    let path = path(physical)?;
    let meta = std::fs::metadata(&path).ok()?;
    if meta.len() > BYTES_MAX {
        return None;
    }
    let file = std::fs::read(&path).ok()?;
    match check(&file, physical) {
        Ok(bytes) => Some(bytes.to_vec()),
        Err(why) => {
            log::debug!("{}: {why}; pipelines are made anew", path.display());
            None
        }
    }
}

fn check<'a>(file: &'a [u8], physical: &Physical) -> Result<&'a [u8], &'static str> {
    let (head, bytes) = file.split_first_chunk::<16>().ok_or("too short")?;
    let (magic, sum) = head.split_at(8);
    if magic != MAGIC {
        return Err("not a pipeline cache");
    }
    if sum != checksum(bytes).to_le_bytes() {
        return Err("damaged");
    }
    // The driver's own header: length, version, vendor, device, UUID.
    let word = |at: usize| {
        bytes.get(at..).and_then(|rest| rest.first_chunk()).map(|word| u32::from_le_bytes(*word))
    };
    let is_ours = word(4) == Some(1)
        && word(8) == Some(physical.vendor_id)
        && word(12) == Some(physical.device_id)
        && bytes.get(16..32) == Some(&physical.cache_uuid[..]);
    if is_ours { Ok(bytes) } else { Err("of another driver") }
}

/// Writes beside and renames, so that no reader sees half a file.
pub(crate) fn write(physical: &Physical, bytes: &[u8]) {
    let Some(path) = path(physical) else { return };
    let result = (|| -> std::io::Result<()> {
        let folder = path.parent().ok_or(std::io::ErrorKind::NotFound)?;
        std::fs::create_dir_all(folder)?;
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let mut file = std::fs::File::create(&part)?;
        file.write_all(MAGIC)?;
        file.write_all(&checksum(bytes).to_le_bytes())?;
        file.write_all(bytes)?;
        drop(file);
        std::fs::rename(part, &path)
    })();
    if let Err(error) = result {
        log::debug!("{}: {error}", path.display());
    }
}
