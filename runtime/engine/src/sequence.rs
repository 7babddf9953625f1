//! One stream of tokens and its place in the KV cache.

use crate::engine::Ubatch;
use crate::model::Model;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

/// Which rows of logits an evaluation gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// Only that of the last token.
    Last,
    /// Every token's.
    All,
}

/// A sequence: its tokens' keys and values are held by blocks of the model's pool, and given back when it is dropped.
///
/// Sequences of one model share the pool and take turns on the device; they can be moved to other threads.
#[derive(Debug)]
pub struct Sequence {
    model: Model,
    blocks: Vec<u32>,
    /// Its recurrent state, once it has any.
    slot: Option<u32>,
    n_past: u32,
}

impl Sequence {
    pub(crate) fn new(model: Model) -> Self {
        Self { model, blocks: Vec::new(), slot: None, n_past: 0 }
    }

    /// The model it belongs to.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens evaluated so far.
    pub fn n_past(&self) -> u32 {
        self.n_past
    }

    /// Tokens that still fit the context.
    pub fn n_left(&self) -> u32 {
        self.model.plan().context.n_ctx.saturating_sub(self.n_past)
    }

    /// Forgets everything from position `n` on. A model with recurrent state cannot go back: it forgets all, unless there is nothing to forget. What is
    /// left is [`Sequence::n_past`].
    pub fn truncate(&mut self, n: u32) {
        let goes_back = n < self.n_past;
        self.n_past = if goes_back && self.model.has_state() { 0 } else { self.n_past.min(n) };
        let keep = self.n_past.div_ceil(self.model.plan().block_len.max(1)) as usize;
        let freed = self.blocks.split_off(keep.min(self.blocks.len()));
        self.model.free_blocks(&freed, self.blocks.is_empty());
    }

    /// Evaluates `tokens` and calls `on_logits(position, row)` for each row asked for; the row may be changed. A prompt longer
    /// than the ubatch is evaluated in pieces. False if `cancel` was seen set between two pieces: the pieces before are kept.
    ///
    /// # Errors
    /// [`Error::ContextFull`], [`Error::KvPoolFull`] or [`Error::TooManySequences`] before anything is evaluated; [`Error::TokenOutOfRange`]; a device's failure, after
    /// which the sequence is as before the piece that failed, or, for a model with recurrent state, empty.
    pub fn eval(
        &mut self,
        tokens: &[u32],
        outputs: Outputs,
        cancel: &AtomicBool,
        mut on_logits: impl FnMut(u32, &mut [f32]) -> Result<()>,
    ) -> Result<bool> {
        let n_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        if n_tokens > self.n_left() {
            let n_ctx = self.model.plan().context.n_ctx;
            return Err(Error::ContextFull { n_ctx, used: self.n_past, asked: n_tokens });
        }
        let n_vocab = self.model.info().n_vocab;
        if let Some(id) = tokens.iter().find(|id| **id >= n_vocab) {
            return Err(Error::TokenOutOfRange { id: *id, n_vocab });
        }
        if self.slot.is_none() {
            self.slot = self.model.take_slot()?;
        }
        self.model.clone().reserve_blocks(&mut self.blocks, self.n_past + n_tokens)?;
        let plan = self.model.plan();
        let piece_max = match outputs {
            Outputs::Last => plan.n_ubatch,
            Outputs::All => plan.n_ubatch.min(plan.n_outputs),
        } as usize;
        let mut done = 0;
        while done < tokens.len() {
            if cancel.load(Ordering::Relaxed) && done > 0 {
                return Ok(false);
            }
            let piece = tokens.get(done..(done + piece_max).min(tokens.len())).unwrap_or(&[]);
            let n_piece = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let last = done + piece.len() == tokens.len();
            let rows = match outputs {
                Outputs::All => 0..n_piece,
                Outputs::Last if last => n_piece - 1..n_piece,
                Outputs::Last => 0..0,
            };
            let ubatch = Ubatch {
                tokens: piece,
                first_pos: self.n_past,
                blocks: &self.blocks,
                state_slot: self.slot.unwrap_or(0),
                rows,
            };
            if let Err(error) = self.model.run(&ubatch, &mut on_logits) {
                // Nobody knows how far the state came.
                if self.slot.is_some() {
                    self.truncate(0);
                }
                return Err(error);
            }
            self.n_past += n_piece;
            done += piece.len();
        }
        Ok(true)
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.model.free_blocks(&self.blocks, true);
        if let Some(slot) = self.slot {
            self.model.free_slot(slot);
        }
    }
}
