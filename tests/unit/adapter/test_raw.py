"""Families that tokenise texts themselves: each text gets one outcome at its own place, in all operations."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from unit.adapter.test_batch import arrays, reasons, tokens

from sie_adapter.engine.raw import extract_options, run_raw
from sie_adapter.families.extraction import ExtractOptions, Preparation, by_options
from sie_contracts.errors import InferenceFailed, InternalFailure, InvalidInput, SIEError
from sie_contracts.models.muvera import Muvera
from sie_contracts.wire.ipc import BatchDone, Group, Rows, RunBatch
from sie_contracts.wire.messages import Ok, RunOptions

RAW = RunOptions(normalize=False)
NAN = float("nan")


@dataclass
class Letters:
    """A family that counts letters. The text `bad` gets an error, and `nan` a NaN. The first `lost` results are left
    out.
    """

    lost: int = 0
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def encode(self, texts: Sequence[str], options: RunOptions) -> list[Any]:
        self.calls.append(tuple(texts))
        if options.parameters.get("colour"):
            raise InvalidInput("colour: no such thing", reason="schema")
        results = [self._vectors(text) for text in texts]
        return results[self.lost :]

    def _vectors(self, text: str) -> dict[str, Any] | SIEError:
        if text == "bad":
            return InferenceFailed("bad", reason="their_own")
        counts = [float(text.count(letter)) for letter in "abc"]
        rows = np.eye(3)[["abc".index(letter) for letter in text if letter in "abc"]].reshape(-1, 3)
        outputs: dict[str, Any] = {
            "dense": [NAN] * 3 if text == "nan" else counts,
            "sparse": ([1, 5], [0.5, 0.25]),
            "multivector": rows,
        }
        if text.startswith("nan in "):
            name = text.removeprefix("nan in ")
            outputs = {"dense": counts, name: ([1], [NAN]) if name == "sparse" else np.full((2, 3), NAN)}
        if text == "only dense":
            outputs = {"dense": counts}
        return outputs

    def score(self, query: str, texts: Sequence[str], options: RunOptions) -> list[Any]:
        self.calls.append((query, *texts))
        if query == "poison":
            raise InvalidInput("poison", reason="poison")
        scores = [self._score(query, text) for text in texts]
        return scores[self.lost :]

    def _score(self, query: str, text: str) -> float | SIEError:
        if text == "bad":
            return InferenceFailed("bad", reason="their_own")
        return NAN if text == "nan" else len(set(query) & set(text))

    def extract(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> list[Any]:
        self.calls.append(tuple(texts))
        results = [self._found(text, option) for text, option in zip(texts, options, strict=True)]
        return results[self.lost :]

    def _found(self, text: str, option: ExtractOptions) -> dict[str, Any] | SIEError:
        if text == "bad":
            return InferenceFailed("bad", reason="their_own")
        entities: list[dict[str, Any]] = [
            {"text": label, "start": text.index(label)} for label in option.labels if label in text
        ]
        if text == "nan":
            entities.append({"score": NAN})
        return {"entities": entities, "threshold": option.threshold, "flat": option.parameters.get("flat_ner")}


def run(
    operation: str, texts: Sequence[str], *groups: Group, family: Any = None, lengths: Sequence[int] | None = None
) -> BatchDone:
    counts = np.array([len(text) for text in texts] if lengths is None else lengths, "<i4")
    message = RunBatch("b", "m", operation, counts.tobytes(), b"", groups, texts=tuple(texts))  # type: ignore[arg-type]
    with torch.inference_mode():
        return run_raw(Letters() if family is None else family, message)


def test_texts_become_vectors_with_the_options_of_their_group() -> None:
    family = Letters()
    cut = RunOptions(outputs=("dense",), dimensions=2)
    three = RunOptions(outputs=("sparse", "multivector", "dense"), normalize=False, dtype="float16")
    encoding = RunOptions(outputs=("dense",), muvera=Muvera(2, 1, None, None))
    groups = (Group(0, 2, RAW), Group(2, 3, cut), Group(3, 3), Group(3, 4, three), Group(4, 5, encoding))
    done = run("encode", ["a", "bb", "abc", "ca", "ab"], *groups, family=family)
    assert family.calls == [("a", "bb"), ("abc",), ("ca",), ("ab",)]
    got = arrays(done)
    assert [outcome["dense"].tolist() for outcome in got[:2]] == [[1, 0, 0], [0, 2, 0]]
    np.testing.assert_allclose(got[2]["dense"], np.array([1, 1]) / np.sqrt(2), rtol=1e-6)
    assert list(got[3]) == ["sparse.indices", "sparse.values", "multivector", "dense"]
    assert got[3]["multivector"].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert got[3]["dense"].dtype == np.float16
    assert got[3]["sparse.values"].tolist() == [0.5, 0.25]
    assert got[4]["dense"].shape == (2 * 2 * 3,)
    assert tokens(done) == [1, 2, 3, 2, 2]


def test_errors_stand_in_the_place_of_their_text_and_nothing_that_is_not_finite_leaves() -> None:
    """The errors are one of the family, a NaN, an output that the family lacks, and a zero vector."""
    three = RunOptions(outputs=("dense", "multivector"), normalize=False)
    done = run(
        "encode", ["a", "bad", "nan", "only dense", "b", "zzz"], Group(0, 3, RAW), Group(3, 5, three), Group(5, 6, RAW)
    )
    assert reasons(done) == ["", "their_own", "non_finite", "unsupported_output", "", "non_finite"]
    assert arrays(done)[4]["dense"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("output", ["sparse", "multivector", "dense"])
def test_a_nan_in_any_output_stays_inside(output: str) -> None:
    """The output dense is a MUVERA encoding of rows with a NaN."""
    options = RunOptions(outputs=(output,), muvera=Muvera(2, 1, None, None) if output == "dense" else None)
    text = f"nan in {'multivector' if output == 'dense' else output}"
    done = run("encode", [text, "abc"], Group(0, 2, options))
    assert reasons(done) == ["non_finite", ""]
    assert all(np.isfinite(array).all() for entry in arrays(done) for array in entry.values())


def test_what_one_group_asks_in_vain_is_no_harm_to_the_others() -> None:
    poisoned, wide = RunOptions(parameters={"colour": "red"}), RunOptions(dimensions=4)
    done = run("encode", ["a", "b", "c", "a"], Group(0, 1, RAW), Group(1, 3, poisoned), Group(3, 4, wide))
    assert reasons(done) == ["", "schema", "schema", "bad_dimensions"]
    scored = run("score", ["poison", "a", "b", "ab", "b"], Group(0, 3), Group(3, 5))
    assert reasons(scored) == ["poison", "poison", ""]


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
def test_an_exception_of_the_model_fails_the_text_that_causes_it_only(operation: str) -> None:
    class Breaking:
        def encode(self, texts: Sequence[str], options: RunOptions) -> list[Any]:
            return [{"dense": [float(text)]} for text in texts]

        def score(self, query: str, texts: Sequence[str], options: RunOptions) -> list[Any]:
            return [float(text) for text in texts]

        def extract(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> list[Any]:
            if "refused" in texts:
                raise InvalidInput("not this text")
            return [{"number": float(text)} for text in texts]

    texts = ["1", "1", "1", "no number", "1", "1"]
    done = run(operation, texts, Group(0, 2, RAW), Group(2, 4, RAW), Group(4, 6, RAW), family=Breaking())
    codes = ["" if isinstance(outcome, Ok) else outcome.error.code for outcome in done.outcomes]
    alone = ["", "", "", "INFERENCE_ERROR", "", ""]
    assert codes == (["", "INFERENCE_ERROR", ""] if operation == "score" else alone)
    if operation == "extract":
        refused = run(operation, ["1", "refused", "1"], Group(0, 2, RAW), Group(2, 3, RAW), family=Breaking())
        assert ["" if isinstance(outcome, Ok) else outcome.error.code for outcome in refused.outcomes] == [
            "",
            "INVALID_INPUT",
            "",
        ]


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
def test_no_text_runs_again_on_a_lost_device(operation: str) -> None:
    calls = []

    def lose(*_: Any) -> list[Any]:
        calls.append(1)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        run(operation, ["a", "b", "c"], Group(0, 3, RAW), family=SimpleNamespace(**{operation: lose}))
    assert len(calls) == 1


def test_the_texts_of_a_group_are_scored_against_its_first() -> None:
    family = Letters()
    done = run(
        "score", ["abc", "ab", "bad", "nan", "x", "cc", "c"], Group(0, 5), Group(5, 7), Group(7, 7), family=family
    )
    assert family.calls == [("abc", "ab", "bad", "nan", "x"), ("cc", "c")]
    assert reasons(done) == ["", "their_own", "non_finite", "", ""]
    assert [outcome.score for outcome in done.outcomes if isinstance(outcome, Ok)] == [2, 0, 1]
    assert tokens(done) == [5, 1, 3], "the query counts once, for the first text"
    assert not done.block


def test_all_groups_are_extracted_from_in_one_call() -> None:
    family = Letters()
    first = RunOptions(labels=("b", "a"), threshold=0.5, parameters={"flat_ner": True})
    done = run(
        "extract", ["ab", "bad", "xa", "nan"], Group(0, 2, first), Group(2, 4, RunOptions(labels=("a",))), family=family
    )
    assert family.calls == [("ab", "bad", "xa", "nan")]
    assert reasons(done) == ["", "their_own", "", "non_finite"]
    assert [outcome.data for outcome in done.outcomes if isinstance(outcome, Ok)] == [
        {"entities": [{"text": "b", "start": 1}, {"text": "a", "start": 0}], "threshold": 0.5, "flat": True},
        {"entities": [{"text": "a", "start": 1}], "threshold": None, "flat": None},
    ]


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
def test_a_result_less_fails_the_batch_and_never_shifts(operation: str) -> None:
    with pytest.raises(InternalFailure) as caught:
        run(operation, ["a", "b", "c"], Group(0, 3, RAW), family=Letters(lost=1))
    assert caught.value.reason == "wrong_length"


@pytest.mark.parametrize(
    ("texts", "lengths", "groups"),
    [
        (["a"], [1, 1], (Group(0, 2),)),
        (["a", "b"], [1, 1], (Group(0, 1),)),
        (["a", "b"], [1], (Group(0, 2),)),
        (["a"], [1], ()),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(
    texts: list[str], lengths: list[int], groups: tuple[Group, ...]
) -> None:
    with pytest.raises(InternalFailure) as caught:
        run("encode", texts, *groups, lengths=lengths)
    assert caught.value.reason == "malformed_batch"


def test_texts_that_do_not_fit_together_are_halved_and_one_that_fits_nowhere_is_refused() -> None:
    class Small(Letters):
        def encode(self, texts: Sequence[str], options: RunOptions) -> list[Any]:
            if len(texts) > 2 or "huge" in texts:
                raise torch.OutOfMemoryError
            return super().encode(texts, options)

    done = run("encode", ["a", "b", "ab", "huge", "c", "bc", "abc"], Group(0, 7, RAW), family=Small())
    assert reasons(done)[3] == "out_of_memory"
    good = [outcome for outcome in done.outcomes if isinstance(outcome, Ok)]
    vectors = [np.frombuffer(done.block, "<f4", 3, outcome.outputs["dense"].offset).tolist() for outcome in good]
    assert vectors == [[float(text.count(letter)) for letter in "abc"] for text in ("a", "b", "ab", "c", "bc", "abc")]


@dataclass(frozen=True)
class Counted:
    """The letters of each text, and the padding to the longest."""

    counts: list[int]
    padding: int


class Tokenising:
    """A family that tokenises itself and records the threads."""

    rows: ClassVar = {"extract": Rows("raw")}

    def __init__(self) -> None:
        self.threads: list[str] = []

    def prepare(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> Preparation:
        preparation = Preparation()
        preparation.make(texts, options, self._make)
        return preparation

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], preparation: Preparation | None = None
    ) -> list[Any]:
        prepared = preparation or Preparation()
        return by_options(
            texts, options, lambda some, own: self._extract(some, own, prepared.pop_or_make(some, own, self._make))
        )

    def _make(self, texts: Sequence[str], option: ExtractOptions) -> Counted:
        self.threads.append(threading.current_thread().name)
        if "bad" in texts:
            raise ValueError("bad")
        counts = [len(text) for text in texts]
        return Counted(counts, len(counts) * max(counts) - sum(counts))

    def _extract(self, texts: Sequence[str], option: ExtractOptions, prepared: Counted) -> list[Any]:
        sizes = zip(texts, prepared.counts, strict=True)
        return [{"entities": [{"text": text, "size": size}]} for text, size in sizes]


def test_a_family_that_tokenises_itself_tells_how_long_and_with_what_padding() -> None:
    """Tokenising counts as `preprocess_ms`, on the lane and before it."""
    family, texts = Tokenising(), ("a", "abc", "ab")
    groups = (Group(0, 2), Group(2, 3, RunOptions(labels=("x",))))
    message = RunBatch("b", "m", "extract", np.array([1, 3, 2], "<i4").tobytes(), b"", groups, texts=texts)
    on_lane = run_raw(family, message)
    assert (on_lane.padding, len(family.threads)) == (2, 2)
    assert on_lane.preprocess_ms > 0
    preparation = family.prepare(texts, extract_options(message))
    before = len(family.threads)
    prepared = run_raw(family, message, preparation=preparation)
    assert len(family.threads) == before, "nothing is left to tokenise"
    assert prepared.outcomes == on_lane.outcomes
    assert (prepared.padding, prepared.preprocess_ms) == (2, 1e3 * preparation.seconds)


def test_what_cannot_be_prepared_fails_for_its_text_alone() -> None:
    family, texts = Tokenising(), ("a", "bad", "ab")
    message = RunBatch("b", "m", "extract", np.array([1, 3, 2], "<i4").tobytes(), b"", (Group(0, 3),), texts=texts)
    done = run_raw(family, message, preparation=family.prepare(texts, extract_options(message)))
    assert [isinstance(outcome, Ok) for outcome in done.outcomes] == [True, False, True]
