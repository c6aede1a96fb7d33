"""Keys of cached answers: all that determines an answer is part of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sie_contracts.media.documents import DocumentFile
from sie_contracts.models.muvera import Muvera
from sie_contracts.settings import load
from sie_contracts.wire.messages import Input, Mention, RunOptions, TextChunks
from sie_gateway.admission.grant import Grant
from sie_gateway.inference.answers import CachePolicy, digests_of, space_of
from sie_gateway.inference.body import RequestItem

# a value of each field of the options that differs from its default
OPTIONS: dict[str, Any] = {
    "outputs": ("sparse",),
    "prefix": "query: ",
    "suffix": " end",
    "truncate": "START",
    "pooling": "cls",
    "normalize": False,
    "dimensions": 4,
    "max_tokens": 7,
    "lora": "org/x",
    "dtype": "float16",
    "is_query": True,
    "muvera": Muvera(),
    "pieces": (("a", "query"),),
    "query_prefix": "q",
    "query_suffix": "s",
    "instruction": "find",
    "labels": ("person",),
    "threshold": 0.5,
    "parameters": {"flat": True},
    "document_tokens": 3,
    "variant": "0f",
    "sound_from_s": 1.0,
}
ITEMS: dict[str, RequestItem] = {
    "text": RequestItem("b"),
    "tokens": RequestItem(None, tokens=(1, 2)),
    "pair": RequestItem("a", pair="b"),
    "vectors": RequestItem("a", vectors=np.ones((1, 2), np.float32)),
    "images": RequestItem("a", images=(b"png",)),
    "mentions": RequestItem("a", mentions=(Mention("x", 0, 1),)),
    "audio": RequestItem("a", audio=b"wav"),
    "document": RequestItem("a", document=DocumentFile(b"pdf")),
    "chunks": RequestItem("a", chunks=TextChunks(spans=bytes(8))),
}


def digest_of(item: RequestItem, query: RequestItem | None = None) -> bytes:
    (digest,) = digests_of((item,), query)
    return digest


def test_each_option_is_part_of_the_key() -> None:
    """A field that is new needs a value in OPTIONS here, and nothing in the product."""
    assert OPTIONS.keys() == set(RunOptions.__struct_fields__)
    runs = [RunOptions(), *(msgspec.structs.replace(RunOptions(), **{name: OPTIONS[name]}) for name in OPTIONS)]
    assert len({space_of("k", "f", "encode", run) for run in runs}) == len(runs)


def test_owner_fingerprint_and_operation_are_part_of_the_key() -> None:
    spaces = {
        space_of(owner, fingerprint, operation, RunOptions())
        for owner in ("", "k", "l")
        for fingerprint in ("f", "g")
        for operation in ("encode", "score", "extract")
    }
    assert len(spaces) == 18
    assert space_of("k", "f", "encode", RunOptions()) in spaces


def test_each_field_of_an_input_is_part_of_the_digest() -> None:
    assert ITEMS.keys() == set(Input.__struct_fields__)
    items = [RequestItem("a"), *ITEMS.values()]
    assert len({digest_of(item) for item in items}) == len(items)


def test_a_score_is_cached_for_its_pair_of_query_and_document() -> None:
    first, second = RequestItem("first"), RequestItem("second")
    pairs = [(first, None), (first, second), (second, first), (first, first), (second, None)]
    assert len({digest_of(document, query) for document, query in pairs}) == len(pairs)
    both = list(digests_of((first, second), RequestItem("q")))
    assert both == [digest_of(first, RequestItem("q")), digest_of(second, RequestItem("q"))]


def test_fields_that_no_worker_reads_are_not_part_of_the_digest() -> None:
    assert digest_of(RequestItem("a", id="1", metadata={"b": 2})) == digest_of(RequestItem("a"))


def test_the_settings_name_who_uses_cached_answers() -> None:
    """SIE_CACHE_SHARED, SIE_CACHE_EXCLUDED_MODELS."""

    def owner(grant: Grant, model: str = "a/b", **environ: str) -> str | None:
        return CachePolicy.from_settings(load(environ=environ).settings).owner(grant, model)

    assert owner(Grant("k")) == "k"
    assert owner(Grant("k"), SIE_CACHE_SHARED="true") == ""
    assert owner(Grant("k", caches=False), SIE_CACHE_SHARED="true") is None
    excluded = {"SIE_CACHE_EXCLUDED_MODELS": "a/b,c/d"}
    assert (owner(Grant("k"), "a/b", **excluded), owner(Grant("k"), "e/f", **excluded)) == (None, "k")
