"""Bodies and replies of Cohere's routes for vectors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.dialects import Embeddings, Parts, Priority, VectorType
from sie_contracts.api.inference import Truncation
from sie_contracts.api.shapes import MINI, TIMES, Flag, Map, Text, Texts, Timing, Usage, Whole, needs_one_of


class CohereInput(Struct, kw_only=True):
    """An input of several parts: its texts, one per line, its images and its sound."""

    content: Parts


class EmbedV1(Struct, kw_only=True):
    """Texts, images or inputs of several parts, in the form of the first version of Cohere's API."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "input_type": "search_document",
        "texts": ["Hello"],
        "embedding_types": ["float"],
    }

    model: Text = UNSET
    texts: Texts = UNSET
    images: Annotated[list[str], Meta(description="Data URIs, base64 or URLs.")] | UnsetType = UNSET
    inputs: list[CohereInput] | UnsetType = UNSET
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | UnsetType = UNSET
    embedding_types: list[VectorType] | UnsetType = UNSET
    output_dimension: Whole = UNSET
    max_tokens: Whole = UNSET
    truncate: Truncation | UnsetType = UNSET
    normalize: Flag = UNSET
    options: Map = UNSET
    priority: Priority = UNSET


class EmbedV2(EmbedV1, kw_only=True):
    """Texts, images or inputs of several parts, in the form of the second version of Cohere's API."""

    model: str
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"]


_needs_inputs = needs_one_of("texts", "images", "inputs")
EmbedV1Body = Annotated[EmbedV1, _needs_inputs]
EmbedV2Body = Annotated[EmbedV2, _needs_inputs]


class ShownImage(Struct, kw_only=True):
    """Width, height, format and bit depth of an image, from the first bytes of its file."""

    width: Whole = UNSET
    height: Whole = UNSET
    format: Text = UNSET
    bit_depth: Whole = UNSET


class Embedded(Struct, kw_only=True):
    """Vectors by type (`float`, `int8` and so on). In version 1 of Cohere's API, a request that names no type gets a
    plain list of vectors.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "2b2c...",
        "response_type": "embeddings_by_type",
        "embeddings": {"float": [[0.02, -0.07]]},
        "texts": ["Hello"],
        "meta": {"api_version": {"version": "2"}},
        "timing": TIMES,
        "fingerprint": "b1946ac9",
    }

    id: Text = UNSET
    response_type: Text = UNSET
    embeddings: dict[str, Any] | Embeddings | UnsetType = UNSET
    embeddings_scale: Map = UNSET
    texts: list[str | None] | UnsetType = UNSET
    images: list[ShownImage] | UnsetType = UNSET
    meta: Map = UNSET
    usage: Usage | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    fingerprint: Text = UNSET
    warnings: Texts = UNSET
    explain: list[dict[str, Any]] | UnsetType = UNSET
