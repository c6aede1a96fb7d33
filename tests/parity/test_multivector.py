"""Late interaction equals MultiVectorEncoder on the same folders, of Stanford ColBERT and of PyLate: markers,
expansion, skip lists, MaxSim.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import heads_checkpoints as checkpoints
from parity.checkpoints import MAX_TOKENS, WIDTH, dense
from parity.device import SIXTEEN, require_precision
from parity.heads_checkpoints import residual, with_markers
from parity.heads_engine import MAX_DIFFERENCE, Array, HeadsEngine, HeadsModel, check
from parity.table import ParityTable
from selection import long_but
from sentence_transformers import MultiVectorEncoder
from text_rows import text_rows

from sie_adapter.heads import States
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.packed.packing import Items, Positions, pack
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.wire.messages import RunOptions

OUT = 24
MIN_TAU = 0.98  # Kendall's, of the ranking of 50 documents
Rows = list[NDArray[np.float32]]
Folder = Callable[[str], Path]


def _stanford(metadata: dict[str, Any] | None) -> Callable[[Path], Path]:
    return lambda folder: checkpoints.stanford(folder, OUT, metadata)


def _pylate(architecture: str, config: dict[str, Any], *projections: Any) -> Callable[[Path], Path]:
    modules = projections or (dense(WIDTH, OUT),)
    return lambda folder: checkpoints.pylate(folder, with_markers(architecture), modules, config)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "stanford defaults": _stanford(None),
    "stanford": _stanford(
        {
            "query_maxlen": 24,
            "doc_maxlen": 90,
            "query_token_id": "[unused1]",
            "doc_token_id": "[unused0]",
            "mask_punctuation": True,
            "attend_to_mask_tokens": False,
        }
    ),
    "stanford attended": _stanford({"query_maxlen": 40, "attend_to_mask_tokens": True, "mask_punctuation": False}),
    "pylate defaults": _pylate("bert", {}),
    "pylate bert": _pylate("bert", {"query_length": 48, "document_length": 180, "attend_to_expansion_tokens": False}),
    "pylate attended": _pylate(
        "bert", {"query_length": 48, "attend_to_expansion_tokens": True, "skiplist_words": [".", "river"]}
    ),
    "pylate unexpanded": _pylate("bert", {"query_length": 12, "do_query_expansion": False, "skiplist_words": []}),
    "pylate xlm-roberta": _pylate(
        "xlm-roberta", {"query_length": 32, "document_length": 300, "attend_to_expansion_tokens": True}
    ),
    "pylate modernbert": _pylate(
        "modernbert",
        {"query_length": 32, "document_length": 300, "do_query_expansion": True},
        residual(dense(WIDTH, 96, activation=torch.nn.GELU)),
        residual(dense(96, 96, bias=True, activation=torch.nn.Tanh, seed=1)),
        dense(96, OUT, seed=2),
    ),
    "pylate modernbert attended": _pylate("modernbert", {"query_length": 140, "attend_to_expansion_tokens": True}),
    # A local layer sees 8 tokens to either side, so most of the filling is out of sight of every word.
    "pylate modernbert narrow": _pylate("modernbert narrow", {"query_length": 64}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("multivector")
    return functools.cache(lambda name: FOLDERS[name](root / name.replace(" ", "-")))


@pytest.fixture(scope="module")
def engine() -> Iterator[HeadsEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    heads_engine = HeadsEngine()
    yield heads_engine
    heads_engine.stop()
    torch.set_num_threads(threads)


def load(
    engine: HeadsEngine, folder: Path, precision: str = "float32", prompts: dict[str, str] | None = None, **head: Any
) -> HeadsModel:
    model = engine.load(
        folder, {"multivector": OUT}, max_tokens=MAX_TOKENS, precision=precision, head=head, prompts=prompts or {}
    )
    require_precision(model.encoder.precision, precision)
    return model


@functools.cache
def reference(folder: Path, precision: str = "float32") -> MultiVectorEncoder:
    return MultiVectorEncoder(str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": precision})


def oracle(model: MultiVectorEncoder, texts: Sequence[str], *, is_query: bool) -> Rows:
    """Encode one text at a time, so that no padding enters the numbers."""
    encode = model.encode_query if is_query else model.encode_document
    return [row.float().numpy() for row in encode(list(texts), batch_size=1, show_progress_bar=False)]


def rows(outputs: Sequence[dict[str, Array]]) -> Rows:
    return [row["multivector"] for row in outputs]


def difference(got: Rows, expected: Rows) -> float:
    """Return the largest difference of a component. The shapes must be equal."""
    assert [row.shape for row in got] == [row.shape for row in expected]
    return max(float(np.abs(left - right).max()) for left, right in zip(got, expected, strict=True))


def assert_equal(model: HeadsModel, got: Rows, expected: Rows, table: ParityTable, name: str) -> None:
    assert [len(row) for row in got] == [len(row) for row in expected]
    check(table, f"multivector {name}", model, np.concatenate(got), np.concatenate(expected))


@pytest.mark.parametrize("is_query", [True, False], ids=["queries", "documents"])
@pytest.mark.parametrize("name", long_but(FOLDERS, ["stanford", "pylate modernbert"]))
def test_rows_equal_the_oracle(
    name: str, is_query: bool, folder: Folder, engine: HeadsEngine, table: ParityTable
) -> None:
    """The batches have 40, 1, 2 and 5 texts."""
    model, texts = load(engine, folder(name)), checkpoints.texts(40)
    assert model.encoder.attention == "sdpa"
    expected = oracle(reference(folder(name)), texts, is_query=is_query)
    for start, stop in ((0, 40), (0, 1), (1, 3), (3, 8)):
        part = model.encode(texts[start:stop], "multivector", is_query=is_query)
        assert_equal(model, rows(part), expected[start:stop], table, name)


@pytest.mark.parametrize(
    "name",
    long_but(
        ["stanford", "stanford attended", "pylate xlm-roberta", "pylate modernbert narrow"], ["stanford attended"]
    ),
)
def test_padded_rows_equal_the_oracle(name: str, folder: Folder, engine: HeadsEngine, table: ParityTable) -> None:
    """The path to which any folder may fall back is right too, in a batch of queries and documents."""
    model, texts = (
        engine.load(folder(name), {"multivector": OUT}, max_tokens=MAX_TOKENS, padded=True),
        checkpoints.texts(32),
    )
    assert model.path == "padded"
    options = [RunOptions(outputs=("multivector",), is_query=is_query) for is_query in (True, False)]
    for outputs, option in zip(model.encode_items([(texts, option) for option in options]), options, strict=True):
        assert_equal(
            model, rows(outputs), oracle(reference(folder(name)), texts, is_query=option.is_query), table, name
        )


@pytest.mark.parametrize(
    "name", long_but(["stanford", "pylate modernbert", "pylate modernbert narrow"], ["pylate modernbert narrow"])
)
def test_bfloat16_is_as_near_as_the_oracle_in_bfloat16(
    name: str, folder: Folder, engine: HeadsEngine, table: ParityTable
) -> None:
    model, texts = load(engine, folder(name), SIXTEEN), checkpoints.texts(32)
    for is_query in (True, False):
        expected = oracle(reference(folder(name)), texts, is_query=is_query)
        stock = oracle(reference(folder(name), SIXTEEN), texts, is_query=is_query)
        got = rows(model.encode(texts, "multivector", is_query=is_query))
        check(table, f"multivector {name}", model, *(np.concatenate(side) for side in (got, expected, stock)))


def test_two_threads_at_once_give_what_one_gives(folder: Folder, engine: HeadsEngine) -> None:
    model, texts = load(engine, folder("pylate modernbert narrow")), checkpoints.texts()
    batches = [texts[start : start + 8] for start in range(0, 64, 8)]
    for is_query in (True, False):
        at_once = model.encode_at_once(batches, "multivector", is_query=is_query)
        for outputs, batch in zip(at_once, batches, strict=True):
            for row, expected in zip(
                rows(outputs), rows(model.encode(batch, "multivector", is_query=is_query)), strict=True
            ):
                np.testing.assert_array_equal(row, expected)


def test_queries_and_documents_share_a_batch(folder: Folder, engine: HeadsEngine) -> None:
    """Each input gives the same as alone, in any order."""
    model, texts = load(engine, folder("pylate modernbert narrow")), checkpoints.texts(24)
    alone = {
        is_query: [row for text in texts for row in rows(model.encode([text], "multivector", is_query=is_query))]
        for is_query in (0, 1)
    }
    options = [RunOptions(outputs=("multivector",), is_query=is_query) for is_query in (True, False)]
    queries, documents = model.encode_items([(texts, options[0]), (texts[::-1], options[1])])
    assert difference(rows(queries), alone[1]) <= 2e-6
    assert difference(rows(documents)[::-1], alone[0]) <= 2e-6


@pytest.mark.parametrize("name", long_but(["stanford", "pylate modernbert", "pylate unexpanded"], ["stanford"]))
def test_scores_are_the_oracle_s_maxsim(name: str, folder: Folder, engine: HeadsEngine) -> None:
    model, texts, stock = load(engine, folder(name)), checkpoints.texts(50, seed=4), reference(folder(name))
    for query in ("river engine (winter)", "", texts[7]):
        expected = stock.similarity(stock.encode_query([query]), stock.encode_document(texts, show_progress_bar=False))[
            0
        ].numpy()
        scores = model.score(query, texts, "multivector")
        np.testing.assert_allclose(scores, expected, atol=1e-4)
        left, right = (
            np.sign(side[:, None] - side[None, :])[np.triu_indices(len(texts), 1)] for side in (scores, expected)
        )
        assert (left * right).mean() >= MIN_TAU


def test_the_entry_wins_over_the_files(folder: Folder, engine: HeadsEngine, tmp_path: Path) -> None:
    """The entry acts as if the files had its values."""
    place = folder("stanford")
    settings = {
        "query_marker": "[unused0]",
        "document_marker": "[unused1]",
        "query_length": 32,
        "document_length": 0,
        "attend_expansion": True,
    }
    model, texts = load(engine, place, **settings, skip_punctuation=False), checkpoints.texts(16)
    shutil.copytree(place, tmp_path / "other")
    metadata = {"query_maxlen": 32, "attend_to_mask_tokens": True, "mask_punctuation": False}
    (tmp_path / "other" / "artifact.metadata").write_text(json.dumps(metadata))
    stock = reference(tmp_path / "other")
    for is_query in (True, False):
        sequences = rows(model.encode(texts, "multivector", is_query=is_query))
        assert difference(sequences, oracle(stock, texts, is_query=is_query)) <= MAX_DIFFERENCE
    bare = load(engine, place, query_expansion=False, query_marker="", skip_punctuation=False)
    for is_query, sequences in ((True, ["river"]), (False, ["river, river"])):
        tokens = len(text_rows(bare.tokenizer, sequences)[0].ids)
        assert [len(row) for row in rows(bare.encode(sequences, "multivector", is_query=is_query))] == [
            tokens + (not is_query)
        ]


@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_a_native_folder_is_followed(strategy: str, folder: Folder, engine: HeadsEngine, tmp_path: Path) -> None:
    """The folder is as sentence-transformers saves it: the markers are prompts, which the entry has."""
    stock = reference(folder("pylate xlm-roberta"))
    stock[0].query_expansion = {
        "strategy": strategy,
        "attend": False,
        "length": 20,
        "token": "</s>" if strategy == "min" else None,
    }
    stock.save_pretrained(str(tmp_path / "native"), create_model_card=False)
    prompts = {"query": "[Q] {text}", "document": "[D] {text}"}
    model, saved = load(engine, tmp_path / "native", prompts=prompts), reference(tmp_path / "native")
    texts = checkpoints.texts(16)
    for is_query, prefix in ((True, "[Q] "), (False, "[D] ")):
        expected = oracle(saved, texts, is_query=is_query)
        assert difference(expected, oracle(stock, texts, is_query=is_query)) <= 1e-6
        assert (
            difference(rows(model.encode(texts, "multivector", is_query=is_query, prefix=prefix)), expected)
            <= MAX_DIFFERENCE
        )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"query_prefix": "query: "}, "marker 'query: ' is not one token"),
        ({"query_length": MAX_TOKENS + 1}, "padded to 561 tokens"),
    ],
)
def test_what_would_be_wrong_is_refused(
    config: dict[str, Any], message: str, engine: HeadsEngine, tmp_path: Path
) -> None:
    place = _pylate("bert", config)(tmp_path / "refused")
    with pytest.raises(ModelLoadFailed, match=message):
        load(engine, place)


def test_a_mask_of_another_kind_is_refused(folder: Folder, engine: HeadsEngine, tmp_path: Path) -> None:
    reference(folder("pylate bert")).save_pretrained(str(tmp_path / "native"), create_model_card=False)
    config = next((tmp_path / "native").glob("*_MultiVectorMask")) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "skiplist_tasks": ["query", "document"]}))
    with pytest.raises(ModelLoadFailed, match="MultiVectorMask"):
        load(engine, tmp_path / "native")


@pytest.mark.parametrize(
    "change",
    [
        {"attend_to_expansion_tokens": True},
        {"query_length": 33},
        {"query_prefix": "[D] "},
        {"do_query_expansion": False},
    ],
)
def test_a_setting_that_is_ignored_would_show(change: dict[str, Any], folder: Folder, tmp_path: Path) -> None:
    """With the setting changed, the same weights give other rows, so the tests above notice an ignored setting."""
    shutil.copytree(folder("pylate defaults"), tmp_path / "other")
    config = tmp_path / "other" / "config_sentence_transformers.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    base, variant = (
        oracle(reference(place), ["river (winter)"], is_query=True)[0]
        for place in (folder("pylate defaults"), tmp_path / "other")
    )
    assert base.shape != variant.shape or np.abs(base - variant).max() > 100 * MAX_DIFFERENCE


def test_only_the_sequence_that_is_not_finite_is_not_usable() -> None:
    counts = np.array([3, 4, 4, 9], np.int64)
    packed = pack(Items(counts, np.arange(20, dtype=np.int32)), np.arange(4), Positions())
    hidden = torch.randn(20, 8)
    hidden[9] = torch.inf
    head = MultivectorHead(torch.nn.Linear(8, 4), torch.device("cpu"), skipped=frozenset({0, 19}), drop_first=True)
    with torch.inference_mode():
        output = head.reduce(States(hidden, packed, np.array([False, False, False, True])), np.array([0, 2, 3]))
    assert output.usable.tolist() == [True, False, True]
    assert [len(row) for row in output.rows] == [2, 3, 8]  # id 0 is in the first row, id 19 in a query
