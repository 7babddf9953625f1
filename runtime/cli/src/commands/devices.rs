//! `tegula devices`: backends, devices, heaps, buffer types, and why files were skipped.

use super::plan::figure;
use crate::args::DevicesArgs;
use crate::output;
use crate::table::{table, terminal_width};
use anyhow::Result;
use serde::Serialize;
use tegula::memory::plan::FigureReport;
use tegula::{DeviceEntry, Runtime, format_uuid};

#[derive(Serialize)]
struct Report {
    backends: Vec<BackendReport>,
    skipped: Vec<SkippedReport>,
    searched: Vec<SearchedReport>,
}

#[derive(Serialize)]
struct BackendReport {
    id: String,
    version: String,
    description: String,
    path: String,
    interface_revision: u32,
    devices: Vec<DeviceReport>,
    faulty: Vec<FaultReport>,
}

#[derive(Serialize)]
struct FaultReport {
    index: u32,
    error: String,
}

#[derive(Serialize)]
struct DeviceReport {
    id: String,
    name: String,
    kind: String,
    vendor: String,
    driver: String,
    uuid: Option<String>,
    pci: Option<String>,
    /// 0 is only used when named.
    rank: u32,
    heaps: Vec<HeapReport>,
    buffer_types: Vec<BufferTypeReport>,
    contradictions: Vec<String>,
}

#[derive(Serialize)]
struct HeapReport {
    kind: String,
    pool: u64,
    total: FigureReport,
    free: FigureReport,
}

#[derive(Serialize)]
struct BufferTypeReport {
    name: String,
    heap: u32,
    host_access: String,
    pinned: bool,
    import: bool,
    max_size: FigureReport,
    preferred_chunk: FigureReport,
    alignment: u64,
    read_bandwidth: FigureReport,
}

#[derive(Serialize)]
struct SkippedReport {
    path: String,
    reason: String,
}

#[derive(Serialize)]
struct SearchedReport {
    folder: String,
    origin: String,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    let runtime = output::runtime()?;
    let report = report(&runtime);
    if args.json { output::print_json(&report) } else { output::print(&text(&report)) }
}

fn report(runtime: &Runtime) -> Report {
    let entries = runtime.devices();
    let registry = runtime.registry();
    let backends = registry
        .backends
        .iter()
        .map(|backend| BackendReport {
            id: backend.id().to_owned(),
            version: backend.version().to_owned(),
            description: backend.description().to_owned(),
            path: backend.path().display().to_string(),
            interface_revision: backend.revision(),
            devices: entries
                .iter()
                .filter(|entry| entry.backend.id() == backend.id())
                .map(device)
                .collect(),
            faulty: backend
                .faulty()
                .iter()
                .map(|fault| FaultReport { index: fault.index, error: fault.error.to_string() })
                .collect(),
        })
        .collect();
    let skipped = registry.skipped.iter().map(|skipped| SkippedReport {
        path: skipped.path.display().to_string(),
        reason: skipped.reason.to_string(),
    });
    let searched = registry.search_path.dirs.iter().map(|(folder, origin)| SearchedReport {
        folder: folder.display().to_string(),
        origin: origin.to_string(),
    });
    Report { backends, skipped: skipped.collect(), searched: searched.collect() }
}

fn device(entry: &DeviceEntry) -> DeviceReport {
    let info = &entry.info;
    DeviceReport {
        id: entry.id(),
        name: info.name.clone(),
        kind: info.kind.to_string(),
        vendor: info.vendor.clone(),
        driver: info.driver.clone(),
        uuid: info.uuid.map(format_uuid),
        pci: info.pci.clone(),
        rank: info.rank,
        heaps: info
            .heaps
            .iter()
            .map(|heap| HeapReport {
                kind: heap.kind.to_string(),
                pool: heap.pool,
                total: heap.total.into(),
                free: heap.free.into(),
            })
            .collect(),
        buffer_types: info
            .buffer_types
            .iter()
            .map(|kind| BufferTypeReport {
                name: kind.name.clone(),
                heap: kind.heap,
                host_access: kind.host_access.to_string(),
                pinned: kind.pinned,
                import: kind.import,
                max_size: kind.max_size.into(),
                preferred_chunk: kind.preferred_chunk.into(),
                alignment: kind.alignment,
                read_bandwidth: kind.read_bandwidth.into(),
            })
            .collect(),
        contradictions: info.contradictions.clone(),
    }
}

fn text(report: &Report) -> String {
    let mut out = Vec::new();
    if report.backends.is_empty() {
        out.push("no backend could be loaded".to_owned());
    }
    for backend in &report.backends {
        out.push(format!(
            "{} {}  {}\n  {}",
            backend.id, backend.version, backend.description, backend.path
        ));
        for device in &backend.devices {
            out.push(device_text(device));
        }
        for fault in &backend.faulty {
            out.push(format!("  {}:{} cannot be used: {}", backend.id, fault.index, fault.error));
        }
        if backend.devices.is_empty() && backend.faulty.is_empty() {
            out.push("  no devices".to_owned());
        }
    }
    if !report.skipped.is_empty() {
        out.push("\nskipped:".to_owned());
    }
    for skipped in &report.skipped {
        out.push(format!("  {}: {}", skipped.path, skipped.reason));
    }
    if report.backends.is_empty() {
        out.push("\nfolders searched:".to_owned());
        for searched in &report.searched {
            out.push(format!("  {} ({})", searched.folder, searched.origin));
        }
    }
    out.join("\n")
}

fn device_text(device: &DeviceReport) -> String {
    let named = if device.rank == 0 { ", only used when named" } else { "" };
    let identity: Vec<String> = [
        device.uuid.as_ref().map(|uuid| format!("uuid:{uuid}")),
        device.pci.as_ref().map(|pci| format!("pci:{pci}")),
        (!device.driver.is_empty()).then(|| device.driver.clone()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut out = format!("  {}  {} ({}{named})", device.id, device.name, device.kind);
    if !identity.is_empty() {
        out.push_str(&format!("\n    {}", identity.join(", ")));
    }
    let width = terminal_width().map(|width| width.saturating_sub(4));
    let heaps: Vec<Vec<String>> = (0..)
        .zip(&device.heaps)
        .map(|(i, heap): (u32, _)| {
            vec![format!("{i} {}", heap.kind), sourced(&heap.free), sourced(&heap.total)]
        })
        .collect();
    let types: Vec<Vec<String>> = device
        .buffer_types
        .iter()
        .map(|kind| {
            let size = sourced(&kind.max_size);
            vec![kind.name.clone(), kind.heap.to_string(), size, kind.host_access.clone()]
        })
        .collect();
    let tables = [
        table(&["heap", "free", "total"], &heaps, &[], width),
        table(&["buffer type", "heap", "max_size", "host access"], &types, &[], width),
    ];
    for line in tables.iter().flat_map(|table| table.lines()) {
        out.push_str("\n    ");
        out.push_str(line);
    }
    for contradiction in &device.contradictions {
        out.push_str(&format!("\n    contradiction: {contradiction}"));
    }
    out
}

/// A figure with its source, always: this table is where numbers are checked.
fn sourced(value: &FigureReport) -> String {
    match value.value {
        Some(_) if value.source == "driver" => format!("{} (driver)", figure(value)),
        _ => figure(value),
    }
}
