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
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from sie_cli.display import document
from sie_cli.gateway_client import ModelDescription
from sie_cli.main import main
from sie_cli.refusal import CommandRefused
from sie_cli.trying.asking import ModelAnswer, Question, QuestionInput, ask_model, read, reply, strongest, verb_of
from sie_cli.trying.shown import LINES, LabelledSpan, bar, colours, heat, marked, shares, shown
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
EXPLAIN = {
    "chunk": 0,
    "worker": "vm",
    "lane": "_default.cpu.default",
    "priority": "interactive",
    "batch": {"id": "vm-1", "items": 2, "tokens": 18, "padding": 14, "engine": "openvino", "swapped": False},
    "stages": {"load_ms": 405.7, "device_wait_ms": 2.8, "inference_ms": 3.4, "worker_ms": 413.3},
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


ENTITIES = [
    {"bbox": None, "end": 3, "label": "person", "score": 0.7529, "start": 0, "text": "Ada"},
    {"bbox": None, "end": 25, "label": "place", "score": 0.168, "start": 19, "text": "London"},
]
ADA = "Ada met Charles in London."


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


def test_a_folder_needs_a_cluster_of_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["run", str(tmp_path), "a text", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1, result.output
    assert "is a folder, which only a `sie serve` of this machine can read" in result.output


@pytest.mark.parametrize(("stdin", "why"), [(b"", "standard input is empty"), (b"\xff", "no text in UTF-8")])
def test_standard_input_without_a_text_is_refused(stdin: bytes, why: str) -> None:
    result = CliRunner().invoke(main, ["try", "m", "-"], input=stdin)
    assert (result.exit_code, why in result.output) == (1, True), result.output


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


def test_dense_vectors_have_their_figures_and_a_cosine_of_each_pair() -> None:
    text = picture(
        encoded(dense(0.6, 0.8, 0, 0), dense(0.8, 0.6, 0, 0), dense(0, 0, 0, -2), texts=("a cat", "a\nkitten", "tax"))
    )
    assert text.startswith("test/m3  encode\n\ndense: 4 numbers, float32\n")
    assert "1  1.000       7  +0.600  +0.800  +0.000  +0.000  a cat\n" in text
    assert "2  1.000       7  +0.800  +0.600  +0.000  +0.000  a kitten\n" in text
    assert "3  2.000       7  +0.000  +0.000  +0.000  -2.000  tax\n" in text
    heat_map = text.partition("cosine of each pair\n")[2].splitlines()
    assert [line.split() for line in heat_map[:4]] == [
        ["1", "2", "3"],
        ["1", "1.000", "0.960", "0.000"],
        ["2", "0.960", "1.000", "0.000"],
        ["3", "0.000", "0.000", "1.000"],
    ]
    assert "418.0 ms in total: 412.6 ms queue, 3.4 ms inference, 2.0 ms other; 14 tokens" in text


def test_one_vector_and_whole_numbers_have_no_cosines() -> None:
    assert "cosine" not in picture(encoded(dense(1, 0, 0, 0), texts=("a",)))
    text = picture(encoded(dense(1, -2, dtype=np.int8), dense(3, 4, dtype=np.int8), texts=("a", "b")))
    assert "+1  -2" in text
    assert "cosine" not in text, "of packed bits it would mean nothing"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_heat_map_has_as_many_texts_as_there_is_room(width: int) -> None:
    count = 30
    answer = encoded(*(dense(1, number, 0, 0) for number in range(count)), texts=tuple(map(str, range(count))))
    text = picture(answer, width)
    some = (width - 4) // 8
    assert f"{count - some} more texts; --json has all vectors" in text


def test_a_vector_of_zeros_is_no_fault() -> None:
    assert "nan" not in picture(encoded(dense(0, 0, 0, 0), dense(1, 0, 0, 0), texts=("a", "b")))


def sparse(count: int) -> dict[str, Any]:
    held = {"indices": np.arange(count, dtype=np.int32), "values": np.arange(1, count + 1, dtype=np.float32)}
    return {"sparse": held, "outputs": {"sparse": {"dims": 72, "dtype": "float32"}}, "usage": USAGE}


def test_the_strongest_words_of_a_sparse_vector_come_first() -> None:
    answer = encoded(sparse(12), texts=("a",))
    assert strongest(answer.results[0]["sparse"]) == (list(range(11, 1, -1)), [float(n) for n in range(12, 2, -1)])
    long_answer = ModelAnswer(**{**vars(answer), "words": {number: f"w{number}\x1b" for number in range(12)}})
    text = picture(long_answer)
    assert f"w11?  12.000  {'█' * 24}\n" in text
    assert "w2?" in text
    assert "w1? " not in text
    assert "2 weaker words" in text
    ids = picture(answer)
    assert "ID  WEIGHT" in ids, "the gateway did not tell the words"
    assert f"11  12.000  {'█' * 24}\n" in ids


def test_a_sparse_vector_without_words_is_no_fault() -> None:
    assert "sparse: weights of 72 words" in picture(encoded(sparse(0), texts=("a",)))


def test_late_interaction_shows_its_shape() -> None:
    result = {
        "multivector": np.ones((13, 32), np.float32),
        "outputs": {"multivector": {"token_dims": 32, "num_tokens": 13, "dtype": "float32"}},
        "usage": USAGE,
    }
    text = picture(encoded(result, texts=("hello world",)))
    assert "multivector: 32 numbers a token, float32" in text
    assert "1  13 x 32           hello world" in text


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


def test_what_failed_is_named_and_the_rest_is_shown() -> None:
    answer = encoded(dense(1, 0, 0, 0), FAILED, dense(0, 1, 0, 0), texts=("a", "b", "c"))
    text = picture(answer)
    assert answer.failed == 1
    assert "failed: b: INFERENCE_ERROR: no?[2J" in text
    assert "         1       3\n" in text, "the heat map names texts by their numbers"


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


def test_documents_are_ranked_with_bars() -> None:
    text = picture(scored(0.75, 0.5, None))
    assert "query: who?" in text
    assert f"   1  0.7500  {'█' * 18}        3  text 3\n" in text
    assert f"   2  0.5000  {'█' * 12}              2  text 2\n" in text
    assert "failed: text 1: INFERENCE_ERROR" in text
    assert "a score is a probability, from 0 to 1" in text


def test_bars_of_other_scales_go_from_the_least_to_the_largest() -> None:
    assert shares([12.0, 6.0]) == [1.0, 0.5]
    assert shares([4.0, -4.0, 0.0]) == [1.0, 0.0, 0.5]
    assert shares([0.5], most=1.0) == [0.5]
    assert shares([1.5], most=1.0) == [1.0]
    assert shares([0.0, 0.0]) == [0.0, 0.0]
    assert shares([]) == []
    assert bar(1.0).plain == "█" * 24
    assert bar(0.0).plain == ""
    assert bar(0.0001).plain == "▏", "more than nothing is seen"
    assert bar(7.0).plain == "█" * 24


# ---- extract


def test_what_was_found_is_marked_in_the_text_and_listed() -> None:
    text = picture(extracted(ADA, ("person", "place"), entities=ENTITIES))
    assert "\n[Ada] met Charles in [London].\n" in text, "in brackets, where there are no colours"
    assert "person  Ada     0.753  0 to 3\n" in text
    assert "place   London  0.168  19 to 25\n" in text
    assert "\nthe model was loaded for this request; the next one is faster" in text


def test_colours_mark_instead_of_brackets() -> None:
    text = picture(extracted(ADA, ("person", "place"), entities=ENTITIES), colours=True)
    assert "[Ada]" not in text
    assert "\x1b[30;42mAda\x1b[0m met Charles in \x1b[30;45mLondon\x1b[0m." in text


def test_marks_stand_where_they_are_in_a_text_with_control_characters_and_wide_ones() -> None:
    text = "😀\x1b\u202eAda\nB"
    marked_text = marked(
        text, [LabelledSpan(3, 6, "p"), LabelledSpan(0, 7, "q")], colours(["p", "q"]), has_colours=False
    )
    assert marked_text.plain == "[😀??[Ada]\n]B"
    assert marked(text, [LabelledSpan(3, 6, "p")], colours(["p"]), has_colours=True).plain == "😀??Ada\nB"


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


def test_nothing_found_says_what_to_do() -> None:
    assert "nothing was found; --threshold 0.1" in picture(extracted(ADA, ("person",)))


def test_all_kinds_of_findings_are_shown() -> None:
    answer = extracted(
        ADA,
        classifications=[{"label": "calm", "score": 0.75}, {"label": "joy", "score": 0.25}],
        relations=[{"head": "Ada", "tail": "Charles", "relation": "met", "score": 0.5}],
        objects=[{"label": "a red car", "score": 0.83, "bbox": [412, 230, 180, 96]}],
        data={"text": "\n".join(["a\x1b"] * 30), "pages": [1, 2], "long": list(range(500))},
    )
    text = picture(answer)
    assert f"calm   0.750  {'█' * 18}\n" in text
    assert "Ada   met       Charles  0.500\n" in text
    assert "a red car  0.830  x 412, y 230, 180 x 96\n" in text
    assert text.count("\na?\n") + text.count("a?\n…") >= LINES // 2
    assert "… 10 more lines (--json has all)" in text
    assert "pages: [1,2]" in text
    assert "… (--json has all)" in text


# ---- all verbs


def test_explain_shows_each_stage_as_a_bar() -> None:
    text = picture(encoded(dense(1, 0, 0, 0), texts=("a",), explain=[EXPLAIN]))
    assert f"model load   405.7  {'█' * 23}" in text
    assert "inference      3.4  ▎" in text
    assert "a batch of 2 inputs with 18 tokens, engine openvino" in " ".join(text.split())
    assert text.count("device wait    2.8") == 1, "of its part at the worker"
    assert "STAGE" not in picture(encoded(dense(1, 0, 0, 0), texts=("a",))), "only where it is asked for"


def test_what_was_cut_is_told() -> None:
    usage = {"prompt_tokens": 512, "total_tokens": 512, "truncated_items": [0]}
    assert "512 tokens\n1 text cut to the model's length" in picture(
        encoded(dense(1, 0, 0, 0), texts=("a",), usage=usage)
    )


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


@pytest.mark.parametrize(
    ("value", "colours"),
    [
        (-1.0, "white on rgb(24,44,92)"),
        (0.0, "white on rgb(24,44,92)"),
        (0.5, "black on rgb(137,124,92)"),
        (1.0, "black on rgb(250,204,92)"),
        (2.0, "black on rgb(250,204,92)"),
    ],
)
def test_a_heat_map_has_a_colour_for_each_cosine(value: float, colours: str) -> None:
    assert heat(value) == colours


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


def test_the_help_has_an_example_of_each_verb() -> None:
    text = CliRunner().invoke(main, ["try", "--help"], terminal_width=120).output
    for part in (
        "sie try sentence-transformers/",
        "--query",
        "--labels",
        "@cat.jpg",
        "sie try BAAI/bge-m3 - --explain",
    ):
        assert part in text
