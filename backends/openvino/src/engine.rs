//! What all executables of an open device share.

use crate::kernels::Kernels;
use crate::library::cache_folder;
use crate::ov::{Compiled, Context, Core, Model, Properties};
use crate::pool::Pool;
use tegula_sdk::{Error, Result};

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
        log::info!("{n} threads, OpenVINO {}", Core::version());
        Ok(Self {
            core,
            device: device.to_owned(),
            context: None,
            max_size: None,
            properties,
            pool,
            kernels: Kernels::detect(),
            constant_max: u64::MAX,
        })
    }

    /// A GPU. `max_size` binds its buffers and every constant of a model, which its plugin allocates each by itself.
    pub(crate) fn gpu(core: Core, device: &str, n_threads: u32, max_size: u64) -> Result<Self> {
        let (_, pool) = threads(n_threads)?;
        let context = core.context(device)?;
        let mut properties = vec![
            ("INFERENCE_PRECISION_HINT".to_owned(), "f32".to_owned()),
            ("DYNAMIC_QUANTIZATION_GROUP_SIZE".to_owned(), "0".to_owned()),
            ("PERFORMANCE_HINT".to_owned(), "LATENCY".to_owned()),
        ];
        if let Some(folder) = model_cache(&core, device) {
            properties.push(("CACHE_DIR".to_owned(), folder));
        }
        Ok(Self {
            core,
            device: device.to_owned(),
            context: Some(context),
            max_size: Some(max_size),
            properties,
            pool,
            kernels: Kernels::detect(),
            constant_max: max_size,
        })
    }

    /// Compiles a model for this device.
    pub(crate) fn compile(&self, model: &Model) -> Result<Compiled> {
        self.core.compile(model, &self.device, self.context.as_ref(), &self.properties)
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

/// Where compiled models of a device are kept, by version and device: kernels are compiled from source, which takes seconds.
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
