//! Whether a driver has the cooperative matrices that the fast product of prompts is written for.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::instance::Instance;
use crate::shaders;
use ash::vk;

/// Shared memory of the kernel.
const SHARED_BYTES: u32 = 38 << 10;

/// 16x16x16 of f16 into f32 by one subgroup of 32, with the features that the kernel's SPIR-V names. `TEGULA_VULKAN_MATRICES=0` says no.
pub(crate) fn are_usable(
    instance: &Instance,
    raw: vk::PhysicalDevice,
    subgroup: u32,
    shared_max: u32,
) -> bool {
    if shaders::MATMUL_COOPMAT.is_empty()
        || subgroup != 32
        || shared_max < SHARED_BYTES
        || std::env::var("TEGULA_VULKAN_MATRICES").is_ok_and(|v| v == "0")
    {
        return false;
    }
    let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
    let mut f12 = vk::PhysicalDeviceVulkan12Features::default();
    let mut features =
        vk::PhysicalDeviceFeatures2::default().push_next(&mut f12).push_next(&mut matrices);
    // SAFETY: the device is of this instance and has the extension (the caller looked).
    unsafe { instance.raw.get_physical_device_features2(raw, &mut features) };
    if matrices.cooperative_matrix != vk::TRUE
        || f12.shader_float16 != vk::TRUE
        || f12.vulkan_memory_model != vk::TRUE
    {
        return false;
    }
    let functions = instance.matrices();
    // SAFETY: as above.
    let shapes = unsafe { functions.get_physical_device_cooperative_matrix_properties(raw) };
    let (half, single) = (vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
    shapes.unwrap_or_default().iter().any(|shape| {
        (shape.m_size, shape.n_size, shape.k_size) == (16, 16, 16)
            && (shape.a_type, shape.b_type) == (half, half)
            && (shape.c_type, shape.result_type) == (single, single)
            && shape.scope == vk::ScopeKHR::SUBGROUP
    })
}
