//! Random bits, fast and repeatable.

/// SplitMix64: one multiplication-xor chain for each 64 bits, every seed as good as any other.
#[derive(Debug, Clone)]
pub(crate) struct Bits {
    state: u64,
}

impl Bits {
    /// Bits of one piece of one tensor.
    pub(crate) fn new(seed: u64, name: &str, piece: u64) -> Self {
        // FNV-1a over the name, so that tensors differ.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut out = Self { state: seed ^ name.rotate_left(17) };
        out.state = out.next() ^ piece;
        out
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn fill(&mut self, out: &mut [u8]) {
        let mut words = out.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = words.into_remainder();
        let last = self.next().to_le_bytes();
        rest.iter_mut().zip(last).for_each(|(to, from)| *to = from);
    }
}
