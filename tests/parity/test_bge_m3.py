"""BGE-M3's three outputs and four scores equal FlagEmbedding's, from one pass. The oracle's numbers are
golden/bge_m3.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.checkpoints import dense
from parity.device import SIXTEEN
from parity.heads_checkpoints import M3_TOKENS, M3_WIDTH, bge_m3
from parity.heads_engine import Array, HeadsEngine, HeadsModel
from parity.table import Agreement, ParityTable, Scores
from sentence_transformers import SentenceTransformer
from text_rows import text_rows
from transformers import AutoTokenizer

from sie_adapter.loading.inspection import inspect
from sie_adapter.packed.backbone import Backbone
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.options import SCORE_MODES
from sie_contracts.wire.messages import RunOptions

GOLDEN = json.loads((Path(__file__).parent / "golden" / "bge_m3.json").read_text())
TEXTS = [row["text"] for row in GOLDEN["texts"]]
ALL = ("dense", "sparse", "multivector")
TOLERANCE = 1e-5
PROJECTED = 20  # the output width of a Dense of modules.json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bge_m3(tmp_path_factory.mktemp("m3") / "bge-m3")


@pytest.fixture(scope="module")
def engine() -> Iterator[HeadsEngine]:
    heads_engine = HeadsEngine()
    yield heads_engine
    heads_engine.stop()


def load(engine: HeadsEngine, folder: Path, precision: str = "float32", width: int = M3_WIDTH) -> HeadsModel:
    outputs = {
        "dense": width,
        "sparse": len(AutoTokenizer.from_pretrained(folder)),
        "multivector": M3_WIDTH,
        "score": 0,
    }
    return engine.load(folder, outputs, max_tokens=M3_TOKENS, precision=precision)


@pytest.fixture(scope="module")
def model(engine: HeadsEngine, folder: Path) -> HeadsModel:
    return load(engine, folder)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each forward pass appends its number of sequences."""
    passes: list[int] = []
    forward = Backbone.forward

    def counted(self: Backbone, packed: Any) -> Any:
        passes.append(len(packed.order))
        return forward(self, packed)

    monkeypatch.setattr(Backbone, "forward", counted)
    return passes


def assert_equals_golden(row: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(row["dense"], expected["dense"], atol=tolerance)
    np.testing.assert_allclose(row["multivector"], expected["multivector"], atol=tolerance)
    assert row["multivector"].shape == (len(expected["ids"]) - 1, M3_WIDTH)
    weights = dict(zip(row["sparse.indices"].tolist(), row["sparse.values"].tolist(), strict=True))
    assert weights == pytest.approx(
        {int(number): weight for number, weight in expected["sparse"].items()}, abs=tolerance
    )


def full(size: int, indices: Sequence[int], values: Sequence[float]) -> Array:
    vector = np.zeros(size)
    vector[list(indices)] = values
    return vector


def record(table: ParityTable, model: HeadsModel, rows: Sequence[dict[str, Any]]) -> None:
    """Record how far the outputs of TEXTS are from the oracle's."""
    golden, size = GOLDEN["texts"], model.encoder.vocabulary
    sides = {
        "dense": [np.array([row["dense"] for row in side]) for side in (rows, golden)],
        "multivector": [np.concatenate([row["multivector"] for row in side]) for side in (rows, golden)],
        "sparse": [
            np.array([full(size, row["sparse.indices"], row["sparse.values"]) for row in rows]),
            np.array([full(size, list(map(int, row["sparse"])), list(row["sparse"].values())) for row in golden]),
        ],
    }
    for name, (got, expected) in sides.items():
        some = np.linalg.norm(expected, axis=1) > 0.1  # the empty text has no sparse weights, and another hardly any
        table.record(f"bge-m3 {name}", model.path, model.encoder.precision, Agreement.of(got[some], expected[some]))


def test_texts_become_the_oracle_s_ids(model: HeadsModel) -> None:
    assert [row.ids.tolist() for row in text_rows(model.tokenizer, TEXTS)] == [row["ids"] for row in GOLDEN["texts"]]


def test_three_outputs_of_one_pass_equal_the_oracle(
    model: HeadsModel, monkeypatch: pytest.MonkeyPatch, table: ParityTable
) -> None:
    passes = count_passes(monkeypatch)
    rows = model.encode(TEXTS, *ALL)
    record(table, model, rows)
    for row, expected in zip(rows, GOLDEN["texts"], strict=True):
        assert_equals_golden(row, expected)
    assert passes == [len(TEXTS)]


def test_work_items_that_want_other_outputs_share_the_pass(model: HeadsModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each work item gets the outputs that it requests and no others, with the values of a request for all outputs."""
    items = [
        (TEXTS[place::4], RunOptions(outputs=outputs))
        for place, outputs in enumerate([*((name,) for name in ALL), ALL])
    ]
    passes = count_passes(monkeypatch)
    encodings = model.encode_items(items)
    assert passes == [len(TEXTS)]
    complete = model.encode(TEXTS, *ALL)
    for place, rows in enumerate(encodings):
        for row, expected in zip(rows, complete[place::4], strict=True):
            assert {name.partition(".")[0] for name in row} == set(items[place][1].outputs)
            for name, array in row.items():
                np.testing.assert_allclose(array, expected[name], atol=2e-6)


@pytest.mark.parametrize("mode", SCORE_MODES)
def test_scores_equal_the_oracle(
    mode: str, model: HeadsModel, monkeypatch: pytest.MonkeyPatch, table: ParityTable
) -> None:
    """The modes are dense, sparse, colbert, and their sum with the weights .4, .2, .4. The query is encoded once."""
    passes = count_passes(monkeypatch)
    for expected in GOLDEN["scores"]:
        scores = model.score(expected["query"], TEXTS, *SCORE_MODES[mode])
        table.record(
            f"bge-m3 score, {mode}",
            model.path,
            model.encoder.precision,
            Scores(float(np.abs(scores - expected[mode]).max())),
        )
        np.testing.assert_allclose(scores, expected[mode], atol=TOLERANCE)
    assert passes == [1 + len(TEXTS)] * len(GOLDEN["scores"])


def test_a_dense_module_changes_the_dense_vectors_alone(
    engine: HeadsEngine, tmp_path: Path, table: ParityTable
) -> None:
    """The dense vectors equal those of sentence-transformers on the folder. The two heads read the states before the
    module, as in FlagEmbedding.
    """
    folder = bge_m3(tmp_path / "projected", [dense(M3_WIDTH, PROJECTED, bias=True, activation=torch.nn.Tanh)])
    entry = inspect(folder, "test/m3", {"path": str(folder)}).entry
    assert (entry["outputs"]["dense"], entry["outputs"]["multivector"]) == (PROJECTED, M3_WIDTH)
    model = load(engine, folder, width=PROJECTED)
    rows = model.encode(TEXTS, *ALL)
    oracle = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
    oracle.max_seq_length = M3_TOKENS
    expected = oracle.encode(TEXTS)
    got = np.array([row["dense"] for row in rows])
    table.record("bge-m3 dense, projected", model.path, model.encoder.precision, Agreement.of(got, expected))
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    for row, golden, vector in zip(rows, GOLDEN["texts"], expected, strict=True):
        assert_equals_golden(row, {**golden, "dense": vector})


def test_weights_of_the_request_are_normalised(model: HeadsModel) -> None:
    expected = GOLDEN["scores"][2]
    weights = {"dense": 3.0, "sparse": 1.0, "colbert": 0.0}
    scores = model.score(expected["query"], TEXTS, *ALL, parameters={"score_weights": weights})
    mixed = (3 * np.array(expected["dense"]) + np.array(expected["sparse"])) / 4
    np.testing.assert_allclose(scores, mixed, atol=TOLERANCE)


def test_bfloat16_stays_near(engine: HeadsEngine, folder: Path, table: ParityTable) -> None:
    model = load(engine, folder, SIXTEEN)
    if model.encoder.precision != SIXTEEN:
        pytest.skip("this CPU does not compute in bfloat16")
    rows = model.encode(TEXTS, *ALL)
    record(table, model, rows)
    for row, expected in zip(rows, GOLDEN["texts"], strict=True):
        assert row["dense"] @ np.array(expected["dense"]) >= 0.995
        assert (row["multivector"] * np.array(expected["multivector"])).sum(1).mean() >= 0.995
        weights = {int(number): weight for number, weight in expected["sparse"].items() if weight > 0.5}
        got = dict(zip(row["sparse.indices"].tolist(), row["sparse.values"].tolist(), strict=True))
        assert {number: got.get(number) for number in weights} == pytest.approx(weights, abs=0.3)


@pytest.mark.parametrize("name", ["sparse_linear.pt", "colbert_linear.pt"])
def test_a_head_that_holds_anything_else_is_refused(name: str, engine: HeadsEngine, tmp_path: Path) -> None:
    place = bge_m3(tmp_path / "bge-m3")
    torch.save({**torch.load(place / name), "scale": torch.ones(1)}, place / name)
    with pytest.raises(ModelLoadFailed, match="expected weight and bias"):
        load(engine, place)


@pytest.mark.parametrize(
    ("name", "shape", "fault"),
    [
        ("sparse_linear.pt", (1, 40), "a linear layer of the model reads vectors of 40 numbers"),
        ("sparse_linear.pt", (2, None), "computes 2 numbers for a token, expected 1"),
        ("colbert_linear.pt", (8, 40), "a linear layer of the model reads vectors of 40 numbers"),
    ],
)
def test_a_head_of_another_width_is_refused(
    name: str, shape: tuple[int, int | None], fault: str, engine: HeadsEngine, tmp_path: Path
) -> None:
    place = bge_m3(tmp_path / "bge-m3")
    rows, width = shape
    stored = torch.load(place / name)["weight"]
    torch.save({"weight": torch.zeros(rows, width or stored.shape[1])}, place / name)
    with pytest.raises(ModelLoadFailed, match=fault):
        load(engine, place)
