//! A kernel with its arguments: what is fixed when a program is compiled, what a run says, and what was set last.
//!
//! Each launch of a program has a kernel object of its own, and an argument is set again only when it changes: from token to token hardly any
//! does, since lengths that grow lie in tables that kernels read.

use crate::cl::{CommandQueue, Event, Kernel};
use ocl_core::ffi::cl_mem;
use tegula_sdk::program::{Dim, ValueId};
use tegula_sdk::{Error, Result};

/// An argument. Memory is two arguments of the kernel: buffer and first byte.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Arg {
    /// A value of the program, wherever it lies in this run.
    Value(ValueId),
    /// Memory that stays: a weight's tile, constants.
    Fixed(Memory),
    /// An extra region of scratch.
    Region(usize),
    /// Rows of a value.
    Rows(Dim),
    /// Rows times something.
    Count(Dim, u64),
    U32(u32),
    U64(u64),
    F32(f32),
}

/// A buffer and the first byte in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory(pub(crate) cl_mem, pub(crate) u64);

#[expect(
    unsafe_code,
    reason = "handles of buffers are used by several threads, one after the other"
)]
// SAFETY: a handle that any thread may use; the core keeps the buffer as long as the executable.
unsafe impl Send for Memory {}

/// Work-groups in a dimension: rows times `mul`, divided by `div`, rounded up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) dim: Dim,
    pub(crate) mul: u64,
    pub(crate) div: u64,
    /// Added to the quotient, where there are rows.
    pub(crate) plus: u64,
}

impl Extent {
    pub(crate) const ONE: Self = Self { dim: Dim::Fixed(1), mul: 1, div: 1, plus: 0 };

    pub(crate) fn fixed(n: u64) -> Self {
        Self { dim: Dim::Fixed(n), ..Self::ONE }
    }

    fn groups(&self, frame: &Frame) -> Result<usize> {
        let n = frame.rows(self.dim).checked_mul(self.mul).map(|n| n.div_ceil(self.div.max(1)));
        // Without rows there is nothing to do, however many work-groups come on top.
        let n = n.and_then(|n| if n == 0 { Some(0) } else { n.checked_add(self.plus) });
        let n = n.and_then(|n| usize::try_from(n).ok());
        n.ok_or_else(|| Error::invalid("a kernel of more than 2^64 work-groups"))
    }
}

/// A run as launches see it.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    pub(crate) n_tokens: u64,
    pub(crate) n_outputs: u64,
    /// By value id.
    pub(crate) values: Vec<Option<Memory>>,
    pub(crate) regions: Vec<Memory>,
}

impl Frame {
    pub(crate) fn rows(&self, dim: Dim) -> u64 {
        match dim {
            Dim::Fixed(n) => n,
            Dim::NTokens => self.n_tokens,
            Dim::NOutputs => self.n_outputs,
        }
    }

    pub(crate) fn value(&self, id: ValueId) -> Result<Memory> {
        let place = self.values.get(id.index()).copied().flatten();
        place.ok_or_else(|| Error::invalid(format!("value {} lies nowhere", id.0)))
    }
}

/// What an argument is set to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Setting {
    Mem(cl_mem),
    U64(u64),
    U32(u32),
    F32(f32),
}

/// A kernel that knows its settings.
#[derive(Debug)]
pub(crate) struct Call {
    kernel: Kernel,
    last: Vec<Setting>,
}

#[expect(
    unsafe_code,
    reason = "handles of buffers are used by several threads, one after the other"
)]
// SAFETY: settings are compared, never followed; the kernel is Send.
unsafe impl Send for Call {}

impl Call {
    pub(crate) fn new(kernel: Kernel) -> Self {
        Self { kernel, last: Vec::new() }
    }

    /// Sets what differs from the last time.
    pub(crate) fn set(&mut self, settings: &[Setting]) -> Result<()> {
        for (index, setting) in (0u32..).zip(settings) {
            if self.last.get(index as usize) == Some(setting) {
                continue;
            }
            match *setting {
                Setting::Mem(mem) => self.kernel.set_mem(index, mem),
                Setting::U64(value) => self.kernel.set_u64(index, value),
                Setting::U32(value) => self.kernel.set_u32(index, value),
                Setting::F32(value) => self.kernel.set_f32(index, value),
            }
            .inspect_err(|_| self.last.clear())?;
        }
        self.last.clear();
        self.last.extend_from_slice(settings);
        Ok(())
    }

    /// Enqueues; nothing where there are no work-groups.
    pub(crate) fn enqueue(
        &self,
        sink: &mut Sink<'_>,
        what: &'static str,
        groups: [usize; 2],
        local: usize,
    ) -> Result<()> {
        if groups.contains(&0) {
            return Ok(());
        }
        let global = groups[0].checked_mul(local);
        let global = global.ok_or_else(|| Error::invalid("a kernel over 2^64 work-items"))?;
        let with_event = sink.profile.is_some();
        let event =
            sink.queue.kernel(&self.kernel, [global, groups[1], 1], [local, 1, 1], with_event)?;
        if let (Some(list), Some(event)) = (sink.profile.as_deref_mut(), event) {
            list.push((what, event));
        }
        Ok(())
    }
}

/// Where launches go.
pub(crate) struct Sink<'a> {
    pub(crate) queue: &'a CommandQueue,
    /// Events with the names of their ops, where times are taken.
    pub(crate) profile: Option<&'a mut Vec<(&'static str, Event)>>,
}

/// A kernel, its arguments and its shape.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) what: &'static str,
    pub(crate) call: Call,
    pub(crate) args: Vec<Arg>,
    pub(crate) groups: [Extent; 2],
    pub(crate) local: usize,
}

impl Launch {
    /// Sets what changed and enqueues. `settings` is a list that keeps its capacity.
    pub(crate) fn run(
        &mut self,
        sink: &mut Sink<'_>,
        frame: &Frame,
        settings: &mut Vec<Setting>,
    ) -> Result<()> {
        let groups = [self.groups[0].groups(frame)?, self.groups[1].groups(frame)?];
        if groups.contains(&0) {
            return Ok(());
        }
        settings.clear();
        settle(&self.args, frame, settings)?;
        self.call.set(settings)?;
        self.call.enqueue(sink, self.what, groups, self.local)
    }
}

/// What arguments are in a run, after those that are settled already.
pub(crate) fn settle(args: &[Arg], frame: &Frame, settings: &mut Vec<Setting>) -> Result<()> {
    for arg in args {
        match *arg {
            Arg::Value(id) => memory(settings, frame.value(id)?),
            Arg::Fixed(place) => memory(settings, place),
            Arg::Region(index) => {
                let region = frame.regions.get(index).copied();
                memory(settings, region.ok_or_else(|| Error::invalid("a region too few"))?);
            }
            Arg::Rows(dim) => settings.push(Setting::U32(u32_of(frame.rows(dim))?)),
            Arg::Count(dim, per_row) => {
                settings.push(Setting::U64(frame.rows(dim).saturating_mul(per_row)));
            }
            Arg::U32(value) => settings.push(Setting::U32(value)),
            Arg::U64(value) => settings.push(Setting::U64(value)),
            Arg::F32(value) => settings.push(Setting::F32(value)),
        }
    }
    Ok(())
}

pub(crate) fn memory(settings: &mut Vec<Setting>, Memory(mem, offset): Memory) {
    settings.push(Setting::Mem(mem));
    settings.push(Setting::U64(offset));
}

pub(crate) fn u32_of(n: u64) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::unsupported(format!("{n} does not fit 32 bits")))
}
