//! Devices of llama.cpp, and the placement of a model on them.

mod fit;
mod tensors;

pub(super) use fit::other_split_files;
pub use tensors::{TensorPlacement, TensorRule};

use super::ffi::{devices as ffi, loading::LoadParams};
use super::{GgufHeader, GpuLayers, ModelError, ModelOptions, SplitMode};
use fit::{Gpu, GpuRequirements};
use std::path::Path;

/// A device that llama.cpp computes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// llama.cpp's name, e.g. `CUDA0`.
    pub name: String,
    /// Human-readable name.
    pub description: String,
    /// True for a GPU, integrated or not.
    pub gpu: bool,
    /// Total memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// True if it is integrated into the processor.
    integrated: bool,
    backend: String,
    /// llama.cpp's name of its buffer type.
    buffer: String,
    splits_rows: bool,
    /// Id that is the same for all backends of the device.
    id: Option<String>,
}

/// The part of a model that is on GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// Names of the GPUs in use; empty for CPU only.
    pub devices: Vec<String>,
    /// Number of layers on GPUs.
    pub gpu_layers: u32,
    /// Maximum number of such layers: all layers and the output.
    pub layers: u32,
}

/// The reason why the requested placement is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// There is no GPU with this name.
    #[error("--device names '{name}', but {available}; --device none uses the CPU only")]
    Device {
        /// The name.
        name: String,
        /// List of the GPUs.
        available: String,
    },
    /// There are fewer GPUs.
    #[error("--main-gpu {main_gpu} does not exist: {available}, counted from 0")]
    MainGpu {
        /// The value.
        main_gpu: usize,
        /// List of the GPUs.
        available: String,
    },
    /// There are more shares than GPUs.
    #[error("--tensor-split has {shares} shares, but {available}")]
    Shares {
        /// Number of shares.
        shares: usize,
        /// List of the GPUs.
        available: String,
    },
    /// There is no such buffer type.
    #[error("--override-tensor has the unknown buffer '{name}'; the buffers are {available}")]
    Buffer {
        /// The name.
        name: String,
        /// List of the buffers.
        available: String,
    },
    /// An invalid pattern.
    #[error("--override-tensor has an invalid regular expression: {reason}")]
    Pattern {
        /// The error.
        reason: String,
    },
    /// The GPU's backend cannot split weights.
    #[error("--split-mode row is not possible with {name}: {backend} cannot split weights; use --split-mode layer")]
    Rows {
        /// The GPU.
        name: String,
        /// Its backend.
        backend: String,
    },
}

/// Returns all devices, GPUs and others.
#[must_use]
pub fn devices() -> Vec<Device> {
    let device = |found: ffi::RawDevice| Device {
        gpu: [llama_cpp_sys_2::GGML_BACKEND_DEVICE_TYPE_GPU, llama_cpp_sys_2::GGML_BACKEND_DEVICE_TYPE_IGPU]
            .contains(&found.kind),
        integrated: found.kind == llama_cpp_sys_2::GGML_BACKEND_DEVICE_TYPE_IGPU,
        name: found.name,
        description: found.description,
        backend: found.backend,
        buffer: found.buffer,
        splits_rows: found.splits_rows,
        id: found.id,
        memory_bytes: found.memory_bytes,
        free_bytes: found.free_bytes,
    };
    ffi::list().into_iter().map(device).collect()
}

/// Returns the reason why no GPU is available.
#[must_use]
pub const fn missing_gpu_reason() -> &'static str {
    if cfg!(any(feature = "cuda", feature = "vulkan", feature = "metal")) {
        "no GPU was found"
    } else {
        "this build has no GPU support; build with cargo build --release --features cuda (or vulkan, or metal)"
    }
}

/// Rejects a context whose KV cache is larger than all memory of this machine including its GPUs. llama.cpp would
/// allocate the memory page by page until the system kills a process.
pub(super) fn check_context(options: &ModelOptions, header: &GgufHeader) -> Result<(), ModelError> {
    let context = &options.context;
    let memory: u64 = devices().iter().map(|device| device.memory_bytes).sum();
    let Some(needed) = fit::cache_bytes(header, context).filter(|&needed| memory > 0 && needed > memory) else {
        return Ok(());
    };
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let reason = format!(
        "its KV cache would need {:.1} GiB, but this machine has {:.1} GiB of memory",
        gib(needed),
        gib(memory)
    );
    Err(ModelError::Context { ctx_size: context.context_per_sequence.saturating_mul(context.sequences), reason })
}

/// Converts the options to llama.cpp's load parameters and returns the placement of the model.
pub(super) fn load_params(
    options: &ModelOptions,
    header: &GgufHeader,
    path: &Path,
) -> Result<(LoadParams, Placement), PlacementError> {
    let all = devices();
    let gpus = selected_gpus(options, &all)?;
    let blocks = header.parameter("block_count").unwrap_or(0);
    let layers = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_add(1);
    // llama.cpp cannot compute with tensors on a GPU that is not in its list of devices.
    let mut buffers: Vec<&str> =
        all.iter().filter(|device| !device.gpu).chain(&gpus).map(|device| device.buffer.as_str()).collect();
    buffers.dedup();
    let rules = options.tensors.rules(blocks, &buffers)?;
    let gpu_layers = match options.gpu_layers {
        _ if gpus.is_empty() => 0,
        GpuLayers::All => layers,
        GpuLayers::Count(count) => count.min(layers),
        GpuLayers::Auto => {
            let others: Vec<GgufHeader> = fit::read_other_headers(path, header)
                .iter()
                .map(|header| tensors::without_cpu_tensors(header, &rules))
                .collect();
            let needs = GpuRequirements::new(&tensors::without_cpu_tensors(header, &rules), &others, options);
            let fitting =
                fit::fitting_layers(&needs, &gpu_shares(&gpus, &all, &options.tensor_split), options.split_mode);
            tracing::debug!(layers = fitting, ?needs, "layers that fit on GPUs");
            u32::try_from(fitting).unwrap_or(u32::MAX)
        }
    };
    let names: Vec<String> = gpus.into_iter().map(|gpu| gpu.name).collect();
    let load_params = LoadParams {
        devices: names.clone(),
        gpu_layers: i32::try_from(gpu_layers).unwrap_or(i32::MAX),
        split_mode: Some(match options.split_mode {
            SplitMode::None => llama_cpp_sys_2::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => llama_cpp_sys_2::LLAMA_SPLIT_MODE_LAYER,
            SplitMode::Row => llama_cpp_sys_2::LLAMA_SPLIT_MODE_ROW,
        }),
        tensor_split: options.tensor_split.clone(),
        tensors: rules,
        mmap: !options.no_mmap,
        mlock: options.mlock,
        check_tensors: options.tuning.check_tensors,
        no_repack: options.tuning.no_repack,
        no_host: options.tuning.no_host,
        overrides: options.tuning.overrides.clone(),
        no_alloc: false,
    };
    Ok((load_params, Placement { devices: names, gpu_layers, layers }))
}

/// Returns the GPUs that a model uses.
fn selected_gpus(options: &ModelOptions, all: &[Device]) -> Result<Vec<Device>, PlacementError> {
    let gpus = match &options.devices {
        None => default_gpus(all),
        Some(names) => {
            let named = |name: &String| {
                let found = all.iter().find(|device| device.gpu && device.name.eq_ignore_ascii_case(name));
                found.cloned().ok_or_else(|| PlacementError::Device { name: name.clone(), available: list_gpus(all) })
            };
            let mut gpus: Vec<Device> = names.iter().map(named).collect::<Result<_, _>>()?;
            let mut seen = std::collections::HashSet::new();
            gpus.retain(|gpu| seen.insert(gpu.name.clone()));
            gpus
        }
    };
    if gpus.is_empty() {
        return Ok(gpus);
    }
    if options.tensor_split.len() > gpus.len() {
        return Err(PlacementError::Shares { shares: options.tensor_split.len(), available: list_gpus(&gpus) });
    }
    if let Some(gpu) = gpus.iter().find(|gpu| options.split_mode == SplitMode::Row && !gpu.splits_rows) {
        return Err(PlacementError::Rows { name: gpu.name.clone(), backend: gpu.backend.clone() });
    }
    if options.split_mode != SplitMode::None {
        return Ok(gpus);
    }
    let main_gpu = options.main_gpu;
    let main = gpus.get(main_gpu).cloned().map(|main| vec![main]);
    main.ok_or_else(|| PlacementError::MainGpu { main_gpu, available: list_gpus(&gpus) })
}

/// Returns the default GPUs like llama.cpp: each GPU once, even if several backends support it, and integrated GPUs
/// only if there are no others.
fn default_gpus(all: &[Device]) -> Vec<Device> {
    let mut selected_gpus: Vec<Device> = Vec::new();
    for device in all.iter().filter(|device| device.gpu && !device.integrated) {
        if device.id.is_none() || selected_gpus.iter().all(|other| other.id != device.id) {
            selected_gpus.push(device.clone());
        }
    }
    if selected_gpus.is_empty() {
        let mut integrated = all.iter().filter(|device| device.integrated);
        let first = integrated.clone().next().map(|device| device.backend.clone());
        selected_gpus.extend(integrated.by_ref().filter(|device| Some(&device.backend) == first.as_ref()).cloned());
    }
    selected_gpus
}

/// Lists the GPUs as a clause of an error message.
fn list_gpus(devices: &[Device]) -> String {
    let gpus: Vec<String> =
        devices.iter().filter(|device| device.gpu).map(|gpu| format!("{} ({})", gpu.name, gpu.description)).collect();
    match &gpus[..] {
        [] => missing_gpu_reason().to_owned(),
        [one] => format!("there is only {one}"),
        [first @ .., last] => format!("there are {} and {last}", first.join(", ")),
    }
}

/// Returns the free memory of each GPU and its share of the layers.
fn gpu_shares(gpus: &[Device], all: &[Device], shares: &[f32]) -> Vec<Gpu> {
    // Like llama.cpp: a GPU with unknown memory counts with the memory of the CPU.
    let processor = all.iter().find(|device| !device.gpu).map_or(0, |device| device.free_bytes);
    let free = |gpu: &Device| if gpu.memory_bytes == 0 && gpu.free_bytes == 0 { processor } else { gpu.free_bytes };
    let by_free = shares.iter().all(|&share| share == 0.0);
    let share = |index: usize, gpu: &Device| {
        if by_free { free(gpu) as f32 } else { shares.get(index).copied().unwrap_or(0.0) }
    };
    gpus.iter().enumerate().map(|(index, gpu)| Gpu { free: free(gpu), share: share(index, gpu) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, id: Option<&str>, integrated: bool) -> Device {
        Device {
            name: name.into(),
            description: format!("the {name}"),
            gpu: true,
            memory_bytes: 8 << 30,
            free_bytes: 6 << 30,
            integrated,
            backend: name.trim_end_matches(char::is_numeric).into(),
            buffer: name.into(),
            splits_rows: name.starts_with("CUDA"),
            id: id.map(str::to_owned),
        }
    }

    fn cpu() -> Device {
        Device { gpu: false, ..gpu("CPU", None, false) }
    }

    fn names(options: &ModelOptions, all: &[Device]) -> Result<Vec<String>, String> {
        let selected_gpus = selected_gpus(options, all).map_err(|error| error.to_string())?;
        Ok(selected_gpus.into_iter().map(|device| device.name).collect())
    }

    #[test]
    fn each_gpu_is_used_once_and_integrated_gpus_only_alone() {
        let defaults = ModelOptions::default();
        let (a, b) = (gpu("CUDA0", Some("0:1"), false), gpu("CUDA1", Some("0:2"), false));
        let (same, own) = (gpu("Vulkan0", Some("0:1"), false), gpu("Vulkan1", None, true));
        assert_eq!(names(&defaults, &[a.clone(), b, same.clone(), own.clone(), cpu()]).unwrap(), ["CUDA0", "CUDA1"]);
        assert_eq!(names(&defaults, &[own, gpu("SYCL0", None, true), cpu()]).unwrap(), ["Vulkan1"]);
        assert!(names(&defaults, &[cpu()]).unwrap().is_empty());
        let both = ModelOptions { devices: Some(vec!["vulkan0".into(), "CUDA0".into(), "CUDA0".into()]), ..defaults };
        assert_eq!(names(&both, &[a, same, cpu()]).unwrap(), ["Vulkan0", "CUDA0"]);
    }

    #[test]
    fn placement_errors_list_the_available_devices() {
        let all = [gpu("CUDA0", None, false), gpu("CUDA1", None, false), cpu()];
        let named = |name: &str| ModelOptions { devices: Some(vec![name.into()]), ..ModelOptions::default() };
        let error = names(&named("CUDA2"), &all).unwrap_err();
        assert!(error.contains("'CUDA2', but there are CUDA0 (the CUDA0) and CUDA1 (the CUDA1);"), "{error}");
        let error = names(&named("CPU"), &all[2..]).unwrap_err();
        assert!(error.contains(missing_gpu_reason()), "{error}");
        let one = ModelOptions { split_mode: SplitMode::None, main_gpu: 1, ..ModelOptions::default() };
        assert_eq!(names(&one, &all).unwrap(), ["CUDA1"]);
        assert!(names(&one, &all[2..]).unwrap().is_empty());
        let error = names(&ModelOptions { main_gpu: 2, ..one }, &all).unwrap_err();
        assert!(error.starts_with("--main-gpu 2 does not exist: there are CUDA0"), "{error}");
        let three = ModelOptions { tensor_split: vec![1.0; 3], ..ModelOptions::default() };
        let error = names(&three, &all).unwrap_err();
        assert!(error.starts_with("--tensor-split has 3 shares, but there are CUDA0"), "{error}");
        assert!(names(&three, &all[2..]).unwrap().is_empty());
        let rows = ModelOptions { split_mode: SplitMode::Row, ..ModelOptions::default() };
        assert_eq!(names(&rows, &all).unwrap(), ["CUDA0", "CUDA1"]);
        let error = names(&rows, &[gpu("Vulkan0", None, false), cpu()]).unwrap_err();
        assert!(error.starts_with("--split-mode row is not possible with Vulkan0: Vulkan cannot"), "{error}");
    }

    #[test]
    fn shares_follow_free_memory_unless_given() {
        let (small, silent) =
            (gpu("CUDA0", None, false), Device { memory_bytes: 0, free_bytes: 0, ..gpu("CUDA1", None, false) });
        let processor = Device { free_bytes: 12 << 30, ..cpu() };
        let all = [small.clone(), silent.clone(), processor];
        let by_free = gpu_shares(&all[..2], &all, &[]);
        assert_eq!(by_free[1], Gpu { free: 12 << 30, share: (12_u64 << 30) as f32 });
        assert_eq!(by_free[0].share * 2.0, by_free[1].share);
        let given: Vec<f32> = gpu_shares(&[small, silent], &all, &[3.0]).iter().map(|gpu| gpu.share).collect();
        assert_eq!(given, [3.0, 0.0]);
    }
}
