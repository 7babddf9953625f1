//! Ops and their parameters. What each computes is said at `tegula_abi::OpCode`.

use tegula_abi as abi;

/// Functions of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// GELU by its tanh form.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// All, with their numbers at the boundary.
    pub const ALL: [(Self, abi::Activation); 6] = [
        (Self::Silu, abi::Activation::SILU),
        (Self::GeluTanh, abi::Activation::GELU_TANH),
        (Self::GeluErf, abi::Activation::GELU_ERF),
        (Self::Relu, abi::Activation::RELU),
        (Self::Sigmoid, abi::Activation::SIGMOID),
        (Self::Tanh, abi::Activation::TANH),
    ];
}

/// Which two elements of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// `x[2i]` and `x[2i + 1]`.
    Adjacent,
    /// `x[i]` and `x[i + n_rot / 2]`.
    Neox,
}

/// What an op does, with its parameters; inputs and outputs are as `tegula_abi::OpCode` lists them.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "parameters are documented once, at the structs of the boundary")]
pub enum OpKind {
    /// Rows of a table by id.
    Embed,
    /// Root mean square norm over groups of `n` elements.
    RmsNorm { eps: f32, n: u32 },
    /// Layer norm over groups of `n` elements.
    LayerNorm { eps: f32, n: u32 },
    /// `x W^T + bias`.
    Matmul,
    /// Rotary position embedding.
    Rope {
        style: RopeStyle,
        head_dim: u32,
        n_rot: u32,
        n_ctx_orig: u32,
        base: f32,
        freq_scale: f32,
        ext_factor: f32,
        attn_factor: f32,
        beta_fast: f32,
        beta_slow: f32,
    },
    /// Stores keys and values of the run.
    KvStore { kv_layer: u32 },
    /// Attention over stored keys and values.
    Attention { kv_layer: u32, n_head: u32, scale: f32, softcap: f32, window: u32 },
    /// `act(gate) * up`.
    Glu { activation: Activation },
    /// `act(x)`.
    Unary { activation: Activation },
    /// Sum; the second may be one row.
    Add,
    /// Product; the second may be one row.
    Mul,
    /// Product with a constant.
    Scale { factor: f32 },
    /// `cap * tanh(x / cap)`.
    Softcap { cap: f32 },
    /// Columns of a matrix.
    Slice { begin: u32, len: u32 },
    /// Columns side by side.
    Concat,
    /// Rows by number.
    GatherRows,
    /// Index of the greatest element of each row.
    Argmax,
    /// The k greatest elements of each row.
    TopK { k: u32 },
}

impl OpKind {
    /// The code at the boundary.
    pub fn code(&self) -> abi::OpCode {
        match self {
            Self::Embed => abi::OpCode::EMBED,
            Self::RmsNorm { .. } => abi::OpCode::RMS_NORM,
            Self::LayerNorm { .. } => abi::OpCode::LAYER_NORM,
            Self::Matmul => abi::OpCode::MATMUL,
            Self::Rope { .. } => abi::OpCode::ROPE,
            Self::KvStore { .. } => abi::OpCode::KV_STORE,
            Self::Attention { .. } => abi::OpCode::ATTENTION,
            Self::Glu { .. } => abi::OpCode::GLU,
            Self::Unary { .. } => abi::OpCode::UNARY,
            Self::Add => abi::OpCode::ADD,
            Self::Mul => abi::OpCode::MUL,
            Self::Scale { .. } => abi::OpCode::SCALE,
            Self::Softcap { .. } => abi::OpCode::SOFTCAP,
            Self::Slice { .. } => abi::OpCode::SLICE,
            Self::Concat => abi::OpCode::CONCAT,
            Self::GatherRows => abi::OpCode::GATHER_ROWS,
            Self::Argmax => abi::OpCode::ARGMAX,
            Self::TopK { .. } => abi::OpCode::TOP_K,
        }
    }

    /// The name in logs and errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::RmsNorm { .. } => "rms_norm",
            Self::LayerNorm { .. } => "layer_norm",
            Self::Matmul => "matmul",
            Self::Rope { .. } => "rope",
            Self::KvStore { .. } => "kv_store",
            Self::Attention { .. } => "attention",
            Self::Glu { .. } => "glu",
            Self::Unary { .. } => "unary",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Scale { .. } => "scale",
            Self::Softcap { .. } => "softcap",
            Self::Slice { .. } => "slice",
            Self::Concat => "concat",
            Self::GatherRows => "gather_rows",
            Self::Argmax => "argmax",
            Self::TopK { .. } => "top_k",
        }
    }
}
