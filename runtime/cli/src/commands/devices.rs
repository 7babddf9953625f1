//! `tegula devices`: backends, devices, heaps, buffer types, and why files were skipped.

mod why;

use super::plan::figure;
use crate::args::DevicesArgs;
use crate::output;
use crate::table::{table, terminal_width};
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use tegula::measure::DeviceRates;
use tegula::memory::plan::FigureReport;
use tegula::memory::units::format_size;
use tegula::selection::normal_pci;
use tegula::{DeviceEntry, ISOLATION_VARIABLE, PROBE_LIMIT_VARIABLE, Runtime, format_uuid};
use tegula_plugin::{ProbeEnd, ProbeFailure, SkipReason};
use why::{DecisionReport, PolicyReport, Why};

#[derive(Serialize)]
struct Report {
    backends: Vec<BackendReport>,
    skipped: Vec<SkippedReport>,
    searched: Vec<SearchedReport>,
    /// With --why: what `auto` takes, in this order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    policy: Vec<PolicyReport>,
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
    /// Names it whatever else is plugged in, where the driver says what it is.
    stable_id: String,
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
    /// With --why: what each selector decides on it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<DecisionReport>,
    /// With --measure: bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<DeviceRates>,
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
    /// Of a plugin that did not survive being tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    probe: Option<ProbeReport>,
}

#[derive(Serialize)]
struct ProbeReport {
    signal: Option<i32>,
    exit: Option<i32>,
    timed_out_s: Option<u64>,
    stage: &'static str,
    said: Option<String>,
    /// How long ago, where it is remembered.
    age_s: Option<u64>,
}

impl ProbeReport {
    fn of(failure: &ProbeFailure) -> Self {
        let mut out = Self {
            signal: None,
            exit: None,
            timed_out_s: None,
            stage: failure.stage.name(),
            said: failure.said.clone(),
            age_s: failure.age.map(|age| age.as_secs()),
        };
        match failure.end {
            ProbeEnd::Signal(signal) => out.signal = Some(signal),
            ProbeEnd::Exit(code) => out.exit = Some(code),
            ProbeEnd::TimedOut(limit) => out.timed_out_s = Some(limit.as_secs()),
            _ => {}
        }
        out
    }
}

#[derive(Serialize)]
struct SearchedReport {
    folder: String,
    origin: String,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    let runtime = output::runtime(&[])?;
    let measured = if args.measure { measure(&runtime, args)? } else { BTreeMap::new() };
    let mut report = report(&runtime);
    let why = if args.why { Some(Why::of(&runtime, args)?) } else { None };
    for device in report.backends.iter_mut().flat_map(|backend| &mut backend.devices) {
        device.measured = measured.get(&device.id).cloned();
        device.why = why.as_ref().map(|why| why.of_device(&device.id)).unwrap_or_default();
    }
    if args.json {
        report.policy = why.map(|why| why.policy).unwrap_or_default();
        return output::print_json(&report);
    }
    let why = why.map(|why| format!("\n{}", why.text())).unwrap_or_default();
    output::print(&format!("{}{why}", text(&report)))
}

/// Measures the devices that are asked for, all of them by default, and says on stderr which.
fn measure(runtime: &Runtime, args: &DevicesArgs) -> Result<BTreeMap<String, DeviceRates>> {
    let entries = match &args.device {
        Some(selector) => runtime.select(Some(selector))?,
        None => runtime.devices(),
    };
    let mut out = BTreeMap::new();
    for entry in entries {
        eprintln!("measuring {} ...", entry.id());
        match runtime.measure(&entry) {
            Ok(rates) => drop(out.insert(entry.id(), rates)),
            Err(error) => log::warn!("{}: {error}", entry.id()),
        }
    }
    Ok(out)
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
        probe: match &skipped.reason {
            SkipReason::Probe(failure) => Some(ProbeReport::of(failure)),
            _ => None,
        },
    });
    let searched = registry.search_path.dirs.iter().map(|(folder, origin)| SearchedReport {
        folder: folder.display().to_string(),
        origin: origin.to_string(),
    });
    Report {
        backends,
        skipped: skipped.collect(),
        searched: searched.collect(),
        policy: Vec::new(),
    }
}

fn device(entry: &DeviceEntry) -> DeviceReport {
    let info = &entry.info;
    DeviceReport {
        id: entry.id(),
        stable_id: entry.stable_id(),
        name: info.name.clone(),
        kind: info.kind.to_string(),
        vendor: info.vendor.clone(),
        driver: info.driver.clone(),
        uuid: info.uuid.map(format_uuid),
        pci: info.pci.as_deref().and_then(normal_pci).or_else(|| info.pci.clone()),
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
        why: Vec::new(),
        measured: None,
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
        out.push(format!("  {}\n    {}", skipped.path, skipped.reason));
    }
    out.extend(advice(&report.skipped));
    if report.backends.is_empty() {
        out.push("\nfolders searched:".to_owned());
        for searched in &report.searched {
            out.push(format!("  {} ({})", searched.folder, searched.origin));
        }
    }
    out.join("\n")
}

/// What to do about plugins that failed when they were tried.
fn advice(skipped: &[SkippedReport]) -> Option<String> {
    let mut failed = skipped.iter().filter_map(|skipped| skipped.probe.as_ref()).peekable();
    failed.peek()?;
    let mut out = format!(
        "\na failed probe is a fault of the plugin or its driver. It is tried again at the next start;\n{ISOLATION_VARIABLE}=off opens it all the same, in this process"
    );
    if failed.any(|probe| probe.timed_out_s.is_some()) {
        out.push_str(&format!(
            ". One that takes too long is tried again after\ntwo minutes, or now with {ISOLATION_VARIABLE}=child; {PROBE_LIMIT_VARIABLE}=SECONDS gives it more time"
        ));
    }
    Some(out)
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
            let read = match kind.read_bandwidth.value {
                Some(rate) => format!("{} ({})", per_second(rate), kind.read_bandwidth.source),
                None => kind.read_bandwidth.state.clone(),
            };
            vec![kind.name.clone(), kind.heap.to_string(), size, kind.host_access.clone(), read]
        })
        .collect();
    let tables = [
        table(&["heap", "free", "total"], &heaps, &[], width),
        table(&["buffer type", "heap", "max_size", "host access", "read"], &types, &[], width),
        device.measured.as_ref().map(|rates| rates_text(rates, width)).unwrap_or_default(),
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

/// What was measured, type by type, and what could not be.
fn rates_text(rates: &DeviceRates, width: Option<usize>) -> String {
    let rate = |rate: Option<u64>| rate.map_or("-".to_owned(), per_second);
    let rows: Vec<Vec<String>> = rates
        .types
        .iter()
        .map(|t| {
            let mut row = vec![t.buffer_type.clone(), format_size(t.size)];
            let rates = [t.device_read, t.copy, t.host_write, t.host_read];
            row.extend(rates.into_iter().chain([t.mapped_write, t.mapped_read]).map(rate));
            row
        })
        .collect();
    let header =
        ["measured", "with", "device read", "copy", "write", "read", "mapped write", "mapped read"];
    let mut out = table(&header, &rows, &[1, 2, 3, 4, 5, 6, 7], width);
    for kind in &rates.types {
        for note in &kind.notes {
            out.push_str(&format!("\n{}: {note}", kind.buffer_type));
        }
    }
    out
}

fn per_second(bytes: u64) -> String {
    format!("{:.1} GB/s", bytes as f64 / 1e9)
}

/// A figure with its source, always: this table is where numbers are checked.
fn sourced(value: &FigureReport) -> String {
    match value.value {
        Some(_) if value.source == "driver" => format!("{} (driver)", figure(value)),
        _ => figure(value),
    }
}
