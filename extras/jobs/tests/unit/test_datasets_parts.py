"""Answers as files: each format returns the rows that were written."""

from __future__ import annotations

import functools
import io
import json
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sie_bulk_jobs.datasets.answers import About, RowAnswer, Shard, shard_of
from sie_bulk_jobs.datasets.parts import PartFault, encode, inspect, outcomes
from sie_bulk_jobs.datasets.rows import InputRow
from sie_contracts.api.jobs import OutputFormat
from sie_contracts.errors import ErrorInfo

FORMATS: list[OutputFormat] = ["parquet", "jsonl", "npy"]
ABOUT = About("job-1", 7, "org/model", "f00d")
FAILED = RowAnswer(ErrorInfo("INVALID_INPUT", "no text", param="input.text"))
RANDOM = np.random.default_rng(7)


def rows(count: int) -> list[InputRow]:
    return [InputRow(f"é{number}", copied={"n": number, "m": {"a": number}, "none": None}) for number in range(count)]


def shard(answers: list[RowAnswer]) -> Shard:
    return shard_of(ABOUT, rows(len(answers)), answers, ("n", "m", "none"))


def table_of(data: bytes) -> pa.Table:
    return parquet.read_table(pa.BufferReader(data))


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def npz_of(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def dense(dtype: str) -> list[RowAnswer]:
    answers = []
    for _ in range(4):
        arrays: dict[str, Any] = {"dense": (RANDOM.standard_normal(8) * 50).astype(dtype)}
        if dtype in ("int8", "uint8"):
            arrays |= {"dense.scale": np.array([RANDOM.random()], np.float32)}
        if dtype == "uint8":
            arrays |= {"dense.offset": np.array([RANDOM.random()], np.float32)}
        answers.append(RowAnswer(tokens=5, truncated=True, arrays=arrays))
    return [answers[0], FAILED, *answers[1:]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
def test_dense_vectors_are_exact_in_each_format(dtype: str) -> None:
    """A row with an error has null in Parquet, no field in JSON Lines, and zeros with `failed` in NumPy archives."""
    answers = dense(dtype)
    answer_shard = shard(answers)
    vectors = [None if answer.error else answer.arrays["dense"].tolist() for answer in answers]
    table = table_of(encode(answer_shard, "parquet"))
    value = table.schema.field("dense").type
    assert pa.types.is_fixed_size_list(value)
    assert value.list_size == 8
    assert value.value_type.to_pandas_dtype() == np.dtype(dtype)
    assert table["dense"].to_pylist() == vectors
    lines = lines_of(encode(answer_shard, "jsonl"))
    assert [line.get("dense") for line in lines] == [
        None if vector is None else pytest.approx(vector, rel=1e-7) for vector in vectors
    ]
    archive = npz_of(encode(answer_shard, "npy"))
    assert archive["dense"].dtype == np.dtype(dtype)
    assert archive["failed"].tolist() == [False, True, False, False, False]
    assert archive["dense"].tolist() == [vector or [0] * 8 for vector in vectors]
    for name in ("dense_scale", "dense_offset"):
        arrays = [answer.arrays.get(name.replace("_", ".")) for answer in answers]
        if any(array is not None for array in arrays):
            expected = [None if array is None else float(array[0]) for array in arrays]
            assert table[name].to_pylist() == expected
            assert [None if np.isnan(number) else number for number in archive[name]] == expected
            values = [line.get(name) for line in lines]
            assert values == [None if number is None else pytest.approx(number) for number in expected]
        else:
            assert name not in table.column_names


def test_ragged_outputs_keep_their_rows() -> None:
    """One of the sparse vectors and one of the multivectors are empty."""
    answers = [
        RowAnswer(
            arrays={
                "sparse.indices": np.arange(count, dtype=np.int32),
                "sparse.values": np.full(count, 0.5, np.float32),
                "multivector": RANDOM.standard_normal((count, 4)).astype(np.float16),
            }
        )
        for count in (3, 0, 2)
    ]
    answers.insert(1, FAILED)
    answer_shard = shard(answers)
    table = table_of(encode(answer_shard, "parquet"))
    lines, archive = lines_of(encode(answer_shard, "jsonl")), npz_of(encode(answer_shard, "npy"))
    for name, column in (
        ("sparse.indices", "sparse_indices"),
        ("sparse.values", "sparse_values"),
        ("multivector", "multivector"),
    ):
        expected = [None if answer.error else answer.arrays[name].tolist() for answer in answers]
        assert table[column].to_pylist() == expected
        assert [line.get(column) for line in lines] == expected
        bounds = archive[f"{column}_rows"]
        got = [archive[column][start:end].tolist() for start, end in pairwise(bounds)]
        assert got == [vectors or [] for vectors in expected]
    assert table.schema.field("sparse_indices").type.value_type == pa.int32()
    inner = table.schema.field("multivector").type.value_type
    assert (inner.list_size, inner.value_type) == (4, pa.float16())


def test_scores_and_extractions() -> None:
    extraction = {"entities": [{"text": "Köln", "label": "city"}], "data": {"x": [1]}}
    answer_shard = shard([RowAnswer(score=0.25), FAILED, RowAnswer(score=-1.5)])
    assert table_of(encode(answer_shard, "parquet"))["score"].to_pylist() == [0.25, None, -1.5]
    assert [line.get("score") for line in lines_of(encode(answer_shard, "jsonl"))] == [0.25, None, -1.5]
    assert npz_of(encode(answer_shard, "npy"))["score"][[0, 2]].tolist() == [0.25, -1.5]
    answer_shard = shard([RowAnswer(data=extraction), FAILED, RowAnswer(data={"entities": []})])
    table = table_of(encode(answer_shard, "parquet"))
    assert [cell and json.loads(cell) for cell in table["entities"].to_pylist()] == [extraction["entities"], None, []]
    assert [cell and json.loads(cell) for cell in table["data"].to_pylist()] == [{"x": [1]}, None, None]
    assert "relations" not in table.column_names
    for kind in ("jsonl", "npy"):
        data = encode(answer_shard, kind)  # type: ignore[arg-type]
        lines = lines_of(data if kind == "jsonl" else npz_of(data)["rows.jsonl"])
        assert [line.get("entities") for line in lines] == [extraction["entities"], None, []]


@pytest.mark.parametrize("kind", FORMATS)
def test_ids_kept_columns_and_errors_are_in_each_format(kind: OutputFormat) -> None:
    data = encode(shard(dense("float32")), kind)
    if kind == "parquet":
        lines = table_of(data).to_pylist()
    else:
        lines = lines_of(data if kind == "jsonl" else npz_of(data)["rows.jsonl"])
    assert [line["id"] for line in lines] == [f"é{number}" for number in range(5)]
    assert [line["n"] for line in lines] == list(range(5))
    copied = [json.loads(line["m"]) if kind == "parquet" else line["m"] for line in lines]
    assert copied == [{"a": number} for number in range(5)]
    assert {line["none"] for line in lines} == {None}
    errors = [line.get("error") for line in lines]
    assert errors == [None, {"code": "INVALID_INPUT", "message": "no text"}, None, None, None]
    assert [line["tokens"] for line in lines] == [5, 0, 5, 5, 5]
    assert [line["truncated"] for line in lines] == [True, False, True, True, True]
    if kind == "npy":
        assert npz_of(data)["ids"].tolist() == [line["id"] for line in lines]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("answers", [dense("float32"), [FAILED] * 3, []])
def test_a_part_says_what_is_in_it_and_the_same_shard_is_the_same_bytes(
    kind: OutputFormat, answers: list[RowAnswer]
) -> None:
    data = encode(shard(answers), kind)
    assert data == encode(shard(answers), kind)
    failed = sum(answer.error is not None for answer in answers)
    expected = msgspec.structs.replace(
        ABOUT,
        rows=len(answers),
        failed=failed,
        tokens=5 * (len(answers) - failed),
        codes={"INVALID_INPUT": failed} if failed else {},
    )
    if kind == "jsonl":
        expected = msgspec.structs.replace(
            expected, job="", shard=0, model="", fingerprint=ABOUT.fingerprint if answers else ""
        )
    assert inspect(data, kind) == expected


def chunked(tokens: int, *spans: tuple[int, int, int]) -> RowAnswer:
    """Return an answer with chunks of these spans: first code point, end, tokens. Sparse vectors have an entry for each
    token.
    """
    sizes = [span[2] for span in spans]
    entries = sum(sizes)
    arrays = {
        "chunks": np.array([(*span, 0, span[2]) for span in spans], np.int32),
        "dense": RANDOM.standard_normal((len(spans), 4)).astype(np.float32),
        "dense.scale": np.arange(len(spans), dtype=np.float32),
        "sparse.indices": np.arange(entries, dtype=np.int32),
        "sparse.values": np.full(entries, 0.5, np.float32),
    }
    return RowAnswer(tokens=tokens, arrays=arrays)


@pytest.mark.parametrize("kind", FORMATS)
def test_encode_writes_a_line_for_each_chunk_and_outcomes_reads_one_for_each_row(kind: OutputFormat) -> None:
    answers = [chunked(9, (0, 4, 3), (4, 9, 4)), FAILED, chunked(3, (1, 2, 1))]
    own = [InputRow(name, text="éa b c def", copied={"chunk_": name}) for name in "xyz"]
    data = encode(shard_of(ABOUT, own, answers, ("chunk_",)), kind)
    if kind == "parquet":
        lines = table_of(data).to_pylist()
    else:
        lines = lines_of(data if kind == "jsonl" else npz_of(data)["rows.jsonl"])
    chunk_fields = [
        tuple(line.get(name) for name in ("id", "chunk", "start", "end", "text", "tokens", "row_tokens"))
        for line in lines
    ]
    assert chunk_fields == [
        ("x", 0, 0, 4, "éa b", 3, 9),
        ("x", 1, 4, 9, " c de", 4, 9),
        ("y", None, None, None, None, 0, None),
        ("z", 0, 1, 2, "a", 1, 3),
    ]
    assert [line["chunk_"] for line in lines] == ["x", "x", "y", "z"]
    vectors = npz_of(data)["dense"][[0, 1, 3]] if kind == "npy" else [lines[at]["dense"] for at in (0, 1, 3)]
    expected_vectors = np.concatenate([answers[0].arrays["dense"], answers[2].arrays["dense"]])
    assert np.array_equal(np.array(vectors, np.float32), expected_vectors)
    if kind != "npy":
        assert [line.get("dense_scale") for line in lines] == [0, 1, None, 0]
        assert [line.get("sparse_indices") for line in lines] == [[0, 1, 2], [3, 4, 5, 6], None, [0]]
    about = inspect(data, kind)
    assert (about.rows, about.failed, about.tokens, about.codes) == (3, 1, 12, {"INVALID_INPUT": 1})
    assert [(row.id, row.tokens, row.error is None) for row in outcomes(data, kind)] == [
        ("x", 9, True),
        ("y", 0, False),
        ("z", 3, True),
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_encode_writes_page_and_heading_of_the_first_word_of_a_chunk_of_a_document(kind: OutputFormat) -> None:
    text = "# A\n\none\n\n# B\n\ntwo"
    answers = [chunked(9, (0, 8, 3), (8, 18, 4)), FAILED]
    rows = [InputRow("x", text=text, page_starts=[(0, 1), (10, 2)]), InputRow("y")]
    data = encode(shard_of(ABOUT, rows, answers), kind)
    if kind == "parquet":
        lines = table_of(data).to_pylist()
        assert [str(table_of(data).schema.field(name).type) for name in ("page", "heading")] == ["int32", "string"]
    else:
        lines = lines_of(data if kind == "jsonl" else npz_of(data)["rows.jsonl"])
    fields = [tuple(line.get(name) for name in ("id", "chunk", "text", "page", "heading")) for line in lines]
    assert fields == [("x", 0, text[:8], 1, "A"), ("x", 1, text[8:], 2, "B"), ("y", None, None, None, None)]
    assert [row.id for row in outcomes(data, kind)] == ["x", "y"]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_part_is_refused(kind: OutputFormat) -> None:
    data = encode(shard(dense("float32")), kind)
    foreign = io.BytesIO()
    parquet.write_table(pa.table({"id": ["a"]}), foreign)
    for wrong in (data[:-10], b"", b"{}\n", foreign.getvalue()):
        if kind != "jsonl" or wrong:  # an empty file is a part without rows
            with pytest.raises(PartFault):
                inspect(wrong, kind)


# nested deeper than readers of Parquet allow
NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(60), [])
JSON = "text of JSON"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2], pa.int64()),
        ([1, 2.5], pa.float64()),
        (["a", None], pa.string()),
        ([1, "a"], JSON),
        ([None, None], pa.null()),
        ([{}, {"a": 1}], JSON),
        ([[1], [2, 3]], pa.list_(pa.field("element", pa.int64()))),
        ([[{}]], JSON),
        ([NESTED], JSON),
        ([2**70, 1], JSON),
        ([b"x", None], pa.binary()),
    ],
)
@pytest.mark.parametrize("format", FORMATS)
def test_any_value_of_a_column_can_be_kept(values: list[Any], kind: Any, format: OutputFormat) -> None:
    own = [InputRow(str(at), copied={"c": value}) for at, value in enumerate(values)]
    data = encode(shard_of(ABOUT, own, [FAILED] * len(own), ("c",)), format)
    assert inspect(data, format).rows == len(values)
    assert len(outcomes(data, format)) == len(values)
    if format == "parquet":
        column = table_of(data)["c"]
        assert column.type == (pa.string() if kind == JSON else kind)
        cells = column.to_pylist()
        assert ([json.loads(text) for text in cells] if kind == JSON else cells) == values
    else:
        lines = lines_of(data if format == "jsonl" else npz_of(data)["rows.jsonl"])
        assert [line["c"] for line in lines] == json.loads(msgspec.json.encode(values))


def test_vectors_that_do_not_fit_together_are_refused() -> None:
    wrong = [RowAnswer(arrays={"dense": np.zeros(width, np.float32)}) for width in (4, 5)]
    with pytest.raises(ValueError, match="dense"):
        shard(wrong)
    wrong = [RowAnswer(arrays={"multivector": np.zeros((2, width), np.float32)}) for width in (4, 5)]
    with pytest.raises(ValueError, match="multivector"):
        shard(wrong)
