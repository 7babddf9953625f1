//! Looks at a file as ELF before the dynamic linker does.
//!
//! `dlopen` maps what the program headers promise; a file that ends earlier kills the process with SIGBUS on the first touch of
//! a missing page. So every segment and the section headers must lie inside the file. The entry symbol is looked up as the
//! dynamic linker would, through the hash tables that PT_DYNAMIC names, so that a library that is no plugin is never opened.
//!
//! The file is read in small pieces at offsets that it states itself: every one is checked against its length, every
//! count is capped, and nothing is mapped. A file that changes between this look and `dlopen` is not defended against: who can
//! write to a plugin folder can run code in the host anyway.

mod exports;

pub use exports::exported_symbols;

use std::fs::File;
use std::os::unix::fs::FileExt;

const CLASS_64: u8 = 2;
const DATA_LITTLE: u8 = 1;
const TYPE_DYN: u16 = 3;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NEEDED: u64 = 1;
const DT_HASH: u64 = 4;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const PHDR_SIZE: usize = 56;
const SHDR_SIZE: u16 = 64;
const SYM_SIZE: u64 = 24;

/// More dynamic entries, needed libraries or symbols in one hash bucket than any linker writes; beyond them a file is damaged.
const MAX_DYNAMIC_BYTES: u64 = 1 << 16;
const MAX_NEEDED: usize = 256;
const MAX_CHAIN: u32 = 1 << 16;
/// Longest name of a needed library that is shown.
const MAX_NAME: u64 = 256;

/// `e_machine` of the machine this code runs on, where it is known.
const MACHINE: Option<u16> = if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else if cfg!(target_arch = "riscv64") {
    Some(243)
} else {
    None
};

/// Why a file is no library that this process could open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElfError {
    /// Reading failed.
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    /// Empty.
    #[error("the file is empty; copy it again")]
    Empty,
    /// Some other kind of file.
    #[error("not an ELF file")]
    NotElf,
    /// Another word size or byte order.
    #[error(
        "built for another kind of machine (class {class}, byte order {data}); this one needs 64-bit little-endian"
    )]
    Class {
        /// `EI_CLASS`.
        class: u8,
        /// `EI_DATA`.
        data: u8,
    },
    /// Another processor.
    #[error("built for processor {machine}, this one is {own}")]
    Machine {
        /// `e_machine` of the file.
        machine: u16,
        /// `e_machine` of this machine.
        own: u16,
    },
    /// A program or object file.
    #[error("not a shared library (ELF type {0})")]
    Type(u16),
    /// The file ends before something that it promises.
    #[error("truncated: {what} ends at byte {end}, the file at {len}; copy it again")]
    Truncated {
        /// What does not fit.
        what: &'static str,
        /// Where it would end.
        end: u64,
        /// Length of the file.
        len: u64,
    },
    /// It makes no sense.
    #[error("damaged: {0}")]
    Damaged(&'static str),
}

/// What the look at a file found.
#[derive(Debug)]
pub(crate) struct Elf {
    /// Whether it exports the symbol asked for.
    pub(crate) exports: bool,
    /// Libraries that it needs.
    pub(crate) needed: Vec<String>,
}

/// Checks the file, and looks for an exported symbol.
pub(crate) fn inspect(file: &File, symbol: &str) -> Result<Elf, ElfError> {
    let reader = Reader { file, len: file.metadata()?.len() };
    let header = check_header(&reader)?;
    let segments = read_segments(&reader, &header)?;
    check_sections(&reader, &header)?;
    let dynamic = read_dynamic(&reader, &segments)?;
    let exports = match (dynamic.gnu_hash, dynamic.sysv_hash) {
        (Some(table), _) => find_gnu(&reader, &dynamic, table, symbol)?,
        (None, Some(table)) => find_sysv(&reader, &dynamic, table, symbol)?,
        (None, None) => return Err(ElfError::Damaged("no table of dynamic symbols")),
    };
    let mut needed = Vec::with_capacity(dynamic.needed.len());
    for at in &dynamic.needed {
        needed.push(dynamic.string(&reader, *at)?);
    }
    Ok(Elf { exports, needed })
}

/// Reads at offsets that the file states.
struct Reader<'a> {
    file: &'a File,
    len: u64,
}

impl Reader<'_> {
    /// Whether `size` bytes at `at` lie inside the file.
    fn check(&self, what: &'static str, at: u64, size: u64) -> Result<(), ElfError> {
        let end = at.checked_add(size).ok_or(ElfError::Damaged("an offset overflows"))?;
        if end > self.len {
            return Err(ElfError::Truncated { what, end, len: self.len });
        }
        Ok(())
    }

    fn bytes<const N: usize>(&self, what: &'static str, at: u64) -> Result<[u8; N], ElfError> {
        self.check(what, at, N as u64)?;
        let mut out = [0; N];
        self.file.read_exact_at(&mut out, at)?;
        Ok(out)
    }

    /// `size` is bounded by the caller.
    fn vec(&self, what: &'static str, at: u64, size: u64) -> Result<Vec<u8>, ElfError> {
        self.check(what, at, size)?;
        let size = usize::try_from(size).map_err(|_| ElfError::Damaged("a size overflows"))?;
        let mut out = vec![0; size];
        self.file.read_exact_at(&mut out, at)?;
        Ok(out)
    }

    fn u32(&self, what: &'static str, at: u64) -> Result<u32, ElfError> {
        Ok(u32::from_le_bytes(self.bytes(what, at)?))
    }
}

/// Little-endian fields of a piece that was read whole; 0 past its end, where no caller asks.
fn u16_in(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u16::from_le_bytes(*b))
}

fn u32_in(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_in(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b))
}

struct Header {
    phoff: u64,
    phnum: u16,
    shoff: u64,
    shentsize: u16,
    shnum: u16,
}

fn check_header(reader: &Reader<'_>) -> Result<Header, ElfError> {
    if reader.len == 0 {
        return Err(ElfError::Empty);
    }
    let magic: [u8; 4] = match reader.bytes("the magic", 0) {
        Err(ElfError::Truncated { .. }) => return Err(ElfError::NotElf),
        other => other?,
    };
    if magic != *b"\x7fELF" {
        return Err(ElfError::NotElf);
    }
    let head: [u8; 64] = reader.bytes("the ELF header", 0)?;
    let (class, data) = (head[4], head[5]);
    if class != CLASS_64 || data != DATA_LITTLE {
        return Err(ElfError::Class { class, data });
    }
    let machine = u16_in(&head, 18);
    if let Some(own) = MACHINE.filter(|own| *own != machine) {
        return Err(ElfError::Machine { machine, own });
    }
    let kind = u16_in(&head, 16);
    if kind != TYPE_DYN {
        return Err(ElfError::Type(kind));
    }
    if usize::from(u16_in(&head, 54)) != PHDR_SIZE {
        return Err(ElfError::Damaged("program headers of an unknown size"));
    }
    Ok(Header {
        phoff: u64_in(&head, 32),
        phnum: u16_in(&head, 56),
        shoff: u64_in(&head, 40),
        shentsize: u16_in(&head, 58),
        shnum: u16_in(&head, 60),
    })
}

struct Segment {
    kind: u32,
    offset: u64,
    vaddr: u64,
    filesz: u64,
}

fn read_segments(reader: &Reader<'_>, header: &Header) -> Result<Vec<Segment>, ElfError> {
    let size = u64::from(header.phnum) * PHDR_SIZE as u64;
    let table = reader.vec("the program header table", header.phoff, size)?;
    let mut segments = Vec::new();
    for entry in table.chunks_exact(PHDR_SIZE) {
        let segment = Segment {
            kind: u32_in(entry, 0),
            offset: u64_in(entry, 8),
            vaddr: u64_in(entry, 16),
            filesz: u64_in(entry, 32),
        };
        if segment.kind == PT_LOAD || segment.kind == PT_DYNAMIC {
            reader.check("a segment", segment.offset, segment.filesz)?;
            if segment.kind == PT_LOAD && u64_in(entry, 40) < segment.filesz {
                return Err(ElfError::Damaged(
                    "a segment with more bytes in the file than in memory",
                ));
            }
            segments.push(segment);
        }
    }
    Ok(segments)
}

/// The section headers stand last in nearly every file, so this finds files that lost only their end.
fn check_sections(reader: &Reader<'_>, header: &Header) -> Result<(), ElfError> {
    if header.shoff == 0 {
        return Ok(());
    }
    if header.shnum > 0 && header.shentsize != SHDR_SIZE {
        return Err(ElfError::Damaged("section headers of an unknown size"));
    }
    let size = u64::from(header.shnum) * u64::from(header.shentsize);
    reader.check("the section header table", header.shoff, size)
}

/// What PT_DYNAMIC says, as offsets into the file.
struct Dynamic {
    symtab: u64,
    strtab: u64,
    strsz: u64,
    gnu_hash: Option<u64>,
    sysv_hash: Option<u64>,
    needed: Vec<u64>,
}

impl Dynamic {
    /// A string of the string table, cut at [`MAX_NAME`] bytes.
    fn string(&self, reader: &Reader<'_>, at: u64) -> Result<String, ElfError> {
        let left = self.strsz.checked_sub(at).ok_or(ElfError::Damaged("a name past the names"))?;
        let start = self.strtab.checked_add(at).ok_or(ElfError::Damaged("an offset overflows"))?;
        let bytes = reader.vec("a name", start, left.min(MAX_NAME))?;
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned())
    }

    /// Whether symbol `index` is defined here, visible outside, and called `name`.
    fn is(&self, reader: &Reader<'_>, index: u32, name: &str) -> Result<bool, ElfError> {
        let at = self
            .symtab
            .checked_add(u64::from(index) * SYM_SIZE)
            .ok_or(ElfError::Damaged("an offset overflows"))?;
        let symbol: [u8; SYM_SIZE as usize] = reader.bytes("the dynamic symbols", at)?;
        let binding = symbol[4] >> 4;
        let defined = u16_in(&symbol, 6) != 0;
        let global_or_weak = binding == 1 || binding == 2;
        Ok(defined && global_or_weak && self.string(reader, u64::from(u32_in(&symbol, 0)))? == name)
    }
}

fn read_dynamic(reader: &Reader<'_>, segments: &[Segment]) -> Result<Dynamic, ElfError> {
    let dynamic = segments
        .iter()
        .find(|s| s.kind == PT_DYNAMIC)
        .ok_or(ElfError::Damaged("no dynamic section"))?;
    let size = dynamic.filesz.min(MAX_DYNAMIC_BYTES);
    let entries = reader.vec("the dynamic section", dynamic.offset, size)?;
    let (mut symtab, mut strtab, mut strsz) = (None, None, None);
    let (mut gnu_hash, mut sysv_hash, mut needed) = (None, None, Vec::new());
    for entry in entries.chunks_exact(16) {
        let (tag, value) = (u64_in(entry, 0), u64_in(entry, 8));
        match tag {
            0 => break,
            DT_NEEDED if needed.len() < MAX_NEEDED => needed.push(value),
            DT_HASH => sysv_hash = Some(file_offset(segments, value)?),
            DT_GNU_HASH => gnu_hash = Some(file_offset(segments, value)?),
            DT_SYMTAB => symtab = Some(file_offset(segments, value)?),
            DT_STRTAB => strtab = Some(file_offset(segments, value)?),
            DT_STRSZ => strsz = Some(value),
            _ => {}
        }
    }
    let missing = ElfError::Damaged("a dynamic section without symbols");
    let (Some(symtab), Some(strtab), Some(strsz)) = (symtab, strtab, strsz) else {
        return Err(missing);
    };
    reader.check("the dynamic names", strtab, strsz)?;
    Ok(Dynamic { symtab, strtab, strsz, gnu_hash, sysv_hash, needed })
}

/// The place in the file of an address, through the segment that holds it.
fn file_offset(segments: &[Segment], vaddr: u64) -> Result<u64, ElfError> {
    segments
        .iter()
        .filter(|s| s.kind == PT_LOAD)
        .find_map(|s| {
            let inside = vaddr.checked_sub(s.vaddr).filter(|inside| *inside < s.filesz)?;
            s.offset.checked_add(inside)
        })
        .ok_or(ElfError::Damaged("a dynamic table outside every segment"))
}

/// Looks `name` up in a GNU hash table: header of four words, bloom filter of 64-bit words, buckets, chains.
fn find_gnu(
    reader: &Reader<'_>,
    dynamic: &Dynamic,
    table: u64,
    name: &str,
) -> Result<bool, ElfError> {
    const WHAT: &str = "the symbol hash table";
    let overflow = || ElfError::Damaged("an offset overflows");
    let head: [u8; 16] = reader.bytes(WHAT, table)?;
    let (n_buckets, first, n_bloom) = (u32_in(&head, 0), u32_in(&head, 4), u32_in(&head, 8));
    if n_buckets == 0 {
        return Ok(false);
    }
    let hash = name.bytes().fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(b)));
    let buckets = table.checked_add(16 + u64::from(n_bloom) * 8).ok_or_else(overflow)?;
    let chains = buckets.checked_add(u64::from(n_buckets) * 4).ok_or_else(overflow)?;
    // `buckets` did not overflow and the bucket lies before `chains`.
    let mut index = reader.u32(WHAT, buckets + u64::from(hash % n_buckets) * 4)?;
    if index < first {
        return Ok(false);
    }
    for _ in 0..MAX_CHAIN {
        let at = chains.checked_add(u64::from(index - first) * 4).ok_or_else(overflow)?;
        let chain = reader.u32(WHAT, at)?;
        if chain | 1 == hash | 1 && dynamic.is(reader, index, name)? {
            return Ok(true);
        }
        if chain & 1 == 1 {
            return Ok(false);
        }
        index = index.checked_add(1).ok_or_else(overflow)?;
    }
    Err(ElfError::Damaged("a hash chain without end"))
}

/// Looks `name` up in a System V hash table: counts of buckets and chains, buckets, chains.
fn find_sysv(
    reader: &Reader<'_>,
    dynamic: &Dynamic,
    table: u64,
    name: &str,
) -> Result<bool, ElfError> {
    const WHAT: &str = "the symbol hash table";
    let overflow = || ElfError::Damaged("an offset overflows");
    let head: [u8; 8] = reader.bytes(WHAT, table)?;
    let (n_buckets, n_chains) = (u32_in(&head, 0), u32_in(&head, 4));
    if n_buckets == 0 {
        return Ok(false);
    }
    let hash = name.bytes().fold(0u32, |h, b| {
        let h = (h << 4).wrapping_add(u32::from(b));
        (h ^ (h >> 24 & 0xf0)) & 0x0fff_ffff
    });
    let buckets = table.checked_add(8).ok_or_else(overflow)?;
    let chains = buckets.checked_add(u64::from(n_buckets) * 4).ok_or_else(overflow)?;
    let mut index = reader.u32(WHAT, buckets + u64::from(hash % n_buckets) * 4)?;
    for _ in 0..MAX_CHAIN {
        if index == 0 {
            return Ok(false);
        }
        if index >= n_chains {
            return Err(ElfError::Damaged("a hash chain past its end"));
        }
        if dynamic.is(reader, index, name)? {
            return Ok(true);
        }
        index = reader.u32(WHAT, chains.checked_add(u64::from(index) * 4).ok_or_else(overflow)?)?;
    }
    Err(ElfError::Damaged("a hash chain without end"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// A shared object with two exported functions, written by the system's compiler.
    fn library(dir: &std::path::Path, style: &str) -> Vec<u8> {
        let (source, out) = (dir.join("x.c"), dir.join("x.so"));
        std::fs::write(&source, "int one(void) { return 1; } int two(void) { return 2; }").unwrap();
        let style = format!("-Wl,--hash-style={style}");
        let mut cc = std::process::Command::new("cc");
        let status = cc.args(["-shared", "-fPIC", &style, "-o"]).arg(&out).arg(&source).status();
        assert!(status.unwrap().success());
        std::fs::read(out).unwrap()
    }

    fn inspect_bytes(bytes: &[u8], symbol: &str) -> Result<Elf, ElfError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        inspect(&file, symbol)
    }

    /// The dynamic linker's answer, from either hash table.
    #[test]
    fn finds_symbols() {
        let dir = tempfile::tempdir().unwrap();
        for style in ["gnu", "sysv"] {
            let bytes = library(dir.path(), style);
            for (symbol, exports) in [("one", true), ("two", true), ("three", false), ("", false)] {
                let elf = inspect_bytes(&bytes, symbol).unwrap();
                assert_eq!(elf.exports, exports, "{style}: {symbol}");
                assert!(elf.needed.iter().all(|n| n.contains(".so")), "{:?}", elf.needed);
            }
            let exports = exported_symbols(&dir.path().join("x.so")).unwrap();
            assert_eq!(exports, ["one", "two"], "{style}");
        }
    }

    /// A damaged file must end in an answer, never in a panic, a large allocation or a long walk.
    #[test]
    fn damage_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        for style in ["gnu", "sysv"] {
            let whole = library(dir.path(), style);
            let mut state = 0x9e37_79b9_7f4a_7c15u64;
            let mut next = |below: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state % below as u64) as usize
            };
            let mut refused = 0;
            for round in 0..3000 {
                let mut bytes = whole.clone();
                for _ in 0..=round % 4 {
                    // Half of the damage goes to the headers, where most decisions are made.
                    let at =
                        if next(2) == 0 { next(1024.min(bytes.len())) } else { next(bytes.len()) };
                    let len = 1 + next(8);
                    let value = [0, 0xff, 0x80, 1][next(4)];
                    let end = (at + len).min(bytes.len());
                    bytes[at..end].fill(value);
                }
                refused += u32::from(inspect_bytes(&bytes, "one").is_err());
                // A wrong list is all that damage may lead to.
                if round % 16 == 0 {
                    std::fs::write(dir.path().join("damaged.so"), &bytes).unwrap();
                    drop(exported_symbols(&dir.path().join("damaged.so")));
                }
            }
            assert!(refused > 300, "only {refused} of 3000 damaged files were noticed");
        }
    }
}
