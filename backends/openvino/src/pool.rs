//! A few threads for the work between models.
//!
//! OpenVINO's own threads sleep meanwhile. Tasks are numbered and taken from one counter, so a thread that the system has taken off its
//! core delays one task and no barrier. The caller works along.

#![expect(unsafe_code, reason = "threads that outlive a call work on what the call borrows")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

type Task = dyn Fn(usize) + Sync;

/// A job as workers see it.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task,
    n_tasks: usize,
}

// SAFETY: the task is `Sync`, and `Pool::run` keeps it alive until no worker uses it.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Grows with every job, so that a worker takes each once.
    generation: u64,
    working: usize,
    panicked: bool,
    ends: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    done: Condvar,
    next: AtomicUsize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads that wait for jobs.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// One job at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// `n` threads work on a job, the caller among them.
    pub(crate) fn new(n: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut pool = Self { shared, threads: Vec::new(), turn: Mutex::new(()) };
        for i in 1..n {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("tegula-openvino-{i}"));
            pool.threads.push(builder.spawn(move || work(&shared))?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Does tasks `0 .. n_tasks` and waits for all. Panics if one of them did.
    pub(crate) fn run(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || n_tasks < 2 {
            (0..n_tasks).for_each(task);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is dropped; the loop below waits until no worker holds the job.
        let task_ptr =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Task>(task) };
        self.shared.next.store(0, Ordering::Relaxed);
        {
            let mut state = self.shared.lock();
            state.job = Some(Job { task: task_ptr, n_tasks });
            state.generation += 1;
            state.panicked = false;
        }
        self.shared.wake.notify_all();
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            take(&self.shared.next, n_tasks, task);
        }));
        let mut state = self.shared.lock();
        state.job = None;
        while state.working > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let panicked = state.panicked;
        drop(state);
        if let Err(payload) = own {
            std::panic::resume_unwind(payload);
        }
        assert!(!panicked, "a thread of the pool panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // Workers catch what their tasks panic with; nothing is left to report.
            let _ = thread.join();
        }
    }
}

fn take(next: &AtomicUsize, n_tasks: usize, task: &dyn Fn(usize)) {
    loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        if i >= n_tasks {
            return;
        }
        task(i);
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    let mut state = shared.lock();
    loop {
        if state.ends {
            return;
        }
        match state.job {
            Some(job) if state.generation != seen => {
                seen = state.generation;
                state.working += 1;
                drop(state);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    // SAFETY: `working` is counted, so `Pool::run` is still waiting and keeps the task alive.
                    take(&shared.next, job.n_tasks, unsafe { &*job.task });
                }));
                state = shared.lock();
                state.panicked |= result.is_err();
                state.working -= 1;
                if state.working == 0 {
                    shared.done.notify_all();
                }
            }
            _ => state = shared.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task done twice stores a key twice; one not done leaves garbage in the output.
    #[test]
    fn every_task_is_done_once() {
        let pool = Pool::new(3).unwrap();
        for n in [0usize, 1, 2, 7, 100] {
            for _ in 0..50 {
                let counts: Vec<_> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(10, &|i| assert!(i != 5, "five"));
        }));
        assert!(panics.is_err());
        pool.run(10, &|_| {});
    }
}
