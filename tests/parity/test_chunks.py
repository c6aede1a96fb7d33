"""Late chunks equal a reference over transformers on the same weights: chunks pooled from the states of their tokens in
the whole text, in windows that overlap where the text is longer than the model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity.checkpoints import ARCHITECTURES, WIDTH, add_modules, build, dense, pooling
from parity.heads_checkpoints import M3_TOKENS, M3_WIDTH, bge_m3
from parity.heads_engine import HeadsEngine, HeadsModel
from text_rows import text_rows
from transformers import AutoModel, AutoTokenizer

from sie_adapter.engine import engines
from sie_contracts.errors import InvalidInput
from sie_contracts.wire.messages import ChunkRule, Input, RunOptions, TextChunks
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import WorkItemInput

MIN_COSINE = 0.9999
ON_CPU = engines.EngineFacts("cpu", reads_text=True)
MAX_TOKENS = 80
# installed engines that compute texts on a CPU
RUNNERS = [name for name, rule in engines.rules().items() if not rule.unasked(ON_CPU) and not rule.obstacle(ON_CPU)]
NAMES = ("bert", "xlm-roberta", "modernbert", "qwen3 causal")
_WORDS = "the river wound past Łódź, 中文文本 and 12,345 mills. A café — “open” until 9? Naïve 👩‍💻 tests; yes! "
Vectors = NDArray[np.float32]
Spans = Sequence[tuple[int, int]]


def _text(characters: int) -> str:
    return (_WORDS * (characters // len(_WORDS) + 1))[:characters]


def _chunks(text: str, spans: Spans, *, context: bool = True) -> Input:
    return Input(text, chunks=TextChunks(spans=np.array(spans, "<i4").tobytes(), context=context))


def _tiled(text: str, size: int) -> Spans:
    return list(itertools.pairwise([*range(0, len(text), size), len(text)]))


class Late:
    """The reference: each token has the state of the window in which it has most context on its shorter side."""

    def __init__(self, folder: Path, most: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()
        self._most = most

    def chunks(self, text: str, spans: Spans) -> Vectors:
        plain = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = plain["input_ids"], [end for _, end in plain["offset_mapping"]]
        whole = self._tokenizer(text)["input_ids"]
        first = next(place for place in range(len(whole)) if whole[place : place + len(ids)] == ids)
        before, after = whole[:first], whole[first + len(ids) :]
        room, count = self._most - len(before) - len(after), 1
        while (length := math.ceil((len(ids) + (count - 1) * (room // 8)) / count)) > room:
            count += 1
        starts = [place * (len(ids) - length) // max(1, count - 1) for place in range(count)]
        best: dict[int, tuple[float, torch.Tensor]] = {}
        for start in starts:
            with torch.inference_mode():
                states = self._model(torch.tensor([before + ids[start : start + length] + after]))[0][0]
            for token in range(start, start + length):
                left = token - start if start else np.inf
                right = start + length - 1 - token if start + length < len(ids) else np.inf
                if token not in best or min(left, right) > best[token][0]:
                    best[token] = min(left, right), states[len(before) + token - start]
            if not start:
                head = states[: len(before)]
        tail = states[len(states) - len(after) :]
        pooled = []
        for first, end in spans:
            own = [token for token in range(len(ids)) if first < ends[token] <= end or (not first and not ends[token])]
            rows = [best[token][1] for token in own]
            rows += list(head) if own[0] == 0 else []
            rows += list(tail) if own[-1] == len(ids) - 1 else []
            pooled.append(torch.stack(rows).mean(0).numpy())
        return np.stack(pooled)


def _cosines(left: NDArray[Any], two: NDArray[Any]) -> NDArray[Any]:
    product = (left * two).sum(-1)
    return product / (np.linalg.norm(left, axis=-1) * np.linalg.norm(two, axis=-1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("chunks")

    @functools.cache
    def built(name: str) -> Path:
        place = build(root / name.replace(" ", "-"), ARCHITECTURES[name])
        return add_modules(place, [pooling("mean")], max_tokens=600)

    return built


@pytest.fixture(scope="module")
def engine() -> Iterator[HeadsEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = HeadsEngine()
    yield engine
    engine.stop()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(engine: HeadsEngine, folder: Callable[[str], Path]) -> Callable[[str, str], HeadsModel]:
    @functools.cache
    def loaded(name: str, runner: str) -> HeadsModel:
        loaded = engine.load(folder(name), {"dense": WIDTH}, max_tokens=MAX_TOKENS, engine=runner)
        assert loaded.encoder.engine_choice.engine == runner
        return loaded

    return loaded


Load = Callable[[str, str], HeadsModel]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_ragged_documents_equal_the_reference(
    model: Load, folder: Callable[[str], Path], name: str, runner: str
) -> None:
    # one window, two windows, five windows and more, a single short text
    texts = [_text(characters) for characters in (90, 260, 900, 7)]
    sizes = (40, 33, 150, 7)
    documents = [(text, _tiled(text, size)) for text, size in zip(texts, sizes, strict=True)]
    documents += [(texts[2], [(0, 1), (3, 30), (20, 900)]), (texts[1], [(len(texts[1]) - 2, len(texts[1]))])]
    reference = Late(folder(name), MAX_TOKENS)
    served = model(name, runner).encode_inputs(
        [_chunks(text, spans) for text, spans in documents], "dense", normalize=False
    )
    for (text, spans), got in zip(documents, served, strict=True):
        assert got["chunks"][:, :2].tolist() == [list(span) for span in spans]
        assert _cosines(got["dense"], reference.chunks(text, spans)).min() >= MIN_COSINE


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_documents_have_the_windows_that_their_tokens_need(model: Load, windows: int) -> None:
    served = model("bert", "torch")
    room = MAX_TOKENS - 2
    most = room + (windows - 1) * (room - room // 8)
    words = " ".join(["river"] * most)
    work_rows = layouts.make(
        served.tokenizer,
        served.encoder.rows["encode"],
        [WorkItemInput([_chunks(words, [(0, len(words))])], None, RunOptions())],
    )[0]
    assert len(work_rows.rows) == windows
    assert max(len(row.ids) for row in work_rows.rows) == MAX_TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_one_chunk_of_the_whole_text_equals_its_plain_vector(model: Load, name: str) -> None:
    served, text = model(name, "torch"), _text(50)
    plain = served.encode([text], "dense")[0]["dense"]
    for context in (True, False):
        (got,) = served.encode_inputs([_chunks(text, [(0, len(text))], context=context)], "dense")
        assert np.abs(got["dense"][0] - plain).max() < 1e-6


@pytest.mark.parametrize("name", ["bert", "qwen3 causal"])
def test_chunks_without_context_equal_their_texts_alone(model: Load, name: str) -> None:
    served, text = model(name, "torch"), _text(400)
    spans = _tiled(text, 60)
    (got,) = served.encode_inputs([_chunks(text, spans, context=False)], "dense", prefix="passage: ")
    alone = served.encode([text[first:end] for first, end in spans], "dense", prefix="passage: ")
    assert _cosines(got["dense"], np.stack([row["dense"] for row in alone])).min() >= MIN_COSINE


@pytest.mark.parametrize("runner", RUNNERS)
def test_batch_mates_change_no_chunk(model: Load, runner: str) -> None:
    served, text = model("modernbert", runner), _text(500)
    own = _chunks(text, _tiled(text, 77))
    mates = [Input(_text(33)), _chunks(_text(350), _tiled(_text(350), 90)), Input("x")]
    (alone,) = served.encode_inputs([own], "dense")
    among = served.encode_inputs([mates[0], own, *mates[1:]], "dense")
    assert np.abs(alone["dense"] - among[1]["dense"]).max() < 1e-5
    plain = served.encode([_text(33), "x"], "dense")
    assert np.abs(among[0]["dense"] - plain[0]["dense"]).max() < 1e-5
    assert np.abs(among[3]["dense"] - plain[1]["dense"]).max() < 1e-5


def test_a_prompt_stands_in_each_window(model: Load, folder: Callable[[str], Path]) -> None:
    served, text = model("bert", "torch"), _text(300)
    work_rows = layouts.make(
        served.tokenizer,
        served.encoder.rows["encode"],
        [WorkItemInput([_chunks(text, [(0, len(text))])], None, RunOptions(prefix="passage: "))],
    )[0]
    assert len(work_rows.rows) > 1
    prompt = text_rows(served.tokenizer, ["passage: "])[0].ids[:-1]
    assert all(row.ids[: len(prompt)].tolist() == prompt.tolist() for row in work_rows.rows)
    short = _text(60)
    (got,) = served.encode_inputs([_chunks(short, [(0, len(short))])], "dense", prefix="passage: ", normalize=False)
    expected = Late(folder("bert"), MAX_TOKENS).chunks("passage: " + short, [(0, len(short) + 9)])
    assert _cosines(got["dense"], expected).min() >= MIN_COSINE


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_dense_layers_come_after_the_pooling_of_a_chunk(engine: HeadsEngine, tmp_path: Path, name: str) -> None:
    layer = dense(WIDTH, 24, bias=True, activation=torch.nn.Tanh)
    place = add_modules(build(tmp_path / "m", ARCHITECTURES[name]), [pooling("mean"), layer], max_tokens=600)
    served = engine.load(place, {"dense": 24}, max_tokens=MAX_TOKENS)
    text = _text(600)
    spans = [(0, 50), (50, 420), (420, 600)]  # the second chunk lies in several windows
    (got,) = served.encode_inputs([_chunks(text, spans)], "dense", normalize=False)
    means = torch.tensor(Late(place, MAX_TOKENS).chunks(text, spans))
    expected = torch.tanh(means @ layer.tensors["linear.weight"].T + layer.tensors["linear.bias"]).numpy()
    assert _cosines(got["dense"], expected).min() >= MIN_COSINE


@pytest.mark.parametrize("name", ["max", "mean+max"])
def test_a_chunk_in_several_windows_has_the_maximum_of_all(
    engine: HeadsEngine, folder: Callable[[str], Path], name: str
) -> None:
    width = WIDTH * len(name.split("+"))
    load = {"precision": "float32", "engine": "torch", "accept_unproven": True}
    served = engine.load(folder("bert"), {"dense": width}, max_tokens=MAX_TOKENS, run={"pooling": name}, load=load)
    text = _text(600)
    (whole,) = served.encode_inputs([_chunks(text, [(0, 600)])], "dense", normalize=False)
    (parts,) = served.encode_inputs([_chunks(text, _tiled(text, 60))], "dense", normalize=False)
    assert np.abs(whole["dense"][0, -WIDTH:] - parts["dense"][:, -WIDTH:].max(0)).max() < 1e-5
    if name == "mean+max":
        reference = Late(folder("bert"), MAX_TOKENS).chunks(text, [(0, 600)])
        assert _cosines(whole["dense"][:, :WIDTH], reference).min() >= MIN_COSINE


def test_one_multivector_and_one_sparse_vector_for_each_chunk(engine: HeadsEngine, tmp_path: Path) -> None:
    served = _m3(engine, tmp_path)
    text = _text(50)
    spans = [(0, 30), (30, 50)]
    (whole,) = served.encode([text], "sparse", "multivector")
    (got,) = served.encode_inputs([_chunks(text, spans)], "sparse", "multivector")
    counts = got["chunks"]
    # the tokens of both chunks are those of the text, in order
    assert np.abs(got["multivector"] - whole["multivector"]).max() < 1e-5
    assert counts[:, 3].sum() == len(whole["multivector"])
    merged: dict[int, float] = {}
    for index, weight in zip(got["sparse.indices"].tolist(), got["sparse.values"].tolist(), strict=True):
        merged[index] = max(merged.get(index, 0.0), weight)
    assert sorted(merged) == whole["sparse.indices"].tolist()
    assert np.abs(np.array([merged[index] for index in sorted(merged)]) - whole["sparse.values"]).max() < 1e-5
    assert counts[:, 4].sum() == len(got["sparse.indices"])


def test_a_sparse_chunk_in_several_windows_has_the_maximum_of_all(engine: HeadsEngine, tmp_path: Path) -> None:
    served = _m3(engine, tmp_path)
    text = _text(700)
    (got,) = served.encode_inputs([_chunks(text, [(0, 700)])], "sparse", "multivector")
    halves = _tiled(text, 50)
    (parts,) = served.encode_inputs([_chunks(text, halves)], "sparse", "multivector")
    assert got["sparse.indices"].tolist() == sorted(set(parts["sparse.indices"].tolist()))
    assert np.abs(got["multivector"] - parts["multivector"]).max() < 1e-5
    for index, weight in zip(got["sparse.indices"], got["sparse.values"], strict=True):
        assert weight == pytest.approx(parts["sparse.values"][parts["sparse.indices"] == index].max(), abs=1e-5)


def _m3(engine: HeadsEngine, place: Path) -> HeadsModel:
    folder = bge_m3(place / "m3")
    vocabulary = AutoModel.from_pretrained(folder).get_input_embeddings().num_embeddings
    outputs = {"dense": M3_WIDTH, "sparse": vocabulary, "multivector": M3_WIDTH}
    return engine.load(folder, outputs, max_tokens=M3_TOKENS)


def test_a_pooling_that_is_no_mean_is_refused(engine: HeadsEngine, tmp_path: Path) -> None:
    place = add_modules(build(tmp_path / "c", ARCHITECTURES["bert"]), [pooling("cls")], max_tokens=600)
    served = engine.load(place, {"dense": WIDTH}, max_tokens=MAX_TOKENS)
    late, alone = _chunks("two words", [(0, 9)]), _chunks("two words", [(0, 9)], context=False)
    work_rows = layouts.make(
        served.tokenizer, served.encoder.rows["encode"], [WorkItemInput([late, alone], None, RunOptions())]
    )[0]
    assert isinstance(work_rows.unfit[0], InvalidInput)
    assert work_rows.unfit[0].reason == "unsupported_pooling"
    assert "cls" in work_rows.unfit[0].message
    assert 1 not in work_rows.unfit


def test_a_rule_gives_chunks_that_tile_the_text(model: Load) -> None:
    text = _text(800)
    rule = Input(text, chunks=TextChunks(ChunkRule(20)))
    (got,) = model("bert", "torch").encode_inputs([rule], "dense")
    spans = got["chunks"][:, :2].tolist()
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert got["chunks"][:, 2].max() <= 20
