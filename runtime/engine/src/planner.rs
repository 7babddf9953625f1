//! Makes the plan: layouts, chunks, context and ubatch of one model on one device.

use crate::memory::context::{ContextInputs, choose};
use crate::memory::kv::KvShape;
use crate::memory::plan::*;
use crate::memory::tiling::{ChunkLimits, Item, pack, pack_file};
use crate::runtime::DeviceEntry;
use crate::{Error, Result};
use tegula_gguf::{Gguf, TensorInfo};
use tegula_plugin::{
    BufferType, CompileOptions, Device, DeviceErrorKind, ExecutableMemory, Heap, POOL_HOST,
    WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, OpKind, Program, Value, ValueId};

/// `max_size` assumed where a device cannot say: what every Vulkan driver must be able to bind.
const MAX_SIZE_BLIND: u64 = 128 << 20;

/// Share of free memory that is left alone, so that the rest of the system keeps breathing.
const RESERVE_SHARE: u64 = 32;

/// Wishes for the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanOptions {
    /// Context in tokens; `None` is the longest sensible one.
    pub n_ctx: Option<u32>,
    /// Type of stored keys.
    pub dtype_k: DType,
    /// Type of stored values.
    pub dtype_v: DType,
    /// Tokens of a run.
    pub n_ubatch: u32,
    /// Rows of logits of a run.
    pub n_outputs: u32,
    /// Whether weights may be used in place from the mapped file.
    pub mmap: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            n_ctx: None,
            dtype_k: DType::F16,
            dtype_v: DType::F16,
            n_ubatch: 512,
            n_outputs: 1,
            mmap: true,
        }
    }
}

/// What a plan is made of.
pub(crate) struct Planner<'a> {
    pub device: &'a Device,
    pub entry: &'a DeviceEntry,
    pub gguf: &'a Gguf,
    pub model: &'a tegula_arch::Model,
    pub program: &'a Program,
    pub ffi: &'a FfiProgram,
    pub options: PlanOptions,
}

/// A buffer type with its limits as the tilings need them.
struct Place<'a> {
    index: u32,
    buffer_type: &'a BufferType,
    heap: &'a Heap,
    limits: ChunkLimits,
}

impl Planner<'_> {
    /// The plan, or why there is none.
    pub(crate) fn plan(&self) -> Result<Plan> {
        self.check_ops()?;
        let info = &self.entry.info;
        let weights_at = self.place(info.type_for_weights)?;
        let kv_at = self.place(info.type_for_kv)?;
        let scratch_at = self.place(info.type_for_scratch)?;
        let weights = self.plan_weights(&weights_at)?;
        let trained = self.model.info().n_ctx_train;
        let n_ctx_bound = self.options.n_ctx.unwrap_or(trained).max(1);
        let (n_ubatch, _, memory) = self.fit_ubatch(&scratch_at, n_ctx_bound)?;
        let fixed = Fixed {
            weights: weights.bytes(true) + weights.bytes(false),
            scratch: memory.scratch.iter().map(|piece| piece.size).sum(),
            logits: self.logits_bytes(n_ubatch)?,
            compile_device: memory.device_bytes,
            compile_host: memory.host_bytes,
        };
        let budget = self.kv_budget(&weights_at, &kv_at, &scratch_at, &fixed)?;
        let per_token = KvShape::new(&self.program.kv_layers, 1, kv_at.limits, 1)?;
        let per_token = per_token.block_bytes() / u64::from(per_token.block_len);
        let context = choose(ContextInputs {
            asked: self.options.n_ctx,
            trained: u64::from(trained),
            kv_bytes_per_token: per_token,
            budget,
        })?;
        let alignment = kv_at.buffer_type.alignment.max(1);
        let kv = KvShape::new(&self.program.kv_layers, context.n_ctx, kv_at.limits, alignment)?;
        // The bound on the context was a guess until now; scratch that depends on it is asked for again.
        let (n_ubatch, ubatch_reason, memory) = self.fit_ubatch(&scratch_at, context.n_ctx)?;
        let mut plan = Plan {
            device: self.entry.id(),
            weights,
            kv,
            context,
            n_ubatch,
            ubatch_reason,
            n_outputs: self.options.n_outputs.clamp(1, n_ubatch.max(1)),
            scratch: memory.scratch,
            compile_device_bytes: memory.device_bytes,
            compile_host_bytes: memory.host_bytes,
            logits_bytes: self.logits_bytes(n_ubatch)?,
            report: self.empty_report(per_token),
        };
        self.fill_report(&mut plan, &weights_at, &kv_at, &scratch_at)?;
        Ok(plan)
    }

    fn place(&self, index: u32) -> Result<Place<'_>> {
        let buffer_type = self.entry.buffer_type(index)?;
        let heap = self.entry.info.heaps.get(buffer_type.heap as usize).ok_or_else(|| {
            Error::NoDevice(format!("{}: buffer type {index} names no heap", self.entry.id()))
        })?;
        let max_size = buffer_type.max_size.get().unwrap_or_else(|| {
            log::warn!(
                "{}: the greatest buffer is unknown; {MAX_SIZE_BLIND} bytes are assumed",
                self.entry.id()
            );
            MAX_SIZE_BLIND
        });
        let preferred =
            buffer_type.preferred_chunk.get().unwrap_or(max_size).clamp(1, max_size.max(1));
        Ok(Place { index, buffer_type, heap, limits: ChunkLimits { max_size, preferred } })
    }

    fn check_ops(&self) -> Result<()> {
        let supported = self.device.supports(self.ffi)?;
        let mut missing: Vec<&str> = self
            .program
            .ops
            .iter()
            .zip(supported)
            .filter(|(_, supported)| !supported)
            .map(|(op, _)| op.kind.name())
            .collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::OpsUnsupported { device: self.entry.id(), ops: missing.join(", ") })
    }

    fn tensor(&self, value: &Value) -> Result<&TensorInfo> {
        Ok(self.gguf.required_tensor(&value.name)?)
    }

    /// Weights in the order of the files, each in the layout that the device asks for.
    fn plan_weights(&self, at: &Place<'_>) -> Result<WeightsPlan> {
        let mut order = Vec::new();
        for (id, value) in self.program.weights() {
            let tensor = self.tensor(value)?;
            order.push((tensor.shard(), tensor.offset(), id, value));
        }
        order.sort_by_key(|(shard, offset, ..)| (*shard, *offset));
        let mut out = WeightsPlan::default();
        let mut in_file: Vec<Vec<(Item, u64, ValueId)>> =
            vec![Vec::new(); self.gguf.shards().len()];
        let mut allocated = Vec::new();
        for (shard, _, id, value) in order {
            let desc = WeightDesc {
                dtype: value.dtype,
                uses: uses_of(self.program, id),
                n_in: value.row_len(),
                n_rows: rows_of(value),
            };
            let layout = self.device.weight_layout(&desc)?;
            let item = Item {
                name: value.name.clone(),
                n_rows: desc.n_rows,
                rows_per_group: u64::from(layout.rows_per_group.max(1)),
                group_bytes: layout.group_bytes,
                alignment: layout.alignment.max(at.buffer_type.alignment).max(1),
            };
            let importable = self.options.mmap && at.buffer_type.import && layout.is_native();
            let range = self.gguf.file_range(self.tensor(value)?).map(|(_, range)| range);
            match (range, in_file.get_mut(shard)) {
                (Some(range), Some(items)) if importable => items.push((item, range.start, id)),
                _ => allocated.push((item, layout.layout, id)),
            }
        }
        for (shard, items) in in_file.into_iter().enumerate() {
            pack_shard(&mut out, shard, items, at)?;
        }
        let items: Vec<Item> = allocated.iter().map(|(item, ..)| item.clone()).collect();
        let packing = pack(&items, at.limits)?;
        let first = out.chunks.len();
        out.chunks.extend(
            packing
                .chunks
                .iter()
                .map(|size| WeightChunk { size: *size, source: ChunkSource::Alloc }),
        );
        out.tiles.extend(packing.tiles.iter().filter_map(|tile| {
            let (_, layout, value) = allocated.get(tile.item)?;
            Some(weight_tile(tile, *value, *layout, first))
        }));
        Ok(out)
    }

    /// The greatest ubatch up to the one asked for whose scratch fits the chunks, why it is lower, and what it takes.
    fn fit_ubatch(
        &self,
        at: &Place<'_>,
        n_ctx: u32,
    ) -> Result<(u32, Option<String>, ExecutableMemory)> {
        let mut n_ubatch = self.options.n_ubatch.min(n_ctx).max(1);
        let mut reason = None;
        loop {
            let options = self.compile_options(at, n_ubatch, n_ctx);
            match self.device.memory(self.ffi, &options) {
                Ok(memory) => return Ok((n_ubatch, reason, memory)),
                Err(error) if error.kind == DeviceErrorKind::TooBig && n_ubatch > 1 => {
                    reason = Some(format!("{n_ubatch} tokens do not fit: {}", error.message));
                    n_ubatch /= 2;
                }
                Err(error) if error.kind == DeviceErrorKind::TooBig => {
                    return Err(Error::ScratchTooBig {
                        device: self.entry.id(),
                        cause: Box::new(error),
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn compile_options(&self, at: &Place<'_>, n_ubatch: u32, n_ctx: u32) -> CompileOptions {
        compile_options(
            n_ubatch,
            self.options.n_outputs.clamp(1, n_ubatch),
            n_ctx,
            at.index,
            at.limits.max_size,
        )
    }

    fn logits_bytes(&self, n_ubatch: u32) -> Result<u64> {
        let rows = u64::from(self.options.n_outputs.clamp(1, n_ubatch.max(1)));
        rows.checked_mul(u64::from(self.model.info().n_vocab))
            .and_then(|n| n.checked_mul(4))
            .ok_or_else(|| Error::Overflow { what: "the bytes of the logits".into() })
    }

    /// Bytes left for the KV cache in its pool; `None` if free memory is unknown.
    fn kv_budget(
        &self,
        weights: &Place<'_>,
        kv: &Place<'_>,
        scratch: &Place<'_>,
        fixed: &Fixed,
    ) -> Result<Option<u64>> {
        let Some(free) = kv.heap.free.get() else { return Ok(None) };
        let same_pool = |place: &Place<'_>| place.heap.pool == kv.heap.pool;
        let mut used = 0u64;
        let mut add = |counts: bool, bytes: u64| {
            used = if counts { used.saturating_add(bytes) } else { used };
        };
        add(same_pool(weights), fixed.weights.saturating_add(fixed.compile_device));
        add(same_pool(scratch), fixed.scratch);
        add(kv.heap.pool == POOL_HOST, fixed.logits.saturating_add(fixed.compile_host));
        let usable = free - free / RESERVE_SHARE;
        usable.checked_sub(used).map(Some).ok_or_else(|| Error::ModelDoesNotFit {
            device: self.entry.id(),
            weights: fixed.weights,
            scratch: fixed.scratch,
            free,
        })
    }

    fn empty_report(&self, kv_bytes_per_token: u64) -> PlanReport {
        let info = self.model.info();
        let tensor_bytes = self
            .program
            .weights()
            .filter_map(|(_, value)| self.gguf.tensor(&value.name))
            .map(TensorInfo::n_bytes)
            .sum();
        PlanReport {
            model: ModelReport {
                path: self.model.file().display().to_string(),
                arch: info.arch.to_owned(),
                name: info.name.clone(),
                tensor_bytes,
                n_params: info.n_params,
            },
            context: ContextReport {
                n_ctx: 0,
                reason: String::new(),
                n_ctx_train: info.n_ctx_train,
                kv_type_k: self.options.dtype_k.name().to_owned(),
                kv_type_v: self.options.dtype_v.name().to_owned(),
                kv_bytes_per_token,
                kv_bytes: 0,
                block_len: 0,
                segment_tokens: 0,
            },
            ubatch: UbatchReport { n_tokens: 0, reason: None },
            devices: Vec::new(),
        }
    }

    fn fill_report(
        &self,
        plan: &mut Plan,
        weights: &Place<'_>,
        kv: &Place<'_>,
        scratch: &Place<'_>,
    ) -> Result<()> {
        plan.report.ubatch =
            UbatchReport { n_tokens: plan.n_ubatch, reason: plan.ubatch_reason.clone() };
        let context = &mut plan.report.context;
        context.n_ctx = plan.context.n_ctx;
        context.reason = plan.context.reason.clone();
        context.kv_bytes = plan.kv.bytes()?;
        context.block_len = plan.kv.block_len;
        context.segment_tokens = plan.kv.segment_blocks * plan.kv.block_len;

        let mut heaps: Vec<HeapReport> =
            (0u32..).zip(&self.entry.info.heaps).map(heap_report).collect();
        let mut push = |heap: u32, chunk: ChunkReport| {
            if let Some(heap) = heaps.get_mut(heap as usize) {
                heap.planned_bytes += chunk.size;
                heap.mapped_bytes += if chunk.source == "mapped" { chunk.size } else { 0 };
                heap.chunks.push(chunk);
            }
        };
        for chunk in self.weight_reports(plan, weights) {
            push(weights.buffer_type.heap, chunk);
        }
        for segment in 0..plan.kv.n_segments() {
            for chunk in kv_reports(&plan.kv, segment, kv)? {
                push(kv.buffer_type.heap, chunk);
            }
        }
        for piece in &plan.scratch {
            push(scratch.buffer_type.heap, chunk_report("scratch", scratch, piece.size));
        }
        if plan.compile_device_bytes > 0 {
            let chunk = chunk_report("compile", weights, plan.compile_device_bytes);
            push(weights.buffer_type.heap, chunk);
        }
        // Memory of the core itself is counted where the host's pool is, if this device has it.
        let host = self.entry.info.heaps.iter().position(|heap| heap.pool == POOL_HOST);
        if let Some(host) = host.and_then(|index| u32::try_from(index).ok()) {
            let own = |usage, size| ChunkReport {
                usage,
                buffer_type: "host".into(),
                max_size: None,
                size,
                source: "allocated",
                tiles: Vec::new(),
            };
            push(host, own("logits", plan.logits_bytes));
            if plan.compile_host_bytes > 0 {
                push(host, own("compile", plan.compile_host_bytes));
            }
        }
        for heap in &mut heaps {
            // Nothing is staged beside its final place today, so loading takes no more than running.
            heap.peak_bytes = heap.planned_bytes;
        }
        let device =
            DeviceReport { id: self.entry.id(), name: self.entry.info.name.clone(), heaps };
        plan.report.devices.push(device);
        Ok(())
    }

    fn weight_reports(&self, plan: &Plan, at: &Place<'_>) -> Vec<ChunkReport> {
        let mut chunks: Vec<ChunkReport> = plan
            .weights
            .chunks
            .iter()
            .map(|chunk| ChunkReport {
                source: match chunk.source {
                    ChunkSource::File { .. } => "mapped",
                    ChunkSource::Alloc => "allocated",
                },
                ..chunk_report("weights", at, chunk.size)
            })
            .collect();
        for tile in &plan.weights.tiles {
            let name = self.program.values.get(tile.value.index()).map(|value| value.name.clone());
            if let Some(chunk) = chunks.get_mut(tile.chunk) {
                chunk.tiles.push(TileReport {
                    tensor: name.unwrap_or_default(),
                    first_row: tile.first_row,
                    n_rows: tile.n_rows,
                    offset: tile.offset,
                    size: tile.size,
                });
            }
        }
        chunks
    }
}

struct Fixed {
    weights: u64,
    scratch: u64,
    logits: u64,
    compile_device: u64,
    compile_host: u64,
}

/// The options that a program is planned and compiled with; one sequence a run.
pub(crate) fn compile_options(
    n_ubatch: u32,
    n_outputs: u32,
    n_ctx: u32,
    scratch_type: u32,
    scratch_chunk_max: u64,
) -> CompileOptions {
    CompileOptions {
        n_tokens_max: n_ubatch,
        n_outputs_max: n_outputs,
        n_seqs_max: 1,
        n_ctx_max: n_ctx,
        scratch_type,
        scratch_chunk_max,
    }
}

/// Rows of a weight; a vector is one row.
pub(crate) fn rows_of(value: &Value) -> u64 {
    match value.rows() {
        tegula_program::Dim::Fixed(n) => n,
        _ => 1,
    }
}

/// Which ops read a weight, as bits of `weight_use`.
pub(crate) fn uses_of(program: &Program, id: ValueId) -> u32 {
    let mut uses = 0;
    for op in &program.ops {
        for (position, input) in op.inputs.iter().enumerate() {
            if *input == id {
                uses |= match (&op.kind, position) {
                    (OpKind::Matmul, 1) => weight_use::MATMUL,
                    (OpKind::Embed, 1) => weight_use::EMBED,
                    _ => weight_use::VECTOR,
                };
            }
        }
    }
    uses
}

fn pack_shard(
    out: &mut WeightsPlan,
    shard: usize,
    items: Vec<(Item, u64, ValueId)>,
    at: &Place<'_>,
) -> Result<()> {
    let values: Vec<ValueId> = items.iter().map(|(_, _, id)| *id).collect();
    let (items, begins): (Vec<Item>, Vec<u64>) =
        items.into_iter().map(|(item, begin, _)| (item, begin)).unzip();
    let packing = pack_file(&items, &begins, at.buffer_type.import_alignment, at.limits)?;
    let first = out.chunks.len();
    for (size, begin) in packing.chunks.iter().zip(&packing.file_begins) {
        let source = ChunkSource::File { shard, begin: *begin };
        out.chunks.push(WeightChunk { size: *size, source });
    }
    out.tiles.extend(packing.tiles.iter().filter_map(|tile| {
        Some(weight_tile(tile, *values.get(tile.item)?, tegula_abi::LAYOUT_NATIVE, first))
    }));
    Ok(())
}

fn weight_tile(
    tile: &crate::memory::tiling::TileSpec,
    value: ValueId,
    layout: u32,
    first_chunk: usize,
) -> WeightTile {
    WeightTile {
        value,
        first_row: tile.first_row,
        n_rows: tile.n_rows,
        chunk: first_chunk + tile.chunk,
        offset: tile.offset,
        size: tile.size,
        layout,
    }
}

fn chunk_report(usage: &'static str, at: &Place<'_>, size: u64) -> ChunkReport {
    ChunkReport {
        usage,
        buffer_type: at.buffer_type.name.clone(),
        max_size: Some(at.buffer_type.max_size.into()),
        size,
        source: "allocated",
        tiles: Vec::new(),
    }
}

fn kv_reports(kv: &KvShape, segment: u32, at: &Place<'_>) -> Result<Vec<ChunkReport>> {
    let packing = kv.pack_segment(segment)?;
    let mut chunks: Vec<ChunkReport> =
        packing.chunks.iter().map(|size| chunk_report("kv", at, *size)).collect();
    for tile in &packing.tiles {
        let side = if tile.item.is_multiple_of(2) { "k" } else { "v" };
        if let Some(chunk) = chunks.get_mut(tile.chunk) {
            chunk.tiles.push(TileReport {
                tensor: format!("kv.{}.{side}", tile.item / 2),
                first_row: u64::from(segment * kv.segment_blocks * kv.block_len),
                n_rows: u64::from(kv.blocks_of(segment) * kv.block_len),
                offset: tile.offset,
                size: tile.size,
            });
        }
    }
    Ok(chunks)
}

fn heap_report((index, heap): (u32, &Heap)) -> HeapReport {
    HeapReport {
        index,
        kind: heap.kind.to_string(),
        pool: if heap.pool == POOL_HOST { "host".into() } else { format!("device {}", heap.pool) },
        total: heap.total.into(),
        free: heap.free.into(),
        planned_bytes: 0,
        mapped_bytes: 0,
        peak_bytes: 0,
        chunks: Vec::new(),
    }
}
