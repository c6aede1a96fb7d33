"""Bodies and replies of Voyage's route for contextualised embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sie_contracts.api.dialects import LISTED, Embedding, VectorType
from sie_contracts.api.shapes import MINI, SHARED, Flag, Map, Reply, Text, TextFlag, Whole


class ContextualizedRequest(Struct, kw_only=True):
    """Documents as lists of their chunks, or with `enable_auto_chunking` as one text each. A query is one text."""

    EXAMPLE: ClassVar[Any] = {
        "model": MINI,
        "inputs": [["Berlin is the capital of Germany.", "The city has 3.7 million inhabitants."]],
        "input_type": "document",
    }

    model: Text = UNSET
    inputs: Annotated[
        list[Annotated[list[str], Meta(min_length=1, max_length=4096)]], Meta(min_length=1, max_length=1000)
    ]
    input_type: Literal["query", "document"] | UnsetType = UNSET
    encoding_format: Literal["float", "base64"] | UnsetType = UNSET
    output_dtype: VectorType | UnsetType = UNSET
    output_dimension: Whole = UNSET
    enable_auto_chunking: TextFlag = UNSET
    chunk_size: Annotated[Whole, Meta(description="Maximum tokens of an automatic chunk; default 512.")] = UNSET
    chunk_overlap: Annotated[
        Whole, Meta(description="Tokens that the next chunk repeats, at most half of `chunk_size`; default 0.")
    ] = UNSET
    normalize: Flag = UNSET
    options: Map = UNSET


class ContextualizedChunk(Embedding, kw_only=True):
    """The vector of a chunk. `text` is set with `enable_auto_chunking`."""

    text: Text = UNSET


class ContextualizedDocument(Struct, kw_only=True):
    """The vectors of a document, in the order of its chunks."""

    object: Text = UNSET
    index: Whole = UNSET
    data: list[ContextualizedChunk] | UnsetType = UNSET


class ContextualizedReply(Reply, kw_only=True):
    """Documents, in the order of the inputs."""

    EXAMPLE: ClassVar[Any] = {
        **LISTED,
        "data": [
            {
                "object": "list",
                "index": 0,
                "data": [
                    {"object": "embedding", "index": 0, "embedding": [0.02, -0.07]},
                    {"object": "embedding", "index": 1, "embedding": [0.01, -0.04]},
                ],
            }
        ],
        **SHARED,
    }

    id: Text = UNSET
    object: Text = UNSET
    created: Whole = UNSET
    data: list[ContextualizedDocument] | UnsetType = UNSET
