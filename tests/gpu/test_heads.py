"""Sparse, multivector and score heads and their epilogues on CUDA equal those of the engine in float32 on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.conftest import Record
from oracle import cosines
from parity import heads_checkpoints as checkpoints
from parity.checkpoints import MAX_TOKENS, WIDTH, dense
from parity.heads_engine import Array, HeadsEngine, HeadsModel
from parity.score_checkpoints import (
    QWEN3_ENTRY,
    Scoring,
    ScoringEngine,
    build_head,
    build_reranker,
    ragged_documents,
    tau,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.heads import Head, States
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.heads.pooling import DenseHead
from sie_adapter.heads.sparse import MaskedLanguageHead, TokenWeightHead
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.packed.packing import Items, Positions, pack
from sie_contracts.models.entries import POOLINGS
from sie_contracts.models.muvera import Muvera
from sie_contracts.settings import Settings

CUDA = torch.device("cuda")
OUT = 24
MIN_COSINE = {"float32": 0.9999, "float16": 0.999}
MAX_DIFFERENCE = {"float32": 1e-4, "float16": 2e-2}  # between probabilities
MIN_TAU = {"float32": 0.98, "float16": 0.9}  # some of the scores are close to each other


class CudaHeads(HeadsEngine):
    """The engine of the heads' parity tests on the GPU."""

    def __init__(self) -> None:
        self._engine = AdapterEngine(Settings(device=CUDA.type))


class CudaScores(ScoringEngine):
    """The engine of the scores' parity tests on the GPU."""

    def __init__(self) -> None:
        self._engine = AdapterEngine(Settings(device=CUDA.type))


@pytest.fixture(scope="module")
def heads() -> Iterator[tuple[HeadsEngine, HeadsEngine]]:
    """Engines on the CPU and on CUDA."""
    engines = (HeadsEngine(), CudaHeads())
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="module")
def scores() -> Iterator[tuple[ScoringEngine, ScoringEngine]]:
    """Engines on the CPU and on CUDA."""
    engines = (ScoringEngine(), CudaScores())
    yield engines
    for engine in engines:
        engine.stop()


def both(
    heads: tuple[HeadsEngine, HeadsEngine], folder: Path, outputs: dict[str, int], precision: str, **entry: Any
) -> list[HeadsModel]:
    """Load the model in float32 on the CPU, and in `precision` on CUDA."""
    return [
        engine.load(folder, outputs, max_tokens=MAX_TOKENS, precision=dtype, **entry)
        for engine, dtype in zip(heads, ("float32", precision), strict=True)
    ]


def full(rows: list[dict[str, Array]], width: int) -> Array:
    """Return sparse rows as [texts, vocabulary + 1]. The last column is a constant, so an empty row has a direction."""
    dense_rows = np.zeros((len(rows), width + 1))
    dense_rows[:, width] = 0.1
    for vector, row in zip(dense_rows, rows, strict=True):
        vector[row["sparse.indices"]] = row["sparse.values"]
    return dense_rows


@pytest.mark.parametrize("precision", MIN_COSINE)
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "mpnet"])
def test_sparse_vectors(
    architecture: str, precision: str, heads: tuple[HeadsEngine, HeadsEngine], tmp_path: Path, record: Record
) -> None:
    """The texts are shorter and longer than a block, and the architectures packed and padded."""
    folder = checkpoints.masked(tmp_path / "model", architecture)
    width = len(AutoTokenizer.from_pretrained(folder))
    expected, got = (
        full(model.encode(checkpoints.texts(), "sparse"), width)
        for model in both(heads, folder, {"sparse": width}, precision)
    )
    similarities = cosines(got, expected)
    record(f"sparse {architecture}", "", precision, float(similarities.min()))
    assert similarities.min() >= MIN_COSINE[precision]


def test_queries_without_a_pass_score_documents_on_the_device(
    heads: tuple[HeadsEngine, HeadsEngine], tmp_path: Path
) -> None:
    """The host makes the rows of queries, the device those of documents."""
    folder = checkpoints.idf(checkpoints.masked(tmp_path / "model", "bert"))
    outputs = {"sparse": len(AutoTokenizer.from_pretrained(folder)), "score": 0}
    models = both(heads, folder, outputs, "float32", head={"query_encoder": "idf"})
    matrices = [
        full(model.encode(checkpoints.texts(16), "sparse", is_query=True), outputs["sparse"]) for model in models
    ]
    np.testing.assert_allclose(matrices[1], matrices[0], atol=1e-6)
    scored = [model.score("river query vector", checkpoints.texts(16), "sparse") for model in models]
    np.testing.assert_allclose(scored[1], scored[0], rtol=1e-3, atol=1e-4)


MULTIVECTOR: dict[str, Callable[[Path], Path]] = {
    # 24 to 48 filling tokens to which no word attends; in local layers most of them are outside the window of any word
    "expanded": lambda folder: checkpoints.pylate(
        folder, checkpoints.with_markers("bert"), [dense(WIDTH, OUT)], {"query_length": 48}
    ),
    "attended": lambda folder: checkpoints.pylate(
        folder,
        checkpoints.with_markers("bert"),
        [dense(WIDTH, OUT)],
        {"query_length": 48, "attend_to_expansion_tokens": True},
    ),
    "expanded windows": lambda folder: checkpoints.pylate(
        folder, checkpoints.with_markers("modernbert narrow"), [dense(WIDTH, OUT)], {"query_length": 64}
    ),
}


@pytest.mark.parametrize("precision", MIN_COSINE)
@pytest.mark.parametrize("name", MULTIVECTOR)
def test_late_interaction(
    name: str, precision: str, heads: tuple[HeadsEngine, HeadsEngine], tmp_path: Path, record: Record
) -> None:
    """Token vectors of queries and documents, scores and MUVERA encodings on CUDA are those of the CPU."""
    folder = MULTIVECTOR[name](tmp_path / "model")
    models = both(heads, folder, {"multivector": OUT}, precision)
    texts = checkpoints.texts(24)
    for is_query in (True, False):
        token_vectors = [
            [row["multivector"] for row in model.encode(texts, "multivector", is_query=is_query)] for model in models
        ]
        assert [len(row) for row in token_vectors[0]] == [len(row) for row in token_vectors[1]]
        cosine = float(np.mean(cosines(np.concatenate(token_vectors[1]), np.concatenate(token_vectors[0]))))
        record(f"multivector {name}", "", precision, cosine)
        assert cosine >= MIN_COSINE[precision]
    expected, got = (model.score("a river (near) the mountain", texts, "multivector") for model in models)
    assert tau(list(expected), list(got)) >= MIN_TAU[precision]
    if precision == "float32":  # a token near a plane may fall to its other side in 16 bit
        options = {"muvera": Muvera(), "is_query": False}
        encoded = [np.stack([row["dense"] for row in model.encode(texts, "dense", **options)]) for model in models]
        filled = np.linalg.norm(encoded[0], axis=1) > 0
        assert cosines(encoded[1][filled], encoded[0][filled]).mean() >= MIN_COSINE[precision]


def heads_on(device: torch.device, width: int) -> dict[str, Head]:
    """Return a head of each kind, with the same weights on every device."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=width, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16
    )
    masked = TransformersHead(BertForMaskedLM(config).eval().to(device), in_float32=False)
    layer = torch.nn.Linear(width, 1).to(device)
    return {
        "masked": MaskedLanguageHead(masked, 50, device, twice=False, dropped=frozenset({0})),
        "token": TokenWeightHead(layer, 50, frozenset({0})),
        "multivector": MultivectorHead(None, device, drop_first=True),
        **{pooling: DenseHead(pooling, None, device) for pooling in POOLINGS},  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("kind", ["masked", "token", "multivector", *POOLINGS])
def test_only_the_sequence_that_is_not_finite_is_not_usable(kind: str) -> None:
    """The finite sequences have the rows of a CPU, although only CUDA uses kernels that reduce segments."""
    lengths = np.array([3, 4, 4, 700])
    ids = np.random.default_rng(0).integers(1, 50, int(lengths.sum()), dtype=np.int32)
    packed = pack(Items(lengths, ids), np.arange(4), Positions())
    hidden = torch.randn(len(ids), 16, generator=torch.Generator().manual_seed(0))
    hidden[7:11] = torch.nan  # all tokens of the third sequence
    indices = np.array([0, 2, 3])
    with torch.inference_mode():
        expected, got = (
            heads_on(device, 16)[kind].reduce(States(hidden.to(device), packed, np.zeros(4, bool)), indices)
            for device in (torch.device("cpu"), CUDA)
        )
    assert got.usable.tolist() == [True, False, True]
    for row in (0, 2):
        sides = [side.rows[row] if isinstance(side.rows[row], tuple) else (side.rows[row],) for side in (expected, got)]
        for left, right in zip(*sides, strict=True):
            torch.testing.assert_close(right.cpu(), left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", MAX_DIFFERENCE)
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3 causal"])
def test_cross_encoders(name: str, precision: str, scores: tuple[ScoringEngine, ScoringEngine], tmp_path: Path) -> None:
    folder = build_head(tmp_path / "model", name, AutoModelForSequenceClassification)
    compare(scores, folder, "cross-encoder", precision)


@pytest.mark.parametrize("precision", MAX_DIFFERENCE)
def test_decoder_rerankers(precision: str, scores: tuple[ScoringEngine, ScoringEngine], tmp_path: Path) -> None:
    folder = build_reranker(tmp_path / "model", "qwen3 causal")
    compare(scores, folder, "decoder-reranker", precision, **QWEN3_ENTRY)


def compare(
    scores: tuple[ScoringEngine, ScoringEngine], folder: Path, family: str, precision: str, **entry: Any
) -> None:
    documents = ragged_documents(40)
    models: list[Scoring] = [
        engine.load(folder, family, dtype, **entry)
        for engine, dtype in zip(scores, ("float32", precision), strict=True)
    ]
    expected, got = (np.array(model.scores("which river is it", documents)) for model in models)
    assert np.abs(got - expected).max() <= MAX_DIFFERENCE[precision]


def test_entities(scores: tuple[ScoringEngine, ScoringEngine], tmp_path: Path) -> None:
    """Spans and labels are equal, and scores nearly equal."""
    labels = ("O", "B-PER", "I-PER", "B-LOC")
    folder = build_head(tmp_path / "model", "bert", AutoModelForTokenClassification, labels)
    expected, got = (engine.load(folder, "token-classifier").found(ragged_documents(24)) for engine in scores)
    for left, right in zip(expected, got, strict=True):
        spans = [
            [(element["label"], element["start"], element["end"]) for element in side["entities"]]
            for side in (left, right)
        ]
        assert spans[0] == spans[1]
        for left_entity, right_entity in zip(left["entities"], right["entities"], strict=True):
            assert abs(left_entity["score"] - right_entity["score"]) <= MAX_DIFFERENCE["float32"]
