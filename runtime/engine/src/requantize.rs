//! Writing a model's weights in smaller types.
//!
//! * **A file is made tensor by tensor.** One tensor and its encoded form are in memory at a time, and the file grows in order; it has another name until
//!   it is whole, so that what is there under the name asked for is a model.
//! * **From what is nearly exact.** F32, F16, BF16 and Q8_0 are read. A file of fewer bits would lose twice, so it is refused.
//! * **Which tensor gets which type** is [`Quant`]'s: the same rule that plans a shape without a file. Norms, biases, routers, convolutions and
//!   whatever else is no large matrix stay as they are.

mod importance;

pub use importance::Importance;

use crate::Quant;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tegula_gguf::{DType, Gguf, GgufError, GgufWriter, TensorInfo, Value};
use tegula_quant::{LayoutError, dequantize, fit};

/// Why a file could not be quantised.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named and each variant says what it means")]
pub enum QuantizeError {
    /// The source is no model, or ends too early.
    #[error(transparent)]
    Gguf(#[from] GgufError),

    /// A tensor of a type that has lost too much already.
    #[error(
        "{}: the tensor {tensor:?} is of type {dtype}; only files of F32, F16, BF16 and Q8_0 are quantised, since what a smaller type lost cannot \
         be had back: take the original",
        .file.display()
    )]
    Source { file: PathBuf, tensor: String, dtype: DType },

    /// A type that is not written.
    #[error(
        "{quant} cannot be written; what can are q8_0, q6_k, q5_k_m, q5_k, q5_1, q5_0, q4_k_m, q4_k, q4_1, q4_0, f16, bf16 and f32"
    )]
    Target { quant: String },

    /// A file is in the way.
    #[error("{} is there already; give another name, or say that it is to be replaced", .file.display())]
    Exists { file: PathBuf },

    /// Writing failed.
    #[error("cannot {action} {}: {cause}", .file.display())]
    Io { file: PathBuf, action: &'static str, cause: std::io::Error },

    /// An importance file that is none, or of another model.
    #[error("{}: {why}", .file.display())]
    Importance { file: PathBuf, why: String },

    /// Data and shape of a tensor do not fit.
    #[error("the tensor {tensor:?}: {cause}")]
    Layout { tensor: String, cause: LayoutError },

    /// A thread ended without a result.
    #[error("a thread that encoded the tensor {tensor:?} failed")]
    Thread { tensor: String },
}

/// How a file is quantised.
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizeOptions<'a> {
    /// The types.
    pub quant: Quant,
    /// How much each column matters; `None` for all the same.
    pub importance: Option<&'a Importance>,
    /// Threads that encode, at least 1.
    pub n_threads: usize,
    /// Whether a file of that name may be replaced.
    pub replace: bool,
}

impl QuantizeOptions<'_> {
    /// These types, one thread, and nothing replaced.
    pub fn new(quant: Quant) -> Self {
        Self { quant, importance: None, n_threads: 1, replace: false }
    }
}

/// A tensor that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantized {
    /// Its name.
    pub name: String,
    /// Its type before.
    pub from: DType,
    /// Its type now.
    pub to: DType,
    /// Bytes before.
    pub bytes_before: u64,
    /// Bytes now.
    pub bytes: u64,
    /// Whether the importance file had something about it.
    pub has_importance: bool,
}

/// A tensor with the type that it gets.
struct Job<'a> {
    info: &'a TensorInfo,
    to: DType,
}

/// Writes the model at `from` to `to` in other types, and tells of each tensor when it is written.
///
/// # Errors
/// [`QuantizeError`]; there is no file at `to` then that was not there before.
pub fn quantize_file(
    from: &Path,
    to: &Path,
    options: &QuantizeOptions<'_>,
    progress: &mut dyn FnMut(&Quantized),
) -> Result<(), QuantizeError> {
    let file_type = file_type(options.quant)?;
    if to.exists() && !options.replace {
        return Err(QuantizeError::Exists { file: to.to_owned() });
    }
    let gguf = Gguf::open(from)?;
    let jobs = jobs(&gguf, options.quant)?;
    let (header, _) = header(&gguf, &jobs, file_type).to_header()?;
    let alignment = gguf.metadata().opt_u32("general.alignment")?.unwrap_or(32).max(1);

    let partial = to.with_added_extension("partial");
    let io = |action| {
        let file = partial.clone();
        move |cause| QuantizeError::Io { file, action, cause }
    };
    let mut out = BufWriter::new(File::create(&partial).map_err(io("create"))?);
    let mut write = || {
        out.write_all(&header).map_err(io("write"))?;
        for job in &jobs {
            let (done, bytes) = encode(&gguf, job, options)?;
            out.write_all(&bytes).map_err(io("write"))?;
            let padding = bytes.len().next_multiple_of(alignment as usize) - bytes.len();
            out.write_all(&vec![0; padding]).map_err(io("write"))?;
            progress(&done);
        }
        out.flush().map_err(io("write"))
    };
    let written = write().and_then(|()| std::fs::rename(&partial, to).map_err(io("rename")));
    if written.is_err() {
        // Best effort: what is left has a name that says what it is.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

/// What `general.file_type` calls the types; for people, nothing is read by it.
fn file_type(quant: Quant) -> Result<u32, QuantizeError> {
    Ok(match quant {
        Quant::Q4KM => 15,
        Quant::Q5KM => 17,
        Quant::Plain(DType::F32) => 0,
        Quant::Plain(DType::F16) => 1,
        Quant::Plain(DType::Q4_0) => 2,
        Quant::Plain(DType::Q4_1) => 3,
        Quant::Plain(DType::Q8_0) => 7,
        Quant::Plain(DType::Q5_0) => 8,
        Quant::Plain(DType::Q5_1) => 9,
        // There is none for a mix of them with Q6_K; these are the small mixes' numbers.
        Quant::Plain(DType::Q4_K) => 14,
        Quant::Plain(DType::Q5_K) => 16,
        Quant::Plain(DType::Q6_K) => 18,
        Quant::Plain(DType::BF16) => 32,
        Quant::Plain(_) => return Err(QuantizeError::Target { quant: quant.name() }),
    })
}

fn jobs(gguf: &Gguf, quant: Quant) -> Result<Vec<Job<'_>>, QuantizeError> {
    let arch = gguf.metadata().get_str("general.architecture")?;
    let n_layer = gguf.metadata().get_u32(&format!("{arch}.block_count"))?;
    let is_tied = gguf.tensor("output.weight").is_none();
    let job = |info| {
        let to = wanted(info, quant, n_layer, is_tied).unwrap_or(TensorInfo::dtype(info));
        let readable = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];
        if to != info.dtype() && !readable.contains(&info.dtype()) {
            return Err(QuantizeError::Source {
                file: gguf.metadata().file().to_owned(),
                tensor: info.name().to_owned(),
                dtype: info.dtype(),
            });
        }
        Ok(Job { info, to })
    };
    gguf.tensors().iter().map(job).collect()
}

/// The type of a large matrix; `None` for a tensor that stays as it is.
fn wanted(info: &TensorInfo, quant: Quant, n_layer: u32, is_tied: bool) -> Option<DType> {
    /// Small ones whose errors decide what all others do, and those that ops read element by element.
    const KEPT: [&str; 8] = [
        "ffn_gate_inp",
        "ffn_gate_inp_shexp",
        "ssm_conv1d",
        "shortconv.conv",
        "per_layer_model_proj",
        "inp_gate",
        "proj",
        "rope_freqs",
    ];
    let name = info.name().strip_suffix(".weight")?;
    let [n_in, n_rows, ..] = info.dims_padded();
    let (layer, part) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) => (layer.parse().ok(), part),
        None => (None, name),
    };
    if n_rows <= 1 || part.ends_with("_norm") || KEPT.contains(&part) {
        return None;
    }
    Some(quant.of_tensor(part, layer, n_layer, is_tied, n_in))
}

/// Everything but the data.
fn header<'a>(gguf: &Gguf, jobs: &[Job<'_>], file_type: u32) -> GgufWriter<'a> {
    let mut writer = GgufWriter::new();
    for (key, value) in gguf.metadata().iter() {
        // A file of its own is no shard, and these two are written anew.
        let is_new = ["general.file_type", "general.quantization_version"].contains(&key);
        if !is_new && !key.starts_with("split.") {
            writer = writer.meta(key, value.clone());
        }
    }
    writer = writer.meta("general.file_type", file_type);
    writer = writer.meta("general.quantization_version", Value::U32(2));
    for job in jobs {
        writer = writer.tensor_shape(job.info.name(), job.info.dims(), job.to);
    }
    writer
}

/// A tensor's bytes in its new type.
fn encode(
    gguf: &Gguf,
    job: &Job<'_>,
    options: &QuantizeOptions<'_>,
) -> Result<(Quantized, Vec<u8>), QuantizeError> {
    let (info, to) = (job.info, job.to);
    let name = info.name().to_owned();
    let source = gguf.read_tensor(info)?;
    let importance = options.importance.filter(|_| to != info.dtype());
    let importance = importance.map(|file| file.of(info)).transpose()?.flatten();
    let mut done = Quantized {
        from: info.dtype(),
        to,
        bytes_before: source.len() as u64,
        bytes: source.len() as u64,
        has_importance: importance.is_some(),
        name: name.clone(),
    };
    if to == info.dtype() {
        return Ok((done, source));
    }
    let [n_in, n_rows, ..] = info.dims_padded();
    let layout = |cause| QuantizeError::Layout { tensor: name.clone(), cause };
    let row_bytes = |dtype: DType| {
        let n = dtype.row_bytes(n_in).map_err(&layout)?;
        // A row is far shorter than the tensor, which is in memory.
        Ok::<_, QuantizeError>(usize::try_from(n).unwrap_or(usize::MAX).max(1))
    };
    let (row_from, row_to) = (row_bytes(info.dtype())?, row_bytes(to)?);
    let n_all = source.len() / row_from;
    let mut bytes = vec![0; n_all.saturating_mul(row_to)];
    let rows = Rows {
        from: info.dtype(),
        to,
        n_in: usize::try_from(n_in).unwrap_or(usize::MAX),
        n_rows: usize::try_from(n_rows).unwrap_or(usize::MAX),
        importance,
    };
    let per_thread = n_all.div_ceil(options.n_threads.max(1)).max(1);
    let pieces = source.chunks(per_thread.saturating_mul(row_from));
    let pieces = pieces.zip(bytes.chunks_mut(per_thread.saturating_mul(row_to))).enumerate();
    let ran: Vec<_> = std::thread::scope(|scope| {
        let rows = &rows;
        let start = |(i, (source, out))| {
            scope.spawn(move || rows.encode(i * per_thread, source, out, [row_from, row_to]))
        };
        let threads: Vec<_> = pieces.map(start).collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    for result in ran {
        result.map_err(|_| QuantizeError::Thread { tensor: name.clone() })?.map_err(&layout)?;
    }
    done.bytes = bytes.len() as u64;
    Ok((done, bytes))
}

/// Rows of one tensor.
struct Rows<'a> {
    from: DType,
    to: DType,
    n_in: usize,
    /// Rows of one of its matrices.
    n_rows: usize,
    /// Of each matrix, one after the other.
    importance: Option<&'a [f32]>,
}

impl Rows<'_> {
    /// Encodes the rows from `first` on.
    fn encode(
        &self,
        first: usize,
        source: &[u8],
        out: &mut [u8],
        [row_from, row_to]: [usize; 2],
    ) -> Result<(), LayoutError> {
        let mut row = vec![0.0; self.n_in];
        let pairs = source.chunks_exact(row_from).zip(out.chunks_exact_mut(row_to));
        for (i, (source, out)) in pairs.enumerate() {
            dequantize(self.from, source, &mut row)?;
            let matrix = (first + i) / self.n_rows.max(1);
            let importance = self.importance.and_then(|all| {
                let begin = matrix.checked_mul(self.n_in)?;
                all.get(begin..begin.checked_add(self.n_in)?)
            });
            fit(self.to, &row, importance, out)?;
        }
        Ok(())
    }
}
