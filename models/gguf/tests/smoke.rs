//! A short fuzz run without a fuzzer, for machines that have none: seeded mutations of valid files, and proptest's
//! random bytes. A panic on a file is a host application taken down by that file.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
#[path = "../fuzz/exercise.rs"]
mod exercise;

use std::time::{Duration, Instant};

use common::sample;
use exercise::exercise;
use proptest::prelude::*;
use tegula_gguf::GgufFile;

/// xorshift64*: any generator will do, as long as a failing seed can be run again.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at the edges of what sizes and counts can be.
const EDGES: [u64; 12] =
    [0, 1, 2, 31, 32, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 61, 1 << 63, u64::MAX - 31, u64::MAX];

/// One change of the kind that finds faults in parsers of binary files.
fn mutate(bytes: &mut Vec<u8>, header: usize, rng: &mut Rng) {
    let at = rng.below(header.min(bytes.len()));
    match rng.below(6) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
        }
        1 => bytes.truncate(rng.below(bytes.len() + 1)),
        2 => drop(bytes.drain(at..(at + rng.below(16)).min(bytes.len()))),
        3 => {
            let end = (at + rng.below(64)).min(bytes.len());
            let copy = bytes.get(at..end).unwrap_or_default().to_vec();
            let to = rng.below(bytes.len());
            bytes.splice(to..to, copy);
        }
        kind => {
            let edge = EDGES[rng.below(EDGES.len())].to_le_bytes();
            let n = if kind == 4 { 4 } else { 8 };
            for (to, from) in bytes.iter_mut().skip(at).zip(edge).take(n) {
                *to = from;
            }
        }
    }
}

#[test]
fn mutated_files_never_panic() {
    let seconds = std::env::var("TEGULA_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let deadline = Instant::now() + Duration::from_secs(seconds.unwrap_or(3));
    let seeds: Vec<(Vec<u8>, usize)> = [sample(), sample().version(2), sample().alignment(64)]
        .iter()
        .map(|writer| {
            let bytes = writer.to_bytes().unwrap();
            let header = GgufFile::parse(&bytes, "x").unwrap().header_bytes() as usize;
            (bytes, header)
        })
        .collect();
    let (mut opened, mut refused) = (0u64, 0u64);
    for seed in 1.. {
        if Instant::now() > deadline {
            break;
        }
        let mut rng = Rng(seed);
        let (bytes, header) = &seeds[rng.below(seeds.len())];
        let mut bytes = bytes.clone();
        for _ in 0..=rng.below(3) {
            mutate(&mut bytes, *header, &mut rng);
        }
        let result = std::panic::catch_unwind(|| exercise(&bytes));
        match result {
            Ok(true) => opened += 1,
            Ok(false) => refused += 1,
            Err(_) => unreachable!("seed {seed} panicked; its {} bytes: {bytes:?}", bytes.len()),
        }
    }
    eprintln!("{opened} mutated files opened, {refused} refused");
    assert!(opened > 100 && refused > 100, "mutations are too mild or too wild");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn random_bytes_never_panic(bytes in any::<Vec<u8>>()) {
        exercise(&bytes);
    }

    #[test]
    fn random_bytes_after_a_header_never_panic(
        n_tensors in 0u64..4,
        n_kv in 0u64..4,
        rest in prop::collection::vec(any::<u8>(), 0..512),
    ) {
        exercise(&common::Raw::new(n_tensors, n_kv).bytes(&rest).0);
    }

    #[test]
    fn random_bytes_inside_a_valid_file_never_panic(
        at in any::<prop::sample::Index>(),
        patch in prop::collection::vec(any::<u8>(), 1..24),
    ) {
        let mut bytes = sample().to_bytes().unwrap();
        let at = at.index(bytes.len());
        bytes.iter_mut().skip(at).zip(&patch).for_each(|(to, from)| *to = *from);
        exercise(&bytes);
    }
}
