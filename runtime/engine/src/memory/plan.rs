//! The plan: every consumer of memory on a device, chunk by chunk, made before anything is allocated and executed as it stands.

use crate::memory::context::ContextChoice;
use crate::memory::kv::KvShape;
use crate::memory::state::StateShape;
use serde::Serialize;
use tegula_plugin::{Figure, FigureSource, FigureState, ScratchDesc};
use tegula_program::ValueId;

/// Where a chunk of weights comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkSource {
    /// A range of a mapped model file, used where it lies: shard and first byte.
    File {
        /// Index of the shard.
        shard: usize,
        /// First byte in the file.
        begin: u64,
    },
    /// A buffer of the device, filled from the file.
    Alloc,
}

/// One chunk of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightChunk {
    /// Bytes.
    pub size: u64,
    /// Where it comes from.
    pub source: ChunkSource,
}

/// One tile of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightTile {
    /// The value in the program.
    pub value: ValueId,
    /// First row.
    pub first_row: u64,
    /// Rows.
    pub n_rows: u64,
    /// Index of the chunk.
    pub chunk: usize,
    /// First byte in the chunk.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// The layout that the device asked for.
    pub layout: u32,
}

/// All weights of a program on one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightsPlan {
    /// The chunks.
    pub chunks: Vec<WeightChunk>,
    /// The tiles, those of one value together and in order of rows.
    pub tiles: Vec<WeightTile>,
}

impl WeightsPlan {
    /// Bytes of all chunks from one kind of source.
    pub fn bytes(&self, from_file: bool) -> u64 {
        let is_file = |chunk: &&WeightChunk| matches!(chunk.source, ChunkSource::File { .. });
        self.chunks.iter().filter(|c| is_file(c) == from_file).map(|chunk| chunk.size).sum()
    }
}

/// The buffer types of a device that a stage's weights and keys and values are made of, by index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryTypes {
    /// For weights.
    pub weights: u32,
    /// For the KV cache.
    pub kv: u32,
}

/// One stage: a run of ops on one device, with its weights and its part of the KV cache in one kind of memory each.
#[derive(Debug, Clone)]
pub struct StagePlan {
    /// Index into [`Plan::devices`].
    pub device: usize,
    /// Where its weights and its part of the KV cache lie.
    pub memory: MemoryTypes,
    /// Weights of its ops.
    pub weights: WeightsPlan,
    /// Its part of the KV cache; without layers if it has none.
    pub kv: KvShape,
    /// Its part of the recurrent state; without layers if it has none.
    pub state: StateShape,
    /// Scratch of a run of this stage. Stages of a device use the same chunks, one after the other.
    pub scratch: Vec<ScratchDesc>,
    /// Bytes of device memory that compiling takes outside buffers.
    pub compile_device_bytes: u64,
    /// Bytes of host memory that compiling takes outside buffers.
    pub compile_host_bytes: u64,
}

/// What was decided for one model. The loader executes exactly this.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The devices used, by id (`cpu:0`).
    pub devices: Vec<String>,
    /// The stages, in the order they run.
    pub stages: Vec<StagePlan>,
    /// For each device, the scratch chunks that its stages share.
    pub scratch: Vec<Vec<ScratchDesc>>,
    /// The context and why.
    pub context: ContextChoice,
    /// Tokens of a KvBlock.
    pub block_len: u32,
    /// KvBlocks that hold the context.
    pub n_blocks: u32,
    /// Greatest number of tokens of a run.
    pub n_ubatch: u32,
    /// Why it is not the number asked for, if it is not.
    pub ubatch_reason: Option<String>,
    /// Greatest number of rows of logits of a run.
    pub n_outputs: u32,
    /// Greatest number of sequences that hold a part of the KV cache at a time.
    pub n_parallel: u32,
    /// Bytes of host memory for rows of logits.
    pub logits_bytes: u64,
    /// Bytes of host memory for what crosses between stages.
    pub activation_bytes: u64,
    /// For people and tools.
    pub report: PlanReport,
}

impl Plan {
    /// The devices, as one word: `vulkan:0 + cpu:0`.
    pub fn device_names(&self) -> String {
        self.devices.join(" + ")
    }
}

/// A [`Figure`] for JSON: `{"value": 4294959104, "state": "known", "source": "driver"}`; no value unless known.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct FigureReport {
    /// The value, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<u64>,
    /// `known`, `unknown` or `not_applicable`.
    pub state: String,
    /// `driver`, `measured`, `override`, `derived` or `none`.
    pub source: String,
}

impl From<Figure> for FigureReport {
    fn from(figure: Figure) -> Self {
        let value = (figure.state == FigureState::KNOWN).then_some(figure.value);
        Self { value, state: figure.state.to_string(), source: figure.source.to_string() }
    }
}

impl FigureReport {
    /// Whether an operator's cap is behind it.
    pub fn is_override(&self) -> bool {
        self.source == FigureSource::OVERRIDE.to_string()
    }
}

/// The plan as people and tools see it.
#[derive(Debug, Clone, Serialize)]
pub struct PlanReport {
    /// The model.
    pub model: ModelReport,
    /// The context and its KV cache.
    pub context: ContextReport,
    /// Tokens of a run.
    pub ubatch: UbatchReport,
    /// Sequences at a time.
    pub parallel: ParallelReport,
    /// What whoever reads the plan should know: assumptions, statements of devices that do not go together, what was forced.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The stages in the order they run, where there is more than one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageReport>,
    /// Each device with its heaps and chunks.
    pub devices: Vec<DeviceReport>,
}

/// The model of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct ModelReport {
    /// The file.
    pub path: String,
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`.
    pub name: Option<String>,
    /// Bytes of all tensors used.
    pub tensor_bytes: u64,
    /// Parameters.
    pub n_params: u64,
}

/// The context of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct ContextReport {
    /// Tokens.
    pub n_ctx: u32,
    /// What decided it.
    pub reason: String,
    /// Tokens the model was trained on, as its file says.
    pub n_ctx_train: u32,
    /// Type of keys.
    pub kv_type_k: String,
    /// Type of values.
    pub kv_type_v: String,
    /// Bytes of one token over all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of the whole cache.
    pub kv_bytes: u64,
    /// Bytes of recurrent state of one sequence, whatever its length.
    #[serde(skip_serializing_if = "is_zero")]
    pub state_bytes_per_sequence: u64,
    /// Tokens of a KvBlock.
    pub block_len: u32,
    /// Tokens of a segment, the step by which the cache grows.
    pub segment_tokens: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that the derive calls")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A stage of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct StageReport {
    /// The device's id.
    pub device: String,
    /// Its first and last layer, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<(u32, u32)>,
    /// Ops.
    pub n_ops: usize,
    /// Bytes that come in from the stage before, for each token, and by which way.
    pub bytes_in_per_token: u64,
    /// How they come in: `host memory`, or empty for the first stage.
    pub path: &'static str,
}

/// The ubatch of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct UbatchReport {
    /// Tokens.
    pub n_tokens: u32,
    /// Why it is lower than asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Sequences of a plan. They share the context's KV cache, so their number changes none of its bytes.
#[derive(Debug, Clone, Serialize)]
pub struct ParallelReport {
    /// Sequences at a time.
    pub n_seqs: u32,
    /// Rows of logits of a run, at least one for each sequence.
    pub n_outputs: u32,
    /// Bytes of them, in the host's memory.
    pub logits_bytes: u64,
}

/// A device of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    /// `cpu:0`.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Its heaps.
    pub heaps: Vec<HeapReport>,
}

/// A heap of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct HeapReport {
    /// Index.
    pub index: u32,
    /// `host` or `device_local`.
    pub kind: String,
    /// Heaps with the same pool share the same bytes.
    pub pool: String,
    /// Bytes in all.
    pub total: FigureReport,
    /// Bytes free when the plan was made.
    pub free: FigureReport,
    /// Bytes that the plan counts on instead, where `free` is unknown or known to be too low.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assumed_free: Option<u64>,
    /// Bytes of this plan once the whole context is in use: what its chunks take, rounding included.
    pub planned_bytes: u64,
    /// Of those, bytes read in place from the mapped file: the system can drop and reread them.
    pub mapped_bytes: u64,
    /// The greatest bytes at any moment, loading included.
    pub peak_bytes: u64,
    /// Everything in it.
    pub chunks: Vec<ChunkReport>,
    /// What loading takes for a while, and gives back.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub loading: Vec<ChunkReport>,
}

/// A chunk of a plan: one buffer of the backend, or memory beside buffers.
#[derive(Debug, Clone, Serialize)]
pub struct ChunkReport {
    /// `weights`, `kv`, `state`, `scratch`, `logits`, `activations` (what crosses between stages), `compile` or, while loading, `staging` (the tile
    /// that is being uploaded).
    pub usage: &'static str,
    /// The buffer type's name; `host` for memory of the core itself.
    pub buffer_type: String,
    /// The buffer type's limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_size: Option<FigureReport>,
    /// Bytes asked for.
    pub size: u64,
    /// Bytes that it takes of its heap: `size`, rounded up to the buffer type's granularity.
    pub taken: u64,
    /// `allocated`, or `mapped` for a range of the model file.
    pub source: &'static str,
    /// The tiles in it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tiles: Vec<TileReport>,
}

/// A tile of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct TileReport {
    /// The tensor.
    pub tensor: String,
    /// First row.
    pub first_row: u64,
    /// Rows.
    pub n_rows: u64,
    /// First byte in the chunk.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}
