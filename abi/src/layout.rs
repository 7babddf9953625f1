//! The recursive layout of the tables, for plugins written in Rust.
//!
//! Sizes and revisions are the contract for everybody. A Rust plugin also exports the layout that its compiler gave the
//! tables, and a host of the *same* revision compares it with its own: a table that was edited without a new revision is
//! refused with the field's name instead of landing calls on wrong slots. Between different revisions the tables differ by
//! right, and only sizes and revisions are looked at.

use crate::{BackendTable, DeviceTable, Host, Plugin, Program, RunArgs, Str};
use abi_stable::StableAbi;
use abi_stable::type_layout::TypeLayout;

/// Everything that crosses, in one type whose layout reaches all tables.
#[repr(C)]
#[derive(StableAbi)]
pub struct Boundary {
    host: *const Host,
    plugin: *const Plugin,
    backend: *const BackendTable,
    device: *const DeviceTable,
    program: *const Program,
    run: *const RunArgs,
    norm: *const crate::NormParams,
    rope: *const crate::RopeParams,
    kv_store: *const crate::KvStoreParams,
    attention: *const crate::AttentionParams,
    activation: *const crate::ActivationParams,
    scale: *const crate::ScaleParams,
    slice: *const crate::SliceParams,
    top_k: *const crate::TopKParams,
    experts: *const crate::ExpertsParams,
    router: *const crate::RouterParams,
    conv_state: *const crate::ConvStateParams,
    gated_delta: *const crate::GatedDeltaParams,
    slice_groups: *const crate::SliceGroupsParams,
    glu_clamped: *const crate::GluClampedParams,
    concat_groups: *const crate::ConcatGroupsParams,
    grouped_router: *const crate::GroupedRouterParams,
}

/// What [`crate::LAYOUT_SYMBOL`] returns. Static in the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct LayoutRecord {
    /// Set by the plugin.
    pub struct_size: usize,
    /// The revision these tables have.
    pub revision: u32,
    /// Version of the layout format; layouts of different formats are not compared.
    pub format: Str,
    /// The layout of [`Boundary`].
    pub layout: &'static TypeLayout,
}

/// The type of [`crate::LAYOUT_SYMBOL`].
pub type LayoutEntry = extern "C" fn() -> *const LayoutRecord;

/// The format of [`TypeLayout`] in this build.
pub const LAYOUT_FORMAT: &str = "abi_stable-0.11";

/// The layout of this crate's own tables.
pub const BOUNDARY_LAYOUT: &TypeLayout = <Boundary as StableAbi>::LAYOUT;

/// The record a Rust plugin exports, and the host compares with.
pub static LAYOUT_RECORD: LayoutRecord = LayoutRecord {
    struct_size: std::mem::size_of::<LayoutRecord>(),
    revision: crate::REVISION,
    format: Str::of(LAYOUT_FORMAT),
    layout: BOUNDARY_LAYOUT,
};

/// Compares a plugin's layout with ours; `Err` holds the text that names the difference.
pub fn check_layout(plugin: &'static TypeLayout) -> Result<(), String> {
    abi_stable::abi_stability::abi_checking::check_layout_compatibility(BOUNDARY_LAYOUT, plugin)
        .map_err(|errors| errors.to_string())
}
