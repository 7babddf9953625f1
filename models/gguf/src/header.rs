//! The first 24 bytes: magic, version and counts; and the names of what people mistake for GGUF.

use std::io::Read;

use crate::GgufError;
use crate::metadata::KV_BYTES_MIN;
use crate::reader::{ByteReader, Field};
use crate::tensor_info::ENTRY_BYTES_MIN;

/// The four bytes every GGUF file begins with, in either byte order.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// The counts of a header, which the file and the limits allow.
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) n_tensors: u64,
    pub(crate) n_kv: u64,
}

impl Header {
    /// Reads the header. `peek` are the first bytes of the file, for the message if it is something else.
    pub(crate) fn read<R: Read>(
        reader: &mut ByteReader<'_, R>,
        peek: &[u8],
    ) -> Result<Header, GgufError> {
        let file = reader.file();
        if peek.is_empty() {
            return Err(GgufError::Empty { file: file.to_owned() });
        }
        if !peek.iter().zip(&MAGIC).all(|(got, wanted)| got == wanted) {
            let begins = peek.get(..peek.len().min(8)).unwrap_or_default();
            let (begins, hint) = (begins.escape_ascii().to_string(), hint(peek));
            return Err(GgufError::NotGguf { file: file.to_owned(), begins, hint });
        }
        reader.fixed::<4>(Field::Header("the magic"))?;
        let version = reader.u32(Field::Header("the version"))?;
        check_version(reader, version)?;
        let tensors = Field::Header("the number of tensors");
        let n_tensors = reader.u64(tensors)?;
        reader.need(n_tensors, ENTRY_BYTES_MIN, tensors)?;
        reader.cap(
            n_tensors,
            reader.limits().n_tensors_max,
            "tensors",
            "n_tensors_max",
            tensors,
        )?;
        let keys = Field::Header("the number of metadata keys");
        let n_kv = reader.u64(keys)?;
        reader.need(n_kv, KV_BYTES_MIN, keys)?;
        reader.cap(n_kv, reader.limits().n_kv_max, "keys", "n_kv_max", keys)?;
        Ok(Header { version, n_tensors, n_kv })
    }
}

fn check_version<R: Read>(reader: &ByteReader<'_, R>, version: u32) -> Result<(), GgufError> {
    let file = || reader.file().to_owned();
    match version {
        2 | 3 => Ok(()),
        1 => {
            let hint = "; convert the model again, version 1 was replaced in August 2023";
            Err(GgufError::UnsupportedVersion { file: file(), version, hint })
        }
        // Real versions are small, so an empty low half means that the bytes are the other way round.
        _ if version != 0 && version & 0xffff == 0 => {
            Err(GgufError::BigEndian { file: file(), version: version.swap_bytes() })
        }
        _ => {
            let hint = "; the file is newer than this program, or corrupt";
            Err(GgufError::UnsupportedVersion { file: file(), version, hint })
        }
    }
}

/// What a file that is not GGUF seems to be, as the end of a sentence.
fn hint(peek: &[u8]) -> &'static str {
    const KNOWN: [(&[u8], &str); 15] = [
        (b"PK\x03\x04", "; it is a zip file, perhaps PyTorch weights, which must be converted"),
        (
            b"version https://git-lfs",
            "; it is a Git LFS pointer: run `git lfs pull` to get the model",
        ),
        (b"lmgg", "; it is a ggml file from before GGUF, which must be converted"),
        (b"fmgg", "; it is a ggmf file from before GGUF, which must be converted"),
        (b"tjgg", "; it is a ggjt file from before GGUF, which must be converted"),
        (b"algg", "; it is a ggla adapter from before GGUF, which must be converted"),
        (b"\x80\x02", "; it is a Python pickle, which must be converted"),
        (b"\x89HDF", "; it is an HDF5 file, which must be converted"),
        (b"\x1f\x8b", "; it is gzip: decompress it first"),
        (b"\x28\xb5\x2f\xfd", "; it is zstd: decompress it first"),
        (b"7z\xbc\xaf", "; it is a 7z archive: unpack it first"),
        (b"\x7fELF", "; it is a program or library"),
        (b"{", "; it looks like JSON, not like weights"),
        (b"<", "; it looks like a web page: the download saved an error or log-in page"),
        (b"\0\0\0\0", "; it begins with zeros: the download is probably unfinished"),
    ];
    if is_safetensors(peek) {
        return "; it is a safetensors file, which must be converted";
    }
    let trimmed = peek.trim_ascii_start();
    let known =
        KNOWN.iter().find(|(magic, _)| peek.starts_with(magic) || trimmed.starts_with(magic));
    known.map_or("", |(_, hint)| hint)
}

/// safetensors: the length of a JSON header in 8 bytes, at most 100 MB, then the JSON.
fn is_safetensors(peek: &[u8]) -> bool {
    let Some((len, json)) = peek.split_first_chunk::<8>() else { return false };
    u64::from_le_bytes(*len) <= 100_000_000 && json.starts_with(b"{")
}
