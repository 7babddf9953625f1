//! Measures the kernels: `cargo run --release -p tegula-cpu --example kernels [threads] [isa]`.
//!
//! Decode is reported as GB/s of weights (one token), prefill as GFLOP/s (2 per multiply-add), attention as microseconds
//! per token and layer. Each figure is the best of several repetitions, so that other processes disturb it less.

#![allow(unsafe_code, reason = "weights are handed over as pointers")]

use std::error::Error;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use tegula_cpu::kernels::{
    Attention, AttnSeq, Choices, ExpertWeights, GatedDelta, HeadPairs, Isa, Kernels, MatMul,
    RowTile, StateSeq,
};
use tegula_cpu::pool::{Pool, default_threads};
use tegula_quant::{DType, quantize, quantize_row_fn};

type Outcome<T> = Result<T, Box<dyn Error>>;

const TYPES: [DType; 14] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q3_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
];

/// Whether one thread does all the work.
static ALONE: AtomicBool = AtomicBool::new(false);

/// Processor seconds with one thread, which other processes disturb little; otherwise seconds of the clock.
fn seconds() -> f64 {
    let clock =
        if ALONE.load(Relaxed) { libc::CLOCK_PROCESS_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: both clocks exist, and the pointer is to a value of the right type.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest of some repetitions, at least `budget` seconds in all.
fn best(budget: f64, mut run: impl FnMut() -> Outcome<()>) -> Outcome<f64> {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    let mut repetitions = 0;
    while repetitions < 3 || start.elapsed().as_secs_f64() < budget {
        let one = seconds();
        run()?;
        best = best.min(seconds() - one);
        repetitions += 1;
    }
    Ok(best)
}

/// Ordinary values where there is an encoder: subnormal weights would measure the machine's slow path. The other types
/// get bytes whose halves are small and finite everywhere.
fn weights(dtype: DType, n_in: usize, n_out: usize) -> Outcome<Vec<u8>> {
    let bytes = n_in / dtype.block_len() * dtype.block_bytes() * n_out;
    if quantize_row_fn(dtype).is_some() {
        let values: Vec<f32> =
            (0..n_in * n_out).map(|i| (i * 37 % 101) as f32 * 0.02 - 1.0).collect();
        let mut out = vec![0; bytes];
        quantize(dtype, &values, &mut out)?;
        return Ok(out);
    }
    Ok((0..bytes).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 & 0x1f).collect())
}

struct Machine {
    kernels: Kernels,
    pool: Pool,
}

impl Machine {
    fn matmul_seconds(
        &self,
        dtype: DType,
        n_in: usize,
        n_out: usize,
        n_tokens: usize,
    ) -> Outcome<f64> {
        let w = weights(dtype, n_in, n_out)?;
        let tiles = [RowTile { data: w.as_ptr(), first_row: 0, n_rows: n_out }];
        let x: Vec<f32> = (0..n_tokens * n_in).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut y = vec![0.0; n_tokens * n_out];
        let mut scratch = vec![0.0; MatMul::scratch_len(self.pool.n_threads(), n_in, n_tokens)];
        best(0.2, || {
            let args = MatMul {
                dtype,
                n_in,
                n_out,
                tiles: &tiles,
                n_tokens,
                x: &x,
                bias: None,
                y: &mut y,
            };
            // SAFETY: the only tile is the whole of `w`.
            unsafe { self.kernels.matmul(&self.pool, args, &mut scratch)? };
            black_box(&mut y);
            Ok(())
        })
    }

    /// 8 of 64 experts of 768 rows of 2048.
    fn experts_seconds(&self, dtype: DType, n_tokens: usize) -> Outcome<f64> {
        let (n_expert, k, n_in, n_rows) = (64, 8, 2048, 768);
        let w = weights(dtype, n_in, n_rows * n_expert)?;
        let tiles = [RowTile { data: w.as_ptr(), first_row: 0, n_rows: n_rows * n_expert }];
        let x: Vec<f32> = (0..n_tokens * n_in).map(|i| (i % 17) as f32 - 8.0).collect();
        let ids: Vec<i32> = (0..n_tokens * k).map(|slot| (slot * 29 % n_expert) as i32).collect();
        let mut y = vec![0.0; ids.len() * n_rows];
        let len = Choices::scratch_len(self.pool.n_threads(), n_expert, k, n_in, n_tokens);
        let mut scratch = vec![0.0; len];
        let choices = Choices { n_expert, k, ids: &ids, n_in, x: &x };
        best(0.2, || {
            let weights = ExpertWeights { dtype, n_rows, tiles: &tiles, bias: None, y: &mut y };
            // SAFETY: the only tile is the whole of `w`.
            unsafe {
                self.kernels.matmul_experts(&self.pool, &choices, &mut [weights], &mut scratch)?;
            }
            black_box(&mut y);
            Ok(())
        })
    }

    /// 32 heads of 128 by 128.
    fn delta_seconds(&self, n_tokens: usize) -> Outcome<f64> {
        let (n_head, dim) = (32, 128);
        let mut record = vec![0.0f32; n_head * dim * dim];
        let row = vec![0.05; n_tokens * n_head * dim];
        let (g, beta) = (vec![-0.1; n_tokens * n_head], vec![0.5; n_tokens * n_head]);
        let mut y = row.clone();
        best(0.2, || {
            let record = record.as_mut_ptr();
            let seqs = [StateSeq { record, is_new: false, first_row: 0, n_rows: n_tokens }];
            let mut args = GatedDelta {
                n_head_k: n_head,
                n_head_v: n_head,
                head_dim_k: dim,
                head_dim_v: dim,
                pairs: HeadPairs::Grouped,
                scale: 1.0,
                seqs: &seqs,
                q: &row,
                k: &row,
                v: &row,
                g: &g,
                beta: &beta,
                y: &mut y,
            };
            // SAFETY: the record has this size and is nobody else's.
            unsafe { self.kernels.gated_delta(&self.pool, &mut args)? };
            Ok(())
        })
    }

    fn attention_seconds(
        &self,
        dtype: DType,
        heads: (usize, usize, usize),
        n_kv: usize,
        n_rows: usize,
    ) -> Outcome<f64> {
        let (n_head, n_head_kv, dim) = heads;
        let block_len = 32;
        let block = dim / dtype.block_len() * dtype.block_bytes() * block_len * n_head_kv;
        let cache = vec![0u8; block * n_kv.div_ceil(block_len)];
        let blocks: Vec<*const u8> = cache.chunks(block).map(<[u8]>::as_ptr).collect();
        let seqs = [AttnSeq { k_blocks: &blocks, v_blocks: &blocks, n_kv, first_row: 0, n_rows }];
        let positions: Vec<u32> = (0..n_rows).map(|i| (n_kv - n_rows + i) as u32).collect();
        let q = vec![0.5; n_rows * n_head * dim];
        let mut out = vec![0.0; n_rows * n_head * dim];
        let len = Attention::scratch_len(self.pool.n_threads(), n_head, n_head_kv, dim, dim);
        let mut scratch = vec![0.0; len];
        best(0.2, || {
            let mut args = Attention {
                n_head,
                n_head_kv,
                head_dim_k: dim,
                head_dim_v: dim,
                k_dtype: dtype,
                v_dtype: dtype,
                block_len,
                scale: 0.125,
                softcap: None,
                window: None,
                causal: true,
                sinks: None,
                seqs: &seqs,
                positions: &positions,
                q: &q,
                out: &mut out,
            };
            // SAFETY: the tables name every block of `cache`.
            unsafe { self.kernels.attention(&self.pool, &mut args, &mut scratch)? };
            black_box(&mut out);
            Ok(())
        })
    }
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(default_threads()), |a| a.parse())?;
    let isa = args.next();
    ALONE.store(threads == 1, Relaxed);
    let kernels = match &isa {
        None => Kernels::detect(),
        Some(name) => Isa::available()
            .find(|i| i.name().starts_with(name.as_str()))
            .and_then(Kernels::with_isa)
            .ok_or("this machine does not have that instruction set")?,
    };
    let machine = Machine { kernels, pool: Pool::new(threads)? };
    println!("{}, {threads} threads", kernels.isa().name());

    let empty = best(0.05, || Ok(machine.pool.run(threads, |_, _| {})?))?;
    println!("empty run of the pool: {:.2} us", empty * 1e6);

    println!("\ndecode, GB/s of weights (millions of weights/ms)");
    println!("{:8}{:>20}{:>20}{:>20}", "", "1536x576", "49152x576", "4864x896");
    for dtype in TYPES {
        print!("{:8}", dtype.name());
        for (n_in, n_out) in [(576, 1536), (576, 49152), (896, 4864)] {
            let n_in = if dtype.block_len() == 256 { n_in / 256 * 256 } else { n_in };
            let seconds = machine.matmul_seconds(dtype, n_in, n_out, 1)?;
            let bytes = n_in / dtype.block_len() * dtype.block_bytes() * n_out;
            print!(
                "{:>12.2} ({:5.2})",
                bytes as f64 / seconds * 1e-9,
                (n_in * n_out) as f64 / seconds * 1e-9
            );
        }
        println!();
    }

    println!("\nQ4_1 1536x576 by tokens, GFLOP/s");
    for n_tokens in [1, 2, 3, 4, 5, 8, 12, 16, 17, 32, 64, 128, 512] {
        let seconds = machine.matmul_seconds(DType::Q4_1, 576, 1536, n_tokens)?;
        print!("{n_tokens}: {:.1}  ", (2 * 576 * 1536 * n_tokens) as f64 / seconds * 1e-9);
    }

    println!("\n\nprefill of 512 tokens, GFLOP/s");
    println!("{:8}{:>12}{:>12}{:>12}{:>12}", "", "1536x576", "576x1536", "192x576", "4864x896");
    for dtype in [DType::F32, DType::F16, DType::Q4_1, DType::Q4_K, DType::Q6_K, DType::IQ4_XS] {
        print!("{:8}", dtype.name());
        for (n_in, n_out) in [(576, 1536), (1536, 576), (576, 192), (896, 4864)] {
            let n_in = if dtype.block_len() == 256 { n_in / 256 * 256 } else { n_in };
            let seconds = machine.matmul_seconds(dtype, n_in, n_out, 512)?;
            print!("{:>12.1}", (2 * n_in * n_out * 512) as f64 / seconds * 1e-9);
        }
        println!();
    }

    println!(
        "\n8 of 64 experts, 768x2048: one token in GB/s of the chosen weights, 512 in GFLOP/s"
    );
    for dtype in [DType::F16, DType::Q4_K, DType::Q8_0, DType::MXFP4] {
        let one = machine.experts_seconds(dtype, 1)?;
        let many = machine.experts_seconds(dtype, 512)?;
        let (bytes, products) =
            (2048 / dtype.block_len() * dtype.block_bytes() * 768 * 8, 2048 * 768 * 8usize);
        let (one, many) = (bytes as f64 / one, 2.0 * (products * 512) as f64 / many);
        println!("{:8}{:>12.2}{:>12.1}", dtype.name(), one * 1e-9, many * 1e-9);
    }
    print!("\ngated delta rule, 32 heads of 128x128, microseconds per token:");
    for n_tokens in [1, 512] {
        let seconds = machine.delta_seconds(n_tokens)?;
        print!("  {n_tokens} tokens: {:.1}", seconds * 1e6 / n_tokens as f64);
    }
    println!();

    println!(
        "\nattention, microseconds per token and layer (heads, kv heads, head_dim; cached tokens; rows)"
    );
    for dtype in [DType::F16, DType::F32, DType::Q8_0] {
        for heads in [(9, 3, 64), (14, 2, 64), (4, 1, 256)] {
            print!("{:6}{:14}", dtype.name(), format!("{}/{}x{}", heads.0, heads.1, heads.2));
            for (n_kv, n_rows) in [(128, 1), (4096, 1), (512, 512), (4096, 128)] {
                let seconds = machine.attention_seconds(dtype, heads, n_kv, n_rows)?;
                print!("  {n_kv}/{n_rows}: {:9.2}", seconds * 1e6 / n_rows as f64);
            }
            println!();
        }
    }
    Ok(())
}
