"""Settings of devices, models, weights and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, CLUSTER_STORE, DEVICE, LABEL, LIST, PATH, STORE, choice, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSettings:
    device: str = row(
        "auto",
        "adapter",
        DEVICE,
        "Device of all forward passes. auto uses one: CUDA, else MPS, else the CPU. all uses every GPU that CUDA shows; without one it is the same as auto. With a list or with all, the worker has one adapter process for each device, which needs Linux. A named device that is absent is a start error.",
    )
    models_dir: str | None = row(
        None,
        "config adapter",
        STORE,
        "Folder or bucket of model files that are added to the packaged catalogue or replace its entries. Requests may name LoRAs in such a folder by path. Default: ./models if it exists. A named folder that is missing is a start error.",
    )
    allow_remote_code: bool = row(
        False,
        "config adapter",
        BOOL,
        "Whether catalogue entries written over HTTP may use load.trust_remote_code, weights.package and families of other distributions. With these, workers run code or use installed packages. Entries of SIE_MODELS_DIR and of the packaged catalogue may always use them.",
    )
    model_paths: tuple[str, ...] | None = row(
        None,
        "config adapter",
        LIST,
        "Comma-separated folders that entries written over HTTP may name (weights.path, run.lora, golden), in addition to the models folder. A models folder that belongs to another user, or that every user may write to, is accepted if it is named here.",
    )
    model_filter: tuple[str, ...] | None = row(
        None, "config", LIST, "Only these models are available. An unknown name is a start error."
    )
    gpu_type: str | None = row(
        None,
        "sidecar gateway",
        LABEL,
        "Overrides the detected type of the GPU. Requests may be routed by this type. It is also the machine profile if SIE_MACHINE_PROFILE is unset.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class WeightSettings:
    local_cache: str | None = row(
        None,
        "sidecar adapter config",
        PATH,
        "Folder where weights are looked up first, and to which downloads and files that are computed from weights (sie-derived) are written. The sidecar only reads it, to announce the models that are there. Default: HF_HOME.",
    )
    cluster_cache: str | None = row(
        None,
        "adapter",
        CLUSTER_STORE,
        "Bucket of weights that workers share, looked up after the local cache. `sie weights push` fills it. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables.",
    )
    hf_fallback: bool = row(
        True, "adapter", BOOL, "Whether weights that no cache has may be downloaded from the Hugging Face Hub."
    )
    hf_home: str = row(
        "~/.cache/huggingface",
        "sidecar adapter config",
        PATH,
        "Variable of Hugging Face: the folder of its caches. SIE reads it only as the default of SIE_LOCAL_CACHE.",
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineSettings:
    preprocessor_workers: int = row(
        4,
        "sidecar adapter",
        whole(1),
        "Number of threads that tokenise, shared by all models. For families whose adapter tokenises: maximum number of batches that it tokenises at the same time.",
    )
    image_workers: int = row(
        4,
        "sidecar",
        whole(1),
        "Number of processes that turn image files into pixels and sound files into features, shared by all models. They start when the first files come.",
    )
    attention_backend: str = row(
        "auto",
        "adapter",
        choice("auto", "flash_attention_2", "sdpa", "eager"),
        "Attention implementation. If the device does not support it, the adapter warns and uses sdpa.",
    )
    default_compute_precision: str = row(
        "float16",
        "adapter",
        choice("float16", "bfloat16", "float32"),
        "Precision of models that do not set their own. A CPU runs 16-bit models in bfloat16 if it has the instructions, else in float32.",
    )
    instrumentation: bool = row(
        False,
        "adapter",
        BOOL,
        "Whether /ws/status of the worker shows sizes, padding, times and memory of the last 100 batches.",
    )
    max_loras_per_model: int = row(10, "adapter", whole(1), "Maximum number of loaded LoRAs per model.")
