"""`sie try`: its inputs, the choice of the verb, and the picture of an answer. The replies are those of a cluster, with
shorter vectors. tests/system/test_try.py runs the command with a cluster.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from sie_cli.gateway_client import ModelDescription
from sie_cli.refusal import CommandRefused
from sie_cli.trying.asking import ModelAnswer, Question, QuestionInput, read
from sie_cli.trying.shown import shown

WIDTHS = {"dense": 4, "sparse": 72, "multivector": 32}
ENCODES = ModelDescription("test/m3", ("encode", "score"), ("text",), (*WIDTHS, "score"), WIDTHS, True, "cosine")
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


# ---- vectors


def sparse(count: int) -> dict[str, Any]:
    held = {"indices": np.arange(count, dtype=np.int32), "values": np.arange(1, count + 1, dtype=np.float32)}
    return {"sparse": held, "outputs": {"sparse": {"dims": 72, "dtype": "float32"}}, "usage": USAGE}


# ---- scores


# ---- extract


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
