"""GLiNER through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gliner import GLiNER
from oracle import WORDS, ragged_texts
from parity.device import on_device
from parity.extraction import Entities, assert_equal, failed
from parity.gliner_checkpoints import GlinerKind, entry_of, gliner_folder
from parity.table import ParityTable, Scores, path_of
from parity.toys import edit_weights
from selection import long_but

from sie_adapter.families import extraction
from sie_adapter.families.extraction import ExtractOptions, LabelVectors
from sie_contracts.errors import InferenceFailed, InvalidInput, ModelLoadFailed
from sie_models_extract import gliner as family
from sie_models_extract.extraction import TextWindow
from sie_models_extract.gliner import GlinerModel, WindowResult

KINDS: tuple[GlinerKind, ...] = ("span", "token", "bi", "bi-token")
LABELS = ("person", "river mountain", "Engine")
THRESHOLD = {"span": 0.3, "token": 0.25, "bi": 0.5, "bi-token": 0.25}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gliner")
    return {kind: gliner_folder(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, GlinerModel]:
    return {kind: load(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def oracles(folders: dict[str, Path]) -> dict[str, Any]:
    return {kind: GLiNER.from_pretrained(str(folder)) for kind, folder in folders.items()}


def load(folder: Path, **kwargs: Any) -> GlinerModel:
    entry = entry_of(folder, "gliner", **kwargs)
    return GlinerModel(folder, entry, entry.load, on_device())


def options(
    kind: str, labels: tuple[str, ...] = LABELS, threshold: float | None = None, **parameters: Any
) -> ExtractOptions:
    return ExtractOptions(labels, THRESHOLD[kind] if threshold is None else threshold, parameters)


def extract(model: GlinerModel, texts: list[str], settings: ExtractOptions) -> list[Entities]:
    results = model.extract(texts, [settings] * len(texts))
    return [result["entities"] for result in results if isinstance(result, dict)]


@pytest.mark.parametrize("kind", long_but(KINDS, ["span", "bi-token"]))
@pytest.mark.parametrize("parameters", [{}, {"flat_ner": False}, {"flat_ner": False, "multi_label": True}])
def test_entities_equal_those_of_the_package(
    models: dict[str, GlinerModel],
    oracles: dict[str, Any],
    kind: GlinerKind,
    parameters: dict[str, bool],
    table: ParityTable,
) -> None:
    texts = [
        *ragged_texts(24, seed=3),
        "Zürich, the harbour (search): e-mail to an_index_of 3.14!",
        "  queue\n\tstream  ",
    ]
    ours = extract(models[kind], texts, options(kind, **parameters))
    rows = 1 if "token" in kind else 5  # the package takes the padding of a token-level batch for words
    theirs = oracles[kind].inference(texts, list(LABELS), threshold=THRESHOLD[kind], batch_size=rows, **parameters)
    assert sum(map(len, theirs)) > 30
    for text, entities, expected in zip(texts, ours, theirs, strict=True):
        assert_equal(entities, expected)
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)
        difference = max(
            (abs(entity["score"] - reference["score"]) for entity, reference in zip(entities, expected, strict=True)),
            default=0.0,
        )
        table.record(f"gliner {kind}", path_of(models[kind].attention), models[kind].precision, Scores(difference))


@pytest.mark.parametrize("kind", long_but(KINDS, ["span", "token"]))
def test_what_was_prepared_off_the_lane_gives_the_same(models: dict[str, GlinerModel], kind: GlinerKind) -> None:
    """The lane tokenises no prepared text again. Texts that were not prepared, and those whose labels fail, give the
    same as before.
    """
    texts = ["queue worker", "queue worker stream", "", "queue worker stream search index engine " * 9, "index"]
    settings = [options(kind), options(kind), options(kind), options(kind, ("queue",)), options(kind, ())]
    preparation = models[kind].prepare(texts, settings)
    assert preparation.seconds > 0
    assert models[kind].extract(texts, settings, preparation)[:4] == models[kind].extract(texts, settings)[:4]
    assert preparation.padding > 0
    again = models[kind].prepare(texts[:1], settings[:1])
    made_s = again.seconds
    models[kind].extract(texts[:1], settings[:1], again)
    assert again.seconds == made_s, "the lane tokenises nothing"
    models[kind].extract(texts[3:4], settings[3:4], again)
    assert again.seconds > made_s


@pytest.mark.parametrize("kind", ["token", "bi-token"])
def test_padding_holds_no_entities(models: dict[str, GlinerModel], oracles: dict[str, Any], kind: GlinerKind) -> None:
    """Rows of different lengths run in one pass. With a threshold of 0 the package finds entities in the padding and
    fails.
    """
    texts = ["queue worker", "queue", "queue worker stream search index engine"]
    with pytest.raises(IndexError):
        oracles[kind].inference(texts, list(LABELS), threshold=0.0)
    with torch.inference_mode():
        words, any_score = [text.split() for text in texts], options(kind, threshold=0.0)
        request = models[kind]._request(any_score, list(LABELS))
        rows = models[kind]._read(words, models[kind]._collated(words, any_score), request)
    alone = [oracles[kind].inference([text], list(LABELS), threshold=0.0)[0] for text in texts]
    for row, text, expected in zip(rows, texts, alone, strict=True):
        assert isinstance(row, WindowResult)
        words = text.split()
        assert [(" ".join(words[first : last + 1]), label) for first, last, label, _ in row.spans] == [
            (entity["text"], entity["label"]) for entity in expected
        ]
        assert [span[3] for span in row.spans] == pytest.approx([entity["score"] for entity in expected], abs=1e-5)


def test_the_threshold_is_one_half_unless_the_parameters_say_otherwise(
    models: dict[str, GlinerModel], oracles: dict[str, Any]
) -> None:
    texts = ragged_texts(6, seed=4)
    for parameters, threshold in (({}, 0.5), ({"threshold": 0.2}, 0.2)):
        [*ours] = models["span"].extract(texts, [ExtractOptions(LABELS, None, parameters)] * 6)
        for result, expected in zip(
            ours, oracles["span"].inference(texts, list(LABELS), threshold=threshold), strict=True
        ):
            assert_equal(result["entities"], expected)  # type: ignore[index]


@pytest.mark.parametrize("kind", long_but(KINDS, ["span"]))
def test_an_item_is_independent_of_its_batch(models: dict[str, GlinerModel], kind: GlinerKind) -> None:
    """One batch has 64 ragged texts, three label lists and two thresholds. Each of the first 16 texts and of the odd
    last ones gives the same alone.
    """
    texts = [*ragged_texts(61, seed=5, longest=120), "", "queue", " ".join(WORDS * 4)]
    lists = (LABELS, LABELS[::-1], ("vector",))
    settings = [options(kind, lists[index % 3], (0.05, 0.4)[index % 2]) for index in range(64)]
    together = models[kind].extract(texts, settings)
    for item in (*range(16), 61, 62, 63):
        [alone] = models[kind].extract([texts[item]], [settings[item]])
        assert_equal(together[item]["entities"], alone["entities"])  # type: ignore[index]


def test_an_entity_past_the_limit_of_words_is_found_where_it_stands(
    models: dict[str, GlinerModel], oracles: dict[str, Any]
) -> None:
    """The windows of 600 words have 384 words and share 48. Entities from word 360 on are those of the second window,
    which begins at word 336.

    An entity of up to 4 words may cross that border, so the comparison leaves these words out.
    """
    words = random.Random(7).choices(WORDS, k=600)
    text = "  ".join(words)
    [entities] = extract(models["span"], [text], options("span"))
    shift = len("  ".join(words[:336])) + 2
    middle, clear = len("  ".join(words[:360])) + 2, len("  ".join(words[:364])) + 2
    second = oracles["span"].inference([text[shift:]], list(LABELS), threshold=THRESHOLD["span"])[0]
    expected = [{**entity, "start": entity["start"] + shift, "end": entity["end"] + shift} for entity in second]
    expected = [entity for entity in expected if entity["start"] >= clear]
    assert expected[-1]["start"] > len("  ".join(words[:384]))
    assert_equal([entity for entity in entities if entity["start"] >= clear], expected)
    first = oracles["span"].inference(["  ".join(words[:384])], list(LABELS), threshold=THRESHOLD["span"])[0]
    assert_equal(
        [entity for entity in entities if entity["end"] < middle],
        [entity for entity in first if entity["end"] < middle],
    )


def test_where_two_windows_disagree_the_better_span_stays(models: dict[str, GlinerModel]) -> None:
    request = models["span"]._request(options("span"), list(LABELS))
    windows = [(TextWindow(0, 0, 20), [(0, 0, "a", 0.9), (14, 17, "a", 0.6), (18, 19, "a", 0.8)])]
    windows.append((TextWindow(0, 12, 32), [(12, 13, "b", 0.9), (16, 18, "b", 0.7), (20, 21, "b", 0.5)]))
    assert models["span"]._joined(windows, request) == [(0, 0, "a", 0.9), (16, 18, "b", 0.7), (20, 21, "b", 0.5)]
    windows[0][1][1] = (14, 17, "a", 0.75)
    assert models["span"]._joined(windows, request) == [(0, 0, "a", 0.9), (14, 17, "a", 0.75), (20, 21, "b", 0.5)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_words_has_no_entities(models: dict[str, GlinerModel], kind: GlinerKind) -> None:
    assert extract(models[kind], ["", " \n\t ", "queue"], options(kind, threshold=0.0))[:2] == [[], []]


def test_neighbours_of_one_label_are_merged_on_request(models: dict[str, GlinerModel]) -> None:
    entities = [
        {"label": "a", "score": 0.5, "start": 0, "end": 4},
        {"label": "a", "score": 0.9, "start": 5, "end": 8},
        {"label": "a", "score": 0.6, "start": 8, "end": 9},
        {"label": "b", "score": 0.7, "start": 10, "end": 12},
        {"label": "a", "score": 0.4, "start": 14, "end": 15},
    ]
    merged = [(entity["label"], entity["score"], entity["start"], entity["end"]) for entity in family._merged(entities)]
    assert merged == [("a", 0.9, 0, 9), ("b", 0.7, 10, 12), ("a", 0.4, 14, 15)]
    texts = ragged_texts(8, seed=9)
    apart = extract(models["token"], texts, options("token", threshold=0.2))
    joined = extract(models["token"], texts, options("token", threshold=0.2, merge_adjacent_entities=True))
    assert sum(map(len, joined)) < sum(map(len, apart))
    for text, detections in zip(texts, joined, strict=True):
        assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in detections)
        for entity, following in itertools.pairwise(detections):
            assert entity["label"] != following["label"] or following["start"] - entity["end"] > 1


@contextmanager
def counted_labels(model: GlinerModel) -> Iterator[list[int]]:
    """The number of labels of each call of the label encoder."""
    calls: list[int] = []
    encoder = model._gliner.model.token_rep_layer.labels_encoder
    hook = encoder.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments[0])))
    yield calls
    hook.remove()


def test_label_vectors_are_computed_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folders["bi"])
    texts = ragged_texts(4, seed=10)
    with counted_labels(model) as calls:
        first = extract(model, texts, options("bi"))
        assert calls == [3]
        assert extract(model, texts, options("bi")) == first
        extract(model, texts, options("bi", ("vector", *LABELS)))
        assert calls == [3, 1]
        uncached_entities = extract(model, texts, options("bi", precompute_labels=False))
        assert calls == [3, 1, 3]
        for cached_entities, computed in zip(first, uncached_entities, strict=True):
            assert_equal(cached_entities, computed)
        monkeypatch.setattr(extraction, "_LABELS_CACHED", 2)
        extract(model, texts, options("bi", ("bridge",)))
        extract(model, texts, options("bi", ("bridge", "Engine")))
        extract(model, texts, options("bi", ("vector",)))
        assert calls == [3, 1, 3, 1, 1]  # Engine was the last of its list, vector was dropped


def test_long_labels_do_not_stay_in_memory() -> None:
    """The package reads at most 512 tokens of a label, and no request is refused for a longer one."""
    vectors = LabelVectors(lambda labels: torch.zeros(len(labels), 4))
    tracemalloc.start()
    try:
        for number in range(100):
            vectors.encode([f"{number} {'x' * 100_000}"])
        traced_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert traced_bytes < 1_000_000


def test_labels_that_cannot_be_used_fail_their_items_alone(models: dict[str, GlinerModel]) -> None:
    many = tuple(f"label number {number}" for number in range(600))
    settings = [
        options("span"),
        options("span", ()),
        options("span", ("<<ENT>>",)),
        options("span", many),
        options("span", LABELS),
    ]
    good, empty, reserved, long, twin = models["span"].extract(["search index queue"] * 5, settings)
    assert isinstance(good, dict)
    assert isinstance(twin, dict)
    assert_equal(twin["entities"], good["entities"])
    for result, text in ((empty, "at least one"), (reserved, "<<ENT>>"), (long, "of 3072 tokens")):
        assert text in failed(result, InvalidInput).message


@contextmanager
def forward_hook(model: GlinerModel, hook: Callable[..., Any]) -> Iterator[None]:
    handle = model._gliner.model.register_forward_hook(hook, with_kwargs=True)
    yield
    handle.remove()


def test_scores_that_are_not_finite_fail_their_item_alone(models: dict[str, GlinerModel]) -> None:
    texts = ["queue", "queue worker stream", "queue worker"]
    expected = extract(models["span"], texts, options("span", threshold=0.1))

    def poison(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for row in (kwargs["text_lengths"][:, 0] == 3).nonzero():
            output.logits[row, 1, 1, 1] = float("nan")

    with forward_hook(models["span"], poison):
        first, second, third = models["span"].extract(texts, [options("span", threshold=0.1)] * 3)
    assert failed(second, InferenceFailed).reason == "non_finite"
    for result, entities in ((first, expected[0]), (third, expected[2])):
        assert_equal(result["entities"], entities)  # type: ignore[index]


def test_a_batch_that_fails_is_tried_again_text_by_text(
    models: dict[str, GlinerModel], caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["queue", "queue worker stream", "queue worker"]
    expected = extract(models["span"], texts, options("span"))

    def fail(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if (kwargs["text_lengths"] == 3).any():
            raise ValueError("queue worker stream")

    with forward_hook(models["span"], fail):
        first, second, third = models["span"].extract(texts, [options("span")] * 3)
    assert "queue" not in failed(second, InferenceFailed).message
    assert len(caplog.records) == 1
    for result, entities in ((first, expected[0]), (third, expected[2])):
        assert_equal(result["entities"], entities)  # type: ignore[index]


def test_out_of_memory_is_left_to_the_caller(models: dict[str, GlinerModel]) -> None:
    def fail(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with forward_hook(models["span"], fail), pytest.raises(torch.OutOfMemoryError):
        models["span"].extract(["queue", "worker"], [options("span")] * 2)


def test_folders_without_a_description_of_their_backbone_take_it_from_below(
    models: dict[str, GlinerModel], tmp_path: Path
) -> None:
    texts = ragged_texts(4, seed=13)
    for pickled in (False, True):
        folder = gliner_folder(tmp_path / f"old-{pickled}", described=False, pickled=pickled)
        model = load(folder)
        for ours, same in zip(
            extract(model, texts, options("span")), extract(models["span"], texts, options("span")), strict=True
        ):
            assert_equal(ours, same)
        assert model.tokenizer == models["span"].tokenizer
    shutil.rmtree(folder / "no")
    with pytest.raises(ModelLoadFailed, match="its backbone no/backbone is neither in the hub cache") as caught:
        load(folder)
    assert caught.value.extras["error_class"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("prompt_rep_layer.0.bias"), "1 missing keys: prompt_rep_layer.0.bias"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "1 unexpected keys: extra"),
        (
            lambda weights: weights.update({"prompt_rep_layer.0.bias": torch.zeros(3)}),
            "1 mismatched keys: prompt_rep_layer.0.bias",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folders: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    folder = shutil.copytree(folders["span"], tmp_path / "copy")
    edit_weights(folder, change)
    with pytest.raises(ModelLoadFailed, match=message) as caught:
        load(folder)
    assert caught.value.extras["error_class"] == "INCOMPATIBLE"


class _Opener:
    """A pickle that opens a file for writing when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_neither_weights_nor_configurations_run_code(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["bi"], tmp_path / "copy")
    marker = tmp_path / "marker"
    config = json.loads((folder / "gliner_config.json").read_text())
    config["encoder_config"]["auto_map"] = {"AutoModel": "code.Model", "AutoConfig": "code.Config"}
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "gliner_config.json").write_text(json.dumps(config))
    load(folder)
    assert not marker.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"neither model.safetensors nor pytorch_model.bin"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": _Opener(marker)}, protocol=2))
    with pytest.raises(ModelLoadFailed, match="contains objects other than tensors"):
        load(folder)
    assert not marker.exists()
