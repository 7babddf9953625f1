//! [`Limits`]: what a header may cost.
//!
//! Lengths are checked against the bytes left in the file first. That alone is not enough, because a sparse file can be
//! terabytes long and cost its maker nothing; so there are absolute caps too. The defaults are several times what any
//! known model needs, and keep a process that opens the worst file they allow under 50 MB of resident memory.

/// Caps on what is read from one model's headers; exceeding one is [`GgufError::LimitExceeded`](crate::GgufError).
///
/// Start from [`Limits::default`] and change fields; the type may gain fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of header, metadata and tensor table, over all shards of a model. Default 32 MiB; the largest vocabulary
    /// known (262,144 tokens, 514,906 merges) takes 16 MB.
    pub header_bytes_max: u64,
    /// Metadata keys per file. Default 16,384; models have 20 to 100.
    pub n_kv_max: u64,
    /// Tensors over all shards of a model. Default 65,536; the largest expert models with one tensor per expert have
    /// about 30,000.
    pub n_tensors_max: u64,
    /// Bytes of one string value or string element. Default 16 MiB.
    pub string_bytes_max: u64,
    /// Elements of one array. Default 4,194,304.
    pub array_len_max: u64,
    /// Arrays inside arrays, over all of a file. Default 65,536.
    pub n_nested_arrays_max: u64,
    /// Depth of arrays: 1 is an array of scalars. Default 4.
    pub array_depth_max: u32,
    /// Bytes of one tensor's name. Default 255; ggml stops at 63.
    pub tensor_name_bytes_max: u64,
    /// Shards of one model. Default 1,024.
    pub n_shards_max: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            header_bytes_max: 32 << 20,
            n_kv_max: 1 << 14,
            n_tensors_max: 1 << 16,
            string_bytes_max: 16 << 20,
            array_len_max: 1 << 22,
            n_nested_arrays_max: 1 << 16,
            array_depth_max: 4,
            tensor_name_bytes_max: 255,
            n_shards_max: 1024,
        }
    }
}
