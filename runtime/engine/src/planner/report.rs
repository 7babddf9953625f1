//! The plan for people and tools: every chunk with its tiles, heap by heap.

use super::free::{HeapFree, Origin};
use super::stage::{Bounds, Place, Places};
use super::{OpenDevice, Planner};
use crate::Result;
use crate::memory::kv::{KvShape, bytes_per_token};
use crate::memory::plan::*;
use crate::memory::state::StateShape;
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
            state_bytes_per_sequence: 0,
            block_len: 0,
            segment_tokens: 0,
        },
        ubatch: UbatchReport { n_tokens: 0, reason: None },
        parallel: ParallelReport { n_seqs: 0, n_outputs: 0, logits_bytes: 0 },
        notes: Vec::new(),
        stages: Vec::new(),
        devices: Vec::new(),
    }
}

/// Fills the report from the finished plan. `free` is what was counted on, for each heap of each device.
pub(super) fn fill(
    planner: &Planner<'_>,
    stages: &[(Stage, FfiProgram)],
    bounds: Bounds,
    free: &[Vec<HeapFree>],
    plan: &mut Plan,
) -> Result<()> {
    let report = &mut plan.report;
    report.ubatch = UbatchReport { n_tokens: plan.n_ubatch, reason: plan.ubatch_reason.clone() };
    report.parallel = ParallelReport {
        n_seqs: plan.n_parallel,
        n_outputs: plan.n_outputs,
        logits_bytes: plan.logits_bytes,
    };
    report.context.n_ctx = plan.context.n_ctx;
    report.context.reason = plan.context.reason.clone();
    report.context.block_len = plan.block_len;
    for stage in &plan.stages {
        report.context.kv_bytes += stage.kv.bytes()?;
        report.context.state_bytes_per_sequence += stage.state.sequence_bytes();
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
    for ((index, open), free) in planner.devices.iter().enumerate().zip(free) {
        let mut heaps: Vec<HeapReport> =
            (0u32..).zip(&open.entry.info.heaps).zip(free).map(heap_report).collect();
        fill_device(planner, stages, plan, index, &mut heaps)?;
        let (id, name) = (open.entry.id(), open.entry.info.name.clone());
        devices.push(DeviceReport { id, name, heaps });
    }
    fill_host(planner, stages, bounds, plan, &mut devices)?;
    for heap in devices.iter_mut().flat_map(|device| &mut device.heaps) {
        add_up(heap);
    }
    plan.report.devices = devices;
    Ok(())
}

/// The sums over a heap's chunks.
fn add_up(heap: &mut HeapReport) {
    let sum = |test: &dyn Fn(&ChunkReport) -> bool| -> u64 {
        let taken = heap.chunks.iter().filter(|chunk| test(chunk)).map(|chunk| chunk.taken);
        taken.fold(0, u64::saturating_add)
    };
    let all = sum(&|_| true);
    heap.mapped_bytes = sum(&|chunk| chunk.source == "mapped");
    // While the model is loaded there is no KV cache yet, and devices are loaded one after the other.
    let before_kv = sum(&|chunk| chunk.usage != "kv");
    let loading = heap.loading.iter().map(|chunk| chunk.taken).max().unwrap_or(0);
    heap.planned_bytes = all;
    heap.peak_bytes = all.max(before_kv.saturating_add(loading));
}

fn fill_device(
    planner: &Planner<'_>,
    stages: &[(Stage, FfiProgram)],
    plan: &Plan,
    device: usize,
    heaps: &mut [HeapReport],
) -> Result<()> {
    let mut push = |place: &Place<'_>, chunk: ChunkReport| {
        if let Some(heap) = heaps.get_mut(place.buffer_type.heap as usize) {
            heap.chunks.push(chunk);
        }
    };
    let mut scratch = plan.scratch.get(device).map_or(&[][..], Vec::as_slice);
    for ((stage, _), part) in stages.iter().zip(&plan.stages) {
        if part.device != device {
            continue;
        }
        let places = planner.places_of(part)?;
        for chunk in weight_reports(&stage.program, part, &places) {
            push(&places.weights, chunk);
        }
        for segment in 0..part.kv.n_segments() {
            for chunk in kv_reports(stage, &part.kv, segment, &places.kv)? {
                push(&places.kv, chunk);
            }
        }
        for slot in 0..part.state.n_slots {
            for chunk in state_reports(stage, &part.state, slot, &places.kv)? {
                push(&places.kv, chunk);
            }
        }
        if part.compile_device_bytes > 0 {
            let chunk = chunk_report("compile", &places.weights, part.compile_device_bytes);
            push(&places.weights, ChunkReport { taken: chunk.size, ..chunk });
        }
        // The stages of a device share it.
        for piece in std::mem::take(&mut scratch) {
            push(&places.scratch, chunk_report("scratch", &places.scratch, piece.size));
        }
    }
    Ok(())
}

/// Memory of the core itself, for each device its own: what the device makes for other stages and for the caller, and the tile that is being
/// uploaded. It is counted in the device's own heap of the host's memory, else in another device's, else by itself.
fn fill_host(
    planner: &Planner<'_>,
    stages: &[(Stage, FfiProgram)],
    bounds: Bounds,
    plan: &Plan,
    devices: &mut Vec<DeviceReport>,
) -> Result<()> {
    for (index, open) in planner.devices.iter().enumerate() {
        let own = || stages.iter().zip(&plan.stages).filter(|(_, part)| part.device == index);
        let (mut crossing, mut upload) = (0u64, 0u64);
        for ((stage, _), part) in own() {
            crossing = crossing.saturating_add(planner.crossing_bytes(stage, bounds)?);
            upload = upload.max(largest_upload(&stage.program, part)?);
        }
        let is_last = plan.stages.last().is_some_and(|part| part.device == index);
        let compile: u64 = own().map(|(_, part)| part.compile_host_bytes).sum();
        let steady = [
            ("logits", if is_last { plan.logits_bytes } else { 0 }),
            ("activations", crossing),
            ("compile", compile),
        ];
        let has_own = open.entry.info.heaps.iter().any(|heap| heap.pool == POOL_HOST);
        let whose = if has_own { String::new() } else { format!(", for {}", open.entry.id()) };
        let chunk = |(usage, size): (&'static str, u64)| ChunkReport {
            usage,
            buffer_type: format!("host{whose}"),
            max_size: None,
            size,
            taken: size,
            source: "allocated",
            tiles: Vec::new(),
        };
        let some = |(_, size): &(&str, u64)| *size > 0;
        let heap = host_heap(&planner.devices, index, devices);
        heap.chunks.extend(steady.into_iter().filter(some).map(chunk));
        let staging = Some(("staging", upload)).filter(some).map(chunk);
        heap.loading.extend(staging.map(|chunk| ChunkReport { source: "mapped", ..chunk }));
    }
    Ok(())
}

/// The heap in which the host's memory of device `index` is counted.
fn host_heap<'a>(
    opened: &[OpenDevice],
    index: usize,
    devices: &'a mut Vec<DeviceReport>,
) -> &'a mut HeapReport {
    let of_device = |device: usize| {
        let heaps = &opened.get(device)?.entry.info.heaps;
        Some((device, heaps.iter().position(|heap| heap.pool == POOL_HOST)?))
    };
    let found = of_device(index).or_else(|| (0..opened.len()).find_map(of_device));
    let (device, heap) = found.unwrap_or((opened.len(), 0));
    if device == devices.len() {
        devices.push(DeviceReport {
            id: "host".into(),
            name: "the host's memory, which none of the devices states".into(),
            heaps: vec![HeapReport { pool: "host".into(), kind: "host".into(), ..no_heap() }],
        });
    }
    &mut devices[device].heaps[heap]
}

fn no_heap() -> HeapReport {
    let unknown = || tegula_plugin::Figure::UNKNOWN.into();
    HeapReport {
        index: 0,
        kind: String::new(),
        pool: String::new(),
        total: unknown(),
        free: unknown(),
        assumed_free: None,
        planned_bytes: 0,
        mapped_bytes: 0,
        peak_bytes: 0,
        chunks: Vec::new(),
        loading: Vec::new(),
    }
}

/// Bytes of the file behind the largest tile that is uploaded.
fn largest_upload(program: &Program, part: &StagePlan) -> Result<u64> {
    let mut largest = 0;
    for tile in &part.weights.tiles {
        let chunk = part.weights.chunks.get(tile.chunk);
        if chunk.is_some_and(|chunk| chunk.source == ChunkSource::Alloc) {
            let value = program.value(tile.value)?;
            let row = value.dtype.row_bytes(value.row_len()).unwrap_or(0);
            largest = largest.max(row.saturating_mul(tile.n_rows));
        }
    }
    Ok(largest)
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
        .map(|chunk| {
            let report = chunk_report("weights", &places.weights, chunk.size);
            match chunk.source {
                ChunkSource::File { .. } => {
                    ChunkReport { source: "mapped", taken: chunk.size, ..report }
                }
                ChunkSource::Alloc => report,
            }
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

/// The chunks of one sequence's recurrent state, its tiles named by layer and op.
fn state_reports(
    stage: &Stage,
    state: &StateShape,
    slot: u32,
    at: &Place<'_>,
) -> Result<Vec<ChunkReport>> {
    let packing = state.pack_slot()?;
    let mut chunks: Vec<ChunkReport> =
        packing.chunks.iter().map(|size| chunk_report("state", at, *size)).collect();
    for tile in &packing.tiles {
        let is_user =
            |op: &&tegula_program::Op| op.kind.state_layer() == u32::try_from(tile.item).ok();
        let user = stage.program.ops.iter().find(is_user);
        let (layer, name) = user.map_or((0, "?"), |op| (op.layer.unwrap_or(0), op.kind.name()));
        if let Some(chunk) = chunks.get_mut(tile.chunk) {
            chunk.tiles.push(TileReport {
                tensor: format!("state.{layer}.{name}"),
                first_row: slot.into(),
                n_rows: 1,
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
        taken: at.taken(size),
        source: "allocated",
        tiles: Vec::new(),
    }
}

fn heap_report(((index, heap), free): ((u32, &Heap), &HeapFree)) -> HeapReport {
    let is_stated = [Origin::Stated, Origin::FarBelowHost].contains(&free.origin);
    HeapReport {
        index,
        kind: heap.kind.to_string(),
        pool: if heap.pool == POOL_HOST { "host".into() } else { format!("device {}", heap.pool) },
        total: heap.total.into(),
        free: heap.free.into(),
        assumed_free: free.bytes.filter(|_| !is_stated),
        ..no_heap()
    }
}
