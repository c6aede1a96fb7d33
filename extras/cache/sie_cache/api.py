"""Bodies and replies of the routes that show and erase the cached answers of gateways."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from sie_contracts.api.shapes import MINI, Flag, Text


class CachedModel(Struct, kw_only=True):
    """Answers of one model in the cache of a gateway. `key`: API key that uses them; empty if all keys share them, or
    without authentication.
    """

    model: str
    key: str
    answers: int


class CacheState(Struct, kw_only=True):
    """Cache of the gateway that replies. `max_bytes`: largest size of the cache; 0 if the gateway has none.
    `evictions`: number of answers that were removed for lack of room. `gateways`: number of gateways, each of which may
    have a cache of its own. `models`: at most 1000, those with the most answers first.
    """

    EXAMPLE: ClassVar[Any] = {
        "max_bytes": 268435456,
        "bytes": 19030400,
        "answers": 10000,
        "evictions": 0,
        "gateways": 2,
        "models": [{"model": MINI, "key": "", "answers": 10000}],
    }

    max_bytes: int
    bytes: int
    answers: int
    evictions: int
    gateways: int
    models: list[CachedModel]


class CacheErasure(Struct, kw_only=True, forbid_unknown_fields=True):
    """Selection of answers to erase, in the caches of all gateways. An answer is erased if it fits each field that is
    set. At least one field is set.
    """

    EXAMPLE: ClassVar[Any] = {"model": MINI}

    model: Annotated[Text, Meta(description="Id of a model.")] = ""
    key: Annotated[Text, Meta(description="Id of an API key, as in metrics. Only answers of this key are erased.")] = ""
    text: Annotated[
        str | None,
        Meta(description="Text of the input. An input with other content, such as images, cannot be selected."),
    ] = None
    query: Annotated[str | None, Meta(description="Query of a scoring request; `text` is then the document.")] = None
    all: Annotated[Flag, Meta(description="True: every answer.")] = False


class CacheErased(Struct, kw_only=True):
    """Result of an erasure. `answers`: number of answers that the replying gateway has erased. `gateways`: number of
    gateways that the erasure was sent to, this one included.
    """

    EXAMPLE: ClassVar[Any] = {"answers": 10000, "gateways": 2}

    answers: int
    gateways: int
