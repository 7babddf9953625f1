//! How the products of [`super::experts`] run: slots sorted by expert, cut into entries, entries put together to passes, and the tasks of
//! a pass.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use super::activations::{Activations, GROUP_FLOATS};
use super::experts::{EXPERT_PRODUCTS_MAX, Stack};
use super::int_gemm::PACKED_FLOATS;
use super::int_tasks::{self, DotTask, PackTask, Quantize};
use super::matmul::{DOT_TOKENS_MAX, LINE, NARROW_ROWS, PANEL_ROWS, TASK_WORK_MIN};
use super::matmul_f32;
use super::product::{Input, Product, Tokens};
use super::shared::SharedMut;
use crate::kernels::{KernelError, Kernels};
use crate::pool::{Pool, PoolError};

/// Activations whose quantising is worth waking the threads for: some tens of microseconds.
const QUANTIZE_SHARED_MIN: usize = 64 * 1024;

/// How products are computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// On 16-bit activations.
    Ints,
    /// On f32.
    Floats,
}

impl Way {
    /// f32 of a packed token.
    fn packed(self, input: Input<'_>) -> usize {
        match self {
            Way::Ints => input.groups() * PACKED_FLOATS,
            Way::Floats => input.n_in,
        }
    }

    /// Tokens of a packed panel.
    fn width(self, kernels: Kernels) -> usize {
        match self {
            Way::Ints => 2 * kernels.pair_lanes(),
            Way::Floats => matmul_f32::panel_width(kernels),
        }
    }

    fn thread_scratch(self, tokens_padded: usize) -> usize {
        match self {
            Way::Ints => int_tasks::thread_scratch(tokens_padded),
            Way::Floats => matmul_f32::thread_scratch(tokens_padded),
        }
    }
}

/// Slots of one expert that are multiplied together.
#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    expert: u32,
    /// Their place in the sorted list, and how many.
    first: u32,
    n: u32,
    /// Where their activations lie, in cache lines.
    at: u32,
}

impl Entry {
    /// Multiplied as few tokens are.
    fn is_few(&self) -> bool {
        self.n as usize <= DOT_TOKENS_MAX
    }
}

/// The slots in order of their experts.
pub(super) struct Lists<'a> {
    slots: &'a [u32],
    entries: &'a mut [Entry],
}

impl<'a> Lists<'a> {
    /// f32 of memory that the lists take.
    pub(super) fn len(n_expert: usize, n_slots: usize) -> usize {
        const ENTRY: usize = size_of::<Entry>() / size_of::<f32>();
        n_expert.saturating_add(1).saturating_add(n_slots.saturating_mul(1 + ENTRY))
    }

    /// Sorts the slots by their ids, which are below `n_expert`; no entry has more than `entry_max`.
    pub(super) fn fill(
        memory: &'a mut [f32],
        ids: &[i32],
        n_expert: usize,
        entry_max: usize,
    ) -> Lists<'a> {
        // SAFETY: u32 has the size and alignment of f32, and every pattern is valid for both.
        let memory: &'a mut [u32] =
            unsafe { std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), memory.len()) };
        let (ends, memory) = memory.split_at_mut(n_expert + 1);
        let (slots, memory) = memory.split_at_mut(ids.len());
        // SAFETY: an entry is four u32 without padding, and there is room for one for each slot.
        let entries: &'a mut [Entry] = unsafe {
            let n = size_of_val(memory) / size_of::<Entry>();
            std::slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), n)
        };
        // Counting sort: `ends[e]` is where the next slot of expert e goes, at last where those of e end.
        ends.fill(0);
        for id in ids {
            ends[id.unsigned_abs() as usize + 1] += 1;
        }
        for e in 0..n_expert {
            ends[e + 1] += ends[e];
        }
        for (slot, id) in (0u32..).zip(ids) {
            let end = &mut ends[id.unsigned_abs() as usize];
            slots[*end as usize] = slot;
            *end += 1;
        }
        let (mut n, mut first) = (0, 0);
        for (expert, end) in (0u32..).zip(&ends[..n_expert]) {
            while first < *end {
                let len = (*end - first).min(entry_max as u32);
                entries[n] = Entry { expert, first, n: len, at: 0 };
                (n, first) = (n + 1, first + len);
            }
        }
        Lists { slots, entries: &mut entries[..n] }
    }
}

/// What the passes of a run share.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) kernels: Kernels,
    pub(super) pool: &'a Pool,
    pub(super) way: Way,
    /// Those that are computed this way.
    pub(super) stacks: &'a [Option<Stack<'a>>; EXPERT_PRODUCTS_MAX],
    pub(super) input: Input<'a>,
    /// Slots that read one row of X.
    pub(super) sharing: usize,
    /// Few tokens: rows of X are quantised once, in order, and all entries are products of few tokens.
    pub(super) few: bool,
    /// Most tokens of an entry, padded.
    pub(super) tokens_padded: usize,
}

/// Runs the products; false if they have to be computed in f32.
pub(super) fn run(
    job: &Job<'_>,
    lists: &mut Lists<'_>,
    work: &mut [f32],
) -> Result<bool, KernelError> {
    if job.stacks.iter().all(Option::is_none) {
        return Ok(true);
    }
    let threads = match job.few {
        true => 0,
        false => job.pool.n_threads() * job.way.thread_scratch(job.tokens_padded),
    };
    let (area, threads) = work.split_at_mut(work.len().saturating_sub(threads) / LINE * LINE);
    let lines_max = u32::try_from(area.len() / LINE).unwrap_or(u32::MAX);
    let (area, threads) = (SharedMut::new(area), SharedMut::new(threads));
    let mut rest = &mut *lists.entries;
    while !rest.is_empty() {
        let (mut n, mut at) = (0, 0u32);
        for entry in &mut *rest {
            let lines = u32::try_from(job.lines(entry)).unwrap_or(u32::MAX);
            if n > 0 && at.saturating_add(lines) > lines_max {
                break;
            }
            entry.at = at;
            (n, at) = (n + 1, at.saturating_add(lines));
        }
        let (entries, later) = rest.split_at_mut(n);
        let pass = Pass { job, slots: lists.slots, entries, area, threads };
        if !pass.prepare()? {
            return Ok(false);
        }
        pass.multiply()?;
        rest = later;
    }
    Ok(true)
}

impl Job<'_> {
    /// Cache lines of an entry's activations.
    fn lines(&self, entry: &Entry) -> usize {
        let n = entry.n as usize;
        let floats = match self.way {
            _ if self.few => 0,
            Way::Floats if entry.is_few() => 0,
            Way::Ints if entry.is_few() => n * self.input.groups() * GROUP_FLOATS,
            way => n.next_multiple_of(way.width(self.kernels)) * way.packed(self.input),
        };
        floats / LINE
    }

    /// Calls `task(worker, index)` for every index; on this thread alone where there is not enough to do.
    fn tasks(
        &self,
        is_much: bool,
        n: usize,
        task: impl Fn(usize, usize) + Sync,
    ) -> Result<(), PoolError> {
        if is_much {
            return self.pool.run(n, task);
        }
        (0..n).for_each(|index| task(0, index));
        Ok(())
    }
}

/// Entries whose activations are in memory at the same time.
struct Pass<'a> {
    job: &'a Job<'a>,
    slots: &'a [u32],
    entries: &'a [Entry],
    area: SharedMut<'a, f32>,
    threads: SharedMut<'a, f32>,
}

impl Pass<'_> {
    fn tokens(&self, entry: &Entry) -> Tokens<'_> {
        let first = entry.first as usize;
        Tokens::listed(&self.slots[first..first + entry.n as usize], self.job.sharing)
    }

    fn address(&self, entry: &Entry) -> *mut f32 {
        self.area.as_mut_ptr().wrapping_add(entry.at as usize * LINE)
    }

    /// Slots of all entries.
    fn n_slots(&self) -> usize {
        self.entries.iter().map(|entry| entry.n as usize).sum()
    }

    /// Quantises and packs activations; false where one is not finite.
    fn prepare(&self) -> Result<bool, PoolError> {
        let Job { kernels, way, input, few, .. } = *self.job;
        let finite = AtomicBool::new(true);
        if few {
            if way == Way::Ints {
                let n_rows = input.x.len() / input.n_in.max(1);
                let is_much = input.x.len() >= QUANTIZE_SHARED_MIN;
                self.job.tasks(is_much, n_rows, |_, row| {
                    let tokens = Tokens::run(row..row + 1);
                    let out = self.activations(self.area.as_mut_ptr(), row).cast_mut();
                    kernels.dispatch_words(Quantize { input, tokens, out, finite: &finite });
                })?;
            }
            return Ok(finite.into_inner());
        }
        let width = way.width(kernels);
        let panels = |entry: &Entry| match entry.is_few() {
            true => 1,
            false => (entry.n as usize).div_ceil(width),
        };
        let is_much = self.n_slots() * input.n_in >= QUANTIZE_SHARED_MIN;
        self.job.tasks(is_much, self.entries.iter().map(panels).sum(), |_, mut panel| {
            for entry in self.entries {
                if panel < panels(entry) {
                    return self.pack(entry, panel, width, &finite);
                }
                panel -= panels(entry);
            }
        })?;
        Ok(finite.into_inner())
    }

    /// One panel of an entry's activations.
    fn pack(&self, entry: &Entry, panel: usize, width: usize, finite: &AtomicBool) {
        let Job { kernels, way, input, .. } = *self.job;
        let (tokens, address) = (self.tokens(entry), self.address(entry));
        let out = address.wrapping_add(panel * width * way.packed(input));
        match way {
            Way::Ints if entry.is_few() => {
                let out = address.cast();
                kernels.dispatch_words(Quantize { input, tokens, out, finite });
            }
            Way::Ints => {
                let tokens = tokens.part(panel * width, width);
                kernels.dispatch_words(PackTask { input, tokens, width, out, finite });
            }
            Way::Floats if entry.is_few() => {}
            Way::Floats => {
                let tokens = tokens.part(panel * width, width);
                kernels.dispatch(matmul_f32::PackTask { input, tokens, out });
            }
        }
    }

    /// The `i`th quantised row from `address` on.
    fn activations(&self, address: *mut f32, i: usize) -> *const Activations {
        address.cast::<Activations>().wrapping_add(i * self.job.input.groups()).cast_const()
    }

    /// Rows of W for one task: enough tasks for all threads, and each worth its taking.
    fn rows(&self, stack: &Stack<'_>) -> usize {
        let n_threads = self.job.pool.n_threads();
        let all = self.entries.len() * stack.n_out();
        if self.entries.iter().all(Entry::is_few) {
            let work = self.job.input.n_in.max(1) * self.n_slots().div_ceil(self.entries.len());
            let least = (TASK_WORK_MIN / work).max(4);
            return all.div_ceil(16 * n_threads).max(least).next_multiple_of(4);
        }
        let fair = all.div_ceil(4 * n_threads).next_multiple_of(NARROW_ROWS);
        fair.clamp(NARROW_ROWS, PANEL_ROWS)
    }

    fn multiply(&self) -> Result<(), PoolError> {
        let stacks = self.job.stacks;
        let rows: [usize; EXPERT_PRODUCTS_MAX] =
            std::array::from_fn(|i| stacks[i].as_ref().map_or(1, |stack| self.rows(stack)));
        let pieces = |i: usize| stacks[i].as_ref().map_or(0, |s| s.n_out().div_ceil(rows[i]));
        let n_tasks = (0..EXPERT_PRODUCTS_MAX).map(|i| pieces(i) * self.entries.len()).sum();
        let n_out: usize = stacks.iter().flatten().map(Stack::n_out).sum();
        let is_much = self.n_slots() * self.job.input.n_in * n_out > TASK_WORK_MIN;
        self.job.tasks(is_much, n_tasks, |worker, mut task| {
            for (i, stack) in stacks.iter().enumerate() {
                let (Some(stack), n) = (stack, pieces(i) * self.entries.len()) else { continue };
                if task < n {
                    let (entry, piece) = (&self.entries[task / pieces(i)], task % pieces(i));
                    let columns = piece * rows[i]..stack.n_out().min((piece + 1) * rows[i]);
                    let product = stack.expert(entry.expert as usize);
                    return self.task(worker, entry, &product, columns);
                }
                task -= n;
            }
        })
    }

    fn task(&self, worker: usize, entry: &Entry, product: &Product<'_>, columns: Range<usize>) {
        let Job { kernels, way, input, few, tokens_padded, .. } = *self.job;
        let (tokens, address) = (self.tokens(entry), self.address(entry));
        if entry.is_few() {
            return match way {
                Way::Floats => matmul_f32::dot_rows(kernels, product, columns, input, tokens),
                Way::Ints => {
                    let mut x = [std::ptr::null(); DOT_TOKENS_MAX];
                    for (t, x) in x.iter_mut().enumerate().take(tokens.len()) {
                        *x = match few {
                            true => self.activations(self.area.as_mut_ptr(), tokens.x(t)),
                            false => self.activations(address, t),
                        };
                    }
                    kernels.dispatch_words(DotTask { product, rows: columns, tokens, x });
                }
            };
        }
        let len = way.thread_scratch(tokens_padded);
        // SAFETY: a worker number is in use once at a time, so this thread's part is its own.
        let own = unsafe { self.threads.slice(worker * len, len) };
        match way {
            Way::Floats => matmul_f32::gemm_rows(kernels, product, &columns, tokens, address, own),
            Way::Ints => int_tasks::gemm_rows(kernels, product, &columns, tokens, address, own),
        }
    }
}
