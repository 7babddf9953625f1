//! One stream of tokens and its place in the KV cache.

use crate::batch::BatchItem;
use crate::engine::Part;
use crate::model::Model;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::atomic::AtomicBool;

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
/// Sequences of one model share the pool and take turns on the device, or are evaluated together by [`Model::eval_batch`]; they can be
/// moved to other threads.
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
        let model = self.model.clone();
        let mut item = BatchItem { outputs, ..BatchItem::new(self, tokens) };
        let whole =
            model.eval_batch(std::slice::from_mut(&mut item), cancel, |_, position, row| {
                on_logits(position, row)
            })?;
        item.refusal.map_or(Ok(whole), Err)
    }

    /// Takes the memory that `tokens` need, if `model` can evaluate them.
    pub(crate) fn prepare(&mut self, model: &Model, tokens: &[u32]) -> Result<()> {
        if !self.model.is_same(model) {
            return Err(Error::OtherModel);
        }
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
        self.model.clone().reserve_blocks(&mut self.blocks, self.n_past + n_tokens)
    }

    /// Its part of a run, after [`Sequence::prepare`].
    pub(crate) fn part<'a>(&'a self, tokens: &'a [u32], rows: Range<usize>) -> Part<'a> {
        Part {
            tokens,
            first_pos: self.n_past,
            blocks: &self.blocks,
            state_slot: self.slot.unwrap_or(0),
            rows,
        }
    }

    /// Counts tokens that were evaluated.
    pub(crate) fn advance(&mut self, n: usize) {
        self.n_past = self.n_past.saturating_add(u32::try_from(n).unwrap_or(u32::MAX));
    }

    /// After a run that failed nobody knows how far recurrent state came.
    pub(crate) fn lose_state(&mut self) {
        if self.slot.is_some() {
            self.truncate(0);
        }
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
