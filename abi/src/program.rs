//! A program as it crosses: flat arrays of values and ops, with typed parameters per op code.
//!
//! Static single assignment: an op reads values and makes new ones; the only state is the KV cache and the recurrent state. Ops stand in an order
//! that can be run as is. What an op computes never changes: a variant is an op code of its own, never a new field that an older reader would not see.
//! Shapes are row-major, outermost dimension first: activations are `[n_tokens, n]`, weights `[n_rows, n_in]`.

use crate::types::open_enum;
use crate::{DType, Slice, Str};
use abi_stable::StableAbi;
use std::ffi::c_void;

/// [`Value::dims`]: tokens of the run.
pub const DIM_N_TOKENS: i64 = -1;
/// [`Value::dims`]: rows of the run whose results are wanted.
pub const DIM_N_OUTPUTS: i64 = -2;

open_enum! {
    /// Where a value comes from.
    ValueKind: u32 {
        /// Given at every run.
        INPUT = 1,
        /// Bound at compile; tiled along its rows.
        WEIGHT = 2,
        /// Made by an op.
        RESULT = 3,
    }
}

/// A typed, shaped value. Its index in [`Program::values`] is its id.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Value {
    /// Set by the host.
    pub struct_size: usize,
    /// Where it comes from.
    pub kind: ValueKind,
    /// Element type; only weights have block types.
    pub dtype: DType,
    /// 1 or 2.
    pub n_dims: u32,
    /// Unused; keeps `dims` aligned.
    pub reserved: u32,
    /// Outermost first; negative ones are symbolic (`DIM_*`).
    pub dims: [i64; 4],
    /// The tensor's name for weights, a hint for people otherwise.
    pub name: Str,
}

open_enum! {
    /// What an op does. Inputs and outputs are listed in order; `?` marks inputs that may be absent at the end of the list.
    OpCode: u32 {
        /// `(ids i32[n], W) -> f32[n, n_in]`: row `ids[i]` of W. No parameters.
        EMBED = 1,
        /// `(x, weight?) -> y`: [`NormParams`].
        RMS_NORM = 2,
        /// `(x, weight, bias?) -> y`: [`NormParams`].
        LAYER_NORM = 3,
        /// `(x f32[n, n_in], W, bias? f32[n_rows]) -> f32[n, n_rows]`: `x W^T + bias`. No parameters.
        MATMUL = 4,
        /// `(x, positions i32[n], factors? f32[n_rot / 2]) -> y`: [`RopeParams`].
        ROPE = 5,
        /// `(k, v) -> ()`: stores the run's keys and values at their positions. [`KvStoreParams`].
        KV_STORE = 6,
        /// `(q, sinks? f32[n_head]) -> f32[n, n_head * head_dim_v]`: [`AttentionParams`].
        ATTENTION = 7,
        /// `(gate, up) -> act(gate) * up`: [`ActivationParams`].
        GLU = 8,
        /// `(x) -> act(x)`: [`ActivationParams`].
        UNARY = 9,
        /// `(a, b) -> a + b`; b may be one row, used for every row of a. No parameters.
        ADD = 10,
        /// `(a, b) -> a * b`; b may be one row, or a weight of one number. No parameters.
        MUL = 11,
        /// `(x) -> x * factor`: [`ScaleParams`].
        SCALE = 12,
        /// `(x) -> cap * tanh(x / cap)`: [`ScaleParams`], `factor` is the cap.
        SOFTCAP = 13,
        /// `(x f32[n, m]) -> f32[n, len]`: columns `begin .. begin + len`. [`SliceParams`].
        SLICE = 14,
        /// `(a f32[n, p], b f32[n, q]) -> f32[n, p + q]`. No parameters.
        CONCAT = 15,
        /// `(x f32[n, m], rows i32[k]) -> f32[k, m]`. No parameters.
        GATHER_ROWS = 16,
        /// `(x f32[n, m]) -> i32[n]`: index of the greatest element, the first of equals. No parameters.
        ARGMAX = 17,
        /// `(x f32[n, m]) -> (i32[n, k], f32[n, k])`: the k greatest, in falling order, the first of equals before. [`TopKParams`].
        TOP_K = 18,
        /// `(x f32[n, n_in] or f32[n, k * n_in], W, ids i32[n, k], bias? f32[n_expert, n_rows]) -> f32[n, k * n_rows]`, where W is
        /// `[n_expert * n_rows, n_in]`, expert after expert: columns `j * n_rows ..` of row i are `x W_e^T + bias_e` with `e = ids[i, j]`.
        /// All k products of a row read the same x, or, where x is k times as wide, columns `j * n_in ..` of it. [`ExpertsParams`].
        MATMUL_EXPERTS = 19,
        /// `(logits f32[n, n_expert], selection_bias? f32[n_expert]) -> (ids i32[n, k], weights f32[n, k])`: [`RouterParams`].
        ROUTER_TOPK = 20,
        /// `(x f32[n, k * m], weights f32[n, k]) -> f32[n, m]`: the sum over j of `weights[i, j]` times columns `j * m ..`. No parameters.
        COMBINE_EXPERTS = 21,
        /// `(x) -> x / sqrt(sum(x^2) + eps)` over groups of n elements: [`NormParams`].
        L2_NORM = 22,
        /// `(x f32[n, m], W f32[m, kernel], bias? f32[m]) -> f32[n, m]`: causal convolution over time, each column by itself. [`ConvStateParams`].
        CONV_STATE = 23,
        /// `(q f32[n, n_head_k * head_dim_k], k likewise, v f32[n, n_head_v * head_dim_v], g f32[n, n_head_v], beta f32[n, n_head_v])
        /// -> f32[n, n_head_v * head_dim_v]`: the gated delta rule. [`GatedDeltaParams`].
        GATED_DELTA = 24,
        /// `(x f32[n, c * group]) -> f32[n, c * len]`: columns `begin .. begin + len` of every group of `group` columns. [`SliceGroupsParams`].
        SLICE_GROUPS = 25,
        /// `(gate, up) -> a / (1 + exp(-alpha a)) * (b + 1)` with `a = min(gate, limit)`, `b = clamp(up, -limit, limit)`. [`GluClampedParams`].
        GLU_CLAMPED = 26,
        /// `(a f32[n, c * p] or f32[n, p], b f32[n, c * q]) -> f32[n, c * (p + q)]`: for every group, its columns of a and then its columns of b. Where a
        /// has one group alone, all groups get it. [`ConcatGroupsParams`].
        CONCAT_GROUPS = 27,
        /// `(logits f32[n, n_expert], selection_bias? f32[n_expert]) -> (ids i32[n, k], weights f32[n, k])`: as ROUTER_TOPK, from the experts of the best
        /// groups. [`GroupedRouterParams`].
        ROUTER_TOPK_GROUPED = 28,
    }
}

/// One op.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Op {
    /// Set by the host.
    pub struct_size: usize,
    /// What it does.
    pub code: OpCode,
    /// The transformer layer it belongs to, -1 for none; for logs and placement.
    pub layer: i32,
    /// Ids of what it reads.
    pub inputs: Slice<u32>,
    /// Ids of what it makes.
    pub outputs: Slice<u32>,
    /// The parameter struct of its code, starting with its `struct_size`; null if the code has none.
    pub params: *const c_void,
}

/// Keys and values of one layer.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct KvLayer {
    /// Set by the host.
    pub struct_size: usize,
    /// Its group: layers of a group share block tables.
    pub group: u32,
    /// Its index among the layers of the group.
    pub index: u32,
    /// Heads of keys and values.
    pub n_head_kv: u32,
    /// Elements of a key.
    pub head_dim_k: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Type of stored keys: F32, F16, BF16, Q8_0 or Q4_0.
    pub dtype_k: DType,
    /// Type of stored values.
    pub dtype_v: DType,
}

/// State that an op keeps for each sequence between runs: `n_elements` f32, contiguous, in an order that the op says.
/// Exactly one op names it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct StateLayer {
    /// Set by the host.
    pub struct_size: usize,
    /// Elements of one sequence's record.
    pub n_elements: u64,
}

/// A program. Borrowed for the call it is passed to.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Program {
    /// Set by the host.
    pub struct_size: usize,
    /// For logs.
    pub name: Str,
    /// All values.
    pub values: Slice<Value>,
    /// All ops, in an order that can be run.
    pub ops: Slice<Op>,
    /// Ids of the inputs, in the order of [`crate::RunArgs::inputs`].
    pub inputs: Slice<u32>,
    /// Ids of the outputs, in the order of [`crate::RunArgs::outputs`].
    pub outputs: Slice<u32>,
    /// The layers of the KV cache that KV_STORE and ATTENTION name.
    pub kv_layers: Slice<KvLayer>,
    /// The recurrent state that CONV_STATE and GATED_DELTA name. Default: none.
    pub state_layers: Slice<StateLayer>,
}

/// Parameters of RMS_NORM, LAYER_NORM and L2_NORM.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct NormParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Added to the mean square (variance, sum of squares) before the root.
    pub eps: f32,
    /// Elements normalised together; divides the last dimension. Per-head norms have the head's size here. Weight and bias have this length.
    pub n: u32,
}

open_enum! {
    /// Which two elements of a head rope turns together.
    RopeStyle: u32 {
        /// `x[2i]` and `x[2i + 1]`.
        ADJACENT = 0,
        /// `x[i]` and `x[i + n_rot / 2]`.
        NEOX = 1,
    }
}

/// Parameters of ROPE. Pair i of a head at position p turns by `p * f`, where with `full = base^(-2i / n_rot) / factors[i]`:
///
/// * `f = full * freq_scale` when `ext_factor` is 0, else as YaRN mixes them:
///   `f = full * freq_scale * (1 - mix) + full * mix`, `mix = ext_factor * (1 - clamp((i - low) / max(high - low, 0.001), 0, 1))`,
///   `low = max(floor(pair(beta_fast)), 0)`, `high = min(ceil(pair(beta_slow)), n_rot - 1)`,
///   `pair(b) = n_rot * ln(n_ctx_orig / (2 pi b)) / (2 ln(base))`.
/// * Cosine and sine are multiplied by exactly `attn_factor`. YaRN's `0.1 ln(s) + 1` is part of that number where a model
///   wants it; the op adds no term of its own.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct RopeParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Which elements pair up.
    pub style: RopeStyle,
    /// Elements of a head; divides the last dimension.
    pub head_dim: u32,
    /// Elements of a head that turn, from its start; even, at most `head_dim`.
    pub n_rot: u32,
    /// Context the model was trained on before scaling; used when `ext_factor` is not 0.
    pub n_ctx_orig: u32,
    /// Frequency base.
    pub base: f32,
    /// Position scale (1 / scaling factor).
    pub freq_scale: f32,
    /// YaRN's extrapolation mix; 0 for none.
    pub ext_factor: f32,
    /// Magnitude of cosine and sine.
    pub attn_factor: f32,
    /// YaRN's fast boundary, in rotations.
    pub beta_fast: f32,
    /// YaRN's slow boundary, in rotations.
    pub beta_slow: f32,
}

/// Parameters of KV_STORE.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct KvStoreParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Index into [`Program::kv_layers`].
    pub kv_layer: u32,
}

/// Parameters of ATTENTION: causal softmax attention over the sequence's stored keys and values, this run's included.
/// Query head h reads key head `h / (n_head / n_head_kv)`. A head's sink takes part in its softmax as one more score, neither
/// scaled nor capped, whose value is zero.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct AttentionParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Index into [`Program::kv_layers`].
    pub kv_layer: u32,
    /// Query heads; a multiple of the layer's n_head_kv.
    pub n_head: u32,
    /// Multiplies every score.
    pub scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`; 0 for none.
    pub softcap: f32,
    /// A query at p sees positions above `p - window`; 0 for all up to p.
    pub window: u32,
}

open_enum! {
    /// Functions of one number.
    Activation: u32 {
        /// `x / (1 + exp(-x))`.
        SILU = 0,
        /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
        GELU_TANH = 1,
        /// `0.5 x (1 + erf(x / sqrt(2)))`.
        GELU_ERF = 2,
        /// `max(x, 0)`.
        RELU = 3,
        /// `1 / (1 + exp(-x))`.
        SIGMOID = 4,
        /// `tanh(x)`.
        TANH = 5,
        /// `ln(1 + exp(x))`.
        SOFTPLUS = 6,
    }
}

/// Parameters of GLU and UNARY.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ActivationParams {
    /// Set by the host.
    pub struct_size: usize,
    /// The function.
    pub activation: Activation,
}

/// Parameters of SCALE and SOFTCAP.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ScaleParams {
    /// Set by the host.
    pub struct_size: usize,
    /// The factor, or the cap.
    pub factor: f32,
}

/// Parameters of SLICE.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct SliceParams {
    /// Set by the host.
    pub struct_size: usize,
    /// First column.
    pub begin: u32,
    /// Number of columns.
    pub len: u32,
}

/// Parameters of TOP_K.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct TopKParams {
    /// Set by the host.
    pub struct_size: usize,
    /// How many; at most the last dimension.
    pub k: u32,
}

/// Parameters of MATMUL_EXPERTS.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ExpertsParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Experts; divides the rows of W.
    pub n_expert: u32,
}

open_enum! {
    /// From a router's logits to the weights of experts.
    RouterGating: u32 {
        /// Softmax over all experts.
        SOFTMAX = 0,
        /// Sigmoid of each.
        SIGMOID = 1,
        /// Softmax over the selected experts alone.
        SOFTMAX_SELECTED = 2,
    }
}

/// Parameters of ROUTER_TOPK.
///
/// With `p = softmax(logits)`, `sigmoid(logits)` or, for SOFTMAX_SELECTED, `logits`, the selected experts are the k greatest of `p + selection_bias`, in
/// falling order, the first of equals before; a NaN is less than everything. Their weights are their `p`, without the bias, for SOFTMAX_SELECTED the
/// softmax over the k; with `normalise` they are then divided by their sum, which counts as at least 1e-20; last they are multiplied by `scale`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct RouterParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Experts of a token; at most n_expert.
    pub k: u32,
    /// How logits become weights.
    pub gating: RouterGating,
    /// 1 to divide the weights by their sum, 0 not to.
    pub normalise: u32,
    /// Multiplies the weights.
    pub scale: f32,
}

/// Parameters of CONV_STATE. With `x[s]` the row of the sequence's position s, zero before position 0:
/// `y[t] = bias + sum over j in 0 .. kernel of W[:, j] * x[t - (kernel - 1) + j]`.
///
/// The record is `[kernel - 1][m]`: the sequence's last `kernel - 1` rows of x, the oldest first. It is read for rows before this run,
/// and written with what the next run needs.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ConvStateParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Index into [`Program::state_layers`].
    pub state_layer: u32,
}

open_enum! {
    /// Which head of queries and keys a head of values goes with, of `n_head_k` and `n_head_v`.
    HeadOrder: u32 {
        /// Head h with `h / (n_head_v / n_head_k)`: neighbours share.
        GROUPED = 0,
        /// Head h with `h % n_head_k`.
        TILED = 1,
    }
}

/// Parameters of GATED_DELTA (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", equation 10).
///
/// Each head of values has a state S of `[head_dim_v][head_dim_k]`, all zero before position 0. For each token in order, with the head's
/// q, k, v, g, beta (k is normalised by whoever makes it; g is the logarithm of the decay, at most 0; beta is between 0 and 1):
///
/// ```text
/// S = exp(g) S
/// d = beta (v - S k)
/// S = S + d k^T
/// y = scale S q
/// ```
///
/// The record is `[n_head_v][head_dim_v][head_dim_k]`: S after the sequence's last token. Rows of S do not touch each other. Backends may compute several tokens
/// at once by an equal form.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct GatedDeltaParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Index into [`Program::state_layers`].
    pub state_layer: u32,
    /// Heads of queries and keys.
    pub n_head_k: u32,
    /// Heads of values; a multiple of n_head_k.
    pub n_head_v: u32,
    /// Elements of a query and of a key.
    pub head_dim_k: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Which heads go together.
    pub order: HeadOrder,
    /// Multiplies the result.
    pub scale: f32,
}

/// Parameters of SLICE_GROUPS.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct SliceGroupsParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Columns of a group; divides the last dimension.
    pub group: u32,
    /// First column in each group.
    pub begin: u32,
    /// Number of columns of each group.
    pub len: u32,
}

/// Parameters of CONCAT_GROUPS.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct ConcatGroupsParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Columns of a group of the first input; divides its last dimension.
    pub group_a: u32,
    /// Columns of a group of the second input; divides its last dimension, and the quotient is the number of groups.
    pub group_b: u32,
}

/// Parameters of ROUTER_TOPK_GROUPED.
///
/// Experts stand in `n_group` groups of neighbours. With `s = p + selection_bias`, p as for ROUTER_TOPK, a group's score is the sum of its `n_score` greatest s.
/// The `n_group_used` groups of the greatest scores, the first of equals before, are searched: the selected experts are the k greatest s of
/// their experts, in falling order, the first of equals before. The rest is as for ROUTER_TOPK; a NaN is less than everything, in sums too, where it counts as
/// negative infinity.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct GroupedRouterParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Experts of a token; at most those of `n_group_used` groups.
    pub k: u32,
    /// How logits become weights.
    pub gating: RouterGating,
    /// 1 to divide the weights by their sum, 0 not to.
    pub normalise: u32,
    /// Multiplies the weights.
    pub scale: f32,
    /// Groups; divides n_expert.
    pub n_group: u32,
    /// Groups that are searched; at most `n_group`.
    pub n_group_used: u32,
    /// Scores of a group that count; at most a group's experts.
    pub n_score: u32,
}

/// Parameters of GLU_CLAMPED.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct GluClampedParams {
    /// Set by the host.
    pub struct_size: usize,
    /// Steepness of the sigmoid.
    pub alpha: f32,
    /// Bound of both sides; more than 0.
    pub limit: f32,
}
