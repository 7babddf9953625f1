//! Several sequences evaluated together.
//!
//! A run reads the weights once for all its tokens, whosever they are: eight sequences that generate together cost little more than
//! one. Prompts and generated tokens go into the same runs, as many as the plan's ubatch, rows of logits and sequences allow.

use crate::engine::{OnRow, Part, Ubatch};
use crate::model::Model;
use crate::sequence::{Outputs, Sequence};
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// What one sequence takes part with.
#[derive(Debug)]
pub struct BatchItem<'a> {
    /// The sequence, of the model that evaluates it.
    pub sequence: &'a mut Sequence,
    /// Tokens that follow those it has.
    pub tokens: &'a [u32],
    /// Which of their rows of logits are wanted.
    pub outputs: Outputs,
    /// Why it did not take part, once the batch was evaluated: [`Error::ContextFull`], [`Error::KvPoolFull`], [`Error::TooManySequences`],
    /// [`Error::TokenOutOfRange`] or [`Error::OtherModel`]. The sequence is as it was, and the others go on.
    pub refusal: Option<Error>,
}

impl<'a> BatchItem<'a> {
    /// All of `tokens`, with the last one's logits.
    pub fn new(sequence: &'a mut Sequence, tokens: &'a [u32]) -> Self {
        Self { sequence, tokens, outputs: Outputs::Last, refusal: None }
    }
}

/// What is left of a run that is being filled.
struct Room {
    tokens: usize,
    rows: usize,
    seqs: usize,
}

impl Room {
    /// How many of `left` tokens an item gets in this run, and the rows of logits among them.
    fn take(&mut self, left: usize, outputs: Outputs) -> Option<(usize, std::ops::Range<usize>)> {
        if left == 0 || self.tokens == 0 || self.rows == 0 || self.seqs == 0 {
            return None;
        }
        let n = match outputs {
            Outputs::Last => left.min(self.tokens),
            Outputs::All => left.min(self.tokens).min(self.rows),
        };
        let rows = match outputs {
            Outputs::All => 0..n,
            Outputs::Last if n == left => n - 1..n,
            Outputs::Last => 0..0,
        };
        self.tokens -= n;
        self.rows -= rows.len();
        self.seqs -= 1;
        Some((n, rows))
    }
}

/// One item's share of a run.
struct Share {
    item: usize,
    n: usize,
    rows: std::ops::Range<usize>,
}

impl Model {
    /// Evaluates the tokens of several sequences together and calls `on_logits(item, position, row)` for each row asked for; the row may be
    /// changed. What does not fit one run goes in several. An item that is refused keeps its reason in [`BatchItem::refusal`]. False if
    /// `cancel` was seen set between two runs: those before are kept, and each sequence knows how far it is ([`Sequence::n_past`]).
    ///
    /// # Errors
    /// A device's failure, or that of `on_logits`: sequences that took part in the run that failed are as before it, or, for a model
    /// with recurrent state, empty; the others are whole.
    pub fn eval_batch(
        &self,
        items: &mut [BatchItem<'_>],
        cancel: &AtomicBool,
        mut on_logits: impl FnMut(usize, u32, &mut [f32]) -> Result<()>,
    ) -> Result<bool> {
        for item in &mut *items {
            item.refusal = item.sequence.prepare(self, item.tokens).err();
        }
        let mut done = vec![0; items.len()];
        // Whoever was left out of a full run goes first in the next one.
        let mut first = 0;
        loop {
            let shares = self.shares(items, &done, first);
            let Some(last) = shares.last() else { return Ok(true) };
            if cancel.load(Ordering::Relaxed) && done.iter().any(|n| *n > 0) {
                return Ok(false);
            }
            first = last.item + 1;
            self.run_shares(items, &done, &shares, &mut on_logits)?;
            for share in &shares {
                if let (Some(item), Some(done)) =
                    (items.get_mut(share.item), done.get_mut(share.item))
                {
                    item.sequence.advance(share.n);
                    *done += share.n;
                }
            }
        }
    }

    /// The next run: as much of each item as there is room for, from item `first` on.
    fn shares(&self, items: &[BatchItem<'_>], done: &[usize], first: usize) -> Vec<Share> {
        let plan = self.plan();
        let mut room = Room {
            tokens: plan.n_ubatch as usize,
            rows: plan.n_outputs as usize,
            seqs: plan.n_parallel as usize,
        };
        let order = (first..items.len()).chain(0..first.min(items.len()));
        let share = |index: usize| {
            let item = items.get(index).filter(|item| item.refusal.is_none())?;
            let left = item.tokens.len().saturating_sub(done.get(index).copied().unwrap_or(0));
            let (n, rows) = room.take(left, item.outputs)?;
            Some(Share { item: index, n, rows })
        };
        order.filter_map(share).collect()
    }

    fn run_shares(
        &self,
        items: &mut [BatchItem<'_>],
        done: &[usize],
        shares: &[Share],
        on_logits: OnRow<'_>,
    ) -> Result<()> {
        let part = |share: &Share| {
            let (item, done) = (items.get(share.item)?, *done.get(share.item)?);
            let tokens = item.tokens.get(done..done + share.n)?;
            Some(item.sequence.part(tokens, share.rows.clone()))
        };
        let parts: Vec<Part<'_>> = shares.iter().filter_map(part).collect();
        let result = self.run(&Ubatch { parts: &parts }, &mut |part, position, row| {
            shares.get(part).map_or(Ok(()), |share| on_logits(share.item, position, row))
        });
        if result.is_err() {
            for share in shares {
                if let Some(item) = items.get_mut(share.item) {
                    item.sequence.lose_state();
                }
            }
        }
        result
    }
}
