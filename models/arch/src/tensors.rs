//! The tensors of a file, and which of them a model reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tegula_gguf::{DType, Gguf};

use crate::ArchError;

/// A tensor that the model reads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorSpec {
    /// Its name in the file and in programs.
    pub name: String,
    /// One or two sizes, outermost first: `[n]` or `[n_rows, n_in]`.
    pub dims: Vec<u64>,
    /// Its type in the file.
    pub dtype: DType,
}

/// Shapes and types by name; the file's data and metadata can be dropped.
#[derive(Debug, Clone)]
pub(crate) struct TensorTable {
    file: PathBuf,
    by_name: BTreeMap<String, Fact>,
}

#[derive(Debug, Clone, Copy)]
struct Fact {
    /// Innermost first, as in the file, padded with ones.
    dims: [u64; 4],
    dtype: DType,
}

/// What a weight is used as, which decides the types it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Norm weights, biases, rope factors: programs have them as F32 only, and that is how files store them.
    Vector,
    /// Rows to look up or to multiply with.
    Matrix,
}

impl Use {
    fn expected(self) -> &'static str {
        match self {
            Self::Vector => "F32",
            Self::Matrix => "F32, F16, BF16 or a quantised weight type",
        }
    }

    fn allows(self, dtype: DType) -> bool {
        match self {
            Self::Vector => dtype == DType::F32,
            // Q8_1 and Q8_K are formats of activations inside kernels: no file of weights has them.
            Self::Matrix => match dtype {
                DType::F64 | DType::Q8_1 | DType::Q8_K => false,
                dtype => dtype.is_float() || dtype.is_quantized(),
            },
        }
    }
}

impl TensorTable {
    pub(crate) fn new(gguf: &Gguf) -> Self {
        let fact = |dims, dtype| Fact { dims, dtype };
        let by_name = gguf
            .tensors()
            .iter()
            .map(|tensor| (tensor.name().to_owned(), fact(tensor.dims_padded(), tensor.dtype())))
            .collect();
        Self { file: gguf.metadata().file().to_owned(), by_name }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.file
    }

    /// The file, for an error.
    pub(crate) fn file(&self) -> PathBuf {
        self.file.clone()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Rows of a matrix.
    pub(crate) fn n_rows(&self, name: &str) -> Option<u64> {
        self.by_name.get(name).map(|fact| fact.dims[1])
    }

    /// The type of `name`, if it is in the file with the shape `dims` (outermost first) and can be used so.
    pub(crate) fn check(&self, name: &str, dims: &[u64], usage: Use) -> Result<DType, ArchError> {
        let (file, tensor) = (self.file(), name.to_owned());
        let Some(fact) = self.by_name.get(name) else {
            return Err(ArchError::MissingTensor { file, tensor, expected: format!("{dims:?}") });
        };
        let mut wanted = [1; 4];
        wanted.iter_mut().zip(dims.iter().rev()).for_each(|(to, from)| *to = *from);
        if wanted != fact.dims {
            let n_dims = fact.dims.iter().rposition(|n| *n != 1).map_or(1, |last| last + 1);
            let got = fact.dims.iter().take(n_dims.max(dims.len())).rev().copied().collect();
            return Err(ArchError::WrongShape { file, tensor, expected: dims.to_vec(), got });
        }
        if !usage.allows(fact.dtype) {
            let (expected, got) = (usage.expected(), fact.dtype);
            return Err(ArchError::WrongDType { file, tensor, expected, got });
        }
        Ok(fact.dtype)
    }
}
