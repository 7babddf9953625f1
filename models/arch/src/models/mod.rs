//! One file per architecture.

pub(crate) mod cohere;
pub(crate) mod deepseek2;
pub(crate) mod gemma2;
pub(crate) mod gemma3;
pub(crate) mod gemma4;
pub(crate) mod glm4;
pub(crate) mod gpt_oss;
pub(crate) mod granite;
pub(crate) mod lfm2;
pub(crate) mod llama;
pub(crate) mod olmo2;
pub(crate) mod olmoe;
pub(crate) mod phi3;
pub(crate) mod qwen2;
pub(crate) mod qwen3;
pub(crate) mod qwen3next;
pub(crate) mod smollm3;
pub(crate) mod starcoder2;
