//! What all executables of an open device share.

use crate::kernels::Kernels;
use crate::library::cache_folder;
use crate::ov::{Compiled, Context, Core, Model, Properties};
use crate::pool::Pool;
use tegula_sdk::{Error, Result};

/// Models of the processor with fewer bytes of constants compile faster than they are looked up.
const CACHED_MIN: u64 = 1 << 20;

/// The open device.
pub(crate) struct Engine {
    pub(crate) core: Core,
    /// OpenVINO's name of the device.
    pub(crate) device: String,
    /// A GPU's context; `None` for the processor.
    pub(crate) context: Option<Context>,
    /// The greatest buffer of a GPU.
    pub(crate) max_size: Option<u64>,
    properties: Properties,
    /// Folder of compiled models, and the bytes of constants from which on a model is kept there.
    cache: Option<(String, u64)>,
    pub(crate) pool: Pool,
    pub(crate) kernels: Kernels,
    /// No constant of a model may be larger.
    pub(crate) constant_max: u64,
}

impl Engine {
    /// The host's processor with `n_threads` threads; 0 takes as many as there are processors.
    pub(crate) fn cpu(core: Core, device: &str, n_threads: u32) -> Result<Self> {
        let (n, pool) = threads(n_threads)?;
        let properties = [
            // Everything that OpenVINO would decide by the processor is asked for: it would take bf16 where there is bf16, and quantise activations.
            ("INFERENCE_PRECISION_HINT", "f32".to_owned()),
            ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0".to_owned()),
            ("PERFORMANCE_HINT", "LATENCY".to_owned()),
            ("NUM_STREAMS", "1".to_owned()),
            ("INFERENCE_NUM_THREADS", n.to_string()),
        ];
        let properties = properties.map(|(key, value)| (key.to_owned(), value)).into();
        let cache = model_cache(&core, device).map(|folder| (folder, CACHED_MIN));
        log::info!("{n} threads, OpenVINO {}", Core::version());
        Ok(Self {
            core,
            device: device.to_owned(),
            context: None,
            max_size: None,
            properties,
            cache,
            pool,
            kernels: Kernels::detect(),
            constant_max: u64::MAX,
        })
    }

    /// A GPU. `max_size` binds its buffers and every constant of a model, which its plugin allocates each by itself.
    pub(crate) fn gpu(core: Core, device: &str, n_threads: u32, max_size: u64) -> Result<Self> {
        let (_, pool) = threads(n_threads)?;
        let context = core.context(device)?;
        let properties = [
            ("INFERENCE_PRECISION_HINT", "f32"),
            ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"),
            ("PERFORMANCE_HINT", "LATENCY"),
        ];
        let properties = properties.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let cache = model_cache(&core, device).map(|folder| (folder, 0));
        Ok(Self {
            core,
            device: device.to_owned(),
            context: Some(context),
            max_size: Some(max_size),
            properties,
            cache,
            pool,
            kernels: Kernels::detect(),
            constant_max: max_size,
        })
    }

    /// Compiles a model with `bytes` of constants for this device. OpenVINO finds it again by the contents of text and constants.
    pub(crate) fn compile(&self, model: &Model, bytes: u64) -> Result<Compiled> {
        let cache = self.cache.iter().filter(|(_, least)| bytes >= *least);
        let cache = cache.map(|(folder, _)| ("CACHE_DIR".to_owned(), folder.clone()));
        let properties = self.properties.iter().cloned().chain(cache).collect();
        self.core.compile(model, &self.device, self.context.as_ref(), &properties)
    }
}

/// The number of threads, and a pool of as many; 0 takes one for each processor.
fn threads(n_threads: u32) -> Result<(usize, Pool)> {
    let n = match n_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n as usize,
    };
    let pool = Pool::new(n);
    Ok((n, pool.map_err(|e| Error::new(tegula_sdk::abi::Status::DRIVER, e.to_string()))?))
}

/// Where compiled models of a device are kept, by version and device: for a GPU, kernels are compiled from source, which takes
/// seconds; for a processor, rewriting a model takes most of the time to load it.
fn model_cache(core: &Core, device: &str) -> Option<String> {
    let name = core.property(device, "FULL_DEVICE_NAME").unwrap_or_else(|_| device.to_owned());
    let clean = |text: &str| {
        let keep = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        text.chars().map(keep).collect::<String>()
    };
    let folder =
        cache_folder()?.join("openvino-models").join(clean(&Core::version())).join(clean(&name));
    std::fs::create_dir_all(&folder).ok()?;
    folder.to_str().map(ToOwned::to_owned)
}
