//! The commands about how good a file is, and about making smaller ones.

use super::LoadArgs;
use clap::Args;
use std::path::PathBuf;
use tegula::Quant;

/// `tegula perplexity`.
#[derive(Debug, Args)]
#[command(after_help = "\
The text is cut into windows of -c tokens (512 where it is not given), one after the other; the second half of each is
scored, each token by the logits before it. Figures compare with those of llama-perplexity at the same -c.
The fields of --json: model, device, n_ctx, windows, tokens_scored, perplexity, perplexity_error (one standard
deviation), nll and nll_error (of a token's negative log probability, in nats).")]
pub(crate) struct PerplexityArgs {
    /// The text, UTF-8; - is stdin
    #[arg(index = 2, help_heading = None)]
    pub(crate) file: PathBuf,
    /// Score at most N windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
}

/// `tegula kl`.
#[derive(Debug, Args)]
#[command(after_help = "\
The windows are those of `tegula perplexity`; at each scored position KL(BASE || MODEL) is the distance, in nats, of the
model's prediction from the base's. Both models are loaded, with the same options.
The fields of --json: model, base, device, n_ctx, windows, tokens_scored, kl_mean, kl_mean_error, kl_median, kl_p90, kl_p99,
kl_max, same_top (the share of positions with the same likeliest token), perplexity, perplexity_base, log_ratio and
log_ratio_error (of the quotient of the two perplexities).")]
pub(crate) struct KlArgs {
    /// The model it is compared with, such as the original of a quantised file
    #[arg(index = 2, help_heading = None)]
    pub(crate) base: PathBuf,
    /// The text, UTF-8
    #[arg(index = 3, help_heading = None)]
    pub(crate) file: PathBuf,
    /// Score at most N windows
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
}

/// `tegula quantize`.
#[derive(Debug, Args)]
#[command(after_help = "\
The source is of F32, F16, BF16 or Q8_0; of a split model, any shard, and one file is written. Scales are searched for each
QuantBlock. q4_k_m and q5_k_m are mixes: half of attn_v and ffn_down, and the output matrix, get q6_k.
Norms, biases, routers and convolutions stay as they are. `tegula kl` tells what was lost.

Examples:
  tegula quantize model-f16.gguf model-q4_k_m.gguf
  tegula quantize model-f16.gguf model-q4_0.gguf --quant q4_0 --importance model.imatrix.gguf")]
pub(crate) struct QuantizeArgs {
    /// The model: a GGUF file, or the name of one in the cache folder
    pub(crate) model: PathBuf,
    /// The file to write
    pub(crate) output: PathBuf,
    /// q4_k_m, q5_k_m, or one type: q8_0, q6_k, q5_k, q5_1, q5_0, q4_k, q4_1, q4_0, f16, bf16 or f32
    #[arg(long, value_name = "QUANT", default_value = "q4_k_m")]
    pub(crate) quant: Quant,
    /// A file that tells how much each column matters, as llama-imatrix writes it
    #[arg(long, value_name = "FILE")]
    pub(crate) importance: Option<PathBuf>,
    /// Threads [default: the usable cores]
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) threads: Option<u32>,
    /// Replace a file of that name
    #[arg(long)]
    pub(crate) force: bool,
    /// As JSON, with every tensor
    #[arg(long)]
    pub(crate) json: bool,
}
