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
    /// `ln(1 + exp(x))`.
    Softplus,
}

impl Activation {
    /// All, with their numbers at the boundary.
    pub const ALL: [(Self, abi::Activation); 7] = [
        (Self::Silu, abi::Activation::SILU),
        (Self::GeluTanh, abi::Activation::GELU_TANH),
        (Self::GeluErf, abi::Activation::GELU_ERF),
        (Self::Relu, abi::Activation::RELU),
        (Self::Sigmoid, abi::Activation::SIGMOID),
        (Self::Tanh, abi::Activation::TANH),
        (Self::Softplus, abi::Activation::SOFTPLUS),
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

/// From a router's logits to the weights of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RouterGating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Softmax over the selected experts alone.
    SoftmaxSelected,
}

impl RouterGating {
    /// All, with their numbers at the boundary.
    pub const ALL: [(Self, abi::RouterGating); 3] = [
        (Self::Softmax, abi::RouterGating::SOFTMAX),
        (Self::Sigmoid, abi::RouterGating::SIGMOID),
        (Self::SoftmaxSelected, abi::RouterGating::SOFTMAX_SELECTED),
    ];
}

/// Which head of queries and keys a head of values goes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadOrder {
    /// Head h with `h / (n_head_v / n_head_k)`.
    Grouped,
    /// Head h with `h % n_head_k`.
    Tiled,
}

impl HeadOrder {
    /// All, with their numbers at the boundary.
    pub const ALL: [(Self, abi::HeadOrder); 2] =
        [(Self::Grouped, abi::HeadOrder::GROUPED), (Self::Tiled, abi::HeadOrder::TILED)];
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
    /// Products with the rows of selected experts.
    MatmulExperts { n_expert: u32 },
    /// The experts of each row and their weights.
    RouterTopk { k: u32, gating: RouterGating, normalise: bool, scale: f32 },
    /// Weighted sum over the experts of each row.
    CombineExperts,
    /// Division by the root of the sum of squares over groups of `n` elements.
    L2Norm { eps: f32, n: u32 },
    /// Causal convolution over time, each column by itself.
    ConvState { state_layer: u32 },
    /// The gated delta rule.
    GatedDelta {
        state_layer: u32,
        n_head_k: u32,
        n_head_v: u32,
        head_dim_k: u32,
        head_dim_v: u32,
        order: HeadOrder,
        scale: f32,
    },
    /// Columns of every group of columns.
    SliceGroups { group: u32, begin: u32, len: u32 },
    /// Gated unit with both sides bounded.
    GluClamped { alpha: f32, limit: f32 },
    /// Columns of two values side by side, group by group.
    ConcatGroups { group_a: u32, group_b: u32 },
    /// The experts of each row, of the best groups, and their weights.
    RouterTopkGrouped {
        k: u32,
        gating: RouterGating,
        normalise: bool,
        scale: f32,
        n_group: u32,
        n_group_used: u32,
        n_score: u32,
    },
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
            Self::MatmulExperts { .. } => abi::OpCode::MATMUL_EXPERTS,
            Self::RouterTopk { .. } => abi::OpCode::ROUTER_TOPK,
            Self::CombineExperts => abi::OpCode::COMBINE_EXPERTS,
            Self::L2Norm { .. } => abi::OpCode::L2_NORM,
            Self::ConvState { .. } => abi::OpCode::CONV_STATE,
            Self::GatedDelta { .. } => abi::OpCode::GATED_DELTA,
            Self::SliceGroups { .. } => abi::OpCode::SLICE_GROUPS,
            Self::GluClamped { .. } => abi::OpCode::GLU_CLAMPED,
            Self::ConcatGroups { .. } => abi::OpCode::CONCAT_GROUPS,
            Self::RouterTopkGrouped { .. } => abi::OpCode::ROUTER_TOPK_GROUPED,
        }
    }

    /// The KV layer that the op stores to or reads.
    pub fn kv_layer(&self) -> Option<u32> {
        match self {
            Self::KvStore { kv_layer } | Self::Attention { kv_layer, .. } => Some(*kv_layer),
            _ => None,
        }
    }

    /// The same op on another state layer; an op without state as it is.
    pub fn with_state_layer(self, state_layer: u32) -> Self {
        match self {
            Self::ConvState { .. } => Self::ConvState { state_layer },
            Self::GatedDelta {
                n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale, ..
            } => Self::GatedDelta {
                state_layer,
                n_head_k,
                n_head_v,
                head_dim_k,
                head_dim_v,
                order,
                scale,
            },
            other => other,
        }
    }

    /// The state layer that the op keeps.
    pub fn state_layer(&self) -> Option<u32> {
        match self {
            Self::ConvState { state_layer } | Self::GatedDelta { state_layer, .. } => {
                Some(*state_layer)
            }
            _ => None,
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
            Self::MatmulExperts { .. } => "matmul_experts",
            Self::RouterTopk { .. } => "router_topk",
            Self::CombineExperts => "combine_experts",
            Self::L2Norm { .. } => "l2_norm",
            Self::ConvState { .. } => "conv_state",
            Self::GatedDelta { .. } => "gated_delta",
            Self::SliceGroups { .. } => "slice_groups",
            Self::GluClamped { .. } => "glu_clamped",
            Self::ConcatGroups { .. } => "concat_groups",
            Self::RouterTopkGrouped { .. } => "router_topk_grouped",
        }
    }
}
