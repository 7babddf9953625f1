//! The plan for people and tools: every chunk with its tiles, heap by heap.

use super::Planner;
use super::stage::{Place, Places};
use crate::Result;
use crate::memory::kv::{KvShape, bytes_per_token};
use crate::memory::plan::*;
use crate::partition::Stage;
use tegula_plugin::{Heap, POOL_HOST};
use tegula_program::ffi::FfiProgram;
use tegula_program::{Program, ValueKind};

/// What can be said before the plan is made.
pub(super) fn empty(planner: &Planner<'_>) -> PlanReport {
    let Planner { arch, program, options, .. } = planner;
    let info = arch.info();
    PlanReport {
        model: ModelReport {
            path: arch.file().display().to_string(),
            arch: info.arch.to_owned(),
            name: info.name.clone(),
            tensor_bytes: planner.weight_bytes(),
            n_params: info.n_params,
        },
        context: ContextReport {
            n_ctx: 0,
            reason: String::new(),
            n_ctx_train: info.n_ctx_train,
            kv_type_k: options.dtype_k.name().to_owned(),
            kv_type_v: options.dtype_v.name().to_owned(),
            kv_bytes_per_token: bytes_per_token(&program.kv_layers),
            kv_bytes: 0,
            block_len: 0,
            segment_tokens: 0,
        },
        ubatch: UbatchReport { n_tokens: 0, reason: None },
        stages: Vec::new(),
        devices: Vec::new(),
    }
}

/// Fills the report from the finished plan.
pub(super) fn fill(
    planner: &Planner<'_>,
    stages: &[(Stage, FfiProgram)],
    plan: &mut Plan,
) -> Result<()> {
    let report = &mut plan.report;
    report.ubatch = UbatchReport { n_tokens: plan.n_ubatch, reason: plan.ubatch_reason.clone() };
    report.context.n_ctx = plan.context.n_ctx;
    report.context.reason = plan.context.reason.clone();
    report.context.block_len = plan.block_len;
    for stage in &plan.stages {
        report.context.kv_bytes += stage.kv.bytes()?;
        let tokens = stage.kv.segment_blocks * stage.kv.block_len;
        report.context.segment_tokens = report.context.segment_tokens.max(tokens);
    }
    if stages.len() > 1 {
        let names: Vec<String> = planner.devices.iter().map(|d| d.entry.id()).collect();
        report.stages = stages
            .iter()
            .map(|(stage, _)| stage_report(stage, names.get(stage.device).cloned()))
            .collect();
    }
    let mut devices = Vec::new();
    for (index, open) in planner.devices.iter().enumerate() {
        let mut heaps: Vec<HeapReport> =
            (0u32..).zip(&open.entry.info.heaps).map(heap_report).collect();
        fill_device(planner, stages, plan, index, &mut heaps)?;
        for heap in &mut heaps {
            heap.planned_bytes = heap.chunks.iter().map(|chunk| chunk.size).sum();
            let mapped = heap.chunks.iter().filter(|chunk| chunk.source == "mapped");
            heap.mapped_bytes = mapped.map(|chunk| chunk.size).sum();
            // Weights are read from the mapped file straight into their place, so loading takes no more than running.
            heap.peak_bytes = heap.planned_bytes;
        }
        let (id, name) = (open.entry.id(), open.entry.info.name.clone());
        devices.push(DeviceReport { id, name, heaps });
    }
    fill_host(planner, plan, &mut devices);
    plan.report.devices = devices;
    Ok(())
}

fn fill_device(
    planner: &Planner<'_>,
    stages: &[(Stage, FfiProgram)],
    plan: &Plan,
    device: usize,
    heaps: &mut [HeapReport],
) -> Result<()> {
    let places = planner.places(device)?;
    let mut push = |place: &Place<'_>, chunk: ChunkReport| {
        if let Some(heap) = heaps.get_mut(place.buffer_type.heap as usize) {
            heap.chunks.push(chunk);
        }
    };
    for ((stage, _), part) in stages.iter().zip(&plan.stages) {
        if part.device != device {
            continue;
        }
        for chunk in weight_reports(&stage.program, part, &places) {
            push(&places.weights, chunk);
        }
        for segment in 0..part.kv.n_segments() {
            for chunk in kv_reports(stage, &part.kv, segment, &places.kv)? {
                push(&places.kv, chunk);
            }
        }
        if part.compile_device_bytes > 0 {
            let chunk = chunk_report("compile", &places.weights, part.compile_device_bytes);
            push(&places.weights, chunk);
        }
    }
    for piece in plan.scratch.get(device).into_iter().flatten() {
        push(&places.scratch, chunk_report("scratch", &places.scratch, piece.size));
    }
    Ok(())
}

/// Memory of the core itself, counted where the first device sees the host's pool.
fn fill_host(planner: &Planner<'_>, plan: &Plan, devices: &mut [DeviceReport]) {
    let place = planner.devices.iter().enumerate().find_map(|(index, open)| {
        let heap = open.entry.info.heaps.iter().position(|heap| heap.pool == POOL_HOST)?;
        Some((index, heap))
    });
    let Some((device, heap)) = place else { return };
    let heap = devices.get_mut(device).and_then(|device| device.heaps.get_mut(heap));
    let Some(heap) = heap else { return };
    let compile: u64 = plan.stages.iter().map(|stage| stage.compile_host_bytes).sum();
    let own = [
        ("logits", plan.logits_bytes),
        ("activations", plan.activation_bytes),
        ("compile", compile),
    ];
    for (usage, size) in own.into_iter().filter(|(_, size)| *size > 0) {
        heap.chunks.push(ChunkReport {
            usage,
            buffer_type: "host".into(),
            max_size: None,
            size,
            source: "allocated",
            tiles: Vec::new(),
        });
        heap.planned_bytes += size;
        heap.peak_bytes += size;
    }
}

fn stage_report(stage: &Stage, device: Option<String>) -> StageReport {
    let layers = || stage.program.ops.iter().filter_map(|op| op.layer);
    let comes_in = stage.program.inputs.iter().filter_map(|id| {
        let value = stage.program.values.get(id.index())?;
        (value.kind == ValueKind::Input && value.dims.len() == 2).then(|| value.row_len() * 4)
    });
    let bytes_in_per_token: u64 = comes_in.sum();
    StageReport {
        device: device.unwrap_or_default(),
        layers: layers().min().zip(layers().max()),
        n_ops: stage.program.ops.len(),
        bytes_in_per_token,
        path: if bytes_in_per_token > 0 { "host memory" } else { "" },
    }
}

fn weight_reports(program: &Program, part: &StagePlan, places: &Places<'_>) -> Vec<ChunkReport> {
    let mut chunks: Vec<ChunkReport> = part
        .weights
        .chunks
        .iter()
        .map(|chunk| ChunkReport {
            source: match chunk.source {
                ChunkSource::File { .. } => "mapped",
                ChunkSource::Alloc => "allocated",
            },
            ..chunk_report("weights", &places.weights, chunk.size)
        })
        .collect();
    for tile in &part.weights.tiles {
        let name = program.values.get(tile.value.index()).map(|value| value.name.clone());
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

fn kv_reports(
    stage: &Stage,
    kv: &KvShape,
    segment: u32,
    at: &Place<'_>,
) -> Result<Vec<ChunkReport>> {
    let packing = kv.pack_segment(segment)?;
    let mut chunks: Vec<ChunkReport> =
        packing.chunks.iter().map(|size| chunk_report("kv", at, *size)).collect();
    // KV layers in their order, named by the transformer layer that stores them.
    let names: Vec<u32> = stage
        .program
        .ops
        .iter()
        .filter(|op| matches!(op.kind, tegula_program::OpKind::KvStore { .. }))
        .filter_map(|op| op.layer)
        .collect();
    for tile in &packing.tiles {
        let side = if tile.item.is_multiple_of(2) { "k" } else { "v" };
        let layer = names.get(tile.item / 2).copied().unwrap_or(0);
        if let Some(chunk) = chunks.get_mut(tile.chunk) {
            chunk.tiles.push(TileReport {
                tensor: format!("kv.{layer}.{side}"),
                first_row: u64::from(segment) * u64::from(kv.segment_blocks * kv.block_len),
                n_rows: u64::from(kv.blocks_of(segment)) * u64::from(kv.block_len),
                offset: tile.offset,
                size: tile.size,
            });
        }
    }
    Ok(chunks)
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
