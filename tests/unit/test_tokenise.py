"""Answers of the tokenizer by itself, compared with the library: tokens with their bytes, their number, and the text of
ids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from test_rows import EACH, EXAMPLES, SHORT, TEXTS, library, ours, plain

from sie_contracts.errors import InvalidInput
from sie_contracts.models.options import counting, decoding, tokenizing
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Failed, Input, Ok, RunOptions
from sie_sidecar.prepare import tokenizer_requests
from sie_sidecar.prepare.layouts import make
from sie_sidecar.prepare.long_text import HARD_TEXT
from sie_sidecar.prepare.rows import WorkItemInput
from sie_sidecar.prepare.tokenizer_requests import answer

ALL_HARD = "".join(HARD_TEXT) + " \U0001f469\u200d\U0001f4bb Zürich 東京"


def told(kind: str, texts: list[str], options: RunOptions) -> list[dict[str, Any]]:
    tokenizations = []
    for outcome in answer(ours(kind), "tokenize", WorkItemInput([Input(text) for text in texts], None, options)):
        assert isinstance(outcome, Ok)
        assert outcome.data is not None
        assert outcome.tokens == len(outcome.data["ids"])
        assert outcome.outputs == {}
        tokenizations.append(outcome.data)
    return tokenizations


def counted(kind: str, inputs: list[Input], run: RunOptions) -> list[int]:
    counts = []
    for outcome in answer(ours(kind), "tokenize", WorkItemInput(inputs, None, counting(run))):
        assert isinstance(outcome, Ok)
        assert outcome.data is None
        counts.append(outcome.tokens)
    return counts


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans(), prefix=st.sampled_from(["", "query: ", "é "])
)
@example(texts=[ALL_HARD, ""], special=True, prefix="")
def test_tokens_are_those_of_the_library_with_their_bytes(
    kind: str, texts: list[str], special: bool, prefix: str
) -> None:
    """A token's slice of the UTF-8 text is its text. The library gives the same places in characters."""
    for text, output in zip(texts, told(kind, texts, tokenizing(prefix, add_special_tokens=special)), strict=True):
        whole = prefix + text
        expected = library(kind)(
            whole, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        assert output["ids"] == expected["input_ids"]
        assert output["special"] == [mark == 1 for mark in expected["special_tokens_mask"]]
        data = whole.encode()
        for index, (start, stop) in enumerate(expected["offset_mapping"]):
            if output["special"][index]:
                assert output["starts"][index] is None
                assert output["stops"][index] is None
                assert output["texts"][index] == library(kind).convert_ids_to_tokens(output["ids"][index])
            else:
                assert (
                    data[output["starts"][index] : output["stops"][index]].decode()
                    == output["texts"][index]
                    == whole[start:stop]
                )
                assert output["starts"][index] == len(whole[:start].encode())


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), prefix=st.sampled_from(["", "query: "]))
@example(texts=["river mountain " * 3000, "", ALL_HARD], prefix="query: ")
def test_the_count_is_that_of_the_rows_before_they_are_cut(kind: str, texts: list[str], prefix: str) -> None:
    """Texts are counted, and so are their ids."""
    run = RunOptions(prefix=prefix, truncate="NONE", max_tokens=8)
    for inputs in ([Input(text) for text in texts], [Input(tokens=tuple(plain(kind, text))) for text in texts]):
        (work_rows,) = make(ours(kind), Rows("text", tokens=True), [WorkItemInput(inputs, None, run)])
        assert counted(kind, inputs, run) == [row.full for row in work_rows.rows]
    assert counted(kind, [Input(text) for text in texts], run) == [
        len(library(kind)(prefix + text)["input_ids"]) for text in texts
    ]


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(text=SHORT, skip=st.booleans())
def test_ids_are_read_back_as_the_library_does(kind: str, text: str, skip: bool) -> None:
    ids = library(kind)(text)["input_ids"]
    (outcome,) = answer(
        ours(kind), "decode", WorkItemInput([Input(tokens=tuple(ids))], None, decoding(skip_special_tokens=skip))
    )
    assert isinstance(outcome, Ok)
    assert outcome.data == {"text": library(kind)._tokenizer.decode(ids, skip_special_tokens=skip)}
    assert outcome.tokens == len(ids)


@pytest.mark.parametrize(("operation", "options"), [("decode", decoding()), ("tokenize", counting(RunOptions()))])
def test_an_id_that_is_no_token_is_an_error_of_its_own_input(operation: Any, options: RunOptions) -> None:
    inputs = [Input(tokens=ids) for ids in ((40,), (40, 1 << 33), ())]
    first, wrong, last = answer(ours("wordpiece"), operation, WorkItemInput(inputs, None, options))
    assert isinstance(first, Ok)
    assert isinstance(last, Ok)
    assert isinstance(wrong, Failed)
    assert (wrong.error.code, wrong.error.reason, wrong.error.param) == ("INVALID_INPUT", "bad_token_id", "tokens[1]")


@pytest.mark.parametrize(
    ("operation", "options", "given_input"),
    [
        ("decode", decoding(), Input("a")),
        ("tokenize", tokenizing(), Input(tokens=(5,))),
        ("tokenize", counting(RunOptions()), Input()),
    ],
)
def test_what_has_nothing_to_answer_from_is_an_error_of_its_own_input(
    operation: Any, options: RunOptions, given_input: Input
) -> None:
    good = Input(tokens=(40,)) if operation == "decode" else Input("a")
    first, wrong = answer(ours("wordpiece"), operation, WorkItemInput([good, given_input], None, options))
    assert isinstance(first, Ok)
    assert isinstance(wrong, Failed)
    assert wrong.error.reason == "empty_item"


def test_more_than_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is only counted is read in pieces, and may be longer than one whose tokens are returned."""
    monkeypatch.setattr(tokenizer_requests, "MAX_TOLD_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer_requests, "MAX_CHARACTERS", 200)
    inputs = [Input("river " * 20)]
    assert counted("wordpiece", inputs, RunOptions()) == [22]
    with pytest.raises(InvalidInput) as refused:
        told("wordpiece", ["river " * 20], tokenizing())
    assert (refused.value.reason, refused.value.extras) == ("too_many_tokens", {"limit": 100})
    with pytest.raises(InvalidInput):
        counted("wordpiece", inputs * 2, RunOptions())
    with pytest.raises(InvalidInput):
        answer(ours("wordpiece"), "decode", WorkItemInput([Input(tokens=(5,) * 201)], None, decoding()))
