//! What is known of the project's backends: what each does not support, and what it is known to do wrong.
//!
//! The two lists are never mixed. The first is permanent, and says what a user of the backend cannot have; the second is a list of work and
//! shrinks. The suite itself knows no backend, so the lists stand here.

#![forbid(unsafe_code)]

use tegula_conformance::{Entry, Expectations};

/// What backends refuse, and rightly so.
pub const UNSUPPORTED: &[Entry] = &[
    lacks("vulkan", "matmul_experts/"),
    lacks("vulkan", "router_topk/"),
    lacks("vulkan", "combine_experts/"),
    lacks("vulkan", "glu_clamped/"),
    lacks("vulkan", "conv_state/"),
    lacks("vulkan", "gated_delta/"),
    lacks("vulkan", "l2_norm/"),
    lacks("vulkan", "slice_groups/"),
    lacks("opencl", "matmul_experts/"),
    lacks("opencl", "router_topk/"),
    lacks("opencl", "combine_experts/"),
    lacks("opencl", "glu_clamped/"),
    lacks("opencl", "conv_state/"),
    lacks("opencl", "gated_delta/"),
    lacks("opencl", "l2_norm/"),
    lacks("opencl", "slice_groups/"),
    lacks("openvino", "matmul_experts/"),
    lacks("openvino", "router_topk/"),
    lacks("openvino", "combine_experts/"),
    lacks("openvino", "glu_clamped/"),
    lacks("openvino", "conv_state/"),
    lacks("openvino", "gated_delta/"),
    lacks("openvino", "l2_norm/"),
    lacks("openvino", "slice_groups/"),
    lacks("vulkan", "mul/a weight of one number"),
    lacks("opencl", "mul/a weight of one number"),
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
