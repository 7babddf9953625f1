//! A tour over everything a device can do, so that a fault anywhere is met by it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use tegula_plugin::*;
use tegula_program::ffi::FfiProgram;
use tegula_program::{Dim, ProgramBuilder};
use tegula_quant::DType;
use test_tegula_fake::{Installed, Stats};

pub(crate) const N_IN: usize = 32;
pub(crate) const N_ROWS: usize = 40;
const N_TOKENS: usize = 2;

/// The registry of these files, and nothing else.
pub(crate) fn load(paths: &[&Path]) -> Registry {
    let paths: Vec<_> = paths.iter().map(|path| path.to_path_buf()).collect();
    Registry::load_from(SearchPath::build(&paths, None, false, None))
}

/// The tiny model of the golden data, if it is there.
pub(crate) fn model_file() -> Option<PathBuf> {
    let golden = std::env::var_os("TEGULA_GOLDEN").map(PathBuf::from);
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/golden");
    let file = golden.unwrap_or_else(|| beside.into()).join("tiny/llama256/model-q8_0.gguf");
    if file.is_file() {
        return Some(file);
    }
    eprintln!("SKIPPED: no {}", file.display());
    None
}

/// A library whose constructor or destructor does `code`, and whose entry refuses; it is named like a plugin.
pub(crate) fn compile(dir: &Path, code: &str) -> PathBuf {
    let plugin = dir.join("libtegula_c.so");
    let source = plugin.with_extension("c");
    let entry = "int tegula_backend_v1(const void *host, unsigned *out) { (void)host; (void)out; return 8; }";
    let headers =
        "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n#include <fcntl.h>\n";
    std::fs::write(&source, format!("{headers}{code}\n{entry}\n")).unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&plugin).arg(&source);
    assert!(cc.status().unwrap().success(), "{code}");
    plugin
}

/// What was alive at the end, which must be nothing, after a host that broke no rule.
pub(crate) fn assert_clean(fake: &Installed, what: &str) -> Stats {
    let stats = fake.stats().unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(stats.is_empty(), "{what}: left behind: {stats:?}");
    assert_eq!(stats.violations, Vec::<String>::new(), "{what}");
    stats
}

/// `y = x W^T`, then scaled.
fn program() -> FfiProgram {
    let mut b = ProgramBuilder::new("tour");
    let x = b.input("x", DType::F32, &[Dim::NTokens, Dim::Fixed(N_IN as u64)]);
    let w = b.weight("w", DType::F32, &[N_ROWS as u64, N_IN as u64]);
    let y = b.matmul(x, w, None);
    let y = b.scale(y, 2.0);
    b.output("y", y);
    FfiProgram::new(&b.finish().unwrap())
}

fn bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn weight(row: usize, column: usize) -> f32 {
    (row as f32 - column as f32) / 8.0
}

fn x(token: usize, column: usize) -> f32 {
    (token + 1) as f32 * (column % 5) as f32
}

/// What the program computes.
pub(crate) fn expected() -> Vec<f32> {
    let dot = |t: usize, r: usize| (0..N_IN).map(|c| x(t, c) * weight(r, c)).sum::<f32>() * 2.0;
    (0..N_TOKENS).flat_map(|t| (0..N_ROWS).map(move |r| dot(t, r))).collect()
}

/// Calls every function of a device: memory, an import where it has one, transfers, a program and two runs of it, the first to host memory
/// and the second to a buffer. Gives the outputs of both.
pub(crate) fn tour(device: &Device) -> Result<[Vec<f32>; 2], DeviceError> {
    let info = device.info();
    let alloc = |size: usize, buffer_type, usage| {
        device.alloc(&BufferDesc { size: size as u64, buffer_type, usage })
    };
    let desc = WeightDesc {
        dtype: DType::F32,
        uses: weight_use::MATMUL,
        n_in: N_IN as u64,
        n_rows: N_ROWS as u64,
        rows_per_expert: 0,
    };
    let program = program();
    let layout = device.weight_layout(&desc)?;
    device.supports(&program)?;
    let size = layout.bytes(N_ROWS as u64).unwrap() as usize;
    let buffer = Arc::new(alloc(size, info.type_for_weights, BufferUsage::WEIGHTS)?);
    let tile = Tile {
        first_row: 0,
        n_rows: N_ROWS as u64,
        buffer,
        offset: 0,
        size: size as u64,
        layout: layout.layout,
    };
    let out_size = N_TOKENS * N_ROWS * 4;
    let out = alloc(out_size, info.type_for_scratch, BufferUsage::SCRATCH)?;
    let staging = alloc(out_size, info.type_for_staging, BufferUsage::STAGING)?;
    staging.map()?;
    let weights_type = info.buffer_types.get(info.type_for_weights as usize);
    let _imported = match weights_type.filter(|t| t.import) {
        Some(_) => {
            let owner: Arc<Vec<u8>> = Arc::new(vec![1; 4096]);
            let usage = BufferUsage::WEIGHTS;
            let desc = BufferDesc { size: 4096, buffer_type: info.type_for_weights, usage };
            Some(device.import(&desc, owner, 0..4096)?)
        }
        None => None,
    };
    let scratch_type = info.buffer_types.get(info.type_for_scratch as usize);
    let options = CompileOptions {
        n_tokens_max: N_TOKENS as u32,
        n_outputs_max: 1,
        n_seqs_max: 1,
        n_ctx_max: 8,
        scratch_type: info.type_for_scratch,
        scratch_chunk_max: scratch_type.and_then(|t| t.max_size.get()).unwrap_or(1 << 20),
    };
    let memory = device.memory(&program, &options)?;
    let scratch = memory.scratch.iter();
    let scratch: Vec<Buffer> = scratch
        .map(|piece| alloc(piece.size as usize, info.type_for_scratch, BufferUsage::SCRATCH))
        .collect::<Result<_, _>>()?;
    let mut queue = device.queue()?;
    let rows = (0..N_ROWS).flat_map(|r| (0..N_IN).map(move |c| weight(r, c)));
    queue.upload(&desc, &tile, &bytes(rows))?;
    let binding = WeightBinding { value: 1, tiles: vec![tile] };
    let executable = device.compile(&program, &options, &[binding])?;
    let x = bytes((0..N_TOKENS).flat_map(|t| (0..N_IN).map(move |c| x(t, c))));
    let scratch: Vec<_> = scratch.iter().map(Buffer::whole).collect();
    let run = |queue: &mut Queue, output: OutputData<'_>| {
        let mut args = RunArgs {
            n_tokens: N_TOKENS as u32,
            n_outputs: 0,
            inputs: &[InputData::Host(&x)],
            outputs: &mut [output],
            scratch: &scratch,
            seqs: &[],
            kv: &[],
            state: None,
        };
        queue.run(&executable, &mut args)
    };
    let mut first = vec![0; out_size];
    run(&mut queue, OutputData::Host(&mut first))?;
    queue.write(&out, 0, &vec![0; out_size])?;
    run(&mut queue, OutputData::Buffer(out.whole()))?;
    queue.copy(&out.whole(), &staging.whole())?;
    let mut second = vec![0; out_size];
    queue.read(&staging, 0, &mut second)?;
    Ok([floats(&first), floats(&second)])
}

/// That a device works.
pub(crate) fn assert_works(device: &Device, what: &str) {
    let [host, buffer] = tour(device).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(host, expected(), "{what}");
    assert_eq!(buffer, expected(), "{what}");
}

/// Opens a device of the only backend that a fake gives.
pub(crate) fn open(registry: &Registry, index: u32) -> Result<Device, DeviceError> {
    let backend = registry.backends.first().unwrap_or_else(|| panic!("{:?}", registry.skipped));
    Device::open(backend, index, DeviceOptions::default())
}
