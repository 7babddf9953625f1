//! Properties over random cases, with the seed printed.

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable that repeats a run.
const SEED: &str = "TEGULA_TEST_SEED";

/// Tries `cases` random cases, `full` where every case is asked for. The same commit is told the same: the cases are always the same ones, new
/// ones only where every case is asked for. `check` panics where the property does not hold; the case is made
/// smaller then, and shown with the seed.
pub fn property<S: Strategy>(
    name: &str,
    [cases, full]: [u32; 2],
    strategy: S,
    check: impl Fn(S::Value),
) where
    S::Value: Debug,
{
    let drawn = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if crate::full() { now.as_nanos() as u64 } else { 1 }
    };
    let seed = std::env::var(SEED).ok().map(|text| text.parse().expect(SEED)).unwrap_or_else(drawn);
    eprintln!("{name}: {SEED}={seed}");
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config {
        cases: if crate::full() { full } else { cases },
        // Cases load models: a failure is worth a minute of making it smaller, not an hour.
        max_shrink_iters: 64,
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&strategy, |case| {
        check(case);
        Ok::<(), TestCaseError>(())
    });
    if let Err(error) = result {
        panic!("{name}: {error}\nto repeat it: {SEED}={seed}");
    }
}
