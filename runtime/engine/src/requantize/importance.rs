//! Importance files: for each matrix how large the activations of its columns were over a text, in squares.
//!
//! Two formats are about. In GGUF, `NAME.in_sum2` has sums of squares, `[n_in, n_matrix]`, and `NAME.counts` the number of rows that went into each
//! matrix. The older one is a list: names, numbers of calls and sums over them.

use super::QuantizeError;
use std::collections::HashMap;
use std::path::Path;
use tegula_gguf::{Gguf, TensorInfo};
use tegula_quant::dequantize;

/// Entries of a list, and characters of a name, are far fewer.
const ENTRIES_MAX: usize = 1 << 20;

/// Mean squares of the activations of each column, by tensor.
#[derive(Debug, Default)]
pub struct Importance {
    by_name: HashMap<String, Vec<f32>>,
    file: std::path::PathBuf,
}

impl Importance {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`QuantizeError::Importance`] for a file that is neither, [`QuantizeError::Gguf`] and [`QuantizeError::Io`].
    pub fn open(file: &Path) -> Result<Self, QuantizeError> {
        let io = |cause| QuantizeError::Io { file: file.to_owned(), action: "read", cause };
        let mut magic = [0; 4];
        let mut source = std::fs::File::open(file).map_err(io)?;
        std::io::Read::read_exact(&mut source, &mut magic).map_err(io)?;
        let by_name = if &magic == b"GGUF" {
            from_gguf(&Gguf::open(file)?)?
        } else {
            let bytes = std::fs::read(file).map_err(io)?;
            from_list(&bytes)
                .ok_or_else(|| bad(file, "neither GGUF nor a whole list of importances"))?
        };
        if by_name.is_empty() {
            return Err(bad(file, "it has no importances"));
        }
        Ok(Self { by_name, file: file.to_owned() })
    }

    /// Tensors that it tells of.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether it tells of none.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Of each matrix of a tensor, one after the other; `None` where nothing is known.
    pub(super) fn of(&self, tensor: &TensorInfo) -> Result<Option<&[f32]>, QuantizeError> {
        let Some(known) = self.by_name.get(tensor.name()) else { return Ok(None) };
        let [n_in, _, n_matrix, n_more] = tensor.dims_padded();
        let wanted = n_in.saturating_mul(n_matrix).saturating_mul(n_more);
        if known.len() as u64 == wanted {
            return Ok(Some(known));
        }
        let (name, got) = (tensor.name(), known.len());
        Err(bad(
            &self.file,
            format!(
                "{got} importances for {name:?}, which has {wanted} columns: it is of another model"
            ),
        ))
    }
}

fn bad(file: &Path, why: impl Into<String>) -> QuantizeError {
    QuantizeError::Importance { file: file.to_owned(), why: why.into() }
}

fn f32s(gguf: &Gguf, tensor: &TensorInfo) -> Result<Vec<f32>, QuantizeError> {
    let bytes = gguf.read_tensor(tensor)?;
    let mut out = vec![0.0; usize::try_from(tensor.n_elements()).unwrap_or(0)];
    let layout = |cause| QuantizeError::Layout { tensor: tensor.name().to_owned(), cause };
    dequantize(tensor.dtype(), &bytes, &mut out).map_err(layout)?;
    Ok(out)
}

fn from_gguf(gguf: &Gguf) -> Result<HashMap<String, Vec<f32>>, QuantizeError> {
    let mut out = HashMap::new();
    for sums in gguf.tensors() {
        let Some(name) = sums.name().strip_suffix(".in_sum2") else { continue };
        let counts = f32s(gguf, gguf.required_tensor(&format!("{name}.counts"))?)?;
        let n_in = usize::try_from(sums.dims_padded()[0]).unwrap_or(usize::MAX).max(1);
        let mut values = f32s(gguf, sums)?;
        for (i, columns) in values.chunks_mut(n_in).enumerate() {
            let count = counts.get(i).copied().unwrap_or(0.0);
            columns.iter_mut().for_each(|sum| *sum = mean(*sum, count));
        }
        out.insert(name.to_owned(), values);
    }
    Ok(out)
}

/// Of a matrix that no row went into nothing is known: its columns are equally important.
fn mean(sum: f32, count: f32) -> f32 {
    let mean = sum / count;
    if mean.is_finite() && mean >= 0.0 { mean } else { 1.0 }
}

/// `None` for bytes that are no list.
fn from_list(bytes: &[u8]) -> Option<HashMap<String, Vec<f32>>> {
    let mut rest = bytes;
    let number = |rest: &mut &[u8]| {
        let (first, left) = rest.split_first_chunk::<4>()?;
        *rest = left;
        usize::try_from(i32::from_le_bytes(*first)).ok()
    };
    let n_entries = number(&mut rest).filter(|n| *n <= ENTRIES_MAX)?;
    let mut out = HashMap::new();
    for _ in 0..n_entries {
        let len = number(&mut rest).filter(|len| *len <= ENTRIES_MAX)?;
        let (name, left) = rest.split_at_checked(len)?;
        rest = left;
        let n_calls = number(&mut rest)?;
        let n_bytes = number(&mut rest)?.checked_mul(4)?;
        let (values, left) = rest.split_at_checked(n_bytes)?;
        rest = left;
        let values = values.as_chunks::<4>().0.iter();
        let values = values.map(|bytes| mean(f32::from_le_bytes(*bytes), n_calls as f32));
        out.insert(String::from_utf8(name.to_vec()).ok()?, values.collect());
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::from_list;

    /// A truncated file must be told, and not read as a shorter one.
    #[test]
    fn lists_are_read_whole_or_not_at_all() {
        let ints = |all: [i32; 2]| all.into_iter().flat_map(i32::to_le_bytes);
        let values = [3.0f32, 5.0].into_iter().flat_map(f32::to_le_bytes);
        // One entry, its name, two calls, two values.
        let head = ints([1, 4]).chain(*b"name").chain(ints([2, 2]));
        let mut bytes: Vec<u8> = head.chain(values).collect();
        assert_eq!(
            from_list(&bytes).and_then(|list| list.get("name").cloned()),
            Some(vec![1.5, 2.5])
        );
        for len in 0..bytes.len() {
            assert!(from_list(&bytes[..len]).is_none(), "{len}");
        }
        bytes[0] = 0xff;
        assert!(from_list(&bytes).is_none());
    }
}
