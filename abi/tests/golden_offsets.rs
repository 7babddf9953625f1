//! Holds the size, alignment and field offsets of every struct of the boundary.
//!
//! A plugin that was built last year reads its fields at these offsets. From the revision `FROZEN_FROM` on, lines may only be
//! added after the last field of a struct; until then a change is a line in `abi/CHANGELOG.md`. Refresh `offsets.txt` by
//! running this test with `TEGULA_BLESS=1`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::fmt::Write as _;
use std::path::PathBuf;
use tegula_abi::*;

/// Writes the layout of each struct. A field that is missing in a list does not compile, since the pattern names all.
macro_rules! layouts {
    ($($name:ident $(as $alias:ident)?: $($field:ident)*;)*) => {
        /// `size`, `align` and offsets, one struct or field a line.
        fn layouts() -> String {
            let mut out = String::new();
            $({
                type Listed = layouts!(@type $name $($alias)?);
                let _ = |s: &Listed| {
                    let Listed { $($field: _),* } = s;
                };
                let (size, align) = (size_of::<Listed>(), align_of::<Listed>());
                writeln!(out, "{} size {size} align {align}", stringify!($name)).unwrap();
                $(
                    let offset = std::mem::offset_of!(Listed, $field);
                    writeln!(out, "    {offset:>4} {}", stringify!($field)).unwrap();
                )*
            })*
            out
        }

        /// The names of the structs above.
        const LISTED: &[&str] = &[$(stringify!($name)),*];
    };
    (@type $name:ident) => { $name };
    (@type $name:ident $alias:ident) => { $alias };
}

type ValueSlice = Slice<Value>;
type Text16 = Text<16>;

layouts! {
    Str: ptr len;
    Slice as ValueSlice: ptr len stride;
    Figure: value state source;
    Text as Text16: bytes;
    ErrorRecord: struct_size status has native_code asked limit free message message_cap message_len;
    Host: struct_size revision_min revision_max ctx log log_level_max version extension;
    Plugin: struct_size revision_min revision_max id version description backend;
    BackendTable: struct_size open close device_count device_info heap_info buffer_type_info device_open device extension;
    DeviceInfo: struct_size kind has_uuid uuid pci vendor_id n_heaps n_buffer_types type_for_weights type_for_kv type_for_scratch type_for_staging rank name vendor driver;
    HeapInfo: struct_size kind reserved pool total free;
    BufferTypeInfo: struct_size heap host_access flags reserved max_size alignment granularity preferred_chunk read_bandwidth import_alignment name;
    DeviceOptions: struct_size n_threads;
    BufferDesc: struct_size size buffer_type usage;
    BufferRange: buffer offset size;
    WeightDesc: struct_size dtype uses n_in n_rows rows_per_expert;
    WeightLayout: struct_size layout rows_per_group group_bytes alignment;
    WeightTile: struct_size first_row n_rows range layout;
    WeightBinding: struct_size value tiles;
    WeightUpload: struct_size desc tile src src_size;
    CompileOptions: struct_size n_tokens_max n_outputs_max n_seqs_max n_ctx_max scratch_type reserved scratch_chunk_max;
    ScratchDesc: size alignment;
    ExecutableMemory: struct_size scratch scratch_cap scratch_len device_bytes host_bytes;
    DeviceTable: struct_size close buffer_alloc buffer_import buffer_free buffer_map weight_layout program_supports program_memory program_compile executable_free queue_create queue_free queue_write queue_read queue_copy queue_upload queue_run queue_wait;
    Value: struct_size kind dtype n_dims reserved dims name;
    Op: struct_size code layer inputs outputs params;
    KvLayer: struct_size group index n_head_kv head_dim_k head_dim_v dtype_k dtype_v;
    StateLayer: struct_size n_elements;
    Program: struct_size name values ops inputs outputs kv_layers state_layers;
    NormParams: struct_size eps n;
    RopeParams: struct_size style head_dim n_rot n_ctx_orig base freq_scale ext_factor attn_factor beta_fast beta_slow;
    KvStoreParams: struct_size kv_layer;
    AttentionParams: struct_size kv_layer n_head scale softcap window;
    ActivationParams: struct_size activation;
    ScaleParams: struct_size factor;
    SliceParams: struct_size begin len;
    TopKParams: struct_size k;
    ExpertsParams: struct_size n_expert;
    RouterParams: struct_size k gating normalise scale;
    ConvStateParams: struct_size state_layer;
    GatedDeltaParams: struct_size state_layer n_head_k n_head_v head_dim_k head_dim_v order scale;
    SliceGroupsParams: struct_size group begin len;
    GluClampedParams: struct_size alpha limit;
    ConcatGroupsParams: struct_size group_a group_b;
    GroupedRouterParams: struct_size k gating normalise scale n_group n_group_used n_score;
    Binding: struct_size value range host host_size;
    BlockTable: blocks n_blocks first_pos;
    SeqSpan: struct_size first_token n_tokens first_pos reserved tables state_slot reserved_end;
    KvSegment: first_block n_blocks;
    KvGroup: struct_size generation block_len n_layers segments tiles;
    StatePool: struct_size generation n_slots n_layers tiles;
    RunArgs: struct_size n_tokens n_outputs inputs outputs scratch seqs kv state;
    LayoutRecord: struct_size revision format layout;
}

/// A user's old plugin lands its calls on wrong slots when a field moves.
#[test]
#[cfg(target_pointer_width = "64")]
fn offsets_are_as_snapped() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/offsets.txt");
    let now = layouts();
    if std::env::var_os("TEGULA_BLESS").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    let snapped = std::fs::read_to_string(&path).unwrap();
    for (now, snapped) in now.lines().zip(snapped.lines()) {
        assert_eq!(now, snapped, "the boundary changed: see the head of this file");
    }
    assert_eq!(now.lines().count(), snapped.lines().count(), "structs or fields came or went");
}

/// A struct that nobody lists would be free to move.
#[test]
fn every_struct_is_listed() {
    // Not part of the boundary's data: opaque handles, and the type that only gathers layouts.
    let unlisted = ["BackendHandle", "Boundary"];
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = 0;
    for entry in std::fs::read_dir(sources).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let names = text.lines().filter_map(|line| line.strip_prefix("pub struct "));
        for name in names.filter_map(|rest| rest.split([' ', '<', '(']).next()) {
            assert!(LISTED.contains(&name) || unlisted.contains(&name), "{name} is not listed");
            found += 1;
        }
    }
    assert!(found >= LISTED.len(), "{found} structs in the sources, {} listed", LISTED.len());
}
