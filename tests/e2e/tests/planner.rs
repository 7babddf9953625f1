//! Properties of plans, over random models and random devices: nothing is over a limit, nothing is forgotten or counted twice, what is
//! refused can be asked for differently, and what is planned is what is allocated.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests fail by panicking"
)]

mod common;

use common::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use tegula::memory::plan::ChunkSource;
use tegula::{DType, Error, Model, ModelOptions, Outputs, Plan, PlanOptions, Runtime};
use tegula_e2e::{RandomModel, full, property};
use test_tegula_fake::{BufferTypeConfig, DeviceConfig, HeapConfig, Installed, LayoutConfig};

/// `max_size` that is assumed where a device cannot say.
const MAX_SIZE_BLIND: u64 = 128 << 20;

/// The layout that the fake asks for where it groups rows.
const LAYOUT_GROUPED: u32 = 7;

fn options(case: &Case) -> ModelOptions {
    let mut plan = PlanOptions {
        n_ctx: case.n_ctx,
        dtype_k: case.dtype_k,
        dtype_v: case.dtype_v,
        n_ubatch: case.n_ubatch,
        n_outputs: case.n_outputs,
        mmap: case.mmap,
        split: case.split.clone(),
        ..PlanOptions::default()
    };
    plan.place = case.place.iter().map(|rule| rule.parse().unwrap()).collect();
    ModelOptions { device: Some(case.selector()), plan, ..ModelOptions::default() }
}

/// What a heap gives to a plan: the rest is left to the system.
fn usable(free: u64) -> u64 {
    free - free / 32
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Bytes that a chunk takes of its heap.
fn taken(chunk: &Value) -> u64 {
    number(chunk.get("taken").unwrap_or(&chunk["size"]))
}

/// A plan beside the devices that it was made for.
struct Checker<'a> {
    model: &'a RandomModel,
    case: &'a Case,
    plan: &'a Plan,
    report: Value,
    devices: Vec<DeviceConfig>,
}

impl Checker<'_> {
    fn check(&self) {
        self.check_context();
        self.check_heaps();
        self.check_pools();
        self.check_weights();
        self.check_kv();
        self.check_scratch();
    }

    /// The device of the plan's `index`.
    fn device(&self, index: usize) -> &DeviceConfig {
        let id = &self.plan.devices[index];
        let number: usize = id.strip_prefix("fake:").unwrap().parse().unwrap();
        &self.devices[number]
    }

    /// A wish for a context is met to the token, and the cache holds it.
    fn check_context(&self) {
        let plan = self.plan;
        if let Some(asked) = self.case.n_ctx {
            assert_eq!(plan.context.n_ctx, asked);
        }
        assert!(plan.context.n_ctx <= self.case.n_ctx.unwrap_or(self.model.n_ctx_train));
        assert_eq!(plan.n_blocks, plan.context.n_ctx.div_ceil(plan.block_len));
        assert!(plan.n_ubatch <= self.case.n_ubatch.max(1));
        assert_eq!(plan.n_ubatch < self.case.n_ubatch.min(plan.context.n_ctx), {
            plan.ubatch_reason.is_some()
        });
        let context = &self.report["context"];
        let row = |dtype| self.model.kv_row_bytes(dtype) * u64::from(self.model.n_layer);
        let per_token = row(self.case.dtype_k) + row(self.case.dtype_v);
        assert_eq!(number(&context["kv_bytes_per_token"]), per_token);
        let tokens = u64::from(plan.n_blocks) * u64::from(plan.block_len);
        assert_eq!(number(&context["kv_bytes"]), tokens * per_token);
    }

    /// No chunk over its type's limit, no heap over its budget, and the sum is that of the parts.
    fn check_heaps(&self) {
        for (index, device) in list(&self.report["devices"]).iter().enumerate() {
            let config = self.device(index);
            for (heap, own) in list(&device["heaps"]).iter().zip(&config.heaps) {
                let chunks = list(&heap["chunks"]);
                for chunk in chunks.iter().filter(|chunk| chunk.get("max_size").is_some()) {
                    let (limit, size) = (limit(config, chunk), number(&chunk["size"]));
                    assert!(size <= limit, "{chunk} is over {limit}");
                    let tiles = list(&chunk["tiles"]);
                    let end = |tile: &Value| number(&tile["offset"]) + number(&tile["size"]);
                    assert!(tiles.iter().all(|tile| end(tile) <= size), "{chunk}");
                }
                let planned = number(&heap["planned_bytes"]);
                assert_eq!(planned, chunks.iter().map(taken).sum::<u64>(), "{heap}");
                let mapped = chunks.iter().filter(|chunk| chunk["source"] == "mapped");
                assert_eq!(number(&heap["mapped_bytes"]), mapped.map(taken).sum::<u64>());
                assert!(number(&heap["peak_bytes"]) >= planned);
                if let Some(free) = heap["free"]["value"].as_u64() {
                    assert!(planned <= usable(free), "{planned} of {free}: {heap}");
                    assert!(known_free(own).is_none_or(|known| free == known));
                }
            }
        }
    }

    /// Heaps that share a pool do not give the same bytes twice.
    fn check_pools(&self) {
        let mut planned: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for (index, device) in list(&self.report["devices"]).iter().enumerate() {
            for (heap, own) in list(&device["heaps"]).iter().zip(&self.device(index).heaps) {
                let is_host = own.pool == pool_of_host();
                let key = (if is_host { 0 } else { index }, own.pool);
                *planned.entry(key).or_default() += number(&heap["planned_bytes"]);
            }
        }
        for ((index, pool), planned) in planned {
            let free = if pool == pool_of_host() {
                self.host_free()
            } else {
                greatest_free(&self.device(index).heaps, pool)
            };
            let fits = free.is_none_or(|free| planned <= usable(free));
            assert!(fits, "pool {pool}: {planned} of {free:?}: {}", self.report["devices"]);
        }
    }

    /// Of the host's memory a processor knows best, whether it computes or not; without one, it is the greatest that any device states. Cards state
    /// what the machine of the test has, which no case comes near.
    fn host_free(&self) -> Option<u64> {
        let of = |(_, device): (&Card, &DeviceConfig)| greatest_free(&device.heaps, pool_of_host());
        let devices = || self.case.cards.iter().zip(&self.devices);
        let processors = devices().filter(|(card, _)| card.kind == Kind::Host);
        let stated = processors.filter_map(of).max();
        let has_card = self.case.cards.iter().any(|card| card.kind == Kind::Card);
        stated.or_else(|| devices().filter(|_| !has_card).filter_map(of).max())
    }

    /// Every stage's weights are there once: all rows, each in one tile, cut where the layout allows, aligned as was asked.
    fn check_weights(&self) {
        let rows = self.model.rows();
        let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
        let mut next_chunk = vec![0; self.plan.devices.len()];
        for stage in &self.plan.stages {
            let config = self.device(stage.device);
            let reported = self.chunks_of(stage.device, "weights");
            let first = next_chunk[stage.device];
            next_chunk[stage.device] += stage.weights.chunks.len();
            let reported = &reported[first..next_chunk[stage.device]];
            let mut next_row: BTreeMap<&str, u64> = BTreeMap::new();
            let mut spans = Vec::new();
            let mut cursor = vec![0; reported.len()];
            for tile in &stage.weights.tiles {
                let chunk = stage.weights.chunks[tile.chunk];
                let shown = &list(&reported[tile.chunk]["tiles"])[cursor[tile.chunk]];
                cursor[tile.chunk] += 1;
                let name = shown["tensor"].as_str().unwrap();
                let (row_bytes, n_rows) = rows[name];
                let (rows_per_group, group_bytes) = match config.weight_layout {
                    LayoutConfig::Grouped { rows_per_group, pad }
                        if tile.layout == LAYOUT_GROUPED =>
                    {
                        let n = u64::from(rows_per_group);
                        (n, n * row_bytes + pad)
                    }
                    _ => (1, row_bytes),
                };
                let next = next_row.entry(name).or_default();
                assert_eq!(tile.first_row, *next, "{name}");
                assert!(tile.first_row.is_multiple_of(rows_per_group), "{name}");
                assert_eq!(tile.size, tile.n_rows.div_ceil(rows_per_group) * group_bytes, "{name}");
                *next += tile.n_rows;
                assert!(*next <= n_rows, "{name}");
                assert!(tile.offset + tile.size <= chunk.size, "{name}");
                let begin = match chunk.source {
                    ChunkSource::File { begin, .. } => {
                        assert_eq!(tile.layout, 0, "{name} is mapped in another layout");
                        begin
                    }
                    ChunkSource::Alloc => {
                        assert!(tile.offset.is_multiple_of(type_of(config, 0).alignment), "{name}");
                        0
                    }
                };
                assert!((begin + tile.offset).is_multiple_of(config.weight_alignment), "{name}");
                spans.push((tile.chunk, tile.offset, tile.offset + tile.size));
            }
            assert_no_overlap(spans);
            for (name, n) in next_row {
                assert_eq!(n, rows[name].1, "{name} is not whole on {}", config.name);
                *seen.entry(rows.get_key_value(name).unwrap().0).or_default() += 1;
            }
        }
        let names: Vec<&str> = seen.keys().copied().collect();
        let expected: Vec<&str> = rows.keys().map(String::as_str).collect();
        assert_eq!(names, expected, "a weight is in no stage");
        for (name, n) in seen {
            assert!(n == 1 || name == "token_embd.weight" && n == 2 && self.model.tied, "{name}");
        }
    }

    /// Keys and values of every layer are there once: tiles lie in their chunks beside each other and hold every token.
    fn check_kv(&self) {
        let mut layers = 0;
        for stage in &self.plan.stages {
            let shape = &stage.kv;
            layers += shape.layers.len();
            if shape.layers.is_empty() {
                continue;
            }
            assert_eq!(shape.block_len, self.plan.block_len);
            let rows = [self.case.dtype_k, self.case.dtype_v].map(|d| self.model.kv_row_bytes(d));
            let mut blocks = 0;
            let n_segments = shape.n_segments();
            // Segments between the first and the last are like the first.
            for index in [0, n_segments - 1] {
                let packing = shape.pack_segment(index).unwrap();
                assert_eq!(packing.tiles.len(), 2 * shape.layers.len());
                let tokens = u64::from(shape.blocks_of(index) * shape.block_len);
                let mut spans = Vec::new();
                for (item, tile) in packing.tiles.iter().enumerate() {
                    assert_eq!((tile.item, tile.size), (item, tokens * rows[item % 2]));
                    assert!(tile.offset + tile.size <= packing.chunks[tile.chunk]);
                    spans.push((tile.chunk, tile.offset, tile.offset + tile.size));
                }
                assert_no_overlap(spans);
            }
            for index in 0..n_segments {
                blocks += shape.blocks_of(index);
            }
            assert_eq!(blocks, self.plan.n_blocks);
        }
        assert_eq!(layers, self.model.n_layer as usize);
        let mut tokens: BTreeMap<String, u64> = BTreeMap::new();
        for device in 0..self.plan.devices.len() {
            for tile in self.chunks_of(device, "kv").iter().flat_map(|chunk| list(&chunk["tiles"]))
            {
                let name = tile["tensor"].as_str().unwrap().to_owned();
                let next = tokens.entry(name.clone()).or_default();
                assert_eq!(number(&tile["first_row"]), *next, "{name}");
                *next += number(&tile["n_rows"]);
            }
        }
        let all = u64::from(self.plan.n_blocks) * u64::from(self.plan.block_len);
        for layer in 0..self.model.n_layer {
            for side in ["k", "v"] {
                assert_eq!(tokens.get(&format!("kv.{layer}.{side}")), Some(&all), "{layer} {side}");
            }
        }
    }

    fn check_scratch(&self) {
        for (index, pieces) in self.plan.scratch.iter().enumerate() {
            let shown = self.chunks_of(index, "scratch");
            let shown: Vec<u64> = shown.iter().map(|chunk| number(&chunk["size"])).collect();
            assert_eq!(shown, pieces.iter().map(|piece| piece.size).collect::<Vec<_>>());
        }
        for stage in &self.plan.stages {
            for (own, shared) in stage.scratch.iter().zip(&self.plan.scratch[stage.device]) {
                assert!(own.size <= shared.size && own.alignment <= shared.alignment);
            }
        }
    }

    /// A device's chunks for one purpose, in the order of the report.
    fn chunks_of(&self, device: usize, usage: &str) -> Vec<&Value> {
        let heaps = list(&self.report["devices"][device]["heaps"]);
        let chunks = heaps.iter().flat_map(|heap| list(&heap["chunks"]));
        chunks.filter(|chunk| chunk["usage"] == usage).collect()
    }
}

fn known_free(heap: &HeapConfig) -> Option<u64> {
    match heap.free {
        test_tegula_fake::Fig::Known(bytes) => Some(bytes),
        _ => None,
    }
}

fn greatest_free(heaps: &[HeapConfig], pool: u64) -> Option<u64> {
    heaps.iter().filter(|heap| heap.pool == pool).filter_map(known_free).max()
}

fn pool_of_host() -> u64 {
    // What `DeviceConfig::host` states: the fake and the planner agree on it through the boundary.
    DeviceConfig::host("", 0).heaps[0].pool
}

fn type_of(config: &DeviceConfig, index: usize) -> &BufferTypeConfig {
    &config.buffer_types[index]
}

/// The greatest chunk of the buffer type that a chunk is made of.
fn limit(config: &DeviceConfig, chunk: &Value) -> u64 {
    let name = chunk["buffer_type"].as_str().unwrap();
    let own = config.buffer_types.iter().find(|own| own.name == name).unwrap();
    match &own.max_size {
        test_tegula_fake::Fig::Known(bytes) => *bytes,
        _ => MAX_SIZE_BLIND,
    }
}

fn assert_no_overlap(mut spans: Vec<(usize, u64, u64)>) {
    spans.sort_unstable();
    for pair in spans.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "{pair:?} overlap");
    }
}

/// A refusal names what was asked and what there is, and what it proposes works.
fn check_refusal(error: &Error, case: &Case, try_again: &dyn Fn(&ModelOptions) -> Option<Error>) {
    let text = error.to_string();
    let remedies = match error {
        Error::ContextDoesNotFit { asked, bytes, budget, fits, remedies, .. } => {
            assert!(fits < asked && bytes > budget, "{text}");
            assert!(text.contains(&asked.to_string()) && text.contains(&fits.to_string()));
            remedies
        }
        Error::ModelDoesNotFit { needed, free, remedies, device } => {
            assert!(*needed > usable(*free), "{text}");
            assert!(text.contains(device.as_str()) && text.contains(&needed.to_string()));
            remedies
        }
        Error::RowTooBig { asked, limit, .. } => {
            assert!(asked > limit, "{text}");
            assert!(text.contains("TEGULA_MAX_BUFFER"));
            return;
        }
        Error::ScratchTooBig { cause, .. } => {
            assert!(cause.asked > cause.limit && cause.limit.is_some(), "{text}");
            assert!(text.contains("TEGULA_MAX_BUFFER"));
            return;
        }
        Error::MemoryUnknown { device, needed } => {
            assert!(case.cards.iter().any(|card| !card.knows_free), "{text}");
            assert!(text.contains(device.as_str()) && text.contains(&needed.to_string()));
            assert!(text.contains("TEGULA_MEMORY_LIMIT"));
            let mut forced = options(case);
            forced.plan.force = true;
            let error = try_again(&forced);
            let is_no_matter_of_memory =
                matches!(error, Some(Error::RowTooBig { .. } | Error::ScratchTooBig { .. }));
            assert!(error.is_none() || is_no_matter_of_memory, "--force gives no plan: {error:?}");
            return;
        }
        other => panic!("no refusal of a plan: {other}"),
    };
    assert!(!remedies.is_empty() || text.contains("free memory"), "{text}");
    for remedy in remedies.iter().filter(|remedy| remedy.starts_with('-')) {
        let options = with_flags(options(case), remedy);
        if let Some(error) = try_again(&options) {
            panic!("`{remedy}` gives no plan: {error}");
        }
    }
}

/// The options with the flags of a remedy.
fn with_flags(mut options: ModelOptions, remedy: &str) -> ModelOptions {
    let flags = remedy.split("  (").next().unwrap();
    let dtype = |text: &str| DType::from_name(&text.to_ascii_uppercase()).unwrap();
    let mut words = flags.split_whitespace();
    while let (Some(flag), Some(value)) = (words.next(), words.next()) {
        let plan = &mut options.plan;
        match flag {
            "-c" => plan.n_ctx = Some(value.parse().unwrap()),
            "--kv-type" => (plan.dtype_k, plan.dtype_v) = (dtype(value), dtype(value)),
            "--kv-type-k" => plan.dtype_k = dtype(value),
            "--kv-type-v" => plan.dtype_v = dtype(value),
            "--ubatch" => plan.n_ubatch = value.parse().unwrap(),
            "--device" => options.device = Some(value.to_owned()),
            other => panic!("`{remedy}`: this test does not know {other}"),
        }
    }
    options
}

/// Models of every size on devices of every kind: plans keep the limits, refusals help.
#[test]
fn every_plan_is_sound() {
    let folder = tempfile::tempdir().unwrap();
    // Plans, those of them whose context memory decided, and refusals.
    let counts = std::cell::Cell::new([0; 3]);
    property("every_plan_is_sound", [160, 5000], cases(false), |case| {
        let fake = case.install(folder.path());
        let runtime = runtime(&fake);
        let path = case.model.write_sparse(folder.path());
        let result = Model::plan_only(&runtime, &path, &options(&case));
        let [planned, bounded, refused] = counts.get();
        match result {
            Ok(plan) => {
                let is_bounded = plan.context.reason.starts_with("the longest that fits");
                counts.set([planned + 1, bounded + u32::from(is_bounded), refused]);
                check_plan(&case, &plan);
            }
            Err(error) => {
                counts.set([planned, bounded, refused + 1]);
                check_refusal(&error, &case, &|options| {
                    Model::plan_only(&runtime, &path, options).err()
                });
            }
        }
        drop(runtime);
        assert_nothing_allocated(&fake);
    });
    let counts = counts.get();
    println!("plans, bounded by memory, refusals: {counts:?}");
    assert!(counts[0] > 20 && counts[2] > 20, "{counts:?}: cases are lopsided");
    // One in 30 cases: a few hundred are sure to have some, a short run may have none.
    assert!(counts[1] > 0 || !full(), "{counts:?}: memory never decides");
}

fn check_plan(case: &Case, plan: &Plan) {
    let report = serde_json::to_value(&plan.report).unwrap();
    Checker { model: &case.model, case, plan, report, devices: case.devices() }.check();
}

fn assert_nothing_allocated(fake: &Installed) {
    if let Ok(stats) = fake.stats() {
        assert!(stats.is_empty(), "{stats:?}");
        assert_eq!(stats.violations, Vec::<String>::new());
        let _ = std::fs::remove_file(&fake.stats_file);
    }
}

/// What a plan says a device gives for each purpose is what is asked of the device, to the byte, once the whole context is in use.
#[test]
fn plan_bytes_are_allocated_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = std::cell::Cell::new(0);
    property("plan_bytes_are_allocated_bytes", [80, 2000], cases(true), |case| {
        let fake = case.install(folder.path());
        let runtime = runtime(&fake);
        let path = case.model.write(folder.path());
        match Model::open(&runtime, &path, &options(&case), &mut |_| {}) {
            Ok(model) => {
                loaded.set(loaded.get() + 1);
                let plan = model.plan().clone();
                check_plan(&case, &plan);
                fill(&model);
                drop((model, runtime));
                check_books(&case, &plan, &fake);
            }
            Err(error) => check_refusal(&error, &case, &|options| {
                Model::plan_only(&runtime, &path, options).err()
            }),
        }
        let _ = std::fs::remove_file(&fake.stats_file);
    });
    println!("{} models loaded", loaded.get());
    assert!(loaded.get() > 15, "{} models loaded: the devices are too small", loaded.get());
}

/// Evaluates as many tokens as the context has, so that every segment of the cache exists.
fn fill(model: &Model) {
    let n_ctx = model.plan().context.n_ctx;
    let tokens: Vec<u32> = (0..n_ctx).map(|i| 3 + i * 37 % 200).collect();
    let mut rows = 0;
    let go_on = AtomicBool::new(false);
    let evaluated = model.sequence().eval(&tokens, Outputs::Last, &go_on, |_, row| {
        assert!(row.iter().all(|logit| logit.is_finite()));
        rows += 1;
        Ok(())
    });
    assert!(evaluated.unwrap_or_else(|e| panic!("a full context: {e}")));
    assert_eq!(rows, 1);
}

fn check_books(case: &Case, plan: &Plan, fake: &Installed) {
    let stats = fake.stats().unwrap();
    assert!(stats.is_empty(), "left behind: {stats:?}");
    assert_eq!(stats.violations, Vec::<String>::new());
    let report = serde_json::to_value(&plan.report).unwrap();
    let devices = case.devices();
    let used = |id: &str| plan.devices.iter().position(|own| own == id);
    for (nth, (config, books)) in devices.iter().zip(&stats.devices).enumerate() {
        let mut planned: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
        let mut n_mapped = 0;
        let index = used(&format!("fake:{nth}"));
        let heaps = index.map_or(&[][..], |index| list(&report["devices"][index]["heaps"]));
        for chunk in heaps.iter().flat_map(|heap| list(&heap["chunks"])) {
            if chunk["source"] == "mapped" {
                n_mapped += 1;
            } else if chunk.get("max_size").is_some() {
                let name = chunk["buffer_type"].as_str().unwrap();
                let own = config.buffer_types.iter().find(|own| own.name == name).unwrap();
                let [n, bytes] = planned.entry(chunk["usage"].as_str().unwrap()).or_default();
                *n += 1;
                *bytes += number(&chunk["size"]).next_multiple_of(own.granularity.max(1));
            }
        }
        let allocated: BTreeMap<&str, [u64; 2]> =
            books.usage.iter().map(|(usage, own)| (&**usage, [own.allocs, own.bytes])).collect();
        assert_eq!(allocated, planned, "chunks and bytes on {}", config.name);
        assert_eq!(books.bytes_peak, planned.values().map(|[_, bytes]| bytes).sum::<u64>());
        assert_eq!(books.imports, n_mapped, "{}", config.name);
    }
}

/// The runtime with one plugin, and nothing else.
fn runtime(fake: &Installed) -> Runtime {
    fake_runtime(&[fake], tegula::Caps::default())
}
