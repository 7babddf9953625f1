//! The command line.

mod quality;

pub(crate) use quality::{KlArgs, PerplexityArgs, QuantizeArgs};

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use tegula::{
    DType, DeviceCap, Limit, ModelOptions, PlaceRule, PlanOptions, Quant, SamplerOptions, Split,
};
use tegula_plugin::probe::PROBE_ARGUMENT;

/// What no option of a single command says; options win over variables.
const ENVIRONMENT: &str = "\
Models:
  A MODEL is the path of a GGUF file (of a split model, any shard), or the name of one in the cache
  folder: its file name, with or without .gguf, or a beginning that no other has.

Environment:
  TEGULA_DEVICE        Devices to use where --device is not given
  TEGULA_MODELS        Cache folder of models [default: $XDG_CACHE_HOME/tegula/models, or
                       ~/.cache/tegula/models]
  TEGULA_BACKEND_PATH  Folders to search for backends before the usual ones, separated by colons
  TEGULA_ISOLATION     Before a backend is opened, it is tried in a process of its own, which a driver may crash: off
                       opens it at once, child tries it at every start [default: when something changed]
  TEGULA_PROBE_TIMEOUT Seconds that trying a backend may take [default: 10]
  TEGULA_MAX_BUFFER    Greatest size of one buffer, such as 512M or 2G, whatever devices state
  TEGULA_MEMORY_LIMIT  Memory to use of each heap at most, such as 4G
  HF_TOKEN             Token for private and gated models of the Hugging Face hub
  HF_ENDPOINT          Another hub to pull from [default: https://huggingface.co]
  RUST_LOG             What is logged to stderr: error, warn, info, debug [default: warn]";

/// Runs language models from GGUF files on whatever device is there.
#[derive(Debug, Parser)]
#[command(name = "tegula", version, propagate_version = true, after_help = ENVIRONMENT)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continue a text.
    Run(RunArgs),
    /// Talk with a model.
    Chat(ChatArgs),
    /// Show backends, devices and their memory.
    Devices(DevicesArgs),
    /// Measure how fast a model runs here.
    Bench(BenchArgs),
    /// Check that a backend plugin keeps its promises.
    Verify(VerifyArgs),
    /// Show what loading a model would put where.
    Plan(PlanArgs),
    /// Fetch a model from the Hugging Face hub.
    Pull(PullArgs),
    /// Show a model file's metadata and tensors.
    Inspect(InspectArgs),
    /// Turn text from stdin into token ids, or back.
    Tokenize(TokenizeArgs),
    /// Render a list of messages as the model's prompt.
    Template(TemplateArgs),
    /// Show the logits that a model computes for token ids.
    Logits(LogitsArgs),
    /// Measure how well a model predicts a text.
    Perplexity(PerplexityArgs),
    /// Measure how far a model's predictions are from those of another.
    Kl(KlArgs),
    /// Write a model file in smaller types.
    Quantize(QuantizeArgs),
    /// Try a plugin, and nothing else: what this command starts itself for.
    #[command(name = PROBE_ARGUMENT, hide = true)]
    Probe {
        /// The plugin's shared object
        plugin: PathBuf,
    },
}

/// How a model is loaded. Its heading holds for all arguments that follow, so it is flattened after a command's own.
#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// The model: a GGUF file (any shard of a split one), or the name of one in the cache folder
    #[arg(help_heading = None)]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) how: LoadOptions,
}

/// How a model is loaded, whichever it is.
#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Devices to use: auto, cpu, vulkan:0, uuid:..., pci:..., name:*text*, !excluded [default: TEGULA_DEVICE, or auto]
    #[arg(long, value_name = "SELECTOR", allow_hyphen_values = true)]
    pub(crate) device: Option<String>,
    /// Host threads [default: the usable cores]
    #[arg(long, short = 't', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) threads: Option<u32>,
    /// Context in tokens [default: the trained one, or the longest that fits]
    #[arg(long, short = 'c', value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) ctx: Option<u32>,
    /// Element type of the KV cache: f32, f16, bf16, q8_0 or q4_0
    #[arg(long, value_name = "TYPE", default_value = "f16", value_parser = kv_type)]
    pub(crate) kv_type: DType,
    /// Element type of the keys, where it differs
    #[arg(long, value_name = "TYPE", value_parser = kv_type)]
    pub(crate) kv_type_k: Option<DType>,
    /// Element type of the values, where it differs
    #[arg(long, value_name = "TYPE", value_parser = kv_type)]
    pub(crate) kv_type_v: Option<DType>,
    /// Tokens of a prompt that are computed at once
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ubatch: u32,
    /// How layers are divided over several devices: fill (the first takes all that fits), none (the first alone), layer (by free
    /// memory), or a proportion for each device, such as 3,1
    #[arg(long, value_name = "SPLIT", default_value = "fill")]
    pub(crate) split: Split,
    /// Keep weights whose names match PATTERN on DEVICE, such as 'blk\.2[0-9]\.ffn_=cpu'; may be given several times
    #[arg(long, value_name = "PATTERN=DEVICE")]
    pub(crate) place: Vec<PlaceRule>,
    /// Keep the experts of the first N layers on the host's processor; --place goes before it
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) cpu_experts: u32,
    /// Sequences at a time. They share the context, which is a limit and no reservation: the KV cache stays as it is
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) parallel: u32,
    /// Load although the plan does not fit, or nobody knows whether it does
    #[arg(long)]
    pub(crate) force: bool,
    /// Copy weights to memory of the device even where they could be used from the file
    #[arg(long)]
    pub(crate) no_mmap: bool,
    /// Use no more of each heap, such as 4GiB or vulkan:0=2GiB; may be given for several devices [default: TEGULA_MEMORY_LIMIT]
    #[arg(long, value_name = "[DEVICE=]SIZE", value_parser = memory_limit)]
    pub(crate) memory_limit: Vec<DeviceCap>,
    /// Make no buffer larger, as --memory-limit [default: TEGULA_MAX_BUFFER]
    #[arg(long, value_name = "[DEVICE=]SIZE", value_parser = max_buffer)]
    pub(crate) max_buffer: Vec<DeviceCap>,
}

fn memory_limit(text: &str) -> Result<DeviceCap, String> {
    DeviceCap::parse("--memory-limit", Limit::Memory, text).map_err(|error| error.to_string())
}

fn max_buffer(text: &str) -> Result<DeviceCap, String> {
    DeviceCap::parse("--max-buffer", Limit::Buffer, text).map_err(|error| error.to_string())
}

fn kv_type(text: &str) -> Result<DType, String> {
    let allowed = [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0];
    DType::from_name(text)
        .filter(|dtype| allowed.contains(dtype))
        .ok_or_else(|| "one of f32, f16, bf16, q8_0, q4_0".to_owned())
}

impl LoadOptions {
    /// The caps of single devices.
    pub(crate) fn caps(&self) -> Vec<DeviceCap> {
        self.memory_limit.iter().chain(&self.max_buffer).cloned().collect()
    }

    /// As the library wants it, with `n_outputs` rows of logits a run.
    pub(crate) fn options(&self, n_outputs: u32) -> ModelOptions {
        ModelOptions {
            device: self.device.clone(),
            n_threads: self.threads.unwrap_or(0),
            plan: PlanOptions {
                n_ctx: self.ctx,
                dtype_k: self.kv_type_k.unwrap_or(self.kv_type),
                dtype_v: self.kv_type_v.unwrap_or(self.kv_type),
                n_ubatch: self.ubatch,
                n_outputs,
                mmap: !self.no_mmap,
                split: self.split.clone(),
                place: self.place.clone(),
                cpu_experts: self.cpu_experts,
                n_parallel: self.parallel,
                force: self.force,
            },
        }
    }
}

/// How tokens are chosen.
#[derive(Debug, Args)]
pub(crate) struct SampleArgs {
    /// Seed of the choice; the same seed gives the same text [default: random, and told with the timings]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Randomness; 0 always takes the likeliest token
    #[arg(
        long,
        visible_alias = "temp",
        value_name = "X",
        allow_negative_numbers = true,
        default_value_t = 0.8
    )]
    pub(crate) temperature: f32,
    /// Choose among the K likeliest; 0 is all
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub(crate) top_k: u32,
    /// Choose among the likeliest that sum to this probability; 1 is all
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub(crate) top_p: f32,
    /// Leave out what is less likely than this share of the likeliest; 0 is none
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    pub(crate) min_p: f32,
    /// Make tokens of the last 64 less likely; 1 is not at all
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub(crate) repeat_penalty: f32,
    /// Generate at most N tokens [default: to the end of the context]
    #[arg(short = 'n', long = "predict", value_name = "N")]
    pub(crate) n_predict: Option<u32>,
}

impl SampleArgs {
    /// The seed of `options` where it was drawn and had an effect, and so is worth telling.
    pub(crate) fn drawn_seed(&self, options: &SamplerOptions) -> Option<u64> {
        (self.seed.is_none() && options.temperature > 0.0).then_some(options.seed)
    }

    /// As the library wants it; a random seed is drawn where none is given.
    pub(crate) fn options(&self) -> SamplerOptions {
        use std::hash::{BuildHasher, Hasher};
        // 32 bits are enough, and can be typed again.
        let random =
            || std::collections::hash_map::RandomState::new().build_hasher().finish() >> 32;
        SamplerOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            seed: self.seed.unwrap_or_else(random),
            ..SamplerOptions::default()
        }
    }
}

/// `tegula run`.
#[derive(Debug, Args)]
#[command(after_help = "\
The fields of --json: device; seed; prompt_tokens (ids); generation, with tokens (ids, the end-of-text token
included), text, stop (end_of_generation, length, context_full or cancelled), n_prompt, prompt_ms, n_decoded,
decode_ms; load_ms; prompt_tokens_per_s; tokens_per_s; peak_memory_bytes.
Ctrl-C ends the generation early, a second one the program. See `tegula --help` for environment variables.")]
pub(crate) struct RunArgs {
    /// The text to continue; - reads it from stdin
    #[arg(
        short = 'p',
        long,
        value_name = "TEXT",
        required_unless_present = "file",
        conflicts_with = "file"
    )]
    pub(crate) prompt: Option<String>,
    /// Read the text to continue from a file; - is stdin
    #[arg(short = 'f', long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Put the prompt into the model's chat template as a user's message
    #[arg(long)]
    pub(crate) chat: bool,
    /// Go on past the model's end of text
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Give one JSON object on stdout when done, instead of the text as it comes
    #[arg(long)]
    pub(crate) json: bool,
    /// No timings on stderr
    #[arg(long, short = 'q')]
    pub(crate) quiet: bool,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
    #[command(flatten, next_help_heading = "Choosing tokens")]
    pub(crate) sample: SampleArgs,
}

/// `tegula chat`.
#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A system message
    #[arg(long, short = 's', value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
    #[command(flatten, next_help_heading = "Choosing tokens")]
    pub(crate) sample: SampleArgs,
}

/// `tegula bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each case runs once to set things up (column first), then --repeat times (median, least and most). Generation
includes choosing the likeliest token. The context is as long as the longest case needs unless -c says otherwise.
The column weights GB/s counts all weights once a token; a table of embeddings apart from the output matrix is counted
though only a row of it is read.

Examples:
  tegula bench model.gguf
  tegula bench model.gguf -p 512,2048 -n 128 -d 0,8192 --kv-type q8_0 --json")]
pub(crate) struct BenchArgs {
    /// Prompts to measure, in tokens; 0 is none
    #[arg(short = 'p', long, value_name = "N,...", value_delimiter = ',', default_value = "512")]
    pub(crate) prompt: Vec<u32>,
    /// Generations to measure, in tokens; 0 is none
    #[arg(short = 'n', long, value_name = "N,...", value_delimiter = ',', default_value = "128")]
    pub(crate) generate: Vec<u32>,
    /// Tokens that are in the KV cache before
    #[arg(short = 'd', long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    pub(crate) depth: Vec<u32>,
    /// Sequences that generate together, each as many tokens; t/s is that of all
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) sequences: Vec<u32>,
    /// Runs of each case
    #[arg(short = 'r', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// As JSON, with every run
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
}

/// `tegula devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Measure how fast each buffer type is read, written and copied, and remember it for the choice of memory for weights
    #[arg(long)]
    pub(crate) measure: bool,
    /// Say of each device whether `auto`, and the selector in force, takes it, and why not
    #[arg(long)]
    pub(crate) why: bool,
    /// The selector that --why explains, and the devices that --measure measures [default: TEGULA_DEVICE, or all]
    #[arg(long, value_name = "SELECTOR", allow_hyphen_values = true)]
    pub(crate) device: Option<String>,
}

/// `tegula verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each op is run on the plugin's devices and on an oracle, and results are compared; limits,
threads, answers to wrong arguments and orders of dropping are checked as well. What the plugin
says it cannot do is listed, and no fault.
The exit code is 0 only if everything holds.")]
pub(crate) struct VerifyArgs {
    /// The plugin's shared object
    pub(crate) plugin: PathBuf,
    /// Check this device alone [default: each one]
    #[arg(long, value_name = "N")]
    pub(crate) device: Option<u32>,
    /// Check a part alone: abi, load, ops, limits, threads, ... or a group of ops such as matmul; may be repeated
    #[arg(long, value_name = "PART")]
    pub(crate) only: Vec<String>,
    /// Backend to compare results with, by id or file [default: the first found that is only used when named]
    #[arg(long, value_name = "ID|PATH")]
    pub(crate) oracle: Option<String>,
    /// Seconds that one case may take
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) timeout: u32,
    /// As JSON, with every case
    #[arg(long)]
    pub(crate) json: bool,
    /// The process that loads the plugin
    #[arg(long, hide = true)]
    pub(crate) in_process: bool,
}

/// `tegula plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
With --shapes no file is needed: NAME is one of the known shapes (an unknown name lists them), or the path of a
.json file with the fields of one. TEGULA_MAX_BUFFER and TEGULA_MEMORY_LIMIT, or --max-buffer and --memory-limit,
then stand in for the figures of a device that is not here.

Examples:
  tegula plan model.gguf -c 8192 --svg plan.svg
  tegula plan --shapes llama-3.2-3b -c 65536 --max-buffer 4294959104")]
pub(crate) struct PlanArgs {
    /// The model: a GGUF file (any shard of a split one), or the name of one in the cache folder
    #[arg(required_unless_present = "shapes", conflicts_with = "shapes")]
    pub(crate) model: Option<PathBuf>,
    /// Plan a model by its shape alone, such as llama-3.2-3b or shape.json
    #[arg(long, value_name = "NAME")]
    pub(crate) shapes: Option<String>,
    /// Types of a shape's weights: q4_k_m, q5_k_m, or one type such as q8_0, q4_0 or f16
    #[arg(long, value_name = "QUANT", default_value = "q4_k_m", conflicts_with = "model")]
    pub(crate) quant: Quant,
    /// As JSON, with every chunk and tile
    #[arg(long, conflicts_with = "svg")]
    pub(crate) json: bool,
    /// Draw every chunk and tile into a file; - is stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadOptions,
}

/// `tegula pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without :QUANT or /FILE.gguf, the repository's only model is fetched; where there are several, they are listed.
All shards of a split model are fetched. What broke off is continued by the same command. The path of the
model goes to stdout. See `tegula --help` for TEGULA_MODELS, HF_TOKEN and HF_ENDPOINT.

Examples:
  tegula pull ggml-org/gemma-3-270m-it-GGUF
  tegula pull bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M
  tegula pull OWNER/REPO/model.Q8_0.gguf")]
pub(crate) struct PullArgs {
    /// OWNER/REPO, OWNER/REPO:QUANT such as :Q4_K_M, or OWNER/REPO/FILE.gguf
    pub(crate) name: String,
    /// Branch, tag or commit of the repository
    #[arg(long, value_name = "REV", default_value = "main")]
    pub(crate) revision: String,
    /// Replace another file of the same name
    #[arg(long)]
    pub(crate) force: bool,
}

/// `tegula inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// The model: a GGUF file, or the name of one in the cache folder
    pub(crate) model: PathBuf,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Show arrays and texts in full
    #[arg(long)]
    pub(crate) full: bool,
}

/// `tegula tokenize`.
#[derive(Debug, Args)]
pub(crate) struct TokenizeArgs {
    /// The model: a GGUF file, or the name of one in the cache folder
    pub(crate) model: PathBuf,
    /// Neither add tokens such as BOS nor read texts such as <|im_start|> as control tokens
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Do not read texts such as <|im_start|> as control tokens, but add BOS where the model wants it
    #[arg(long, conflicts_with = "no_special")]
    pub(crate) no_parse_special: bool,
    /// A JSON array of ids (and with --decode, read one)
    #[arg(long)]
    pub(crate) json: bool,
    /// Turn ids from stdin into text
    #[arg(long)]
    pub(crate) decode: bool,
}

/// `tegula template`.
#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// The model: a GGUF file, or the name of one in the cache folder
    pub(crate) model: PathBuf,
    /// A JSON file: an array of messages, or an object with `messages`, `tools` and other variables; - is stdin
    pub(crate) messages: PathBuf,
    /// Do not end with the beginning of the assistant's turn
    #[arg(long)]
    pub(crate) no_generation_prompt: bool,
}

/// `tegula logits`.
#[derive(Debug, Args)]
pub(crate) struct LogitsArgs {
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    pub(crate) ids: Vec<u32>,
    /// How many of the greatest to show
    #[arg(long, value_name = "K", default_value_t = 20)]
    pub(crate) top: usize,
    /// Only the last position
    #[arg(long)]
    pub(crate) last: bool,
    /// Evaluate the ids one by one, as generation does, not as one prompt
    #[arg(long)]
    pub(crate) one_by_one: bool,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten, next_help_heading = "Loading")]
    pub(crate) load: LoadArgs,
}
