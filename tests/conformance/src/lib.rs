//! What is known of the project's backends: what each does not support, and what it is known to do wrong.
//!
//! The two lists are never mixed. The first is permanent, and says what a user of the backend cannot have; the second is a list of work and
//! shrinks. The suite itself knows no backend, so the lists stand here.

#![forbid(unsafe_code)]

use tegula_conformance::{Entry, Expectations};

/// What backends refuse, and rightly so.
pub const UNSUPPORTED: &[Entry] = &[
    lacks("openvino", "matmul_experts/"),
    lacks("openvino", "chain/experts of the rows"),
    lacks("openvino", "router_topk/"),
    lacks("openvino", "combine_experts/"),
    lacks("openvino", "glu_clamped/"),
    lacks("openvino", "conv_state/"),
    lacks("openvino", "gated_delta/"),
    lacks("openvino", "l2_norm/"),
    lacks("openvino", "slice_groups/"),
    lacks("openvino", "concat_groups/"),
    lacks("openvino", "router_topk_grouped/"),
    lacks("vulkan", "concat_groups/"),
    lacks("vulkan", "router_topk_grouped/"),
    lacks("opencl", "concat_groups/"),
    lacks("opencl", "router_topk_grouped/"),
];

const fn lacks(backend: &'static str, case: &'static str) -> Entry {
    Entry {
        backend,
        case,
        reason: "not written yet: the core runs it on another device, or names it in its refusal",
    }
}

/// What backends are known to do wrong. A case that passes must be taken off the list.
pub const EXPECTED_FAILURES: &[Entry] = &[];

/// Of one of the project's backends: what it refuses must be listed.
pub fn expectations(backend: &str) -> Expectations {
    Expectations::listed(backend, UNSUPPORTED, EXPECTED_FAILURES)
}
