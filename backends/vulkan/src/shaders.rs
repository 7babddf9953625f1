//! The kernels' SPIR-V, as `build.rs` compiled it; an optional one that the compiler lacked is empty.

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Shader {
    Elementwise,
    Norm,
    Rope,
    KvStore,
    Embed,
    Copy,
    Argmax,
    TopK,
    Router,
    ExpertsSort,
    Combine,
    ConvState,
    GatedDelta,
    Attention,
    AttentionCombine,
    Matvec,
    Matmul,
    MatmulCoopmat,
    ToHalf,
    Probe,
}

impl Shader {
    pub(crate) const COUNT: usize = 20;

    pub(crate) fn code(self) -> &'static [u8] {
        match self {
            Self::Elementwise => ELEMENTWISE,
            Self::Norm => NORM,
            Self::Rope => ROPE,
            Self::KvStore => KV_STORE,
            Self::Embed => EMBED,
            Self::Copy => COPY,
            Self::Argmax => ARGMAX,
            Self::TopK => TOP_K,
            Self::Router => ROUTER,
            Self::ExpertsSort => EXPERTS_SORT,
            Self::Combine => COMBINE,
            Self::ConvState => CONV_STATE,
            Self::GatedDelta => GATED_DELTA,
            Self::Attention => ATTENTION,
            Self::AttentionCombine => ATTENTION_COMBINE,
            Self::Matvec => MATVEC,
            Self::Matmul => MATMUL,
            Self::MatmulCoopmat => MATMUL_COOPMAT,
            Self::ToHalf => TO_HALF,
            Self::Probe => PROBE,
        }
    }

    /// The name in profiles.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Elementwise => "elementwise",
            Self::Norm => "norm",
            Self::Rope => "rope",
            Self::KvStore => "kv_store",
            Self::Embed => "embed",
            Self::Copy => "copy",
            Self::Argmax => "argmax",
            Self::TopK => "top_k",
            Self::Router => "router",
            Self::ExpertsSort => "experts_sort",
            Self::Combine => "combine",
            Self::ConvState => "conv_state",
            Self::GatedDelta => "gated_delta",
            Self::Attention => "attention",
            Self::AttentionCombine => "attention_combine",
            Self::Matvec => "matvec",
            Self::Matmul => "matmul",
            Self::MatmulCoopmat => "matmul_coopmat",
            Self::ToHalf => "to_half",
            Self::Probe => "probe",
        }
    }
}
