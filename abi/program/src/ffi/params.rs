//! The parameters of ops: one struct of the boundary for each code that has any, out and back.

use super::fault;
use crate::{Activation, HeadOrder, OpKind, ProgramError, RopeStyle, RouterGating};
use std::ffi::c_void;
use std::fmt::Display;
use std::mem::size_of;
use tegula_abi as abi;

/// Declares [`Params`]: a variant for each struct, boxed so that its address holds.
macro_rules! params {
    ($($name:ident: $ty:ident;)*) => {
        /// An op's parameters.
        #[derive(Debug)]
        pub(super) enum Params {
            None,
            $($name(Box<abi::$ty>),)*
        }

        impl Params {
            pub(super) fn address(&self) -> *const c_void {
                match self {
                    Self::None => std::ptr::null(),
                    $(Self::$name(params) => std::ptr::from_ref(params.as_ref()).cast(),)*
                }
            }
        }

        $(impl From<abi::$ty> for Params {
            fn from(params: abi::$ty) -> Self {
                let struct_size = size_of::<abi::$ty>();
                Self::$name(Box::new(abi::$ty { struct_size, ..params }))
            }
        })*
    };
}

params! {
    Norm: NormParams;
    Rope: RopeParams;
    KvStore: KvStoreParams;
    Attention: AttentionParams;
    Activation: ActivationParams;
    Scale: ScaleParams;
    Slice: SliceParams;
    TopK: TopKParams;
    Experts: ExpertsParams;
    Router: RouterParams;
    ConvState: ConvStateParams;
    GatedDelta: GatedDeltaParams;
    SliceGroups: SliceGroupsParams;
    GluClamped: GluClampedParams;
    ConcatGroups: ConcatGroupsParams;
    GroupedRouter: GroupedRouterParams;
}

impl Params {
    pub(super) fn of(kind: &OpKind) -> Self {
        let struct_size = 0;
        match *kind {
            OpKind::RmsNorm { eps, n }
            | OpKind::LayerNorm { eps, n }
            | OpKind::L2Norm { eps, n } => abi::NormParams { struct_size, eps, n }.into(),
            OpKind::Rope { .. } => rope_out(kind).into(),
            OpKind::KvStore { kv_layer } => abi::KvStoreParams { struct_size, kv_layer }.into(),
            OpKind::Attention { kv_layer, n_head, scale, softcap, window } => {
                abi::AttentionParams { struct_size, kv_layer, n_head, scale, softcap, window }
                    .into()
            }
            OpKind::Glu { activation } | OpKind::Unary { activation } => {
                let activation = number(&Activation::ALL, activation);
                abi::ActivationParams { struct_size, activation }.into()
            }
            OpKind::Scale { factor } | OpKind::Softcap { cap: factor } => {
                abi::ScaleParams { struct_size, factor }.into()
            }
            OpKind::Slice { begin, len } => abi::SliceParams { struct_size, begin, len }.into(),
            OpKind::TopK { k } => abi::TopKParams { struct_size, k }.into(),
            OpKind::MatmulExperts { n_expert } => {
                abi::ExpertsParams { struct_size, n_expert }.into()
            }
            OpKind::RouterTopk { k, gating, normalise, scale } => {
                let (gating, normalise) =
                    (number(&RouterGating::ALL, gating), u32::from(normalise));
                abi::RouterParams { struct_size, k, gating, normalise, scale }.into()
            }
            OpKind::ConvState { state_layer } => {
                abi::ConvStateParams { struct_size, state_layer }.into()
            }
            OpKind::GatedDelta { .. } => gated_delta_out(kind).into(),
            OpKind::SliceGroups { group, begin, len } => {
                abi::SliceGroupsParams { struct_size, group, begin, len }.into()
            }
            OpKind::GluClamped { alpha, limit } => {
                abi::GluClampedParams { struct_size, alpha, limit }.into()
            }
            OpKind::ConcatGroups { group_a, group_b } => {
                abi::ConcatGroupsParams { struct_size, group_a, group_b }.into()
            }
            OpKind::RouterTopkGrouped { .. } => grouped_router_out(kind).into(),
            OpKind::Embed
            | OpKind::Matmul
            | OpKind::Add
            | OpKind::Mul
            | OpKind::Concat
            | OpKind::GatherRows
            | OpKind::Argmax
            | OpKind::CombineExperts => Self::None,
        }
    }
}

/// The number that `value` has at the boundary.
fn number<T: Copy + PartialEq, N: Copy + Default>(all: &[(T, N)], value: T) -> N {
    all.iter().find(|(known, _)| *known == value).map(|(_, number)| *number).unwrap_or_default()
}

/// The value that has `number` at the boundary.
fn value<T: Copy, N: Copy + PartialEq + Display>(
    all: &[(T, N)],
    what: &str,
    number: N,
) -> Result<T, ProgramError> {
    let known = all.iter().find(|(_, known)| *known == number);
    known.map(|(value, _)| *value).ok_or_else(|| fault(format!("{what} {number}")))
}

const ROPE_STYLES: [(RopeStyle, abi::RopeStyle); 2] =
    [(RopeStyle::Adjacent, abi::RopeStyle::ADJACENT), (RopeStyle::Neox, abi::RopeStyle::NEOX)];

fn rope_out(kind: &OpKind) -> abi::RopeParams {
    let OpKind::Rope {
        style,
        head_dim,
        n_rot,
        n_ctx_orig,
        base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
    } = *kind
    else {
        return abi::RopeParams::default();
    };
    abi::RopeParams {
        struct_size: 0,
        style: number(&ROPE_STYLES, style),
        head_dim,
        n_rot,
        n_ctx_orig,
        base,
        freq_scale,
        ext_factor,
        attn_factor,
        beta_fast,
        beta_slow,
    }
}

fn rope_in(p: &abi::RopeParams) -> Result<OpKind, ProgramError> {
    Ok(OpKind::Rope {
        style: value(&ROPE_STYLES, "rope style", p.style)?,
        head_dim: p.head_dim,
        n_rot: p.n_rot,
        n_ctx_orig: p.n_ctx_orig,
        base: p.base,
        freq_scale: p.freq_scale,
        ext_factor: p.ext_factor,
        attn_factor: p.attn_factor,
        beta_fast: p.beta_fast,
        beta_slow: p.beta_slow,
    })
}

fn gated_delta_out(kind: &OpKind) -> abi::GatedDeltaParams {
    let OpKind::GatedDelta {
        state_layer,
        n_head_k,
        n_head_v,
        head_dim_k,
        head_dim_v,
        order,
        scale,
    } = *kind
    else {
        return abi::GatedDeltaParams::default();
    };
    abi::GatedDeltaParams {
        struct_size: 0,
        state_layer,
        n_head_k,
        n_head_v,
        head_dim_k,
        head_dim_v,
        order: number(&HeadOrder::ALL, order),
        scale,
    }
}

fn gated_delta_in(p: &abi::GatedDeltaParams) -> Result<OpKind, ProgramError> {
    Ok(OpKind::GatedDelta {
        state_layer: p.state_layer,
        n_head_k: p.n_head_k,
        n_head_v: p.n_head_v,
        head_dim_k: p.head_dim_k,
        head_dim_v: p.head_dim_v,
        order: value(&HeadOrder::ALL, "head order", p.order)?,
        scale: p.scale,
    })
}

fn grouped_router_out(kind: &OpKind) -> abi::GroupedRouterParams {
    let OpKind::RouterTopkGrouped { k, gating, normalise, scale, n_group, n_group_used, n_score } =
        *kind
    else {
        return abi::GroupedRouterParams::default();
    };
    abi::GroupedRouterParams {
        struct_size: 0,
        k,
        gating: number(&RouterGating::ALL, gating),
        normalise: u32::from(normalise),
        scale,
        n_group,
        n_group_used,
        n_score,
    }
}

fn grouped_router_in(p: &abi::GroupedRouterParams) -> Result<OpKind, ProgramError> {
    Ok(OpKind::RouterTopkGrouped {
        k: p.k,
        gating: value(&RouterGating::ALL, "router gating", p.gating)?,
        normalise: p.normalise != 0,
        scale: p.scale,
        n_group: p.n_group,
        n_group_used: p.n_group_used,
        n_score: p.n_score,
    })
}

/// # Safety
/// The op's parameters are alive.
unsafe fn params<T: abi::Crossing>(op: &abi::Op) -> Result<T, ProgramError> {
    // SAFETY: alive by the caller's word; the op's code says which struct it is.
    unsafe { abi::read_sized(op.params.cast::<T>()) }
        .ok_or_else(|| fault(format!("op {} without its parameters", op.code)))
}

/// # Safety
/// The op's parameters are alive.
pub(super) unsafe fn kind_in(op: &abi::Op) -> Result<OpKind, ProgramError> {
    use abi::OpCode as Code;
    // SAFETY: alive by the caller's word.
    unsafe {
        Ok(match op.code {
            Code::EMBED => OpKind::Embed,
            Code::MATMUL => OpKind::Matmul,
            Code::ADD => OpKind::Add,
            Code::MUL => OpKind::Mul,
            Code::CONCAT => OpKind::Concat,
            Code::GATHER_ROWS => OpKind::GatherRows,
            Code::ARGMAX => OpKind::Argmax,
            Code::COMBINE_EXPERTS => OpKind::CombineExperts,
            Code::RMS_NORM => {
                let p: abi::NormParams = params(op)?;
                OpKind::RmsNorm { eps: p.eps, n: p.n }
            }
            Code::LAYER_NORM => {
                let p: abi::NormParams = params(op)?;
                OpKind::LayerNorm { eps: p.eps, n: p.n }
            }
            Code::L2_NORM => {
                let p: abi::NormParams = params(op)?;
                OpKind::L2Norm { eps: p.eps, n: p.n }
            }
            Code::ROPE => rope_in(&params(op)?)?,
            Code::KV_STORE => {
                OpKind::KvStore { kv_layer: params::<abi::KvStoreParams>(op)?.kv_layer }
            }
            Code::ATTENTION => {
                let p: abi::AttentionParams = params(op)?;
                OpKind::Attention {
                    kv_layer: p.kv_layer,
                    n_head: p.n_head,
                    scale: p.scale,
                    softcap: p.softcap,
                    window: p.window,
                }
            }
            Code::GLU => OpKind::Glu { activation: activation_in(&params(op)?)? },
            Code::UNARY => OpKind::Unary { activation: activation_in(&params(op)?)? },
            Code::SCALE => OpKind::Scale { factor: params::<abi::ScaleParams>(op)?.factor },
            Code::SOFTCAP => OpKind::Softcap { cap: params::<abi::ScaleParams>(op)?.factor },
            Code::SLICE => {
                let p: abi::SliceParams = params(op)?;
                OpKind::Slice { begin: p.begin, len: p.len }
            }
            Code::TOP_K => OpKind::TopK { k: params::<abi::TopKParams>(op)?.k },
            Code::MATMUL_EXPERTS => {
                OpKind::MatmulExperts { n_expert: params::<abi::ExpertsParams>(op)?.n_expert }
            }
            Code::ROUTER_TOPK => router_in(&params(op)?)?,
            Code::CONV_STATE => {
                OpKind::ConvState { state_layer: params::<abi::ConvStateParams>(op)?.state_layer }
            }
            Code::GATED_DELTA => gated_delta_in(&params(op)?)?,
            Code::SLICE_GROUPS => {
                let p: abi::SliceGroupsParams = params(op)?;
                OpKind::SliceGroups { group: p.group, begin: p.begin, len: p.len }
            }
            Code::GLU_CLAMPED => {
                let p: abi::GluClampedParams = params(op)?;
                OpKind::GluClamped { alpha: p.alpha, limit: p.limit }
            }
            Code::CONCAT_GROUPS => {
                let p: abi::ConcatGroupsParams = params(op)?;
                OpKind::ConcatGroups { group_a: p.group_a, group_b: p.group_b }
            }
            Code::ROUTER_TOPK_GROUPED => grouped_router_in(&params(op)?)?,
            other => return Err(fault(format!("op code {} is newer than this backend", other.0))),
        })
    }
}

fn activation_in(p: &abi::ActivationParams) -> Result<Activation, ProgramError> {
    value(&Activation::ALL, "activation", p.activation)
}

fn router_in(p: &abi::RouterParams) -> Result<OpKind, ProgramError> {
    Ok(OpKind::RouterTopk {
        k: p.k,
        gating: value(&RouterGating::ALL, "router gating", p.gating)?,
        normalise: p.normalise != 0,
        scale: p.scale,
    })
}
