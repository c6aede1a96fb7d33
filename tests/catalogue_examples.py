"""A catalogue with entries of every kind of output, and the resolution of request options against it."""

from __future__ import annotations

from typing import Any

import pytest

from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.options import RequestOptions, run_options


def entry(model: str = "org/Model", **changes: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": model,
            "weights": {"hub": model, "revision": "abc123"},
            "family": "text-encoder",
            "outputs": {"dense": 384},
            "max_tokens": 256,
            **changes,
        }
    )


PROFILES = {
    "short": {"run": {"dimensions": [64, 128], "normalize": False}},
    "cls": {"run": {"pooling": "cls", "instruction": "from the profile", "is_query": True}},
    "cls-short": {"extends": "cls", "run": {"dimensions": [32]}},
    "half": {"load": {"precision": "float16"}},
    "half-again": {"load": {"precision": "float16"}, "run": {"normalize": False}},
    "half-child": {"extends": "half", "load": {"trust_remote_code": True}},
}
RICH = entry(
    "org/rich",
    outputs={"dense": 384, "sparse": 30522},
    load={"precision": "float32"},
    run={"pooling": "mean", "normalize": True, "dimensions": [128, 256]},
    prompts={
        "query": "Instruct: {instruction}\nQuery: {text} ?",
        "document": "passage: {text}",
        "default_instruction": "retrieve",
    },
    profiles=PROFILES,
)
LATE = entry(
    "org/late",
    outputs={"multivector": 128},
    prompts={"query": "q: {text}", "document": "d: {text}"},
    head={"muvera": {"num_repetitions": 10, "seed": 1}},
    profiles={
        "index": {"run": {"muvera": {"num_repetitions": 20, "final_projection_dim": None}}},
        "plain": {"run": {"muvera": True, "is_query": True}},
        "never": {"extends": "index", "run": {"muvera": False}},
    },
)
M3 = entry(
    "org/m3",
    outputs={"dense": 1024, "sparse": 250002, "multivector": 1024, "score": 0},
    run={
        "parameters": {"score_mode": "hybrid", "score_weights": {"dense": 1.0}},
        "lora": "org/base-lora",
        "output_dtype": "float16",
    },
    profiles={
        "sparse": {"run": {"parameters": {"score_mode": "sparse"}, "lora": "org/sparse-lora", "output_dtype": "int8"}},
        "both": {
            "extends": "sparse",
            "run": {"parameters": {"score_weights": {"colbert": 1.0}}, "output_types": ["dense", "sparse"]},
        },
    },
)
CROSS = entry("org/cross", family="cross-encoder", outputs={"score": {}})
JUDGE = entry(
    "org/judge",
    family="decoder-reranker",
    outputs={"score": None},
    pair=["<i> {instruction} <q> {query}", " <d> {document}"],
    prompts={"default_instruction": "judge"},
    head={"yes_token": "yes", "no_token": "no"},
    profiles={"find": {"run": {"instruction": "find"}}},
)
NER = entry("org/ner", family="token-classifier", outputs={"entities": 0})
FINDER = entry(
    "org/finder",
    family="sample-entities",
    outputs={"entities": 0},
    run={"parameters": {"threshold": 0.4, "multi_label": True}},
    profiles={
        "sure": {"run": {"parameters": {"threshold": 0.9}}},
        "nested": {"extends": "sure", "run": {"parameters": {"flat_ner": False}}},
    },
)
RELATIONS = entry("org/relations", family="sample-relations", outputs={"entities": 0, "relations": 0})
NLI = entry("org/nli", family="zero-shot-classifier", outputs={"classifications": 0})
DETECTOR = entry("org/detector", family="sample-objects", inputs=["image"], outputs={"objects": 0})
READER = entry("org/reader", family="sample-reader", inputs=["image"], outputs={"entities": 0, "data": 0})
THEIRS = entry(
    "org/theirs",
    family="their-family",
    outputs={"dense": 8, "entities": 0},
    run={"parameters": {"colour": "red", "size": 1}},
)
CATALOGUE = Catalogue(
    {
        model_entry.id: model_entry
        for model_entry in (
            entry(),
            entry("org/other", bundle="vision"),
            RICH,
            LATE,
            M3,
            CROSS,
            JUDGE,
            NER,
            FINDER,
            RELATIONS,
            NLI,
            DETECTOR,
            READER,
            THEIRS,
            entry("toy"),
            entry("TOY"),
        )
    }
)


def options(body: dict[str, Any], spec: str = "org/rich", **kwargs: Any) -> RequestOptions:
    return run_options(CATALOGUE.resolve(spec), body, **kwargs)[1]


def refused(body: dict[str, Any], spec: str = "org/rich", **kwargs: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        options(body, spec, **kwargs)
    assert caught.value.message.startswith(caught.value.param)
    return caught.value
