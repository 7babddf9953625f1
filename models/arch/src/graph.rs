//! [`Graph`]: a program being written, with the file's tensors at hand.
//!
//! As with [`ProgramBuilder`], methods never fail and the first fault is kept for the end, so that formulas stand alone. A tensor
//! that is missing or wrong gets a stand-in of the expected shape and F32.

use tegula_program::{DType, Dim, KvLayer, Norm, Program, ProgramBuilder, ValueId};

use crate::tensors::{TensorTable, Use};
use crate::{ArchError, ProgramOptions, TensorSpec};

/// Whether a product has a bias, a tensor named as the weight with `.bias`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bias {
    /// Never.
    None,
    /// Where the file has one.
    IfPresent,
    /// Always.
    Required,
}

/// A program being written.
pub(crate) struct Graph<'a> {
    /// Ops without weights are written here.
    pub(crate) ops: ProgramBuilder,
    /// Token ids: i32\[n_tokens\].
    pub(crate) tokens: ValueId,
    /// Positions in the sequence: i32\[n_tokens\].
    pub(crate) positions: ValueId,
    /// Rows whose results are wanted: i32\[n_outputs\].
    pub(crate) output_rows: ValueId,
    tensors: &'a TensorTable,
    options: &'a ProgramOptions,
    fault: Option<ArchError>,
}

impl<'a> Graph<'a> {
    pub(crate) fn new(name: &str, tensors: &'a TensorTable, options: &'a ProgramOptions) -> Self {
        let mut ops = ProgramBuilder::new(name);
        let tokens = ops.input("tokens", DType::I32, &[Dim::NTokens]);
        let positions = ops.input("positions", DType::I32, &[Dim::NTokens]);
        let output_rows = ops.input("output_rows", DType::I32, &[Dim::NOutputs]);
        Self { ops, tokens, positions, output_rows, tensors, options, fault: None }
    }

    /// Positions that a sequence has at most, where that is known.
    pub(crate) fn n_ctx(&self) -> Option<u32> {
        self.options.n_ctx
    }

    /// Whether the file has the tensor.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors.has(tensor)
    }

    /// A matrix of weights, `[n_rows, n_in]`.
    pub(crate) fn matrix(&mut self, tensor: &str, dims: [u64; 2]) -> ValueId {
        self.weight(tensor, &dims, Use::Matrix)
    }

    /// A stack of experts' matrices, `[n_expert, n_rows, n_in]` in the file and `[n_expert * n_rows, n_in]` in the program.
    pub(crate) fn experts(&mut self, tensor: &str, dims: [u64; 3]) -> ValueId {
        let [n_expert, n_rows, n_in] = dims;
        match self.checked(tensor, &dims, Use::Matrix) {
            // Hyperparameters are capped so that their products fit.
            Some(dtype) => self.ops.weight(tensor, dtype, &[n_expert * n_rows, n_in]),
            None => self.tokens,
        }
    }

    /// A small matrix that is read element by element: biases of experts, kernels of convolutions.
    pub(crate) fn table(&mut self, tensor: &str, dims: [u64; 2]) -> ValueId {
        self.weight(tensor, &dims, Use::Vector)
    }

    /// A vector of weights.
    pub(crate) fn vector(&mut self, tensor: &str, n: u32) -> ValueId {
        self.weight(tensor, &[n.into()], Use::Vector)
    }

    /// A vector of weights, where the file has it.
    pub(crate) fn vector_if_present(&mut self, tensor: &str, n: u32) -> Option<ValueId> {
        self.has(tensor).then(|| self.vector(tensor, n))
    }

    /// `x W^T + b` with `W = {name}.weight` of `[n_rows, n_in]` and `b = {name}.bias` of `[n_rows]`.
    pub(crate) fn linear(&mut self, x: ValueId, name: &str, dims: [u64; 2], bias: Bias) -> ValueId {
        let weight = self.matrix(&format!("{name}.weight"), dims);
        let bias_name = format!("{name}.bias");
        let has_bias = match bias {
            Bias::None => false,
            Bias::IfPresent => self.has(&bias_name),
            Bias::Required => true,
        };
        let bias = has_bias.then(|| self.weight(&bias_name, &dims[..1], Use::Vector));
        self.ops.matmul(x, weight, bias)
    }

    /// `x / rms(x) * {name}.weight`, over groups of `norm.n` elements.
    pub(crate) fn rms_norm(&mut self, x: ValueId, name: &str, norm: Norm) -> ValueId {
        let weight = self.vector(&format!("{name}.weight"), norm.n);
        self.ops.rms_norm(x, Some(weight), norm)
    }

    /// `(x - mean) / sd * {name}.weight`, plus `{name}.bias` where the file has it.
    pub(crate) fn layer_norm(&mut self, x: ValueId, name: &str, norm: Norm) -> ValueId {
        let weight = self.vector(&format!("{name}.weight"), norm.n);
        let bias = self.vector_if_present(&format!("{name}.bias"), norm.n);
        self.ops.layer_norm(x, weight, bias, norm)
    }

    /// The KV cache of a layer, with the types that were asked for.
    pub(crate) fn kv_layer(&mut self, group: u32, n_head_kv: u32, dims: [u32; 2]) -> u32 {
        let [head_dim_k, head_dim_v] = dims;
        let ProgramOptions { dtype_k, dtype_v, .. } = *self.options;
        self.ops.kv_layer(KvLayer {
            group,
            index: 0,
            n_head_kv,
            head_dim_k,
            head_dim_v,
            dtype_k,
            dtype_v,
        })
    }

    /// The verified program, or the first fault: a tensor's before the program's, which may follow from it.
    pub(crate) fn finish(self) -> Result<Program, ArchError> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let file = || self.tensors.file();
        self.ops.finish().map_err(|source| ArchError::Program { file: file(), source })
    }

    fn weight(&mut self, tensor: &str, dims: &[u64], usage: Use) -> ValueId {
        match self.checked(tensor, dims, usage) {
            Some(dtype) => self.ops.weight(tensor, dtype, dims),
            None => self.tokens,
        }
    }

    /// The tensor's type, F32 where it is missing or wrong. `None` after that: the program is lost, and a hostile file's thousands of layers
    /// should cost nothing more.
    fn checked(&mut self, tensor: &str, dims: &[u64], usage: Use) -> Option<DType> {
        if self.fault.is_some() {
            return None;
        }
        Some(self.tensors.check(tensor, dims, usage).unwrap_or_else(|fault| {
            self.fault = Some(fault);
            DType::F32
        }))
    }
}

/// The weights of a program, in the order of their first use.
pub(crate) fn tensors_of(program: &Program) -> Vec<TensorSpec> {
    let fixed = |dim: &Dim| if let Dim::Fixed(n) = dim { *n } else { 0 };
    program
        .weights()
        .map(|(_, value)| TensorSpec {
            name: value.name.clone(),
            dims: value.dims.iter().map(fixed).collect(),
            dtype: value.dtype,
        })
        .collect()
}
