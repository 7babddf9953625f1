//! Pipelines: made once a device for each kernel and set of constants, and kept by the driver's cache on disk between processes.
//!
//! All kernels have one layout: 128 bytes of push constants, which every device has, and no descriptors.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::cache_file;
use crate::error::failed;
use crate::gpu::lock;
use crate::physical::Physical;
use crate::shaders::Shader;
use ash::vk;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use tegula_sdk::{Error, Result};

/// Bytes of push constants.
pub(crate) const PUSH_BYTES: u32 = 128;

/// A kernel with its constants: `(id, value)`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub(crate) shader: Shader,
    pub(crate) constants: Vec<(u32, u32)>,
}

impl Kernel {
    pub(crate) fn new(shader: Shader, constants: &[(u32, u32)]) -> Self {
        Self { shader, constants: constants.to_vec() }
    }
}

/// The pipelines of a device.
pub(crate) struct Pipelines {
    pub(crate) layout: vk::PipelineLayout,
    cache: vk::PipelineCache,
    made: Mutex<HashMap<Kernel, vk::Pipeline>>,
    modules: Mutex<[vk::ShaderModule; Shader::COUNT]>,
    has_new: AtomicBool,
}

impl Pipelines {
    pub(crate) fn new(device: &ash::Device, physical: &Physical) -> Result<Self> {
        let ranges = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(PUSH_BYTES)];
        let info = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&ranges);
        // SAFETY: the structs live for the calls.
        let layout = unsafe { device.create_pipeline_layout(&info, None) }
            .map_err(|code| failed("vkCreatePipelineLayout", code))?;
        let bytes = cache_file::read(physical).unwrap_or_default();
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&bytes);
        // SAFETY: as above; the bytes are what this driver wrote, by its own header and a checksum.
        let cache = unsafe { device.create_pipeline_cache(&info, None) };
        Ok(Self {
            layout,
            // Without a cache everything works, slower at the start.
            cache: cache.unwrap_or(vk::PipelineCache::null()),
            made: Mutex::new(HashMap::new()),
            modules: Mutex::new([vk::ShaderModule::null(); Shader::COUNT]),
            has_new: AtomicBool::new(false),
        })
    }

    /// The pipeline of a kernel.
    pub(crate) fn get(&self, device: &ash::Device, kernel: &Kernel) -> Result<vk::Pipeline> {
        if let Some(pipeline) = lock(&self.made).get(kernel) {
            return Ok(*pipeline);
        }
        // Made outside the lock: others are made at the same time.
        let pipeline = self.make(device, kernel)?;
        self.has_new.store(true, Ordering::Relaxed);
        let mut made = lock(&self.made);
        if let Some(first) = made.get(kernel) {
            // SAFETY: nobody else has seen this second one.
            unsafe { device.destroy_pipeline(pipeline, None) };
            return Ok(*first);
        }
        made.insert(kernel.clone(), pipeline);
        Ok(pipeline)
    }

    /// Makes many, on a few threads.
    pub(crate) fn warm(&self, device: &ash::Device, kernels: &[Kernel]) -> Result<()> {
        let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16));
        let next = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let work = || {
                while let Some(kernel) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                    self.get(device, kernel)?;
                }
                Ok(())
            };
            let threads: Vec<_> =
                (0..n_threads.min(kernels.len())).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(Error::invalid("a thread that makes pipelines panicked"))
                })
            })
        })
    }

    fn module(&self, device: &ash::Device, shader: Shader) -> Result<vk::ShaderModule> {
        let mut modules = lock(&self.modules);
        let slot =
            modules.get_mut(shader as usize).ok_or_else(|| Error::invalid("no such shader"))?;
        if *slot == vk::ShaderModule::null() {
            let words: Vec<u32> = shader
                .code()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| u32::from_le_bytes(*word))
                .collect();
            if words.is_empty() {
                return Err(Error::unsupported(format!(
                    "the kernel {} was not built",
                    shader.name()
                )));
            }
            let info = vk::ShaderModuleCreateInfo::default().code(&words);
            // SAFETY: the code is valid SPIR-V, made by the build.
            *slot = unsafe { device.create_shader_module(&info, None) }
                .map_err(|code| failed("vkCreateShaderModule", code))?;
        }
        Ok(*slot)
    }

    fn make(&self, device: &ash::Device, kernel: &Kernel) -> Result<vk::Pipeline> {
        let module = self.module(device, kernel.shader)?;
        let entries: Vec<_> = (0u32..)
            .zip(&kernel.constants)
            .map(|(i, (id, _))| {
                vk::SpecializationMapEntry::default().constant_id(*id).offset(4 * i).size(4)
            })
            .collect();
        let data: Vec<u8> =
            kernel.constants.iter().flat_map(|(_, value)| value.to_ne_bytes()).collect();
        let constants = vk::SpecializationInfo::default().map_entries(&entries).data(&data);
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main")
            .specialization_info(&constants);
        let info = vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout);
        let begin = std::time::Instant::now();
        // SAFETY: the structs live for the call.
        let made = unsafe { device.create_compute_pipelines(self.cache, &[info], None) };
        log::trace!("{kernel:?}: made in {:?}", begin.elapsed());
        let made = made.map_err(|(_, code)| failed("vkCreateComputePipelines", code))?;
        made.first()
            .copied()
            .ok_or_else(|| failed("vkCreateComputePipelines", vk::Result::ERROR_UNKNOWN))
    }

    /// Writes the driver's cache to disk if it has grown.
    pub(crate) fn save_with(&self, device: &ash::Device, physical: &Physical) {
        if self.cache == vk::PipelineCache::null() || !self.has_new.swap(false, Ordering::Relaxed) {
            return;
        }
        // SAFETY: the cache is alive.
        match unsafe { device.get_pipeline_cache_data(self.cache) } {
            Ok(bytes) => cache_file::write(physical, &bytes),
            Err(code) => log::debug!("the pipeline cache is not saved: {code:?}"),
        }
    }

    /// # Safety
    /// The device is idle, and nothing is used again.
    pub(crate) unsafe fn destroy(&self, device: &ash::Device) {
        // SAFETY: by the caller's word; null handles are ignored.
        unsafe {
            for (_, pipeline) in lock(&self.made).drain() {
                device.destroy_pipeline(pipeline, None);
            }
            for module in lock(&self.modules).iter() {
                device.destroy_shader_module(*module, None);
            }
            device.destroy_pipeline_cache(self.cache, None);
            device.destroy_pipeline_layout(self.layout, None);
        }
    }
}
