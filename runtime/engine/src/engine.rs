//! Runs the compiled program, one ubatch at a time.

use crate::Result;
use crate::kv_pool::KvPool;
use std::ops::Range;
use tegula_plugin::{
    BlockTable, Buffer, BufferSpan, Executable, InputData, OutputData, Queue, RunArgs, SeqSpan,
};

/// What runs, with the host memory it reuses from run to run. One run at a time.
#[derive(Debug)]
pub(crate) struct Engine {
    executable: Executable,
    queue: Queue,
    scratch: Vec<Buffer>,
    tokens: Vec<i32>,
    positions: Vec<i32>,
    rows: Vec<i32>,
    logits: Vec<f32>,
    n_vocab: usize,
}

/// One ubatch of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Ubatch<'a> {
    /// Its tokens, at consecutive positions.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub first_pos: u32,
    /// The sequence's blocks, which cover every position up to the last.
    pub blocks: &'a [u32],
    /// Rows whose logits are wanted.
    pub rows: Range<u32>,
}

impl Engine {
    /// `n_outputs` is the greatest number of rows that a run is asked for.
    pub(crate) fn new(
        executable: Executable,
        queue: Queue,
        scratch: Vec<Buffer>,
        n_outputs: u32,
        n_vocab: u32,
    ) -> Self {
        let n_vocab = n_vocab as usize;
        Self {
            executable,
            queue,
            scratch,
            tokens: Vec::new(),
            positions: Vec::new(),
            rows: Vec::new(),
            logits: vec![0.0; n_outputs as usize * n_vocab],
            n_vocab,
        }
    }

    /// Runs a ubatch; rows of logits are in [`Engine::logits`] afterwards.
    pub(crate) fn run(&mut self, ubatch: &Ubatch<'_>, kv: &KvPool) -> Result<()> {
        // Ids and positions fit: ids are below the vocabulary, which has fewer than 2^31 rows in any file that can be
        // read, and positions below the context.
        let signed = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        let n_tokens = u32::try_from(ubatch.tokens.len()).unwrap_or(u32::MAX);
        self.tokens.clear();
        self.tokens.extend(ubatch.tokens.iter().map(|id| signed(*id)));
        self.positions.clear();
        self.positions.extend((ubatch.first_pos..).take(ubatch.tokens.len()).map(signed));
        self.rows.clear();
        self.rows.extend(ubatch.rows.clone().map(signed));
        let scratch: Vec<BufferSpan<'_>> = self.scratch.iter().map(Buffer::whole).collect();
        let tables = [BlockTable { blocks: ubatch.blocks, first_pos: 0 }];
        let seq =
            SeqSpan { first_token: 0, n_tokens, first_pos: ubatch.first_pos, tables: &tables };
        let mut args = RunArgs {
            n_tokens,
            n_outputs: u32::try_from(self.rows.len()).unwrap_or(u32::MAX),
            inputs: &[
                InputData::Host(bytemuck::cast_slice(&self.tokens)),
                InputData::Host(bytemuck::cast_slice(&self.positions)),
                InputData::Host(bytemuck::cast_slice(&self.rows)),
            ],
            outputs: &mut [OutputData::Host(bytemuck::cast_slice_mut(&mut self.logits))],
            scratch: &scratch,
            seqs: &[seq],
            kv: &[kv.group()],
        };
        Ok(self.queue.run(&self.executable, &mut args)?)
    }

    /// The rows of logits of the last run, in its order.
    pub(crate) fn logits(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.logits.chunks_exact_mut(self.n_vocab.max(1))
    }
}
