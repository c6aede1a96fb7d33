"""Models and aliases over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.shapes import MINI, Text, Texts, Whole
from sie_contracts.models.load_errors import LoadErrorClass

ModelState = Literal["available", "loading", "loaded", "unloading", "failed"]


class Download(Struct, kw_only=True):
    """Weights that a worker downloads. `total_bytes` is 0 until it is known."""

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
    """The engine that the entry asks for, the engine that workers use, and the reason for it."""

    requested: str | None
    served: list[str]
    reason: str | None


class LoadError(Struct, kw_only=True):
    """Reason why a worker could not load a model. `permanent`: the worker does not try again until the entry
    changes.
    """

    code: LoadErrorClass
    attempts: int
    permanent: bool
    message: str


class ModelHost(Struct, kw_only=True):
    """A model on one worker. `memory_bytes` is 0 if it is not loaded, `load_s` is 0 if it never was."""

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
    """The checks that a loaded model passed. A load that fails one of them is refused.

    `digests`: the files whose SHA-256 equals the digest in the entry. `packed`: for each output, the worst cosine of
    the packed path with the padded one. `golden`: the worst cosine with vectors of the public oracle; null if the entry
    has no golden vectors.
    """

    digests: list[str]
    packed: dict[str, float]
    golden: float | None
    seconds: float


class AliasTarget(Struct, kw_only=True):
    """A model that serves an alias. Its share of the keys is its weight divided by the sum of all weights."""

    model: str
    weight: int


class ShadowFigures(Struct, kw_only=True):
    """Measurements of a shadow at a gateway since the gateway started. The metrics `sie_gateway_shadow_*` have the
    distributions.

    `copies`: number of copies by their end. `cosine`: the mean cosine of a dense vector that was served and the vector
    of its copy. `rank`: the mean Spearman correlation of the scores that were served and the scores of the copy. Times
    are means. Null: nothing was compared.
    """

    copies: dict[str, int]
    cosine: float | None
    rank: float | None
    served_ms: float | None
    shadow_ms: float | None


class AliasShadow(Struct, kw_only=True):
    """A model that gets copies of a share of an alias' requests."""

    model: str
    share: float
    figures: ShadowFigures


class AliasInfo(Struct, kw_only=True):
    """The models of an alias."""

    targets: list[AliasTarget]
    shadow: AliasShadow | UnsetType = UNSET


class ModelStats(Struct, kw_only=True):
    """Work of a model at the workers that know it."""

    queue_absolute: int


class ModelInfo(Struct, kw_only=True):
    """A model, a profile of a model, or an alias.

    `prompts` lists the prompts by name, and `prompt_texts` has the text of each. `hosts`: each worker that knows the
    model, with its state there. `on_disk`: whether a healthy worker has the weights on its disk.
    `download_bytes`: about what the first load downloads where they are not, without LoRAs; null if it is not known.
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
    prompts: list[str]
    prompt_texts: dict[str, str]
    revision: str
    license: str
    languages: list[str]
    description: str
    certificate: Certificate | None
    fingerprint: str | None
    variant_of: Text = UNSET
    alias: Annotated[AliasInfo | UnsetType, Meta(description="Of an alias: its targets and its shadow.")] = UNSET
    downloads: list[Download]
    precision: Precision
    engine: Engine
    backend: str
    capabilities: list[Literal["embed", "rerank", "classify"]]
    stats: ModelStats
    on_disk: bool
    download_bytes: int | None


class Models(Struct, kw_only=True):
    """The models in two forms: for clients of OpenAI and for clients of SIE. `total`: number of all models, for a
    request with a limit.
    """

    EXAMPLE: ClassVar[Any] = {"object": "list", "data": [ModelInfo.EXAMPLE], "models": [ModelInfo.EXAMPLE]}

    object: str
    data: list[ModelInfo]
    models: list[ModelInfo]
    total: Whole = UNSET
