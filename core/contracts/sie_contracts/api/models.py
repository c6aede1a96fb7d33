"""Replies of the routes that list models and aliases."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.shapes import MINI, Text, Texts, Whole
from sie_contracts.models.load_errors import LoadErrorClass

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]


class Download(Struct, kw_only=True):
    """Weights that a worker downloads. `total_bytes` is 0 while the size is not known."""

    worker: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float


class Precision(Struct, kw_only=True):
    """The requested precision, the precision that workers use, and the reason if they differ."""

    requested: str | None
    served: list[str]
    reason: str | None


class Engine(Struct, kw_only=True):
    """The engine that the catalogue entry requests, the engines that workers use, and the reason why they use them."""

    requested: str | None
    served: list[str]
    reason: str | None


class LoadError(Struct, kw_only=True):
    """Reason why a worker could not load a model. `permanent`: true if the worker will not try again before the
    catalogue entry changes.
    """

    code: LoadErrorClass
    attempts: int
    permanent: bool
    message: str


class ModelHost(Struct, kw_only=True):
    """State of a model on one worker. `memory_bytes`: 0 if the model is not loaded. `load_s`: seconds of its last load;
    0 if it was never loaded. `queued`: number of its messages that the worker has.
    """

    worker: str
    state: ModelState
    memory_bytes: int
    load_s: float
    queued: int
    error: LoadError | None


class ProfileInfo(Struct, kw_only=True):
    """A profile of a model. `changes`: each setting that differs from the default profile, with its value."""

    is_default: bool
    changes: dict[str, Any]
    output_types: Texts = UNSET
    lora_id: Text = UNSET


class Certificate(Struct, kw_only=True):
    """Checks that a loaded model passed. If a check fails, the load is refused.

    `digests`: files whose SHA-256 equals the digest in the catalogue entry. `packed`: for each output, the lowest
    cosine between vectors of a packed batch (no padding) and of a padded batch. `golden`: the lowest cosine with the
    reference vectors in the entry; null if the entry has none.
    """

    digests: list[str]
    packed: dict[str, float]
    golden: float | None
    seconds: float


class AliasTarget(Struct, kw_only=True):
    """A model that serves an alias. Its share of the request keys is its weight divided by the sum of all weights."""

    model: str
    weight: int


class ShadowFigures(Struct, kw_only=True):
    """Measurements of a shadow model at one gateway, since the gateway started. The metrics `sie_gateway_shadow_*` have
    the distributions.

    `copies`: number of copied requests by result. `cosine`: mean cosine between the served dense vector and the vector
    of the copy. `rank`: mean Spearman correlation between the served scores and the scores of the copy. Times are
    means. Null means that nothing was compared yet.
    """

    copies: dict[str, int]
    cosine: float | None
    rank: float | None
    served_ms: float | None
    shadow_ms: float | None


class AliasShadow(Struct, kw_only=True):
    """A shadow model: it gets copies of a share of the requests to an alias."""

    model: str
    share: float
    figures: ShadowFigures


class AliasInfo(Struct, kw_only=True):
    """The target models of an alias, and its shadow model."""

    targets: list[AliasTarget]
    shadow: AliasShadow | UnsetType = UNSET


class ModelStats(Struct, kw_only=True):
    """Work of a model on all workers that report it. `queue_absolute`: number of its messages that workers have."""

    queue_absolute: int


class ModelInfo(Struct, kw_only=True):
    """A model, a profile of a model, or an alias.

    `prompts`: names of its prompts; `prompt_texts`: their texts. `hosts`: state of the model on each worker that
    reports it. `on_disk`: whether a healthy worker has the weights on its disk. `download_bytes`: approximate size of
    the first download, without LoRAs; null if it is not known. `needs_labels`: whether an extraction must name labels.
    `extracts`: fields that the model fills in the answer to an extraction. `options`: request parameters that its
    family reads and some other families do not. `model_type`: its type in the words of Xinference.
    """

    EXAMPLE: ClassVar[Any] = {
        "name": MINI,
        "id": MINI,
        "object": "model",
        "created": 0,
        "owned_by": "sentence-transformers",
        "inputs": ["text"],
        "outputs": ["dense", "score"],
        "tasks": ["encode", "score"],
        "dims": {"dense": 384},
        "loaded": True,
        "state": "loaded",
        "last_error": None,
        "max_sequence_length": 256,
        "profiles": {"default": {"is_default": True, "changes": {}}},
        "bundles": ["default"],
        "worker_count": 1,
        "workers": ["w0"],
        "hosts": [
            {"worker": "w0", "state": "loaded", "memory_bytes": 91000000, "load_s": 1.4, "queued": 0, "error": None}
        ],
        "matryoshka_dims": None,
        "score_scale": "cosine",
        "supports_lora": False,
        "needs_labels": False,
        "extracts": [],
        "options": ["score_mode", "score_weights"],
        "prompts": [],
        "prompt_texts": {},
        "revision": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        "license": "apache-2.0",
        "languages": ["en"],
        "description": "",
        "certificate": {"digests": [], "packed": {"dense": 0.9999999}, "golden": 0.9999998, "seconds": 0.4},
        "fingerprint": "b1946ac9",
        "downloads": [],
        "precision": {"requested": None, "served": ["float32"], "reason": None},
        "engine": {"requested": None, "served": ["torch"], "reason": None},
        "backend": "torch",
        "capabilities": ["embed"],
        "model_type": "embedding",
        "stats": {"queue_absolute": 0},
        "on_disk": True,
        "download_bytes": 91000000,
    }

    name: str
    id: str
    object: str
    created: int
    owned_by: str
    inputs: list[str]
    outputs: list[str]
    tasks: list[Literal["encode", "score", "extract"]]
    dims: dict[str, int]
    loaded: bool
    state: ModelState
    last_error: LoadError | None
    max_sequence_length: int
    profiles: dict[str, ProfileInfo]
    bundles: list[str]
    worker_count: int
    workers: list[str]
    hosts: list[ModelHost]
    matryoshka_dims: list[int] | None
    score_scale: str | None
    supports_lora: bool
    needs_labels: bool
    extracts: list[Literal["entities", "relations", "classifications", "objects", "data"]]
    options: list[str]
    prompts: list[str]
    prompt_texts: dict[str, str]
    revision: str
    license: str
    languages: list[str]
    description: str
    certificate: Certificate | None
    fingerprint: str | None
    variant_of: Text = UNSET
    alias: Annotated[
        AliasInfo | UnsetType, Meta(description="For an alias: its target models and its shadow model.")
    ] = UNSET
    downloads: list[Download]
    precision: Precision
    engine: Engine
    backend: str
    capabilities: list[Literal["embed", "rerank", "classify"]]
    model_type: Literal["embedding", "rerank", "audio", "flexible"]
    stats: ModelStats
    on_disk: bool
    download_bytes: int | None


class Models(Struct, kw_only=True):
    """The models, in two fields: `data` for clients of OpenAI, `models` for clients of SIE. `total`: number of all
    models that match; absent if the request has no `limit`.
    """

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [ModelInfo.EXAMPLE], "models": [ModelInfo.EXAMPLE]}

    object: str
    data: list[ModelInfo]
    models: list[ModelInfo]
    total: Whole = UNSET
