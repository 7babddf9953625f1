//! What a user would lose: a wrong answer (tasks skipped or run twice), a hang, or a process ended by a panic.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::*;

/// Every task runs exactly once, and a worker number is never in use twice at the same time.
fn check(pool: &Pool, n_tasks: usize) {
    let runs: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
    let busy: Vec<AtomicUsize> = (0..pool.n_threads()).map(|_| AtomicUsize::new(0)).collect();
    pool.run(n_tasks, |worker, task| {
        assert_eq!(busy[worker].fetch_add(1, Relaxed), 0);
        runs[task].fetch_add(1, Relaxed);
        busy[worker].fetch_sub(1, Relaxed);
    })
    .unwrap();
    assert!(runs.iter().all(|r| r.load(Relaxed) == 1), "{n_tasks} tasks");
}

#[test]
fn every_task_runs_once() {
    for n_threads in [1, 2, 3, 8] {
        let pool = Pool::new(n_threads).unwrap();
        assert_eq!(pool.n_threads(), n_threads);
        for round in 0..300 {
            check(&pool, round % 37);
        }
    }
}

#[test]
fn sleeping_workers_wake_up() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        check(&pool, 11);
    }
}

#[test]
fn a_run_does_not_wait_for_workers_that_have_no_task() {
    let pool = Pool::new(2).unwrap();
    let other = AtomicUsize::new(0);
    // One task sleeps; the others must all be done meanwhile by whoever is free.
    let start = Instant::now();
    pool.run(9, |_, task| {
        if task == 0 {
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(other.load(Relaxed), 8, "tasks waited behind a slow one");
        } else {
            other.fetch_add(1, Relaxed);
        }
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_panic_is_an_error_and_the_pool_stays_usable() {
    for n_threads in [1, 3] {
        let pool = Pool::new(n_threads).unwrap();
        for _ in 0..5 {
            let error = pool.run(8, |_, task| assert!(task != 5, "task five")).unwrap_err();
            assert!(error.to_string().contains("task five"), "{error}");
            check(&pool, 20);
        }
    }
}

#[test]
fn nested_and_concurrent_runs_finish() {
    let pool = Pool::new(3).unwrap();
    let count = AtomicUsize::new(0);
    pool.run(4, |worker, _| {
        pool.run(5, |inner, _| {
            assert_eq!(inner, worker);
            count.fetch_add(1, Relaxed);
        })
        .unwrap();
    })
    .unwrap();
    assert_eq!(count.load(Relaxed), 20);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    check(&pool, 7);
                }
            });
        }
    });
}

#[test]
fn the_default_is_a_number_that_can_run() {
    let n = default_threads();
    assert!(n >= 1 && n <= std::thread::available_parallelism().unwrap().get());
}
