"""Inputs of jobs from objects to rows: every row of every format exactly once, faults in their places, and objects that
are broken, missing or changed.
"""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyarrow.parquet import encryption

from sie_bulk_jobs.datasets import footers, pages, plans, rows, sizes
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.plans import Broken, plan
from sie_bulk_jobs.datasets.rows import InputRow, read
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import JobInput
from sie_contracts.errors import InvalidInput
from sie_store.object_stores import RetryPolicy, StoreError

TEXT = JobInput(url="u", text="{t}")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.opened(f"{tmp_path}/", (str(tmp_path),))


async def spans_of(place: Place, source: JobInput, shard_rows: int = 4) -> list[RowSpan]:
    planned = [entry async for entry in plan(place, source, shard_rows)]
    assert not [entry for entry in planned if isinstance(entry, Broken)], planned
    return [span for entry in planned if isinstance(entry, list) for span in entry]


async def rows_of(place: Place, source: JobInput, shard_rows: int = 4) -> list[InputRow]:
    """Return all rows. Check that each span has at most `shard_rows` rows and survives its encoding."""
    collected = []
    for span in await spans_of(place, source, shard_rows):
        assert span.rows <= shard_rows
        span = msgspec.msgpack.decode(msgspec.msgpack.encode(span), type=RowSpan)
        part = await read(place, span, source)
        assert len(part) == span.rows
        collected += part
    return collected


def write_jsonl(path: Path, objects: list[Any], end: str = "\n") -> None:
    path.write_text(end.join(map(json.dumps, objects)) + end, "utf-8")


async def test_all_formats_give_the_same_rows(tmp_path: Path, place: Place) -> None:
    """The files of a folder are read by name. Hidden files, markers and manifests are no data."""
    own = [{"id": f"é{number}", "t": f'text "{number}",\n{"x" * number}', "n": number} for number in range(11)]
    write_jsonl(tmp_path / "a.jsonl", own)
    text = "\r\n".join(f'{row["id"]},"{str(row["t"]).replace(chr(34), chr(34) * 2)}",{row["n"]}' for row in own)
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + f"id,t,n\r\n{text}".encode())
    parquet.write_table(pa.Table.from_pylist(own), tmp_path / "c.parquet", row_group_size=3)
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "d.ndjson", own, "\r\n\r\n")
    for name in (".hidden.jsonl", "_SUCCESS", "_x.csv", "manifest.json", "README.md"):
        (tmp_path / name).write_text("nothing")
    source = JobInput(url="u", text="{t}|{n}", id="id", keep=("n",))
    input_rows = await rows_of(place, source)
    assert [(row.id, row.text) for row in input_rows] == [(row["id"], f"{row['t']}|{row['n']}") for row in own] * 4
    assert [row.copied["n"] for row in input_rows] == [*range(11), *map(str, range(11)), *range(11), *range(11)]
    assert {row.fault for row in input_rows} == {None}
    names = [row.id for row in await rows_of(place, TEXT)]
    assert names == [f"{name}#{at}" for name in ("a.jsonl", "b.csv", "c.parquet", "sub/d.ndjson") for at in range(11)]


async def test_a_row_that_cannot_be_used_is_a_fault_in_its_place(tmp_path: Path, place: Place) -> None:
    """The message has the column and never the content."""
    secret = "SECRET"
    lines = [
        '{"t": "good"}',
        f'{{"t": "{secret}',
        f'["{secret}"]',
        f'{{"t": ["{secret}"]}}',
        f'{{"x": "{secret}"}}',
        '{"t": null}',
        f'{{"t": "{secret}\\ud800"}}',
        "[" * 10_000,
        '{"t": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"t": "\xff"}\n\x00')
    input_rows = await rows_of(place, TEXT)
    assert [row.text for row in input_rows if row.fault is None] == ["good", "last"]
    assert [(row.fault.reason, row.fault.param) if row.fault else None for row in input_rows] == [
        None,
        ("malformed", ""),
        ("malformed", ""),
        ("schema", "input.text"),
        ("schema", "input.text"),
        ("schema", "input.text"),
        ("malformed", ""),
        ("malformed", ""),
        None,
        ("malformed", ""),
        ("malformed", ""),
    ]
    assert [row.id for row in input_rows] == [f"a.jsonl#{at}" for at in range(11)]
    assert secret not in str([row.fault for row in input_rows])


async def test_a_csv_row_of_another_width_is_a_fault(tmp_path: Path, place: Place) -> None:
    (tmp_path / "a.csv").write_text('t,u\na,b\nc\nd,e,f\ng,"h"i\nj,k\n')
    input_rows = await rows_of(place, TEXT)
    assert [row.text for row in input_rows] == ["a", None, None, None, "j"]
    assert {row.fault.reason for row in input_rows if row.fault} == {"malformed"}


IMAGE = b"\x89PNG of sorts"


async def test_images_come_from_columns(tmp_path: Path, place: Place) -> None:
    """An image is bytes, a map as in data sets of Hugging Face, a list of these, or base64. Any other value
    is a fault.
    """
    encoded = base64.b64encode(IMAGE).decode()
    write_jsonl(
        tmp_path / "a.jsonl", [{"i": encoded}, {"i": f"data:image/png;base64,{encoded}"}, {"i": "no"}, {"i": 3}]
    )
    parquet.write_table(pa.table({"i": [IMAGE, None]}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"i": [{"bytes": IMAGE, "path": "x"}]}), tmp_path / "c.parquet")
    parquet.write_table(pa.table({"i": [[IMAGE, IMAGE], []]}), tmp_path / "d.parquet")
    input_rows = await rows_of(place, JobInput(url="u", image="i"))
    assert [row.images for row in input_rows] == [*[(IMAGE,)] * 2, (), (), (IMAGE,), (), (IMAGE,), (IMAGE, IMAGE), ()]
    assert [row.fault.param for row in input_rows if not row.images and row.fault] == ["input.image"] * 4


async def test_rows_that_are_read_again_after_a_failure_of_the_store_count_once(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit has room for the rows of one attempt, and not for those of two."""
    parquet.write_table(pa.table({"t": ["x" * 100] * 10}), tmp_path / "a.parquet")
    (span,) = await spans_of(place, TEXT, 10)
    read_parquet, attempts = footers.read, 0

    def breaks_off(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        yield from read_parquet(*arguments)
        if attempts == 1:
            raise StoreError("the connection was reset")

    monkeypatch.setattr(footers, "read", breaks_off)
    monkeypatch.setattr(sizes, "MAX_DECODED_BYTES", 3000)
    input_rows = await read(replace(place, patience=RetryPolicy(pause_s=0.001)), span, TEXT)
    assert (attempts, [row.text for row in input_rows]) == (2, ["x" * 100] * 10)


async def test_images_of_a_folder_are_rows_by_name(tmp_path: Path, place: Place) -> None:
    (tmp_path / "sub").mkdir()
    names = [f"{number:02d}.png" for number in range(9)] + ["sub/a.JPG"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "labels.csv").write_text("x")
    (tmp_path / ".x.png").write_text("x")
    input_rows = await rows_of(place, JobInput(url="u/", format="images"))
    assert [(row.id, row.images) for row in input_rows] == [(name, (name.encode(),)) for name in names]
    file_place = Place.opened(f"{tmp_path}/03.png", (str(tmp_path),))
    assert await rows_of(file_place, JobInput(url="u/03.png")) == [InputRow("03.png", images=(b"03.png",))]


async def test_a_folder_of_images_that_changes_is_refused(tmp_path: Path, place: Place) -> None:
    """An added or changed image concerns only the spans that have it."""
    source = JobInput(url="u/", format="images")
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    first, second = await spans_of(place, source)
    (tmp_path / "5b.png").write_bytes(b"x")
    assert len(await read(place, first, source)) == 4
    with pytest.raises(InvalidInput) as caught:
        await read(place, second, source)
    assert caught.value.reason == "input_changed"
    (tmp_path / "5b.png").unlink()
    assert len(await read(place, second, source)) == 4
    (tmp_path / "6.png").write_bytes(b"xy")
    with pytest.raises(InvalidInput):
        await read(place, second, source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
async def test_an_object_that_is_another_one_is_refused_and_so_is_one_that_is_gone(
    tmp_path: Path, place: Place, name: str
) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        parquet.write_table(pa.table({"t": ["a", "b"]}), path)
    else:
        path.write_text('{"t": "a"}\n' if name.endswith("jsonl") else "t\na\n")
    (span,) = await spans_of(place, TEXT)
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(InvalidInput) as caught:
        await read(place, span, TEXT)
    assert caught.value.reason == "input_changed"
    path.unlink()
    with pytest.raises(InvalidInput) as caught:
        await read(place, span, TEXT)
    assert caught.value.reason == "input_missing"


async def test_broken_objects_do_not_stop_the_others(tmp_path: Path, place: Place) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"t": "a"}])
    parquet.write_table(pa.table({"t": ["x"] * 1000}), tmp_path / "whole.parquet")
    data = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[:-4])
    (tmp_path / "short.parquet").write_bytes(b"PAR1")
    (tmp_path / "junk.parquet").write_bytes(os.urandom(500) + data[-8:])
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "latin.csv").write_bytes(b"t,\xe9\n1,2\n")
    (tmp_path / "endless.csv").write_bytes(b"x" * 100_000)
    (tmp_path / "packed.jsonl.gz").write_bytes(b"x")
    (tmp_path / "schema.csv").write_bytes(b"title,body\nSECRET,SECRET\n")
    (tmp_path / "schema.parquet").write_bytes(data.replace(b"\x01t", b"\x01u"))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    planned = {}
    async for entry in plan(place, TEXT, 10_000):
        planned[entry.source if isinstance(entry, Broken) else entry[0].source if entry else ""] = entry
    reasons = {name: part.error.reason for name, part in planned.items() if isinstance(part, Broken)}
    assert reasons == {
        "cut.parquet": "malformed",
        "short.parquet": "malformed",
        "junk.parquet": "malformed",
        "empty.csv": "malformed",
        "latin.csv": "malformed",
        "endless.csv": "malformed",
        "packed.jsonl.gz": "unsupported_format",
        "schema.csv": "schema",
        "schema.parquet": "schema",
    }
    assert set(planned) - set(reasons) == {"a.jsonl", "whole.parquet", ""}
    schema = planned["schema.csv"]
    assert isinstance(schema, Broken)
    assert schema.error.param == "input.text"
    assert schema.error.message == "input.text: schema.csv has no column 't'; it has title, body"


@pytest.mark.parametrize("nested", [False, True])
async def test_a_small_file_of_many_long_values_is_refused_before_they_are_decoded(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """A dictionary of one value for all rows: 1,000 rows of 100 kB in some hundred bytes."""
    monkeypatch.setattr(sizes, "MAX_DECODED_BYTES", 10 << 20)
    column: pa.Array = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 100_000]))
    if nested:
        column = pa.ListArray.from_arrays(pa.array(range(1001), pa.int32()), column.cast(pa.string()))
    parquet.write_table(pa.table({"t": column}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    (span,) = await spans_of(place, TEXT, 1000)
    with pytest.raises(InvalidInput) as caught:
        await read(place, span, TEXT)
    assert (caught.value.reason, caught.value.param) == ("too_large", "shard_rows")
    few, *_ = await spans_of(place, TEXT, 50)
    assert len(await read(place, few, TEXT)) == 50


class Kms(encryption.KmsClient):
    """Service of keys that leaves keys as they are."""

    def __init__(self, _: encryption.KmsConnectionConfig) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)


async def test_encrypted_columns_of_parquet_are_refused(tmp_path: Path, place: Place) -> None:
    """The footer and the other columns of such a file are plain. pyarrow would end the process."""
    properties = encryption.CryptoFactory(Kms).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["t"]}, plaintext_footer=True),
    )
    table = pa.table({"t": ["a", "b"], "u": ["c", "d"]})
    parquet.write_table(table, tmp_path / "a.parquet", encryption_properties=properties)
    (broken,) = [entry async for entry in plan(place, TEXT, 10)]
    assert isinstance(broken, Broken)
    assert (broken.error.reason, "encrypted" in broken.error.message) == ("malformed", True)
    assert [row.text for row in await rows_of(place, JobInput(url="u", text="{u}"))] == ["c", "d"]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("rows_of_page", [1, 50])
async def test_a_page_that_needs_too_much_memory_is_refused_before_it_is_decompressed(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, version: str, rows_of_page: int
) -> None:
    """Four megabytes in a page of less than a kilobyte."""
    monkeypatch.setattr(footers, "MAX_BATCH_BYTES", 1 << 20)
    table = pa.table({"t": ["x" * ((4 << 20) // rows_of_page)] * rows_of_page})
    file, page = tmp_path / "a.parquet", {"data_page_size": 1 << 30, "data_page_version": version}
    parquet.write_table(table, file, compression="zstd", use_dictionary=False, write_statistics=False, **page)
    assert file.stat().st_size < 4000
    (span,) = await spans_of(place, TEXT, 100)
    with pytest.raises(InvalidInput) as caught:
        await read(place, span, TEXT)
    assert (caught.value.reason, caught.value.param) == ("too_large", "input.url")


async def test_a_footer_that_needs_too_much_memory_is_refused_before_it_is_parsed(tmp_path: Path, place: Place) -> None:
    """In Thrift's compact protocol: version, schema (a root with one text), rows, and a row group of 250,000 columns,
    each with its position alone. pyarrow needs 1.4 kB for each.
    """
    schema = b"\x19\x2c" + b"\x48\x01s\x15\x02\x00" + b"\x15\x0c\x25\x02\x18\x01t\x00"
    columns = b"\x19\xfc\x90\xa1\x0f" + b"\x26\x00\x00" * 250_000
    footer = b"\x15\x02" + schema + b"\x16\x02" + b"\x19\x1c" + columns + b"\x16\x02\x16\x02\x00" + b"\x00"
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    (broken,) = [entry async for entry in plan(place, TEXT, 10)]
    assert isinstance(broken, Broken)
    assert (broken.error.reason, "row groups" in broken.error.message) == ("too_large", True)


@pytest.mark.parametrize(
    "header",
    [
        *(b"\x1c" * 5000, b"\x15\x01\x15\x01\x15\x00", b"\x15\x80", b"\x0f"),
        b"\x15\x02" * 5000 + b"\x00",  # fields beyond any struct of the format
        b"\x19\xf1\xff\xff\xff\x7f",  # a list of 268,435,455 values
    ],
)
def test_a_malformed_header_of_a_page_is_refused(header: bytes) -> None:
    chunk = pages.ChunkPages(0, len(header), values=1, window=1)
    with pytest.raises(pages.PageFault):
        chunk.note(0, header, lambda start, end: header[start:end])


async def test_nothing_to_read_is_refused(tmp_path: Path, place: Place) -> None:
    (tmp_path / "README.md").write_text("x")
    for source in (TEXT, JobInput(url="u/", format="images")):
        with pytest.raises(InvalidInput) as caught:
            await spans_of(place, source)
        assert caught.value.reason == "input_missing"
    missing = Place.opened(f"{tmp_path}/absent.jsonl", (str(tmp_path),))
    (broken,) = [entry async for entry in plan(missing, TEXT, 10)]
    assert isinstance(broken, Broken)
    assert broken.error.reason == "input_missing"


def group(rows: int, size: int = 0) -> footers.ParquetGroup:
    return footers.ParquetGroup(rows, size)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group(3), group(3), group(3), group(5)], [(0, 9, 0, 3), (9, 5, 3, 4)]),
        ([group(25), group(3)], [(0, 9, 0, 1), (9, 9, 0, 1), (18, 7, 0, 1), (25, 3, 1, 2)]),
        ([group(2), group(25)], [(0, 2, 0, 1), (2, 9, 1, 2), (11, 9, 1, 2), (20, 7, 1, 2)]),
        ([group(0), group(4), group(0)], [(0, 4, 1, 3)]),
        ([group(4, 60), group(4, 60)], [(0, 4, 0, 1), (4, 4, 1, 2)]),
        ([group(4, 250)], [(0, 2, 0, 1), (2, 2, 0, 1)]),
        ([group(1, 900)], [(0, 1, 0, 1)]),
        ([], []),
        ([group(0)], []),
    ],
)
def test_row_groups_are_packed_and_split(groups: list[footers.ParquetGroup], expected: list[tuple[int, ...]]) -> None:
    assert [tuple(cut) for cut in footers.cuts(groups, 10, 100)] == expected


async def test_a_large_row_has_a_span_of_its_own_and_is_a_fault_if_it_is_too_large(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SPAN_BYTES", 1000)
    monkeypatch.setattr(rows, "MAX_SPAN_BYTES", 1000)
    write_jsonl(tmp_path / "a.jsonl", [{"t": "a"}, {"t": "b" * 2000}, {"t": "c"}])
    input_rows = await rows_of(place, TEXT)
    assert [row.text for row in input_rows] == ["a", None, "c"]
    assert input_rows[1].fault is not None
    assert [span.rows for span in await spans_of(place, TEXT)] == [1, 1, 1]


@pytest.mark.parametrize("objects", [1, 3])
async def test_a_job_has_a_bounded_number_of_spans(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, objects: int
) -> None:
    """The bound is for one object, and for all objects together."""
    monkeypatch.setattr(plans, "MAX_SPANS", 10)
    for number in range(objects):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"t": "a"}] * (42 // objects))
    with pytest.raises(InvalidInput, match="more than 10 shards of at most 4 rows") as caught:
        await spans_of(place, TEXT)
    assert (caught.value.param, caught.value.reason) == ("shard_rows", "too_many_items")
    assert sum(span.rows for span in await spans_of(place, TEXT, 5)) == 42


MAPS = b"[" + b",".join([b"{}"] * 300_000) + b"]"
BOMBS = {
    "a column that is not read": b'{"t":"a","x":%s}' % MAPS,
    "a column that is kept": b'{"t":"a","k":%s}' % MAPS,
    "a column of the text": b'{"t":%s}' % MAPS,
    "names of columns": b"{%s}" % b",".join(b'"%d":1' % number for number in range(120_000)),
    "no object": MAPS,
}


@pytest.mark.parametrize("bomb", BOMBS)
async def test_a_row_of_many_values_is_read_in_the_memory_of_its_text(tmp_path: Path, place: Place, bomb: str) -> None:
    """Planning and reading take no more than a small multiple of the size of the text. The rows beside it are read. A
    row that would need too many values is a failed row, which says why.
    """
    data = b'{"t":"before"}\n%s\n{"t":"after"}\n' % BOMBS[bomb]
    (tmp_path / "a.jsonl").write_bytes(data)
    source = JobInput(url="u", text="{t}", keep=("k",))
    (span,) = await spans_of(place, source)
    tracemalloc.start()
    try:
        (span,) = await spans_of(place, source)
        before, bad, after = await read(place, span, source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (before.text, after.text) == ("before", "after")
    assert peak < 12 * len(data)
    if bomb == "a column that is not read":
        assert bad.text == "a"
    elif bomb == "no object":
        assert bad.fault is not None
        assert bad.fault.message == "the line is no JSON object"
    else:
        assert bad.fault is not None
        assert bad.fault.reason == "too_large"
        assert "100000" in bad.fault.message


@pytest.mark.parametrize(("is_one_row", "name"), [(True, "k"), (False, "k"), (True, "a.k")])
async def test_lists_of_parquet_that_repeat_a_value_take_little_memory(
    tmp_path: Path, place: Place, is_one_row: bool, name: str
) -> None:
    """A file of less than 10 KB with 20 million zeros, in one row or in many, is refused when it is planned."""
    count = 20_000_000
    ends = [0, count, count] if is_one_row else list(range(0, count + 1, count // 100))
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.zeros(count, np.int64)))
    texts = pa.array(["a"] * (len(ends) - 1))
    parquet.write_table(pa.table({"t": texts, name: lists}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    source = JobInput(url="u", text="{t}", keep=(name,))
    (broken,) = [entry async for entry in plan(place, source, 4)]
    assert isinstance(broken, Broken)
    assert broken.error.reason == "too_large"
    assert f"column '{name}' has 200000" in broken.error.message
    assert [row.text for row in await rows_of(place, TEXT)] == ["a"] * (len(ends) - 1), "it is not read"
