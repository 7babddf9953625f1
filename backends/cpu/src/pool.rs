//! The thread pool: fork-join over numbered tasks, made for runs of a few microseconds.
//!
//! Decisions:
//! - **Tasks are taken, never assigned.** A run is a count of tasks; whoever is awake takes the next one with one
//!   compare-and-swap. A worker that the scheduler has taken off its core delays at most the one task it holds, and a
//!   worker that never wakes up delays nothing, because the caller takes tasks too. There is no barrier over workers.
//! - **Workers spin briefly, then sleep.** A decode step is hundreds of short runs; waking a sleeper costs as much as a
//!   small run, so a worker looks for work for some tens of microseconds before it sleeps. An idle pool burns nothing.
//! - **Workers stay on their cores** where the pool has a thread for each; the caller belongs to the host and is left alone.
//! - **A run allocates nothing.** The job is one borrowed closure in a shared cell.
//! - **A panic is an error of the run.** Tasks not yet started are skipped, the pool stays usable.
//!
//! The whole protocol is one counter, `remaining`. A successful decrement from `n` to `n - 1` owns task `total - n` and
//! keeps the run alive, since the caller returns only when `unfinished` is zero; so the job cell is read only after a
//! successful decrement, and a worker that comes late sees zero and reads nothing.

#![allow(unsafe_code, reason = "the closure of a run is shared with the workers through a pointer")]

mod threads;

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

pub use threads::default_threads;

/// Looks of an idle worker before it sleeps: about 40 microseconds, the pause between two ops of a graph included.
const SPINS_IDLE: u32 = 2_000;
/// Looks of the caller before it sleeps while the last tasks end elsewhere.
const SPINS_END: u32 = 2_000;

/// Why a run did not complete.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A task panicked; the results of the run are incomplete.
    #[error("a task panicked, the results of this run are incomplete: {message}")]
    TaskPanicked {
        /// The panic's message.
        message: String,
    },
    /// The system refused a thread.
    #[error("could not start thread {started} of {wanted}: {source}; ask for fewer threads")]
    Spawn {
        /// Threads asked for, the caller included.
        wanted: usize,
        /// Threads that run, the caller included.
        started: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

type Job = dyn Fn(usize, usize) + Sync;

/// What workers and caller share.
struct Shared {
    /// Tasks that nobody has taken.
    remaining: AtomicUsize,
    /// Tasks that have not ended.
    unfinished: AtomicUsize,
    /// Tasks of the run. Written with `job`, before `remaining`.
    total: AtomicUsize,
    job: UnsafeCell<Option<*const Job>>,
    panicked: AtomicBool,
    shutdown: AtomicBool,
    /// Workers that sleep, or are about to and hold the lock.
    sleepers: AtomicUsize,
    /// Whether the caller sleeps until the run ends.
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    work: Condvar,
    done: Condvar,
    message: Mutex<Option<String>>,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. It is written by the caller of `run`, who holds
// `Pool::entry`, while `unfinished` is zero, and read only by a thread that has taken a task of the current run: the
// taking is an acquire of the release that published `remaining`, and the run cannot end before that task.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointee is `Sync`.
unsafe impl Send for Shared {}

thread_local! {
    /// The pool whose task this thread runs (its address), and the thread's worker number there.
    static INSIDE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// A fixed number of threads, the caller being number 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    entry: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("n_threads", &self.n_threads()).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that can panic runs under these locks, so a poisoned one protects nothing broken.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Pool {
    /// A pool of `n_threads` (at least 1), of which `n_threads - 1` are started; threads already started are ended
    /// when a later one is refused.
    ///
    /// # Errors
    /// [`PoolError::Spawn`] when the system refuses a thread.
    pub fn new(n_threads: usize) -> Result<Pool, PoolError> {
        let shared = Arc::new(Shared {
            remaining: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            total: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            shutdown: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            work: Condvar::new(),
            done: Condvar::new(),
            message: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::new(), entry: Mutex::new(()) };
        let places = threads::places(n_threads);
        for worker in 1..n_threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let place = places.get(worker - 1).copied();
            let thread = std::thread::Builder::new()
                .name(format!("tegula-cpu-{worker}"))
                .spawn(move || {
                    if let Some(cpu) = place {
                        threads::pin(cpu);
                    }
                    worker_main(&shared, worker);
                })
                .map_err(|source| PoolError::Spawn {
                    wanted: n_threads,
                    started: worker,
                    source,
                })?;
            pool.workers.push(thread);
        }
        Ok(pool)
    }

    /// Threads that may run tasks, the caller included: worker numbers are below it.
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(worker, index)` for every index below `n_tasks`, on the caller and the workers, and returns when
    /// all have ended. No two tasks that run at the same time have the same worker number, so it may index scratch.
    ///
    /// Callers on other threads wait for each other. A call from inside a task runs its tasks in order on that thread,
    /// under its worker number.
    ///
    /// # Errors
    /// [`PoolError::TaskPanicked`]; the pool remains usable.
    pub fn run(&self, n_tasks: usize, task: impl Fn(usize, usize) + Sync) -> Result<(), PoolError> {
        let id = Arc::as_ptr(&self.shared).addr();
        let (inside, worker) = INSIDE.get();
        if inside == id {
            return run_inline(worker, n_tasks, &task);
        }
        let _entry = lock(&self.entry);
        let outer = INSIDE.replace((id, 0));
        let result = if n_tasks <= 1 || self.workers.is_empty() {
            run_inline(0, n_tasks, &task)
        } else {
            self.run_shared(n_tasks, &task)
        };
        INSIDE.set(outer);
        result
    }

    fn run_shared<'a>(
        &self,
        n_tasks: usize,
        task: &'a (dyn Fn(usize, usize) + Sync + 'a),
    ) -> Result<(), PoolError> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by threads that hold a task of this run, and this
        // function returns after all tasks have ended.
        let job = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + 'a), *const Job>(task)
        };
        // SAFETY: `entry` is held and `unfinished` is zero: nobody reads the cell (see `Shared`).
        unsafe { *shared.job.get() = Some(job) };
        shared.panicked.store(false, Relaxed);
        shared.total.store(n_tasks, Relaxed);
        shared.unfinished.store(n_tasks, Relaxed);
        // Sequentially consistent, with the load of `sleepers`: a worker about to sleep counts itself first and looks at
        // `remaining` afterwards, so one of the two sees the other.
        shared.remaining.store(n_tasks, SeqCst);
        let sleepers = shared.sleepers.load(SeqCst);
        if sleepers > 0 {
            drop(lock(&shared.lock));
            for _ in 0..sleepers.min(n_tasks - 1) {
                shared.work.notify_one();
            }
        }
        while shared.take_and_run(0) {}
        shared.wait_until_done();
        if shared.panicked.load(Acquire) {
            let message = lock(&shared.message).take().unwrap_or_default();
            return Err(PoolError::TaskPanicked { message });
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, SeqCst);
        drop(lock(&self.shared.lock));
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks, so it can only have ended normally.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Takes one task and runs it; false when there was none to take.
    fn take_and_run(&self, worker: usize) -> bool {
        let mut n = self.remaining.load(Relaxed);
        loop {
            if n == 0 {
                return false;
            }
            match self.remaining.compare_exchange_weak(n, n - 1, AcqRel, Relaxed) {
                Ok(_) => break,
                Err(now) => n = now,
            }
        }
        let index = self.total.load(Relaxed) - n;
        // SAFETY: this thread holds a task of the current run, so the cell was written before and the closure lives.
        let job = unsafe { (*self.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && !self.panicked.load(Relaxed)
            && let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(worker, index)))
        {
            lock(&self.message).get_or_insert(panic_message(&*payload));
            self.panicked.store(true, Release);
        }
        // The last end is the moment after which the caller may go on, and this thread touches nothing of the run.
        if self.unfinished.fetch_sub(1, SeqCst) == 1 && self.caller_sleeps.load(SeqCst) {
            drop(lock(&self.lock));
            self.done.notify_one();
        }
        true
    }

    /// Called by the caller of the run when no task is left to take.
    fn wait_until_done(&self) {
        for _ in 0..SPINS_END {
            if self.unfinished.load(Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        self.caller_sleeps.store(true, SeqCst);
        let mut guard = lock(&self.lock);
        while self.unfinished.load(SeqCst) != 0 {
            guard = self.done.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }

    fn sleep_until_work(&self) {
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, SeqCst);
        while self.remaining.load(SeqCst) == 0 && !self.shutdown.load(SeqCst) {
            guard = self.work.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }
}

fn worker_main(shared: &Shared, worker: usize) {
    INSIDE.set((std::ptr::from_ref(shared).addr(), worker));
    let mut idle = 0;
    while !shared.shutdown.load(Relaxed) {
        if shared.take_and_run(worker) {
            idle = 0;
        } else if idle < SPINS_IDLE {
            idle += 1;
            std::hint::spin_loop();
        } else {
            shared.sleep_until_work();
            idle = 0;
        }
    }
}

fn run_inline(
    worker: usize,
    n_tasks: usize,
    task: &impl Fn(usize, usize),
) -> Result<(), PoolError> {
    catch_unwind(AssertUnwindSafe(|| {
        for index in 0..n_tasks {
            task(worker, index);
        }
    }))
    .map_err(|payload| PoolError::TaskPanicked { message: panic_message(&*payload) })
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests;
