"""Bodies and replies of Ollama's routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts import __version__
from sie_contracts.api.dialects import RERANKER
from sie_contracts.api.shapes import MINI, SHARED, Flag, Map, Reply, Text, TextFlag, Whole

_NAME = f"{MINI}:latest"
_DIGEST = "0b27f2a1a5f1a2f3c7f6cdb7a86ab1b4c2f8dce8bd1f6f4f4ce30aa4cb2de5c9"
_KeepAlive = Annotated[str | float | UnsetType, Meta(description="Ignored: workers manage their memory.")]
_Options = Annotated[Map, Meta(description="`num_ctx`: maximum tokens of an input. Other options are ignored.")]
_Name = Annotated[Text, Meta(description="Name of the model, with or without Ollama's tag `latest`.")]


class OllamaEmbed(Struct, kw_only=True):
    """Texts to encode. A text that is too long is truncated, unless `truncate` is false."""

    EXAMPLE: ClassVar[Any] = {"model": _NAME, "input": ["Hello"]}

    model: _Name = UNSET
    input: str | list[str] | UnsetType = UNSET
    truncate: TextFlag = UNSET
    dimensions: Whole = UNSET
    options: _Options = UNSET
    keep_alive: _KeepAlive = UNSET


class OllamaEmbedded(Reply, kw_only=True):
    """Normalised vectors of the inputs, in their order. Durations are in nanoseconds."""

    EXAMPLE: ClassVar[Any] = {
        "model": _NAME,
        "embeddings": [[0.02, -0.07]],
        "total_duration": 5300000,
        "load_duration": 0,
        "prompt_eval_count": 3,
        **SHARED,
    }

    embeddings: list[list[float]]
    total_duration: Whole = UNSET
    load_duration: Whole = UNSET
    prompt_eval_count: Whole = UNSET


class OllamaPrompt(Struct, kw_only=True):
    """Request for the vector of one text."""

    EXAMPLE: ClassVar[Any] = {"model": _NAME, "prompt": "Hello"}

    model: _Name = UNSET
    prompt: Text = UNSET
    options: _Options = UNSET
    keep_alive: _KeepAlive = UNSET


class OllamaEmbedding(Struct, kw_only=True):
    """Vector of the text. It is not normalised."""

    EXAMPLE: ClassVar[Any] = {"embedding": [0.4, -1.3]}

    embedding: list[float]


class OllamaRerank(Struct, kw_only=True):
    """Request to rank documents, as programs with the address of Ollama send it."""

    EXAMPLE: ClassVar[Any] = {"model": RERANKER, "query": "Who?", "documents": ["Ada", "Bob"], "top_n": 1}

    model: _Name = UNSET
    query: str
    documents: Annotated[list[str], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, description="0: all documents.")] | UnsetType = UNSET


class OllamaDetails(Struct, kw_only=True):
    """Description of a model. `parameter_size` is empty, because it is not known. `quantization_level`: precision of
    the weights; empty if no worker has reported it.
    """

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct, kw_only=True):
    """A model. `size`: bytes in the memory of a worker; 0 if no worker has loaded it. Models with different weights
    have different digests.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Struct, kw_only=True):
    """Models that compute vectors."""

    EXAMPLE: ClassVar[Any] = {
        "models": [
            {
                "name": _NAME,
                "model": _NAME,
                "modified_at": "1970-01-01T00:00:00Z",
                "size": 91000000,
                "digest": _DIGEST,
                "details": {"format": "safetensors", "family": "text-encoder", "families": ["text-encoder"]},
            }
        ]
    }

    models: list[OllamaModel]


class OllamaLoadedModel(OllamaModel, kw_only=True):
    """A loaded model. `expires_at` is far in the future, because a model stays loaded until another model needs its
    memory.
    """

    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(Struct, kw_only=True):
    """Loaded models that compute vectors."""

    EXAMPLE: ClassVar[Any] = {"models": []}

    models: list[OllamaLoadedModel]


class OllamaShow(Struct, kw_only=True):
    """Request for the details of a model."""

    EXAMPLE: ClassVar[Any] = {"model": _NAME}

    model: _Name = UNSET
    name: Annotated[Text, Meta(description="Older clients send this in place of `model`.")] = UNSET
    verbose: Annotated[Flag, Meta(description="Ignored.")] = UNSET


class OllamaShown(Struct, kw_only=True):
    """Details of a model. `modelfile`, `parameters` and `template` are empty."""

    EXAMPLE: ClassVar[Any] = {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "license": "apache-2.0",
        "modified_at": "1970-01-01T00:00:00Z",
        "details": {"format": "safetensors", "family": "text-encoder", "families": ["text-encoder"]},
        "model_info": {
            "general.architecture": "text-encoder",
            "text-encoder.context_length": 256,
            "text-encoder.embedding_length": 384,
        },
        "capabilities": ["embedding"],
    }

    license: str
    modified_at: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modelfile: str = ""
    parameters: str = ""
    template: str = ""


class OllamaVersion(Struct, kw_only=True):
    """The version of this server."""

    EXAMPLE: ClassVar[Any] = {"version": __version__}

    version: str
