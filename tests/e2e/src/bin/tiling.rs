//! What tiling costs: the same model under caps and without one, in one process, in turns of a fraction of a second.
//!
//! `tiling MODEL [DEVICE [ROUNDS [CAP...]]]`, in the release profile: `cargo run --release -p tegula-e2e --bin tiling -- MODEL`. Every round
//! evaluates a prompt of 256 tokens and generates 16 with each of the loaded models, in an order that turns; the figure is the median of
//! the rounds' ratios of times, with the interval that holds the true median at 95 %. A second model without a cap shows what
//! the machine alone makes of the same: whatever slows it for longer than a turn slows both sides of a ratio.

use std::error::Error;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use tegula::{Caps, DeviceCap, Limit, Model, ModelOptions, Outputs, PlanOptions};
use tegula_e2e::runtime_with;

const N_PROMPT: u32 = 256;
const N_GENERATED: u32 = 16;

/// Seconds of the prompt and of generation, and a token of the text that was made.
struct Turn {
    prompt: f64,
    generation: f64,
    text: Vec<u32>,
}

fn turn(model: &Model) -> Result<Turn, tegula::Error> {
    let mut sequence = model.sequence();
    let mut next = 0;
    let mut eval = |tokens: &[u32]| {
        sequence.eval(tokens, Outputs::Last, &AtomicBool::new(false), |_, row| {
            next = tegula_e2e::argmax(row);
            Ok(())
        })?;
        Ok::<_, tegula::Error>(next)
    };
    let words: Vec<u32> = (0..N_PROMPT).map(|i| (i * i + 7 * i) % 251 + 3).collect();
    let start = Instant::now();
    let mut text = vec![eval(&words)?];
    let prompt = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..N_GENERATED {
        text.push(eval(&[text[text.len() - 1]])?);
    }
    Ok(Turn { prompt, generation: start.elapsed().as_secs_f64(), text })
}

/// The median of sorted figures, and the ranks that enclose the true one at 95 % (normal approximation of the binomial).
fn median(sorted: &[f64]) -> (f64, f64, f64) {
    let n = sorted.len();
    let half_width = 0.98 * (n as f64).sqrt();
    let at = |rank: f64| sorted[(rank.max(0.0) as usize).min(n - 1)];
    let middle = (n as f64 - 1.0) / 2.0;
    (at(middle), at((middle - half_width).floor()), at((middle + half_width).ceil()))
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, rest @ ..] = args.as_slice() else {
        return Err("tiling MODEL [DEVICE [ROUNDS [CAP...]]]".into());
    };
    let device = rest.first().map_or("cpu", String::as_str);
    let n_rounds: usize = rest.get(1).map_or(Ok(60), |rounds| rounds.parse())?;
    let caps: Vec<u64> = match rest.get(2..) {
        Some(caps) if !caps.is_empty() => {
            let parse = |cap| DeviceCap::parse("CAP", Limit::Buffer, cap).map(|cap| cap.bytes);
            caps.iter().map(|cap| parse(cap)).collect::<Result<_, _>>()?
        }
        _ => vec![1 << 20, 16 << 20],
    };
    let sides = [None, None].into_iter().chain(caps.iter().map(|cap| Some(*cap)));
    let models: Vec<Model> = sides
        .map(|max_buffer| {
            let plan = PlanOptions { n_ctx: Some(512), ..Default::default() };
            let options = ModelOptions { device: Some(device.into()), plan, ..Default::default() };
            let runtime = runtime_with(Caps { max_buffer, memory_limit: None });
            let model = Model::open(&runtime, path, &options, &mut |_| {})?;
            turn(&model)?;
            Ok(model)
        })
        .collect::<Result<_, tegula::Error>>()?;
    let mut ratios = vec![[Vec::new(), Vec::new()]; models.len()];
    for round in 0..n_rounds.max(1) {
        let mut turns = Vec::new();
        for i in 0..models.len() {
            let side = (i + round) % models.len();
            turns.push((side, turn(&models[side])?));
        }
        turns.sort_by_key(|(side, _)| *side);
        let base = &turns[0].1;
        for (side, now) in &turns[1..] {
            if now.text != base.text {
                println!("NOT the same text with model {side}");
            }
            ratios[*side][0].push(base.prompt / now.prompt);
            ratios[*side][1].push(base.generation / now.generation);
        }
    }
    for (side, both) in ratios.iter_mut().enumerate().skip(1) {
        let name = match side {
            1 => "no cap again".to_owned(),
            _ => format!("cap of {} KiB", caps[side - 2] >> 10),
        };
        let mut say = |what: usize| {
            both[what].sort_by(f64::total_cmp);
            let (middle, low, high) = median(&both[what]);
            format!("{middle:.3} ({low:.3} to {high:.3})")
        };
        println!("{name}: speed of the prompt {}, of generation {}", say(0), say(1));
    }
    Ok(())
}
