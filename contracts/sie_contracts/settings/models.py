"""Settings of devices, models, weights and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, CLUSTER_STORE, DEVICE, LABEL, LIST, PATH, STORE, choice, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSettings:
    device: str = row(
        "auto",
        "SIE_DEVICE",
        "adapter",
        DEVICE,
        "Device of all forward passes; auto takes CUDA, then MPS, then CPU. A named device that is absent is a start error.",
    )
    models_dir: str | None = row(
        None,
        "SIE_MODELS_DIR",
        "config adapter",
        STORE,
        "Folder or bucket of model files laid over the packaged catalogue; a folder also of LoRAs that requests may name by path; ./models is used when it exists. One that is named and missing is a start error.",
    )
    allow_remote_code: bool = row(
        False,
        "SIE_ALLOW_REMOTE_CODE",
        "config adapter",
        BOOL,
        "Whether entries written over HTTP may make workers run code, or use what is installed: load.trust_remote_code, weights.package, families of other distributions. What SIE_MODELS_DIR and the package say may always.",
    )
    model_paths: tuple[str, ...] | None = row(
        None,
        "SIE_MODEL_PATHS",
        "config adapter",
        LIST,
        "Folders, with commas between, that entries written over HTTP may name (weights.path, run.lora, golden), beside the models folder. A models folder of another user or open to all is accepted if it is named here.",
    )
    model_filter: tuple[str, ...] | None = row(
        None, "SIE_MODEL_FILTER", "config", LIST, "Only these models are available. An unknown name is a start error."
    )
    gpu_type: str | None = row(
        None,
        "SIE_GPU_TYPE",
        "sidecar gateway",
        LABEL,
        "Overrides the detected type of the GPU, by which requests may be routed; it is the machine profile where SIE_MACHINE_PROFILE is unset.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class WeightSettings:
    local_cache: str | None = row(
        None,
        "SIE_LOCAL_CACHE",
        "adapter",
        PATH,
        "First place looked up for weights, and where downloads land. Default: HF_HOME.",
    )
    cluster_cache: str | None = row(
        None,
        "SIE_CLUSTER_CACHE",
        "adapter",
        CLUSTER_STORE,
        "Shared weights, second in order after the local cache; `sie weights push` fills it. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables.",
    )
    hf_fallback: bool = row(
        True, "SIE_HF_FALLBACK", "adapter", BOOL, "Whether a miss in the caches may download from the Hugging Face Hub."
    )
    hf_home: str = row(
        "~/.cache/huggingface",
        "HF_HOME",
        "adapter",
        PATH,
        "Hugging Face's own variable, read only: default of SIE_LOCAL_CACHE.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineSettings:
    preprocessor_workers: int = row(
        4,
        "SIE_PREPROCESSOR_WORKERS",
        "sidecar adapter",
        whole(1),
        "Threads that tokenise, shared by all models; in the adapter for families that tokenise themselves.",
    )
    image_workers: int = row(
        4, "SIE_IMAGE_WORKERS", "adapter", whole(1), "Threads that prepare images.", waits_for="image models"
    )
    attention_backend: str = row(
        "auto",
        "SIE_ATTENTION_BACKEND",
        "adapter",
        choice("auto", "flash_attention_2", "sdpa", "eager"),
        "Attention implementation; what the device cannot do falls back to sdpa with a warning.",
    )
    default_compute_precision: str = row(
        "float16",
        "SIE_DEFAULT_COMPUTE_PRECISION",
        "adapter",
        choice("float16", "bfloat16", "float32"),
        "Precision of models that do not set their own. A CPU runs 16-bit models in bfloat16 where it has the instructions, else in float32.",
    )
    instrumentation: bool = row(
        False,
        "SIE_INSTRUMENTATION",
        "adapter",
        BOOL,
        "Sizes, padding, times and memory of the last 100 batches in /ws/status of the worker.",
    )
    max_loras_per_model: int = row(10, "SIE_MAX_LORAS_PER_MODEL", "adapter", whole(1), "LoRAs kept per model.")
