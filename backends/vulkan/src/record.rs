//! Records dispatches into a command buffer: barriers stand only where one really waits for another.
//!
//! Each dispatch names the ranges it reads and writes; a barrier is put before it if one of them was written, or is written and
//! was read, since the last barrier. So products that share an input run side by side.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::gpu::Gpu;
use crate::pipelines::Kernel;
use crate::profile::Profile;
use crate::push::Push;
use ash::vk;
use tegula_sdk::{Error, Result};

/// Bytes of memory: address and size. KV layers, whose bytes lie in many places, have addresses of their own above all real ones.
pub(crate) type Span = (u64, u64);

/// The span that stands for the cache of a KV layer.
pub(crate) fn kv_span(layer: u32) -> Span {
    (u64::MAX - 2 * u64::from(layer) - 1, 1)
}

/// The span that stands for the records of a state layer.
pub(crate) fn state_span(layer: u32) -> Span {
    ((1 << 63) + 2 * u64::from(layer), 1)
}

/// Most workgroups in one direction that every device takes.
const GROUPS_MAX: u64 = 65_535;

/// How many workgroups.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Groups {
    Are([u32; 3]),
    /// Read from a buffer when the commands run.
    At(vk::Buffer, u64),
}

impl Groups {
    /// For kernels that go through their items in strides: enough invocations, and not more than useful.
    pub(crate) fn strided(items: u64, per_group: u32) -> Self {
        let n = items.div_ceil(per_group.into()).min(16_384);
        Self::Are([u32::try_from(n).unwrap_or(1), 1, 1])
    }

    /// For kernels that number their workgroups over two directions.
    pub(crate) fn flat(n: u64, z: u32) -> Result<Self> {
        let x = n.min(32_768);
        let y = if x == 0 { 0 } else { n.div_ceil(x) };
        if y > GROUPS_MAX {
            return Err(Error::unsupported(format!("{n} workgroups")));
        }
        Ok(Self::Are([u32::try_from(x).unwrap_or(0), u32::try_from(y).unwrap_or(0), z]))
    }
}

/// A command buffer being recorded.
pub(crate) struct Recorder<'a> {
    pub(crate) gpu: &'a Gpu,
    commands: vk::CommandBuffer,
    bound: vk::Pipeline,
    read: Vec<Span>,
    written: Vec<Span>,
    profile: Option<&'a mut Profile>,
    /// Everything that was written, ever.
    history: Vec<Span>,
    /// A copy was recorded since the last barrier.
    copied: bool,
    /// A kernel was recorded since the last barrier that copies wait for.
    computed: bool,
    /// Nothing is recorded: the kernels are listed.
    list: Option<Vec<Kernel>>,
    pub(crate) n_dispatches: u32,
    pub(crate) n_barriers: u32,
}

impl<'a> Recorder<'a> {
    pub(crate) fn new(
        gpu: &'a Gpu,
        commands: vk::CommandBuffer,
        profile: Option<&'a mut Profile>,
    ) -> Self {
        Self {
            gpu,
            commands,
            bound: vk::Pipeline::null(),
            read: Vec::new(),
            written: Vec::new(),
            profile,
            history: Vec::new(),
            copied: false,
            computed: false,
            list: None,
            n_dispatches: 0,
            n_barriers: 0,
        }
    }

    /// Lists kernels instead of recording.
    pub(crate) fn lister(gpu: &'a Gpu) -> Self {
        let recorder = Self::new(gpu, vk::CommandBuffer::null(), None);
        Self { list: Some(Vec::new()), ..recorder }
    }

    /// What a lister has found.
    pub(crate) fn into_list(self) -> Vec<Kernel> {
        self.list.unwrap_or_default()
    }

    /// Records a dispatch. What several dispatches read and write together is given to `order` before them.
    pub(crate) fn run(
        &mut self,
        kernel: &Kernel,
        push: &Push,
        groups: Groups,
        reads: &[Span],
        writes: &[Span],
    ) -> Result<()> {
        if let Groups::Are(n) = groups {
            if n.contains(&0) {
                return Ok(());
            }
            if n.iter().any(|n| u64::from(*n) > GROUPS_MAX) {
                return Err(Error::unsupported(format!("{n:?} workgroups of {:?}", kernel.shader)));
            }
        }
        if let Some(list) = &mut self.list {
            if !list.contains(kernel) {
                list.push(kernel.clone());
            }
            return Ok(());
        }
        let pipeline = self.gpu.pipelines.get(&self.gpu.device, kernel)?;
        self.order(reads, writes);
        let (device, commands) = (&self.gpu.device, self.commands);
        // SAFETY: the command buffer is being recorded by this thread; pipeline and layout live as long as the device.
        unsafe {
            if self.bound != pipeline {
                device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
                self.bound = pipeline;
            }
            let (layout, stage) = (self.gpu.pipelines.layout, vk::ShaderStageFlags::COMPUTE);
            device.cmd_push_constants(commands, layout, stage, 0, push.bytes());
            match groups {
                Groups::Are([x, y, z]) => device.cmd_dispatch(commands, x, y, z),
                Groups::At(buffer, offset) => {
                    device.cmd_dispatch_indirect(commands, buffer, offset);
                }
            }
        }
        if let Some(profile) = &mut self.profile {
            profile.mark(self.gpu, commands, kernel);
        }
        self.n_dispatches += 1;
        Ok(())
    }

    /// A copy within the device, ordered like a dispatch.
    pub(crate) fn copy(
        &mut self,
        from: (vk::Buffer, u64, u64),
        to: (vk::Buffer, u64, u64),
        size: u64,
    ) {
        if size == 0 {
            return;
        }
        let ((src, src_offset, src_address), (dst, dst_offset, dst_address)) = (from, to);
        self.order_as(&[(src_address, size)], &[(dst_address, size)], true);
        self.copied = true;
        let copy = vk::BufferCopy { src_offset, dst_offset, size };
        // SAFETY: the command buffer is being recorded; ranges lie in their buffers (the caller looked), which live until the work is done.
        unsafe { self.gpu.device.cmd_copy_buffer(self.commands, src, dst, &[copy]) };
    }

    /// How often a span was written so far: what was made of it holds as long as the number does.
    pub(crate) fn n_writes(&self, span: Span) -> usize {
        self.history.iter().filter(|other| Self::overlaps(span, **other)).count()
    }

    fn overlaps(a: Span, b: Span) -> bool {
        a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
    }

    /// Puts a barrier if what comes next has to wait, and notes what it reads and writes.
    pub(crate) fn order(&mut self, reads: &[Span], writes: &[Span]) {
        self.order_as(reads, writes, false);
    }

    fn order_as(&mut self, reads: &[Span], writes: &[Span], is_copy: bool) {
        if self.list.is_some() {
            return;
        }
        let hits = |list: &[Span], spans: &[Span]| {
            spans.iter().any(|span| list.iter().any(|other| Self::overlaps(*span, *other)))
        };
        // Barriers between kernels have cleared the lists without making anything ready for copies.
        let unseen = is_copy && self.computed;
        if unseen
            || hits(&self.written, reads)
            || hits(&self.written, writes)
            || hits(&self.read, writes)
        {
            self.barrier(is_copy);
        }
        self.computed |= !is_copy;
        self.read.extend_from_slice(reads);
        self.written.extend_from_slice(writes);
        self.history.extend_from_slice(writes);
    }

    /// Kernels wait for kernels; only where copies take part, before or after, for these too. Numbers of workgroups that are read from a
    /// buffer are written by copies alone, and to wait for them costs more than a small kernel.
    fn barrier(&mut self, before_copy: bool) {
        use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
        let (mut from, mut to) = (Stage::COMPUTE_SHADER, Stage::COMPUTE_SHADER);
        let mut barrier = vk::MemoryBarrier::default()
            .src_access_mask(Access::SHADER_WRITE)
            .dst_access_mask(Access::SHADER_READ | Access::SHADER_WRITE);
        if self.copied || before_copy {
            from |= Stage::TRANSFER;
            to |= Stage::TRANSFER | Stage::DRAW_INDIRECT;
            barrier.src_access_mask |= Access::TRANSFER_WRITE;
            barrier.dst_access_mask |=
                Access::TRANSFER_READ | Access::TRANSFER_WRITE | Access::INDIRECT_COMMAND_READ;
            self.computed = false;
        }
        self.copied = false;
        // SAFETY: the command buffer is being recorded.
        unsafe {
            self.gpu.device.cmd_pipeline_barrier(
                self.commands,
                from,
                to,
                vk::DependencyFlags::empty(),
                &[barrier],
                &[],
                &[],
            );
        }
        self.read.clear();
        self.written.clear();
        self.n_barriers += 1;
    }
}
