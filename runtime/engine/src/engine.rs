//! Runs the compiled stages, one ubatch at a time.
//!
//! What crosses between stages lies in the host's memory: a device writes its output there and the next one reads it, which is
//! the one path that every pair of devices has.

use crate::kv_pool::{KvPool, StageKv};
use crate::state_pool::{SlotPool, StageState};
use crate::{Error, Result};
use std::ops::Range;
use tegula_plugin::{
    BlockTable, Buffer, BufferSpan, Executable, InputData, KvGroup, OutputData, Queue, RunArgs,
    SeqSpan, StatePool,
};
use tegula_program::ValueId;

/// Where an input of a stage comes from, or where an output of it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Tokens,
    Positions,
    Rows,
    /// The rows of logits that callers see.
    Logits,
    /// Index of a value that crosses between stages.
    Activation(usize),
}

/// A compiled stage.
#[derive(Debug)]
pub(crate) struct StageRun {
    pub(crate) executable: Executable,
    /// Index of its device.
    pub(crate) device: usize,
    inputs: Vec<Slot>,
    outputs: Vec<Slot>,
}

/// Names the values that stages exchange.
#[derive(Debug)]
pub(crate) struct Wiring {
    tokens: ValueId,
    positions: ValueId,
    rows: ValueId,
    logits: ValueId,
    /// Values that cross, with their greatest size in bytes.
    activations: Vec<(ValueId, u64)>,
}

impl Wiring {
    /// Of a program whose inputs are tokens, positions and rows, and whose output is logits, as every model's are.
    pub(crate) fn new(program: &tegula_program::Program) -> Result<Self> {
        let ([tokens, positions, rows], [logits]) =
            (program.inputs.as_slice(), program.outputs.as_slice())
        else {
            return Err(Error::Overflow { what: "the inputs and outputs of the model".into() });
        };
        let (tokens, positions, rows, logits) = (*tokens, *positions, *rows, *logits);
        Ok(Self { tokens, positions, rows, logits, activations: Vec::new() })
    }

    fn slot(&self, id: ValueId) -> Result<Slot> {
        let activation = || self.activations.iter().position(|(known, _)| *known == id);
        match id {
            id if id == self.tokens => Ok(Slot::Tokens),
            id if id == self.positions => Ok(Slot::Positions),
            id if id == self.rows => Ok(Slot::Rows),
            id if id == self.logits => Ok(Slot::Logits),
            _ => activation()
                .map(Slot::Activation)
                .ok_or_else(|| Error::Overflow { what: format!("value {} between stages", id.0) }),
        }
    }

    /// Adds a stage; its outputs of `sizes` bytes are what later stages may read.
    pub(crate) fn stage(
        &mut self,
        executable: Executable,
        device: usize,
        inputs: &[ValueId],
        outputs: &[(ValueId, u64)],
    ) -> Result<StageRun> {
        let inputs = inputs.iter().map(|id| self.slot(*id)).collect::<Result<_>>()?;
        for (id, size) in outputs {
            if *id != self.logits {
                self.activations.push((*id, *size));
            }
        }
        let outputs = outputs.iter().map(|(id, _)| self.slot(*id)).collect::<Result<_>>()?;
        Ok(StageRun { executable, device, inputs, outputs })
    }
}

/// What runs, with the host memory it reuses from run to run. One run at a time.
#[derive(Debug)]
pub(crate) struct Engine {
    stages: Vec<StageRun>,
    /// For each device.
    queues: Vec<Queue>,
    /// For each device.
    scratch: Vec<Vec<Buffer>>,
    host: HostValues,
    n_vocab: usize,
}

/// Values that lie in the host's memory.
#[derive(Debug, Default)]
struct HostValues {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    rows: Vec<i32>,
    logits: Vec<f32>,
    activations: Vec<Vec<f32>>,
}

impl HostValues {
    fn bytes(&self, slot: Slot) -> &[u8] {
        match slot {
            Slot::Tokens => bytemuck::cast_slice(&self.tokens),
            Slot::Positions => bytemuck::cast_slice(&self.positions),
            Slot::Rows => bytemuck::cast_slice(&self.rows),
            Slot::Logits => bytemuck::cast_slice(&self.logits),
            Slot::Activation(i) => {
                self.activations.get(i).map_or(&[], |floats| bytemuck::cast_slice(floats))
            }
        }
    }

    /// Swaps in what a stage writes, or swaps it back: during a run it is out, so that what the stage reads can be borrowed.
    fn swap(&mut self, slot: Slot, floats: &mut Vec<f32>) {
        match slot {
            Slot::Logits => std::mem::swap(&mut self.logits, floats),
            Slot::Activation(i) => {
                if let Some(place) = self.activations.get_mut(i) {
                    std::mem::swap(place, floats);
                }
            }
            Slot::Tokens | Slot::Positions | Slot::Rows => {}
        }
    }

    fn stage(&mut self, ubatch: &Ubatch<'_>) {
        // Ids and positions fit: ids are below the vocabulary, which has fewer than 2^31 rows in any file that can be
        // read, and positions below the context.
        let signed = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
        self.tokens.clear();
        self.positions.clear();
        self.rows.clear();
        for part in ubatch.parts {
            let first = self.tokens.len();
            let row = |row: usize| i32::try_from(first + row).unwrap_or(i32::MAX);
            self.rows.extend(part.rows.clone().map(row));
            self.tokens.extend(part.tokens.iter().map(|id| signed(*id)));
            self.positions.extend((part.first_pos..).take(part.tokens.len()).map(signed));
        }
    }
}

/// Is given a row of logits: the index of whom it belongs to, its position, and the row.
pub(crate) type OnRow<'a> = &'a mut dyn FnMut(usize, u32, &mut [f32]) -> Result<()>;

/// Tokens that are run together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ubatch<'a> {
    /// At most as many as the plan has sequences; their tokens and rows keep to its bounds too.
    pub parts: &'a [Part<'a>],
}

/// One sequence's part of a ubatch.
#[derive(Debug, Clone)]
pub(crate) struct Part<'a> {
    /// Its tokens, at consecutive positions.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub first_pos: u32,
    /// The sequence's blocks, which cover every position up to the last.
    pub blocks: &'a [u32],
    /// The sequence's slot of recurrent state; anything for a model without.
    pub state_slot: u32,
    /// Of its tokens, those whose logits are wanted.
    pub rows: Range<usize>,
}

impl Engine {
    /// Whether one of its devices is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.queues.iter().any(Queue::is_lost)
    }

    /// `n_outputs` is the greatest number of rows that a run is asked for.
    pub(crate) fn new(
        wiring: &Wiring,
        stages: Vec<StageRun>,
        queues: Vec<Queue>,
        scratch: Vec<Vec<Buffer>>,
        n_outputs: u32,
        n_vocab: u32,
    ) -> Self {
        let n_vocab = n_vocab as usize;
        let floats = |bytes: u64| vec![0.0; usize::try_from(bytes / 4).unwrap_or(0)];
        let host = HostValues {
            logits: vec![0.0; n_outputs as usize * n_vocab],
            activations: wiring.activations.iter().map(|(_, bytes)| floats(*bytes)).collect(),
            ..HostValues::default()
        };
        Self { stages, queues, scratch, host, n_vocab }
    }

    /// Runs a ubatch through all stages; rows of logits are in [`Engine::logits`] afterwards.
    pub(crate) fn run(&mut self, ubatch: &Ubatch<'_>, kv: &KvPool, state: &SlotPool) -> Result<()> {
        self.host.stage(ubatch);
        for index in 0..self.stages.len() {
            let missing = || Error::Overflow { what: format!("stage {index}") };
            let stage = self.stages.get(index).ok_or_else(missing)?;
            let mut made: Vec<Vec<f32>> = vec![Vec::new(); stage.outputs.len()];
            let swap = |host: &mut HostValues, made: &mut Vec<Vec<f32>>| {
                for (slot, floats) in stage.outputs.iter().zip(made) {
                    host.swap(*slot, floats);
                }
            };
            swap(&mut self.host, &mut made);
            let queue = self.queues.get_mut(stage.device).ok_or_else(missing)?;
            let scratch = self.scratch.get(stage.device).map_or(&[][..], Vec::as_slice);
            let kv = kv.stages().get(index).and_then(StageKv::group);
            let state = state.stages().get(index).and_then(StageState::pool);
            let kept = Kept { kv, state };
            let result = stage.run(queue, scratch, kept, ubatch, &self.host, &mut made);
            swap(&mut self.host, &mut made);
            result?;
        }
        Ok(())
    }

    /// The rows of logits of the last run, in its order.
    pub(crate) fn logits(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.host.logits.chunks_exact_mut(self.n_vocab.max(1))
    }
}

/// What a stage keeps of sequences between runs.
#[derive(Clone, Copy)]
struct Kept<'a> {
    kv: Option<&'a KvGroup>,
    state: Option<&'a StatePool>,
}

impl StageRun {
    fn run<'a>(
        &self,
        queue: &mut Queue,
        scratch: &[Buffer],
        kept: Kept<'_>,
        ubatch: &Ubatch<'a>,
        host: &HostValues,
        made: &mut [Vec<f32>],
    ) -> Result<()> {
        let inputs: Vec<InputData<'_>> =
            self.inputs.iter().map(|slot| InputData::Host(host.bytes(*slot))).collect();
        let mut outputs: Vec<OutputData<'_>> =
            made.iter_mut().map(|f| OutputData::Host(bytemuck::cast_slice_mut(f))).collect();
        let n_scratch = self.executable.memory().scratch.len();
        let scratch: Vec<BufferSpan<'_>> =
            scratch.iter().take(n_scratch).map(Buffer::whole).collect();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let groups: Vec<&KvGroup> = kept.kv.into_iter().collect();
        let table = |part: &Part<'a>| BlockTable { blocks: part.blocks, first_pos: 0 };
        let tables: Vec<[BlockTable<'_>; 1]> =
            ubatch.parts.iter().map(|part| [table(part)]).collect();
        let mut first_token = 0;
        let mut seqs = Vec::with_capacity(ubatch.parts.len());
        for (part, tables) in ubatch.parts.iter().zip(&tables) {
            let n_tokens = count(part.tokens.len());
            seqs.push(SeqSpan {
                first_token,
                n_tokens,
                first_pos: part.first_pos,
                tables: tables.get(..groups.len()).unwrap_or(&[]),
                state_slot: part.state_slot,
            });
            first_token = first_token.saturating_add(n_tokens);
        }
        let mut args = RunArgs {
            n_tokens: first_token,
            n_outputs: count(ubatch.parts.iter().map(|part| part.rows.len()).sum()),
            inputs: &inputs,
            outputs: &mut outputs,
            scratch: &scratch,
            seqs: if groups.is_empty() && kept.state.is_none() { &[] } else { &seqs },
            kv: &groups,
            state: kept.state,
        };
        Ok(queue.run(&self.executable, &mut args)?)
    }
}
