//! The values of one run: where each lies, read and written as whole vectors.

use crate::Executable;
use crate::buffer::Bytes;
use crate::weight::Matrix;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::{Dim, Program, ValueId, ValueKind};
use tegula_sdk::{Error, KvGroup, Result, Run, Seq, StatePool};

/// What the run has bound. An operand that is not there is an error only if it is used: a run without outputs need not bind any.
pub(crate) struct Bound<'a> {
    pub(crate) inputs: Vec<Result<Bytes<'a>>>,
    pub(crate) outputs: Vec<Result<Bytes<'a>>>,
}

/// `n` zeros, or OUT_OF_MEMORY where the host has no room for them.
pub(crate) fn zeros<T: Clone + Default>(n: u64) -> Result<Vec<T>> {
    let refuse = |_| {
        let asked = n.saturating_mul(size_of::<T>() as u64);
        Error::out_of_memory("a working copy on the host", asked, None)
    };
    let len = usize::try_from(n).unwrap_or(usize::MAX);
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(refuse)?;
    out.resize(len, T::default());
    Ok(out)
}

/// One run of an executable.
pub(crate) struct Values<'a> {
    executable: &'a Executable,
    run: &'a Run<'a, HostBuffer>,
    bound: Bound<'a>,
}

impl<'a> Values<'a> {
    /// Checks the run against the bounds that the executable was made for.
    pub(crate) fn new(
        executable: &'a Executable,
        run: &'a Run<'a, HostBuffer>,
        bound: Bound<'a>,
    ) -> Result<Self> {
        let options = &executable.options;
        for (what, n, max) in [
            ("tokens", u64::from(run.n_tokens()), options.n_tokens_max),
            ("outputs", u64::from(run.n_outputs()), options.n_outputs_max),
            ("sequences", run.n_seqs() as u64, options.n_seqs_max),
        ] {
            if n > u64::from(max) {
                return Err(Error::invalid(format!("{n} {what}; compiled for at most {max}")));
            }
        }
        Ok(Self { executable, run, bound })
    }

    pub(crate) fn program(&self) -> &'a Program {
        &self.executable.program
    }

    /// Elements of a row of a value.
    pub(crate) fn row_len(&self, id: ValueId) -> Result<usize> {
        let len = self.program().value(id)?.row_len();
        usize::try_from(len).map_err(|_| Error::invalid(format!("rows of {len} elements")))
    }

    /// A weight.
    pub(crate) fn matrix(&self, id: ValueId) -> Result<&'a Matrix> {
        let matrix = self.executable.weights.get(id.index()).and_then(Option::as_ref);
        matrix.ok_or_else(|| Error::invalid(format!("value {} is no weight", id.0)))
    }

    /// All elements of an f32 value or weight vector.
    pub(crate) fn f32s(&self, id: ValueId) -> Result<Vec<f32>> {
        if self.program().value(id)?.kind == ValueKind::Weight {
            return Ok(self.matrix(id)?.rows()?.get(0)?.to_vec());
        }
        self.elements(id, f32::from_le_bytes)
    }

    /// All elements of an i32 value.
    pub(crate) fn i32s(&self, id: ValueId) -> Result<Vec<i32>> {
        self.elements(id, i32::from_le_bytes)
    }

    /// Sets all elements of an f32 value.
    pub(crate) fn put_f32s(&self, id: ValueId, elements: &[f32]) -> Result<()> {
        self.put(id, elements, |x| x.to_le_bytes())
    }

    /// Sets all elements of an i32 value.
    pub(crate) fn put_i32s(&self, id: ValueId, elements: &[i32]) -> Result<()> {
        self.put(id, elements, |x| x.to_le_bytes())
    }

    fn elements<T: Clone + Default>(&self, id: ValueId, of: fn([u8; 4]) -> T) -> Result<Vec<T>> {
        let mut out = zeros(self.n_elements(id)?)?;
        if out.is_empty() {
            return Ok(out);
        }
        let places = self.places(id)?;
        let place =
            places.first().ok_or_else(|| Error::invalid(format!("value {} is nowhere", id.0)))?;
        let bytes = place.part(0, out.len() as u64 * 4).map_err(|error| self.named(id, &error))?;
        let mut raw = [0; 4096];
        for (i, elements) in out.chunks_mut(raw.len() / 4).enumerate() {
            let raw = &mut raw[..elements.len() * 4];
            bytes.part(i as u64 * 4096, raw.len() as u64)?.read(raw)?;
            for (element, raw) in elements.iter_mut().zip(raw.as_chunks().0) {
                *element = of(*raw);
            }
        }
        Ok(out)
    }

    fn put<T: Copy>(&self, id: ValueId, elements: &[T], to: fn(T) -> [u8; 4]) -> Result<()> {
        let n = self.n_elements(id)?;
        if elements.len() as u64 != n {
            return Err(Error::invalid(format!("{} elements for {n}", elements.len())));
        }
        if elements.is_empty() {
            return Ok(());
        }
        for place in self.places(id)? {
            let bytes = place.part(0, n * 4).map_err(|error| self.named(id, &error))?;
            let mut raw = [0; 4096];
            for (i, elements) in elements.chunks(raw.len() / 4).enumerate() {
                let raw = &mut raw[..elements.len() * 4];
                for (raw, element) in raw.as_chunks_mut().0.iter_mut().zip(elements) {
                    *raw = to(*element);
                }
                bytes.part(i as u64 * 4096, raw.len() as u64)?.write(raw)?;
            }
        }
        Ok(())
    }

    fn named(&self, id: ValueId, error: &Error) -> Error {
        let name = self.program().value(id).map_or("?", |value| &value.name);
        Error { message: format!("`{name}`: {}", error.message), ..error.clone() }
    }

    /// Elements of a value in this run.
    fn n_elements(&self, id: ValueId) -> Result<u64> {
        let value = self.program().value(id)?;
        let rows = match value.rows() {
            Dim::Fixed(n) => n,
            Dim::NTokens => self.run.n_tokens().into(),
            Dim::NOutputs => self.run.n_outputs().into(),
        };
        let n = rows.checked_mul(value.row_len()).filter(|n| *n < 1 << 60);
        n.ok_or_else(|| Error::invalid(format!("`{}` has too many elements", value.name)))
    }

    /// Where a value lies: its binding, its place in scratch, or every output that lists it.
    fn places(&self, id: ValueId) -> Result<Vec<Bytes<'a>>> {
        if let Some(place) = self.executable.scratch.values.get(id.index()).copied().flatten() {
            let piece = Bytes::of(&self.run.scratch(place.chunk)?)?;
            return Ok(vec![piece.part(place.offset, place.size)?]);
        }
        let Program { inputs, outputs, .. } = self.program();
        let inputs = inputs.iter().zip(&self.bound.inputs);
        let operands = inputs.chain(outputs.iter().zip(&self.bound.outputs));
        operands.filter(|(other, _)| **other == id).map(|(_, bytes)| bytes.clone()).collect()
    }

    /// The sequences. Their rows must cover the run's tokens in order, and their positions be within the compiled bound.
    pub(crate) fn seqs(&self) -> Result<Vec<Seq<'a>>> {
        let seqs: Vec<_> =
            (0..self.run.n_seqs()).map(|i| self.run.seq(i)).collect::<Result<_>>()?;
        let (mut next, n_ctx) = (0u64, self.executable.options.n_ctx_max);
        for (i, seq) in seqs.iter().enumerate() {
            if u64::from(seq.first_token) != next {
                let first = seq.first_token;
                let why = format!("sequence {i} begins at row {first}, where row {next} is next");
                return Err(Error::invalid(why));
            }
            let end = u64::from(seq.first_pos) + u64::from(seq.n_tokens);
            if end > u64::from(n_ctx) {
                let why = format!("sequence {i} reaches position {end}; compiled for {n_ctx}");
                return Err(Error::invalid(why));
            }
            next += u64::from(seq.n_tokens);
        }
        if next != u64::from(self.run.n_tokens()) {
            let n = self.run.n_tokens();
            return Err(Error::invalid(format!("sequences of {next} tokens in a run of {n}")));
        }
        Ok(seqs)
    }

    /// The recurrent state of the run; of as many layers as the program has.
    pub(crate) fn state(&self) -> Result<StatePool<'a, HostBuffer>> {
        let (pool, n) = (self.run.state()?, self.program().state_layers.len());
        if pool.n_layers as usize != n {
            let why = format!("a state of {} layers, the program has {n}", pool.n_layers);
            return Err(Error::invalid(why));
        }
        Ok(pool)
    }

    /// A KV group of the run.
    pub(crate) fn kv_group(&self, group: u32) -> Result<KvGroup<'a, HostBuffer>> {
        self.run.kv_group(group)
    }
}
