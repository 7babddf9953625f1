//! `tegula logits`: what the model computes, position by position, to hold against a reference.

use crate::args::LogitsArgs;
use crate::output;
use anyhow::Result;
use serde::Serialize;
use tegula::Outputs;

/// Rows of logits computed at once; enough to keep a device busy, little beside any model.
const ROWS: u32 = 16;

#[derive(Serialize)]
struct Logits {
    positions: Vec<Position>,
}

#[derive(Serialize)]
struct Position {
    pos: u32,
    logsumexp: f64,
    top: Vec<(u32, f32)>,
}

pub(crate) fn run(args: &LogitsArgs) -> Result<()> {
    let n_outputs = if args.last || args.one_by_one { 1 } else { ROWS };
    let (model, _) = output::load(&args.load, n_outputs)?;
    output::catch_ctrl_c()?;
    let mut positions = Vec::new();
    let mut sequence = model.sequence();
    let mut keep = |pos: u32, logits: &mut [f32]| {
        positions.push(position(pos, logits, args.top));
        Ok(())
    };
    let outputs = if args.last { Outputs::Last } else { Outputs::All };
    if args.one_by_one {
        for id in &args.ids {
            sequence.eval(&[*id], Outputs::Last, &output::CANCEL, &mut keep)?;
        }
    } else {
        sequence.eval(&args.ids, outputs, &output::CANCEL, &mut keep)?;
    }
    if args.last {
        positions.drain(..positions.len().saturating_sub(1));
    }
    if args.json {
        return output::print_json(&Logits { positions });
    }
    for position in positions {
        let top: Vec<String> =
            position.top.iter().map(|(id, logit)| format!("{id}:{logit:.4}")).collect();
        output::print(&format!(
            "{:>5}  logsumexp {:.5}  {}",
            position.pos,
            position.logsumexp,
            top.join(" ")
        ))?;
    }
    Ok(())
}

fn position(pos: u32, logits: &[f32], top: usize) -> Position {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - greatest).exp()).sum();
    let mut order: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    let falling = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, falling);
    }
    order.truncate(top);
    order.sort_unstable_by(falling);
    Position { pos, logsumexp: f64::from(greatest) + sum.ln(), top: order }
}
