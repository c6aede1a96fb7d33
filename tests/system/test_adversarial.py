"""Hostile input from many clients at once gets a typed error or a right answer, without effect on its batch mates. No
reply holds a NaN.

Every answer of this file goes through `checked`.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import local_models
import msgspec
import numpy as np
import oracle
import pytest
import shared
from cluster import Cluster
from local_models import LocalModels
from oracle import ragged_texts
from selection import long_but

from sie_contracts import arrays
from sie_contracts.models.options import MAX_LABELS

VERBS = {
    "mini": "encode",
    "sparse": "encode",
    "late": "encode",
    "m3": "encode",
    "cross": "score",
    "reranker": "score",
    "late-score": "score",
    "m3-score": "score",
    "zero-shot": "extract",
    "tags": "extract",
}
POISONED = {
    "dense": "encode",
    "sparse": "encode",
    "late": "encode",
    "cross": "score",
    "reranker": "score",
    "zero-shot": "extract",
    "tags": "extract",
}
# the cases of every run; all other cases have the marker `long`
USUAL_POISONED = ("late", "cross")
USUAL_ODD = ("cross",)
QUERY = "search the river"
LABELS = ["person", "river mountain"]
RARE = ("violin", "protein", "compiler", "museum", "kernel", "planet")
POISON = " ".join([*RARE, *["river"] * 200])
MATES = [text for text in ragged_texts(200, seed=8, longest=20) if not set(RARE) & set(text.split())][:20]
BIG = 200_000
ODD = {
    "empty": "",
    "no spaces": "x" * BIG,
    "one wide character": "\u6771" * (BIG // 3),
    "spaces": " " * 100_000,
    "emoji": "👩\u200d💻😀🏳\ufe0f\u200d🌈" * 50,
    "right to left": "שלום עולם \u202e مرحبا بالعالم",
    "controls": "".join(map(chr, range(32))) * 20,
    "nul": "\0",
    "nul inside": "a\0b",
    "marks": "e" + "\u0301" * 5000,
    "no characters": "\ufeff\u200b\ufffe\uffff\U0010ffff",
    "special tokens": "[CLS] [SEP] [PAD] [MASK] </s> <|im_end|>",
    "fields": "{query}{document}{text}{instruction}{}{0}%s$x",
}
Json = dict[str, Any]
Serve = Callable[[str, str, Callable[[Path], None]], None]  # name, kind, function that changes the weights


pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


@pytest.fixture(scope="module")
def serve(cluster: Cluster, open_models: LocalModels, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that changes the weights of a model and then serves the model."""
    models = local_models.under(tmp_path_factory.mktemp("adversarial"))

    def add(name: str, kind: str, change: Callable[[Path], None]) -> None:
        change(models.build(name, kind))
        shutil.copy(models.folder / f"{name}.yaml", open_models.folder)
        shared.wait_until_served(cluster, f"test/{name}")

    return add


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


def checked(answer: httpx.Response) -> Json:
    """Return the body of an answer. Fail for a number that is not finite and for an error that is not typed."""
    body: Json = (
        arrays.unpack(arrays.decode_msgpack(answer.content))
        if "msgpack" in answer.headers["content-type"]
        else answer.json()
    )
    check_finite(body)
    if answer.status_code != 200:
        assert body["error"]["message"]
        assert body["code"] == body["error"]["code"] not in ("", "INTERNAL_ERROR"), body
    return body


def check_finite(value: Any, path: str = "") -> None:
    if isinstance(value, dict):
        assert value.get("score", 0.0) is not None or "error" in value, path
        for name, item in value.items():
            check_finite(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_finite(item, f"{path}[{index}]")
    elif isinstance(value, float | np.ndarray):
        assert np.isfinite(value).all(), path
    elif value is None:  # JSON has no NaN and writes null
        assert ".values" not in path, path


async def ask(
    client: httpx.AsyncClient, name: str, items: list[Any], *, msgpack: bool = False, **params: Any
) -> httpx.Response:
    kind, model = name.removeprefix("poisoned-"), name.removesuffix("-score")
    verb = POISONED[kind] if kind != name else VERBS[name]
    body: Json = {"items": items, "params": params}
    if verb == "score":
        body = {"query": QUERY, **body}
    if verb == "extract" and kind != "tags" and "labels" not in params:
        body = {**body, "labels": LABELS}
    if name == "m3":
        body = {**body, "output_types": ["dense", "sparse", "multivector"]}
    if name == "m3-score":
        body = {**body, "options": {"score_mode": "hybrid"}}
    content = msgspec.msgpack.encode(body) if msgpack else json.dumps(body).encode()
    kind_of = "application/msgpack" if msgpack else "application/json"
    # a first request has no measured duration to go by, and the machine may be busy
    headers = {"content-type": kind_of, "x-sie-explain": "1", "x-sie-timeout-ms": "300000"}
    return await client.post(f"/v1/{verb}/test/{model}", content=content, headers=headers)


def slots(body: Json) -> list[Json]:
    """Return one result for each input, in order."""
    if "items" in body:
        return list(body["items"])
    return sorted(body["scores"], key=lambda entry: int(entry["item_id"].removeprefix("item-")))


def check_close(value: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(value) == set(expected)
        # the tokens of a shared query count for its first document: usage depends on the mates
        for name in set(expected) - {"id", "item_id", "rank", "timing", "usage"}:
            check_close(value[name], expected[name])
    elif isinstance(expected, list) and expected and not isinstance(expected[0], int | float):
        assert len(value) == len(expected)
        for left, right in zip(value, expected, strict=True):
            check_close(left, right)
    elif isinstance(expected, list | float):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-5)
    else:
        assert value == expected


async def alone(client: httpx.AsyncClient, name: str) -> list[Json]:
    entries = []
    for mate in MATES:
        answer = await ask(client, name, [mate])
        assert answer.status_code == 200, answer.text
        entries += slots(checked(answer))
    return entries


@pytest.mark.parametrize("kind", long_but(POISONED, USUAL_POISONED))
async def test_an_overflow_is_an_error_of_its_own_item(client: httpx.AsyncClient, serve: Serve, kind: str) -> None:
    """The poisoned text comes beside its mates in one request, and alone in a request that shares their batch."""
    name, instruction = f"poisoned-{kind}", local_models.QWEN3_ENTRY["prompts"]["default_instruction"]
    vocabulary = [*MATES, QUERY, *LABELS, *local_models.QWEN3_PIECES, instruction]
    await asyncio.to_thread(serve, name, kind, lambda weights: local_models.poison(weights, POISON, vocabulary))
    expected = await alone(client, name)
    has_shared = False
    for _ in range(40):
        # the first requests find the device idle and run alone, while the others gather
        requests = [ask(client, name, [mate]) for mate in MATES]
        requests += [ask(client, name, [*MATES[:10], POISON, *MATES[10:]]), ask(client, name, [POISON])]
        *answers, together, single = await asyncio.gather(*requests)
        body = checked(together)
        has_shared |= any(entry["batch"]["chunks"] > 1 for entry in body["explain"])
        entries = slots(body)
        error = entries.pop(10)["error"]
        assert (error["code"], error["reason"], error["retryable"]) == ("INFERENCE_ERROR", "non_finite", False)
        check_close(entries, expected)
        assert (single.status_code, checked(single)["error"]["reason"]) == (500, "non_finite")
        for answer, mate in zip(answers, expected, strict=True):
            check_close(slots(checked(answer)), [mate])
        if has_shared:
            break
    assert has_shared


@pytest.mark.parametrize("name", long_but(VERBS, USUAL_ODD))
async def test_odd_texts_have_an_answer_or_a_typed_error_and_leave_their_mates_alone(
    client: httpx.AsyncClient, name: str
) -> None:
    expected = await alone(client, name)
    for kind, text in ODD.items():
        beside = [ask(client, name, [mate]) for mate in MATES[:6]]
        together, single, *answers = await asyncio.gather(
            ask(client, name, [MATES[0], text, MATES[1]]), ask(client, name, [text], msgpack=True), *beside
        )
        assert together.status_code == 200, (kind, together.text[:500])
        entries = slots(checked(together))
        check_close([entries[0], entries[2]], expected[:2])
        checked(single)
        assert single.status_code in (200, 400), (kind, single.text[:500])
        if "error" in entries[1]:
            assert entries[1]["error"]["code"] == "INVALID_INPUT", (kind, entries[1])
            assert single.status_code == 400
        for answer, mate in zip(answers, expected, strict=False):
            check_close(slots(checked(answer)), [mate])


async def test_odd_texts_have_the_vectors_of_sentence_transformers(client: httpx.AsyncClient) -> None:
    texts = list(ODD.values())
    vectors = [slot["dense"]["values"] for slot in slots(checked(await ask(client, "mini", texts)))]
    assert oracle.cosines(np.array(vectors, np.float32), oracle.encode(texts)).min() >= 0.9999


BAD_OPTIONS: dict[str, list[Json]] = {
    "m3": [
        *({"dimensions": value} for value in (-1, 0, 15, 1e300, True, 2**70, {}, "16")),
        *({"output_dtype": value} for value in (5, "bfloat16", "int4", "float64", ["float32"])),
        *({"output_types": value} for value in (["dense", None], {"dense": 1}, ["score"], "dense", [["dense"]])),
        *({"truncate": value} for value in (3, "MIDDLE", {})),
        *({"max_seq_length": value} for value in (0, 10**9, "8")),
        *({"instruction": value} for value in (["a"], {"a": 1}, 5)),
        {"normalize": "no"},
        {"pooling": "__class__"},
        {"is_query": "yes"},
        {"options": {"query_template": "no field"}, "is_query": True},
        {"on_item_error": "ignore"},
        {"profile": "none"},
        {"options": 5},
    ],
    "late": [
        *({"muvera": {"num_repetitions": value}} for value in (0, 129, 10**30, "4")),
        {"muvera": "yes"},
        *({"muvera": {"num_simhash_projections": value}} for value in (-1, 31)),
        {"muvera": {"seed": -1}},
        {"muvera": {"": 1}},
        {"muvera": {"num_repetitions": 128, "num_simhash_projections": 10, "final_projection_dim": None}},
    ],
    "m3-score": [
        *(
            {"score_weights": value}
            for value in ({"dense": -1, "sparse": 2}, {"dense": 0}, {"best": 1}, [1, 2], {"dense": "1"})
        ),
        {"score_mode": "best"},
        {"score_mode": 1},
    ],
    "cross": [{"lora_id": 5}, {"lora_id": "a", "lora": "b"}, {"lora_id": "a" * 5000}],
    "reranker": [{"lora_id": "org/lora"}],
    "zero-shot": [
        *(
            {"labels": value}
            for value in ({"a": 1}, ["a", ["b"]], ["a", ""], [f"label {number}" for number in range(10_000)])
        ),
        {"labels": ["x"] * 10_000},
        {"threshold": "0.5"},
        {"hypothesis_template": "{}{}"},
        {"hypothesis_template": "none"},
        {"multi_label": 3},
    ],
    "tags": [{"threshold": [0.5]}],
}


async def test_poisoned_options_are_refused_and_do_not_touch_who_runs_beside(client: httpx.AsyncClient) -> None:
    expected = {name: slots(checked(await ask(client, name, [MATES[0]]))) for name in VERBS}
    for name, several in BAD_OPTIONS.items():
        beside, *refusals = await asyncio.gather(
            ask(client, name, [MATES[0]]), *(ask(client, name, [MATES[0]], **params) for params in several)
        )
        for params, refused in zip(several, refusals, strict=True):
            body = checked(refused)
            assert (refused.status_code, body.get("code")) == (400, "INVALID_INPUT"), (name, str(params)[:100], body)
        check_close(slots(checked(beside)), expected[name])
    for value in (math.nan, math.inf, -math.inf):
        cases: list[tuple[str, Json]] = [
            ("m3", {"dimensions": value}),
            ("zero-shot", {"threshold": value}),
            ("m3-score", {"score_weights": {"dense": value}}),
            ("late", {"muvera": {"seed": value}}),
        ]
        for name, params in cases:
            refused = await ask(client, name, [MATES[0]], msgpack=True, **params)
            assert (refused.status_code, checked(refused)["error"]["reason"]) == (400, "schema"), (name, params)


async def test_a_lora_that_cannot_be_had_is_a_typed_error(client: httpx.AsyncClient) -> None:
    for lora, status in (
        ("../../etc/passwd", 400),
        ("/etc", 400),
        ("no/such-lora", 404),
        ("a" * 900, 404),
        ("\0", 400),
    ):
        refused, beside = await asyncio.gather(
            ask(client, "cross", [MATES[0]], lora_id=lora), ask(client, "cross", [MATES[0]])
        )
        body = checked(refused)
        assert (refused.status_code, body["code"]) == (status, "LORA_LOAD_FAILED"), body
        assert beside.status_code == 200


SURROGATE = "\ud800"
PLACES: list[tuple[str, Json]] = [
    ("encode/test/mini", {"items": [SURROGATE]}),
    ("encode/test/mini", {"items": [{"text": "a", "id": SURROGATE}]}),
    ("encode/test/mini", {"items": [{"text": "a", "metadata": {SURROGATE: 1}}]}),
    ("encode/test/mini", {"items": ["a"], "instruction": SURROGATE}),
    ("encode/test/mini", {"items": ["a"], SURROGATE: 1}),
    ("score/test/cross", {"query": SURROGATE, "items": ["a"]}),
    ("extract/test/zero-shot", {"items": ["a"], "labels": ["a", SURROGATE]}),
    ("extract/test/zero-shot", {"items": ["a"], "labels": ["a"], "options": {"hypothesis_template": "{}" + SURROGATE}}),
]


@pytest.mark.parametrize(("path", "body"), PLACES, ids=range(len(PLACES)))
async def test_a_lone_surrogate_is_refused_wherever_it_stands(client: httpx.AsyncClient, path: str, body: Json) -> None:
    """JSON has the surrogate as an escape, msgpack as the three bytes that would be its UTF-8."""
    packed = msgspec.msgpack.encode(json.loads(json.dumps(body).replace("\\ud800", "~s~"))).replace(
        b"~s~", b"\xed\xa0\x80"
    )
    for content, kind in ((json.dumps(body).encode(), "application/json"), (packed, "application/msgpack")):
        answer = await client.post(f"/v1/{path}", content=content, headers={"content-type": kind})
        assert (answer.status_code, checked(answer)["error"]["reason"]) == (400, "malformed"), kind


async def test_braces_in_labels_and_instructions_are_text(client: httpx.AsyncClient, every_family: LocalModels) -> None:
    from transformers import pipeline

    braces = "{query}{document}{text}"
    # the pipeline raises if the first label is {}: it then takes the template for one without a field
    labels = [
        "river",
        "{}",
        "{label}",
        "{0} {",
    ]
    classify = pipeline("zero-shot-classification", model=str(every_family.weights / "zero-shot"), device="cpu")
    expected = classify(MATES[0], labels)
    (slot,) = slots(checked(await ask(client, "zero-shot", [MATES[0]], labels=labels)))
    assert [classification["label"] for classification in slot["classifications"]] == expected["labels"]
    assert [classification["score"] for classification in slot["classifications"]] == pytest.approx(
        expected["scores"], abs=1e-5
    )

    for instruction, document in (
        (braces, MATES[0]),
        ("plain", braces),
        (braces + "{instruction}", "{document}<Query>: {query}"),
    ):
        (entry,) = slots(checked(await ask(client, "reranker", [document], instruction=instruction)))
        probability = local_models.yes_probability(every_family.weights / "reranker", instruction, QUERY, document)
        assert entry["score"] == pytest.approx(probability, abs=1e-5)

    (slot,) = slots(checked(await ask(client, "mini", [braces], instruction=braces)))
    assert oracle.cosines(np.array(slot["dense"]["values"]), oracle.encode([f"{braces} {braces}"])[0]) >= 0.9999
    templated = await ask(
        client, "mini", [braces], instruction="{text}", options={"doc_template": "{instruction}: {text} {other}"}
    )
    expected_vector = oracle.encode([f"{{text}}: {braces} {{other}}"])[0]
    assert oracle.cosines(np.array(slots(checked(templated))[0]["dense"]["values"]), expected_vector) >= 0.9999


async def test_many_and_long_labels(client: httpx.AsyncClient) -> None:
    """Each list of labels gets an answer or a typed error: as many labels as are allowed, one of 100 kB, odd ones, and
    the same label twice.
    """
    for _ in range(4):  # the first passes of a model say little about the wait behind many labels
        checked(await ask(client, "zero-shot", MATES))
    many = [f"label {number}" for number in range(MAX_LABELS)]
    cases = [many, ["x" * 100_000, "river"], ["\0", "😀", "שלום"], ["river", "river"], ["\u200b", "<<ENT>>"]]
    for labels in cases:
        answer, beside = await asyncio.gather(
            ask(client, "zero-shot", [MATES[0]], labels=labels), ask(client, "zero-shot", [MATES[0]])
        )
        assert answer.status_code in (200, 400), answer.text[:300]
        if answer.status_code == 200:
            assert {classification["label"] for classification in slots(checked(answer))[0]["classifications"]} <= set(
                labels
            )
        else:
            assert "label" in checked(answer)["error"]["message"]
        assert beside.status_code == 200


@pytest.fixture(scope="module")
def large(serve: Serve) -> None:
    """Serve a model whose hidden states are a million times as large."""
    serve("large", "m3", lambda weights: local_models.enlarge(weights, 1e6))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("output", ["dense", "sparse", "multivector"])
async def test_a_value_that_float16_has_not_is_an_error_and_not_an_infinity(
    client: httpx.AsyncClient, output: str
) -> None:
    async def slot(**params: Any) -> Json:
        body = {"items": [MATES[0]], "params": {"output_types": [output], "normalize": False, **params}}
        answer = await client.post("/v1/encode/test/large", json=body)
        return checked(answer)

    exact = (await slot())["items"][0][output]["values"]
    assert np.abs(np.array(exact)).max() > np.finfo(np.float16).max
    assert (await slot(output_dtype="float16"))["error"]["reason"] == "unsupported_dtype"
    for dtype in ("int8", "uint8", "binary"):
        assert output in (await slot(output_dtype=dtype))["items"][0]
    if output != "sparse":
        assert (
            np.abs(np.array((await slot(output_dtype="float16", normalize=True))["items"][0][output]["values"])).max()
            <= 1
        )
