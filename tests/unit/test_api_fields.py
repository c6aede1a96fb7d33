"""Parsers of bodies read the fields that the API declares, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import sample_families
from fake_adapter import WIDTH, toy_entry
from inprocess import GatewayProcess, InProcess

from sie_contracts.api import dialects, inference
from sie_contracts.api.operations import PoolRequest
from sie_contracts.errors import InvalidInput
from sie_contracts.models import families, options
from sie_gateway.http import routes
from sie_gateway.inference import body as bodies
from sie_gateway.inference.handler import InferenceRoute
from sie_gateway.operations import handlers
from sie_runtime.http.routes import FORM

# fields that are declared because clients send them, and that have no effect
IGNORED = {
    "EmbeddingsRequest": {"user"},
    "TeiSimilarityParameters": {"model"},
    "OllamaEmbed": {"keep_alive"},
    "OllamaPrompt": {"keep_alive"},
}
MODELS = {
    "rerank": "toy/score",
    "predict": "toy/classes",
    "classify": "toy/classes",
    "embed_sparse": "toy/wide",
    "extract": "toy/find",
}
WIDE = {"dense": WIDTH, "sparse": 10, "multivector": WIDTH}
ROUTES = [
    route
    for route in routes.ROUTES
    if isinstance(route, InferenceRoute)
    and route.tag != "SIE"
    and route.body is not None
    and FORM not in route.body.media
    and not isinstance(route.body.type, tuple)
]


# fields that are read only beside others
BESIDE: dict[str, dict[str, Any]] = {
    "chunk_size": {"enable_auto_chunking": True, "inputs": [["a"]], "input_type": "document"},
    "chunk_overlap": {"enable_auto_chunking": True, "inputs": [["a"]], "input_type": "document"},
    "top_k": {"top_n": None},
}


UNCHECKED = {"max_chunks_per_doc"}  # a warning says that it is ignored


def whole_fields(struct: Any) -> list[str]:
    hints = get_type_hints(struct)
    return [name for name, hint in hints.items() if int in (hint, *get_args(hint))]


class Recorded(dict[str, Any]):
    """Body that records which of its fields were read. `below` has the same for the maps in it."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.asked: set[str] = set()
        self.below: dict[str, Recorded] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        value = super().get(name, default)
        return self.below.setdefault(name, Recorded(value)) if isinstance(value, dict) else value


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
        cluster.source.put(toy_entry("toy/classes", family="text-classifier", outputs={"classifications": 0}))
        cluster.source.put(toy_entry("toy/wide", family="text-encoder", outputs=WIDE))
        cluster.source.put(toy_entry("toy/find", family="token-classifier", outputs={"entities": 0}))
        # without a worker each request ends with 503, after its body was read
        yield await cluster.gateway(SIE_LOAD_HOLD_S="0", SIE_GATEWAY_REQUEST_TIMEOUT="60")


async def test_dialects_read_the_fields_that_are_declared_and_no_others(
    gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ROUTES) >= 8  # those of the core; those of plug-ins are read too
    for route in ROUTES:
        assert route.body is not None
        declared = getattr(route.body.type, "__origin__", route.body.type)
        model = MODELS.get(route.endpoint, "toy/wide")
        example = {name: value for name, value in declared.EXAMPLE.items() if name != "top_n"}  # in place of top_k
        more = {"parameters": {"truncate": True}} if route.endpoint == "similarity" else {}
        body = Recorded({**example, **more, "model": model})
        monkeypatch.setattr(bodies, "decode", lambda raw, *, msgpack, body=body: body)
        answer = await gateway.client.post(route.path.replace("{model:path}", model), json={})
        assert answer.status_code == 503, answer.text  # the body was read to its end
        assert body.asked == _fields(declared), route.path
        for name, below in body.below.items():
            (inner,) = (struct for struct in _types(declared, name) if hasattr(struct, "__struct_fields__"))
            assert below.asked == _fields(inner), (route.path, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "toy/wide", "input": [[9906.0, 4435]]}),
        ("/v1/embeddings", {"model": "toy/wide", "input": [9906.0]}),
        ("/v1/encode/toy/wide", {"items": [{"text": "abc", "chunks": {"max_tokens": 8.0}}]}),
        ("/v1/encode/toy/wide", {"items": [{"text": "abc", "chunks": [[0.0, 2.0]]}]}),
    ],
)
async def test_a_list_of_whole_numbers_may_have_floats(gateway: GatewayProcess, path: str, body: Any) -> None:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 503, answer.text
    refused = await gateway.client.post(path, json=_with_fractions(body))
    assert refused.status_code in (400, 422), refused.text


def _with_fractions(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_fractions(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_fractions(entry) for entry in value]
    return value + 0.5 if isinstance(value, float) else value


def test_a_body_that_becomes_a_struct_may_have_floats_for_whole_numbers() -> None:
    body = {"name": "a", "gpus": {"cpu": 2.0}}
    assert handlers.converted(body, PoolRequest).gpus == {"cpu": 2}
    with pytest.raises(InvalidInput, match=r"gpus"):
        handlers.converted({**body, "gpus": {"cpu": 2.5}}, PoolRequest)


def _fields(struct: Any) -> set[str]:
    return set(struct.__struct_fields__) - IGNORED.get(struct.__name__, set())


def _types(struct: Any, name: str) -> tuple[Any, ...]:
    hint = get_type_hints(struct)[name]
    return get_args(hint) or (hint,)


def test_the_parameters_of_the_three_verbs_are_those_that_are_merged() -> None:
    """A parameter of a family belongs to the verb that its models do."""
    samples = sample_families.FAMILIES.values()
    of_family = {name for family in (*families.rows().values(), *samples) for name in family.parameters}
    declared = {
        "encode": set(inference.EncodeParams.__struct_fields__),
        "score": set(inference.ScoreParams.__struct_fields__),
        "extract": set(inference.ExtractParams.__struct_fields__),
    }
    for verb, names in declared.items():
        assert names - {"options"} - of_family == options._USED[verb]
    assert set.union(*declared.values()) >= of_family
    assert {"items", "params", "query"} == set(inference.Score.__struct_fields__)
    assert set(inference.Item.__struct_fields__) == bodies._ITEM


async def test_a_whole_number_written_as_a_float_is_a_whole_number_on_every_route(gateway: GatewayProcess) -> None:
    """JSON has only one type of numbers, and some clients write each as a float. Bounds and fractions stay refused."""
    cases: list[tuple[str, dict[str, Any], str]] = []
    for route in ROUTES:
        assert route.body is not None
        declared = getattr(route.body.type, "__origin__", route.body.type)
        model = MODELS.get(route.endpoint, "toy/wide")
        path = route.path.replace("{model:path}", model)
        cases += [
            (path, {**declared.EXAMPLE, **BESIDE.get(name, {}), "model": model}, name)
            for name in whole_fields(declared)
            if name not in UNCHECKED
        ]
    reranks = ("/v1/reranking", "/api/rerank", "/rerank")
    cases += [
        (path, {**dialects.Rerank.EXAMPLE, "model": "toy/score"}, "top_n")
        for path in reranks
        if routes.inference_route(path)
    ]
    cases += [("/reranking", {**dialects.MixedbreadRerank.EXAMPLE, "model": "toy/score"}, "top_k")]
    native = {"dimensions": WIDTH, "max_seq_length": 8}
    cases += [("/v1/encode/toy/wide", {"items": ["a"]}, name) for name in native]
    assert len(cases) > 15
    for path, body, name in cases:
        ints, floats, fraction, low = [
            await gateway.client.post(path, json={**body, name: value}) for value in (WIDTH, float(WIDTH), 8.5, -1.0)
        ]
        assert (ints.status_code, floats.status_code) == (503, 503), (path, name, floats.text)
        assert {fraction.status_code, low.status_code} <= {400, 422}, (path, name)
        assert name in fraction.text, (path, name)
