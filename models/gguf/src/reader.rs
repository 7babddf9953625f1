//! [`ByteReader`]: sequential reads that know how much is left.
//!
//! Its own buffer rather than `BufReader`, because each read needs the file offset for errors, the bytes left in the
//! file and the header budget, and because array elements are converted in bulk straight from the buffer: a vocabulary
//! of 262,144 strings is opened in milliseconds.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use crate::error::clip;
use crate::{GgufError, Limits};

const BUFFER_BYTES: u64 = 256 << 10;

/// What is being read; formatted only when there is an error to report.
#[derive(Clone, Copy)]
pub(crate) enum Field<'a> {
    /// A field of the header.
    Header(&'static str),
    /// The name of the n-th metadata key.
    Key(u64),
    /// A part of the value of a key.
    Value(&'a str, &'static str),
    /// An element of the array at a key.
    Element(&'a str, u64),
    /// The name of the n-th tensor.
    TensorName(u64),
    /// A part of a tensor's entry.
    Tensor(&'a str, &'static str),
}

impl fmt::Display for Field<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Field::Header(name) => f.write_str(name),
            Field::Key(index) => write!(f, "metadata key number {index}"),
            Field::Value(key, part) => write!(f, "{part} of the key {:?}", clip(key)),
            Field::Element(key, index) => write!(f, "element {index} of the key {:?}", clip(key)),
            Field::TensorName(index) => write!(f, "name of tensor number {index}"),
            Field::Tensor(name, part) => write!(f, "{part} of the tensor {:?}", clip(name)),
        }
    }
}

/// A reader of little-endian fields from `source`, which begins at offset 0 and has `file_len` bytes.
pub(crate) struct ByteReader<'f, R> {
    source: R,
    file: &'f Path,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    offset: u64,
    file_len: u64,
    limits: Limits,
}

impl<'f, R: Read> ByteReader<'f, R> {
    pub(crate) fn new(source: R, file: &'f Path, file_len: u64, limits: &Limits) -> Self {
        let buffer_len = file_len.clamp(16, BUFFER_BYTES) as usize;
        ByteReader {
            source,
            file,
            buffer: vec![0; buffer_len].into_boxed_slice(),
            start: 0,
            end: 0,
            offset: 0,
            file_len,
            limits: *limits,
        }
    }

    pub(crate) fn file(&self) -> &'f Path {
        self.file
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Offset in the file of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes between the next one and the end of the file.
    pub(crate) fn left(&self) -> u64 {
        self.file_len.saturating_sub(self.offset)
    }

    /// Checks that `count` items of at least `item_bytes` can still follow, in the file and in the header budget.
    #[inline]
    pub(crate) fn need(
        &self,
        count: u64,
        item_bytes: u64,
        field: Field<'_>,
    ) -> Result<(), GgufError> {
        let left = self.left().min(self.limits.header_bytes_max.saturating_sub(self.offset));
        match count.checked_mul(item_bytes) {
            Some(needed) if needed <= left => Ok(()),
            _ => Err(self.lack(u128::from(count) * u128::from(item_bytes), field)),
        }
    }

    /// Which of the two has fewer than `needed` bytes left.
    #[cold]
    fn lack(&self, needed: u128, field: Field<'_>) -> GgufError {
        if needed > u128::from(self.left()) {
            return self.truncated(needed, self.left(), field);
        }
        let asked = u128::from(self.offset) + needed;
        GgufError::LimitExceeded {
            file: self.file.to_owned(),
            field: field.to_string(),
            offset: self.offset,
            // The sum is at most the length of the file, which has 64 bits.
            asked: u64::try_from(asked).unwrap_or(u64::MAX),
            allowed: self.limits.header_bytes_max,
            unit: "bytes of header",
            limit: "header_bytes_max",
        }
    }

    /// Checks a count against one of the limits.
    pub(crate) fn cap(
        &self,
        asked: u64,
        allowed: u64,
        unit: &'static str,
        limit: &'static str,
        field: Field<'_>,
    ) -> Result<(), GgufError> {
        if asked <= allowed {
            return Ok(());
        }
        let (file, field, offset) = (self.file.to_owned(), field.to_string(), self.offset);
        Err(GgufError::LimitExceeded { file, field, offset, asked, allowed, unit, limit })
    }

    #[cold]
    fn truncated(&self, needed: u128, left: u64, field: Field<'_>) -> GgufError {
        let (file, field, offset) = (self.file.to_owned(), field.to_string(), self.offset);
        GgufError::Truncated { file, field, offset, needed, left }
    }

    fn buffered(&self) -> &[u8] {
        self.buffer.get(self.start..self.end).unwrap_or_default()
    }

    fn consume(&mut self, n: usize) {
        self.start += n;
        self.offset += n as u64;
    }

    /// Refills the empty buffer. A file that became shorter while it is read is truncated.
    fn refill(&mut self, field: Field<'_>) -> Result<(), GgufError> {
        self.start = 0;
        self.end = 0;
        loop {
            match self.source.read(&mut self.buffer) {
                Ok(0) => return Err(self.truncated(1, 0, field)),
                Ok(n) => {
                    self.end = n.min(self.buffer.len());
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => {
                    return Err(GgufError::Io {
                        file: self.file.to_owned(),
                        action: "read",
                        cause,
                    });
                }
            }
        }
    }

    /// The next `N` bytes; every fixed-size field comes through here.
    #[inline]
    pub(crate) fn fixed<const N: usize>(&mut self, field: Field<'_>) -> Result<[u8; N], GgufError> {
        self.need(1, N as u64, field)?;
        if let Some(bytes) = self.buffered().first_chunk::<N>().copied() {
            self.consume(N);
            return Ok(bytes);
        }
        let mut bytes = [0; N];
        let mut rest = bytes.as_mut_slice();
        while !rest.is_empty() {
            if self.buffered().is_empty() {
                self.refill(field)?;
            }
            let n = self.buffered().len().min(rest.len());
            let (now, later) = rest.split_at_mut(n);
            for (to, from) in now.iter_mut().zip(self.buffered()) {
                *to = *from;
            }
            self.consume(n);
            rest = later;
        }
        Ok(bytes)
    }

    pub(crate) fn u32(&mut self, field: Field<'_>) -> Result<u32, GgufError> {
        self.fixed(field).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, field: Field<'_>) -> Result<u64, GgufError> {
        self.fixed(field).map(u64::from_le_bytes)
    }

    /// Appends the next `n` bytes to `out`. The caller has capped `n`.
    pub(crate) fn append(
        &mut self,
        n: u64,
        out: &mut Vec<u8>,
        field: Field<'_>,
    ) -> Result<(), GgufError> {
        self.need(n, 1, field)?;
        let mut rest = self.in_memory(n, field)?;
        out.try_reserve(rest).map_err(|_| self.out_of_memory(n, field))?;
        while rest > 0 {
            if self.buffered().is_empty() {
                self.refill(field)?;
            }
            let n = self.buffered().len().min(rest);
            out.extend_from_slice(self.buffered().get(..n).unwrap_or_default());
            self.consume(n);
            rest -= n;
        }
        Ok(())
    }

    /// The next `count` numbers of `N` bytes each. The caller has capped `count`.
    pub(crate) fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        convert: fn([u8; N]) -> T,
        field: Field<'_>,
    ) -> Result<Vec<T>, GgufError> {
        self.need(count, N as u64, field)?;
        let mut out = self.reserved(count, field)?;
        let count = self.in_memory(count, field)?;
        while out.len() < count {
            let (whole, _) = self.buffered().as_chunks::<N>();
            let n = whole.len().min(count - out.len());
            if n == 0 {
                // The element straddles the end of the buffer.
                out.push(convert(self.fixed(field)?));
                continue;
            }
            out.extend(whole.iter().take(n).map(|bytes| convert(*bytes)));
            self.consume(n * N);
        }
        Ok(out)
    }

    /// An empty list with room for `count` items, whose bytes the caller has checked.
    pub(crate) fn reserved<T>(&self, count: u64, field: Field<'_>) -> Result<Vec<T>, GgufError> {
        let mut out = Vec::new();
        let asked = count.saturating_mul(size_of::<T>() as u64);
        let count = self.in_memory(count, field)?;
        out.try_reserve_exact(count).map_err(|_| self.out_of_memory(asked, field))?;
        Ok(out)
    }

    fn in_memory(&self, n: u64, field: Field<'_>) -> Result<usize, GgufError> {
        usize::try_from(n).map_err(|_| self.out_of_memory(n, field))
    }

    pub(crate) fn out_of_memory(&self, asked: u64, field: Field<'_>) -> GgufError {
        GgufError::OutOfMemory { file: self.file.to_owned(), field: field.to_string(), asked }
    }
}
