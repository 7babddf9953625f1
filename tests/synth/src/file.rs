//! The file: its header at once, its tensors in pieces by several threads.

use crate::block::Maker;
use crate::random::Bits;
use crate::vocab;
use anyhow::{Context as _, Result};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tegula::{Quant, Shape};
use tegula_gguf::{Gguf, TensorInfo};

/// Bytes that a thread makes at a time, about.
const PIECE: u64 = 4 << 20;

/// What to write.
#[derive(Debug, Clone)]
pub struct Options {
    /// The model's shape.
    pub shape: Shape,
    /// The types of its weights.
    pub quant: Quant,
    /// A model file whose tokenizer is taken; `None` makes one whose tokens are bytes.
    pub tokenizer: Option<PathBuf>,
    /// Everything random follows from it.
    pub seed: u64,
    /// Threads; 0 is one for each core.
    pub n_threads: usize,
}

/// What was written.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// Bytes of the file.
    pub bytes: u64,
    /// Tensors.
    pub n_tensors: usize,
}

/// A run of whole blocks of one tensor.
struct Piece<'a> {
    tensor: &'a TensorInfo,
    maker: &'a Content,
    number: u64,
    /// First byte in the file.
    at: u64,
    len: usize,
}

/// What a tensor is filled with.
enum Content {
    Random(Maker),
    Given(Vec<u8>),
}

/// Writes the model at `path`, over what is there; `progress` is told the bytes done and all bytes, from any thread. After an error the file may be
/// incomplete.
///
/// # Errors
/// A type that cannot be made, a tokenizer that does not fit, and the system's.
pub fn write(
    path: &Path,
    options: &Options,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Written> {
    let n_vocab = options.shape.n_vocab as usize;
    let writer = options.shape.writer(options.quant);
    let writer = match &options.tokenizer {
        Some(model) => vocab::copied(writer, model, n_vocab)?,
        None => vocab::bytes(writer, n_vocab)?,
    };
    let (header, bytes) = writer.to_header()?;
    let gguf = Gguf::from_header(&header, path, bytes)?;
    let tensors = gguf.tensors();
    let contents: Vec<Content> =
        tensors.iter().map(|tensor| content(tensor, &options.shape)).collect::<Result<_>>()?;
    let mut pieces = Vec::new();
    for (tensor, maker) in tensors.iter().zip(&contents) {
        let (_, range) = gguf.file_range(tensor).context("a tensor outside the file")?;
        // Pieces end between blocks, and at whole values of the smallest.
        let unit = tensor.dtype().block_bytes() as u64 * 5;
        let step = (PIECE / unit).max(1) * unit;
        let mut at = range.start;
        while at < range.end {
            let len = step.min(range.end - at) as usize;
            pieces.push(Piece { tensor, maker, number: (at - range.start) / step, at, len });
            at += len as u64;
        }
    }
    let write_it = || -> Result<()> {
        let file = File::create(path)?;
        file.set_len(bytes)?;
        file.write_all_at(&header, 0)?;
        write_pieces(&file, &pieces, options, &|done| progress(done, bytes))
    };
    write_it().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Written { bytes, n_tensors: tensors.len() })
}

fn write_pieces(
    file: &File,
    pieces: &[Piece<'_>],
    options: &Options,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let n_threads = match options.n_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let work = || -> std::io::Result<()> {
        let mut buffer = Vec::new();
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            match piece.maker {
                Content::Given(bytes) => file.write_all_at(bytes, piece.at)?,
                Content::Random(maker) => {
                    buffer.resize(piece.len, 0);
                    let mut bits = Bits::new(options.seed, piece.tensor.name(), piece.number);
                    maker.fill(&mut buffer, &mut bits);
                    file.write_all_at(&buffer, piece.at)?;
                }
            }
            progress(done.fetch_add(piece.len as u64, Ordering::Relaxed) + piece.len as u64);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        Ok(())
    })
}

fn content(tensor: &TensorInfo, shape: &Shape) -> Result<Content> {
    let name = tensor.name();
    let n_in = tensor.dims().first().copied().unwrap_or(1);
    let floats =
        |values: Vec<f32>| Content::Given(values.into_iter().flat_map(f32::to_le_bytes).collect());
    Ok(match tensor.dims() {
        [n] if name == "rope_freqs.weight" => floats(rope_divisors(*n, shape.rope_base)),
        // The gain of a norm; other vectors are biases.
        [n] if name.contains("norm") => floats(vec![1.0; *n as usize]),
        [_] => Content::Random(Maker::new(tensor.dtype(), 0.02)?),
        _ => Content::Random(Maker::new(tensor.dtype(), 1.0 / (n_in.max(1) as f32).sqrt())?),
    })
}

/// Divisors of rope's frequencies as models with long contexts have them: none for what turns over within 8192 / 4 positions, 8 for what does not
/// in 8192, and a smooth passage between (Llama 3.1).
fn rope_divisors(n: u64, base: Option<f32>) -> Vec<f32> {
    let base = base.unwrap_or(10_000.0);
    let divisor = |i: u64| {
        let wavelength = 2.0 * std::f32::consts::PI * base.powf(i as f32 / n as f32);
        let turns = 8192.0 / wavelength;
        let smooth = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / 8.0 + smooth)
    };
    (0..n).map(divisor).collect()
}
