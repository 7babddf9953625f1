//! All symbols that a library exports, for its author: a plugin should export its entry symbols and nothing else, since any other
//! can be taken for another library's in a process that opens libraries less carefully than this one.

use super::{
    Dynamic, ElfError, Reader, SYM_SIZE, check_header, check_sections, read_dynamic, read_segments,
    u16_in, u32_in,
};
use std::fs::File;
use std::path::Path;

/// More symbols than any library has; beyond them a file is damaged.
const MAX_SYMBOLS: u32 = 1 << 20;
/// Names that are given; a library with more is not helped by the rest.
const MAX_EXPORTS: usize = 1000;
/// Added by some linkers to every library.
const OF_LINKERS: [&str; 5] = ["_init", "_fini", "_edata", "_end", "__bss_start"];

/// The names of the symbols that a shared library defines for others, sorted, at most 1000 of them. Those that linkers add to every
/// library are left out. The file is read and not opened as a library.
///
/// # Errors
/// The file cannot be read, or is no shared library for this machine.
pub fn exported_symbols(path: &Path) -> Result<Vec<String>, ElfError> {
    let file = File::open(path)?;
    let reader = Reader { len: file.metadata()?.len(), file: &file };
    let header = check_header(&reader)?;
    let segments = read_segments(&reader, &header)?;
    check_sections(&reader, &header)?;
    let dynamic = read_dynamic(&reader, &segments)?;
    let mut out = Vec::new();
    for index in 1..n_symbols(&reader, &dynamic)? {
        let at = dynamic.symtab.checked_add(u64::from(index) * SYM_SIZE);
        let at = at.ok_or(ElfError::Damaged("an offset overflows"))?;
        let symbol: [u8; SYM_SIZE as usize] = reader.bytes("the dynamic symbols", at)?;
        let (binding, visibility) = (symbol[4] >> 4, symbol[5] & 3);
        let is_defined = u16_in(&symbol, 6) != 0;
        // Global, weak or unique, with default or protected visibility.
        if is_defined && matches!(binding, 1 | 2 | 10) && matches!(visibility, 0 | 3) {
            let name = dynamic.string(&reader, u64::from(u32_in(&symbol, 0)))?;
            if !OF_LINKERS.contains(&name.as_str()) {
                out.push(name);
            }
            if out.len() == MAX_EXPORTS {
                break;
            }
        }
    }
    out.sort();
    out.dedup();
    Ok(out)
}

/// Number of dynamic symbols. The System V table states it; the GNU table ends with the last chain of its greatest bucket, and
/// holds every symbol that is defined.
fn n_symbols(reader: &Reader<'_>, dynamic: &Dynamic) -> Result<u32, ElfError> {
    const WHAT: &str = "the symbol hash table";
    let overflow = || ElfError::Damaged("an offset overflows");
    if let Some(table) = dynamic.sysv_hash {
        let n = reader.u32(WHAT, table.checked_add(4).ok_or_else(overflow)?)?;
        return if n > MAX_SYMBOLS { Err(ElfError::Damaged("too many symbols")) } else { Ok(n) };
    }
    let table = dynamic.gnu_hash.ok_or(ElfError::Damaged("no table of dynamic symbols"))?;
    let head: [u8; 16] = reader.bytes(WHAT, table)?;
    let (n_buckets, first, n_bloom) = (u32_in(&head, 0), u32_in(&head, 4), u32_in(&head, 8));
    if n_buckets > MAX_SYMBOLS {
        return Err(ElfError::Damaged("too many symbols"));
    }
    let buckets = table.checked_add(16 + u64::from(n_bloom) * 8).ok_or_else(overflow)?;
    let bytes = reader.vec(WHAT, buckets, u64::from(n_buckets) * 4)?;
    let greatest = bytes.chunks_exact(4).map(|bucket| u32_in(bucket, 0)).max().unwrap_or(0);
    if greatest < first || greatest == 0 {
        return Ok(0);
    }
    let chains = buckets.checked_add(u64::from(n_buckets) * 4).ok_or_else(overflow)?;
    for index in greatest..greatest.saturating_add(MAX_SYMBOLS) {
        let at = chains.checked_add(u64::from(index - first) * 4).ok_or_else(overflow)?;
        if reader.u32(WHAT, at)? & 1 == 1 {
            return index.checked_add(1).ok_or_else(overflow);
        }
    }
    Err(ElfError::Damaged("a hash chain without end"))
}
