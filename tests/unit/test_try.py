"""`sie try`: its inputs, the choice of the verb, and the picture of an answer. The replies are those of a cluster, with
shorter vectors. tests/system/test_try.py runs the command with a cluster.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from sie_cli.display import document
from sie_cli.gateway_client import ModelDescription
from sie_cli.refusal import CommandRefused
from sie_cli.trying.asking import ModelAnswer, Question, QuestionInput, ask_model, read, reply, verb_of
from sie_cli.trying.shown import LabelledSpan, colours, marked, shown
from sie_client import SIEClient
from sie_client.types import Results

WIDTHS = {"dense": 4, "sparse": 72, "multivector": 32}
ENCODES = ModelDescription("test/m3", ("encode", "score"), ("text",), (*WIDTHS, "score"), WIDTHS, True, "cosine")
SCORES = ModelDescription("test/cross", ("score",), ("text",), ("score",), {}, True, "probability")
EXTRACTS = ModelDescription("test/gliner", ("extract",), ("text",), ("entities",), {}, False)
USAGE = {"prompt_tokens": 7, "total_tokens": 7, "truncated": False}
SHARED = {
    "model": "test/model",
    "fingerprint": "f64a6064fd787038",
    "request_id": "01a20d2c-a085-77e9-a1c5-8486fc223c61",
    "usage": {"prompt_tokens": 14, "total_tokens": 14, "truncated_items": []},
    "timing": {
        "queue_time": 6.53,
        "load_time": 405.7,
        "preprocess_time": 0.617,
        "batch_wait_time": 0.353,
        "device_wait_time": 2.8,
        "inference_time": 3.394,
        "postprocess_time": 0.375,
        "unattributed_time": 1.028,
        "total_time": 417.998,
        "queue_ms": 412.584,
        "tokenization_ms": 0.617,
        "inference_ms": 3.394,
        "postprocessing_ms": 0.375,
        "unattributed_ms": 1.028,
        "total_ms": 417.998,
    },
}
FAILED = {"error": {"code": "INFERENCE_ERROR", "message": "no\x1b[2J"}, "usage": {**USAGE, "total_tokens": 0}}


def inputs(*texts: str) -> tuple[QuestionInput, ...]:
    return read(texts, None)[0]


def picture(answer: ModelAnswer, width: int = 100, *, colours: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        width=width,
        file=file,
        highlight=False,
        force_terminal=colours,
        color_system="truecolor" if colours else None,
        legacy_windows=False,
    )
    for part in shown(answer, width, has_colours=colours):
        console.print(part)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert colours or all(len(line) <= width for line in lines), lines
    return "\n".join(lines)


def dense(*values: float, dtype: Any = np.float32) -> dict[str, Any]:
    vector = np.array(values, dtype)
    return {"dense": vector, "outputs": {"dense": {"dims": len(values), "dtype": str(vector.dtype)}}, "usage": USAGE}


def encoded(
    *results: dict[str, Any], texts: tuple[str, ...], info: ModelDescription = ENCODES, **more: Any
) -> ModelAnswer:
    question = Question(info.name, inputs(*texts), explain="explain" in more)
    return ModelAnswer("encode", info, question, results, {**SHARED, **more})


def extracted(text: str, labels: tuple[str, ...] = (), **findings: Any) -> ModelAnswer:
    empty: dict[str, Any] = {"entities": [], "relations": [], "classifications": [], "objects": [], "data": {}}
    slot = {"id": "item-0", **empty, **findings, "usage": USAGE}
    return ModelAnswer("extract", EXTRACTS, Question("test/gliner", inputs(text), labels=labels), [slot], SHARED)


# ---- what is asked


def test_texts_files_and_standard_input_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    for name in ("a.png", "a.wav", "a.pdf", "a"):
        (tmp_path / name).write_bytes(b"x")
    files = [f"@{tmp_path / name}" for name in ("a.png", "a.wav", "a.pdf", "a")]
    question_inputs, query = read(["text", "-", "@@handle", *files], "q")
    assert [dict(question_input.item) for question_input in question_inputs] == [
        {"text": "text"},
        {"text": "two\nlines"},
        {"text": "@handle"},
        {"images": [tmp_path / "a.png"]},
        {"audio": tmp_path / "a.wav"},
        {"document": tmp_path / "a.pdf"},
        {"document": tmp_path / "a"},
    ]
    assert question_inputs[1].label == "two lines"
    assert question_inputs[3].label == files[0]
    assert query is not None
    assert query.item == {"text": "q"}


@pytest.mark.parametrize(
    ("texts", "query", "why"),
    [
        ([], None, "nothing to try"),
        (["a", " \t"], None, "text 2 is empty"),
        (["a"], "", "--query is empty"),
        (["-"], "-", "read only once"),
        (["@nowhere.png"], None, "no file nowhere.png. To send a text that begins with @, write @@"),
        (["@"], None, "no file (no name)"),
        (["@no\x1b[2J"], None, "no file no?[2J"),
        (["\udcff"], None, "text 1 is no valid UTF-8"),
    ],
)
def test_what_cannot_be_asked_is_refused(texts: list[str], query: str | None, why: str) -> None:
    with pytest.raises(CommandRefused) as refused:
        read(texts, query)
    assert why in refused.value.message
    assert refused.value.message.isprintable()


@pytest.mark.parametrize(
    ("info", "options", "verb"),
    [
        (ENCODES, {}, "encode"),
        (replace(ENCODES, tasks=("score", "encode")), {}, "encode"),
        (ENCODES, {"query": QuestionInput({"text": "q"}, "q")}, "score"),
        (SCORES, {"query": QuestionInput({"text": "q"}, "q")}, "score"),
        (EXTRACTS, {}, "extract"),
        (replace(EXTRACTS, tasks=("encode", "extract")), {"labels": ("a",)}, "extract"),
    ],
)
def test_the_verb_follows_the_model_and_the_options(info: ModelDescription, options: dict[str, Any], verb: str) -> None:
    assert verb_of(info, Question("m", (), **options)) == verb


@pytest.mark.parametrize(
    ("info", "options", "why"),
    [
        (SCORES, {}, 'test/cross scores texts against a query: give the query with --query "a question"'),
        (
            replace(ENCODES, tasks=("encode",)),
            {"query": QuestionInput({})},
            "test/m3 does encode; without --query the vectors",
        ),
        (EXTRACTS, {"query": QuestionInput({})}, "--query needs a model that scores; test/gliner does extract"),
        (ENCODES, {"labels": ("a",)}, "--labels needs a model that extracts; test/m3 does encode and score"),
        (ENCODES, {"threshold": 0.5}, "--threshold needs a model that extracts"),
        (ENCODES, {"labels": ("a",), "query": QuestionInput({})}, "use only one of the two"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    info: ModelDescription, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(CommandRefused, match=r".") as refused:
        verb_of(info, Question("m", (), **options))
    assert why in refused.value.message


# ---- vectors


def sparse(count: int) -> dict[str, Any]:
    held = {"indices": np.arange(count, dtype=np.int32), "values": np.arange(1, count + 1, dtype=np.float32)}
    return {"sparse": held, "outputs": {"sparse": {"dims": 72, "dtype": "float32"}}, "usage": USAGE}


def test_a_request_of_which_all_inputs_failed_leaves_the_answer_of_the_others() -> None:
    """The client splits many inputs into several requests, and a result of such a request has no timing."""

    class Client:
        def encode(self, *_: object, **__: object) -> Results[Any]:
            return Results([{**SHARED, **dense(1, 0)}, {**SHARED, **FAILED, "outputs": {}, "timing": {}}])

    question = Question("test/m3", inputs("a", "b"))
    answer = ask_model(
        cast(SIEClient, Client()), replace(ENCODES, tasks=("encode",)), question, "http://127.0.0.1:1", ""
    )
    assert (answer.failed, answer.shared["timing"]) == (1, SHARED["timing"])


# ---- scores


def scored(*scores: float | None, scale: str = "probability") -> ModelAnswer:
    entries = [
        {
            "item_id": f"item-{place}",
            "rank": rank,
            "score": score,
            "usage": USAGE,
            **({} if score is not None else FAILED),
        }
        for rank, (place, score) in enumerate(zip(reversed(range(len(scores))), scores, strict=True))
    ]
    question_inputs, query = read([f"text {number}" for number in range(1, len(scores) + 1)], "who?")
    return ModelAnswer(
        "score", replace(SCORES, score_scale=scale), Question("test/cross", question_inputs, query), entries, SHARED
    )


# ---- extract


def test_a_character_is_not_compared_with_every_mark() -> None:
    """Otherwise, a document with thousands of entities takes minutes."""
    compared = 0

    class Place(int):
        __hash__ = int.__hash__

        def __eq__(self, number: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == number

    spans = [LabelledSpan(Place(10 * number), Place(10 * number + 4), "p") for number in range(100)]
    assert marked("word etc. " * 100, spans, colours(["p"]), has_colours=False).plain == "[word] etc. " * 100
    assert compared <= 4 * len(spans)


# ---- all verbs


@pytest.mark.parametrize("colours", [False, True])
def test_no_control_character_of_a_text_is_written(colours: bool) -> None:
    bad = "a\x1b]0;title\x07\x9b31m\u202eb\r\x00"
    entity = {"bbox": None, "start": 0, "end": 3, "label": bad, "score": 1.0, "text": bad}
    for answer in (
        encoded(dense(1, 0), dense(0, 1), texts=(bad, bad)),
        extracted(bad, (bad,), entities=[entity], data={bad: bad, "list": [bad]}),
    ):
        text = picture(answer, colours=colours)
        assert not {"\x07", "\x9b", "\u202e", "\r", "\x00"} & set(text)
        assert "\x1b]" not in text


def test_json_is_the_reply_of_the_api_and_harmless_to_a_terminal() -> None:
    answer = encoded(
        {**dense(0.5, 1), **sparse(2), "outputs": {**dense(0, 0)["outputs"], **sparse(2)["outputs"]}}, texts=("a",)
    )
    reply_body = json.loads(document(reply(answer)))
    assert reply_body["items"][0]["dense"] == {"dims": 2, "dtype": "float32", "values": [0.5, 1.0]}
    assert reply_body["items"][0]["sparse"] == {"dims": 72, "dtype": "float32", "indices": [0, 1], "values": [1.0, 2.0]}
    assert reply_body["timing"] == SHARED["timing"]
    bad = "a\x9b\x7f\u202e\n東京😀\U000e0001"
    extraction = extracted("x", data={"text": bad})
    text = document(reply(extraction))
    assert json.loads(text)["items"][0]["data"]["text"] == bad
    assert text.replace("\n", "").isprintable()
    assert "東京😀" in text
    assert reply(scored(0.5))["scores"][0]["score"] == 0.5
