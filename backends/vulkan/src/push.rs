//! Push constants, in the order that a kernel declares them.

use crate::pipelines::PUSH_BYTES;

/// Bytes of push constants being filled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Push {
    bytes: [u8; PUSH_BYTES as usize],
    len: usize,
}

impl Push {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; PUSH_BYTES as usize], len: 0 }
    }

    fn put<const N: usize>(mut self, bytes: [u8; N]) -> Self {
        debug_assert!(self.len.is_multiple_of(N), "a kernel's push constants have no gaps");
        if let Some(to) = self.bytes.get_mut(self.len..).and_then(|rest| rest.first_chunk_mut()) {
            *to = bytes;
            self.len += N;
        }
        self
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.put(value.to_ne_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.put(value.to_ne_bytes())
    }

    pub(crate) fn f32(self, value: f32) -> Self {
        self.put(value.to_ne_bytes())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}
