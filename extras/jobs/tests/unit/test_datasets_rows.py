"""Inputs of jobs from objects to rows: every row of every format exactly once, faults in their places, and objects that
are broken, missing or changed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import obstore
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyarrow.parquet import encryption

from sie_bulk_jobs.datasets import footers, pages, plans, rows, sizes
from sie_bulk_jobs.datasets.objects import PIECE_BYTES, ObjectEntry, find, pieces
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.plans import Broken, plan
from sie_bulk_jobs.datasets.rows import InputRow, read
from sie_bulk_jobs.datasets.scan import Cut
from sie_bulk_jobs.records import RowSpan
from sie_contracts.api.jobs import JobChunkRule, JobInput
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


async def test_ids_that_are_missing_or_too_long_are_faults(tmp_path: Path, place: Place) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"t": "a", "i": 7}, {"t": "b"}, {"t": "c", "i": "x" * 1025}, {"t": "d", "i": ""}]
    )
    input_rows = await rows_of(place, JobInput(url="u", text="{t}", id="i"))
    assert [row.id for row in input_rows] == ["7", "a.jsonl#1", "a.jsonl#2", "a.jsonl#3"]
    assert [row.fault.param if row.fault else "" for row in input_rows] == ["", "input.id", "input.id", "input.id"]


async def test_scores_read_a_query_and_a_document(tmp_path: Path, place: Place) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "d": "y"}, {"q": "x"}])
    first, second = await rows_of(place, JobInput(url="u", query="{q}?", document="{d}"))
    assert (first.query, first.document, first.text) == ("x?", "y", None)
    assert second.fault is not None
    assert second.fault.param == "input.document"


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
    assert [row.images for row in input_rows] == [
        *[(IMAGE,)] * 2,
        (),
        (),
        (IMAGE,),
        (),
        (IMAGE,),
        (IMAGE, IMAGE),
        (),
    ]
    assert [row.fault.param for row in input_rows if not row.images and row.fault] == ["input.image"] * 4


async def test_a_file_of_a_document_is_read_as_it_is_and_a_missing_one_is_a_fault(tmp_path: Path, place: Place) -> None:
    forms = ["eA==", {"data": "eA==", "format": "csv"}, None]
    write_jsonl(tmp_path / "a.jsonl", [*({"f": form} for form in forms), {}])
    parquet.write_table(pa.table({"f": [b"x", None]}), tmp_path / "b.parquet")
    input_rows = await rows_of(place, JobInput(url="u", documents="f", chunks=JobChunkRule(9)))
    assert [row.file for row in input_rows] == [*forms, None, b"x", None]
    assert [row.fault.param if row.fault else "" for row in input_rows] == [
        "",
        "",
        *["input.documents"] * 2,
        "",
        "input.documents",
    ]


async def test_the_files_of_a_span_have_a_limit(tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MAX_DECODED_BYTES", 1000)
    for name, form in (("a", "x" * 600), ("b", {"data": "x" * 600})):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"f": form}] * 2)
        (tmp_path / f"{name}.jsonl").rename(tmp_path / "rows.jsonl")
        with pytest.raises(InvalidInput) as caught:
            await rows_of(place, JobInput(url="u", documents="f", chunks=JobChunkRule(9)))
        assert caught.value.reason == "too_large"


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


async def test_an_uploaded_file_is_read_by_its_key_and_called_by_its_name(tmp_path: Path, place: Place) -> None:
    write_jsonl(tmp_path / "0192f0c1", [{"t": "a"}])
    file = Place(place.store, "", "0192f0c1", label="rows.jsonl", root=place.root)
    (row,) = await rows_of(file, TEXT)
    assert (row.id, row.text) == ("rows.jsonl#0", "a")


@pytest.mark.parametrize("keeps_times", [True, False])
async def test_a_copy_of_a_folder_has_the_same_objects(tmp_path: Path, keeps_times: bool) -> None:
    """A folder, and files whose digests are known, are planned. They are copied, which gives them other inodes. A copy
    with the same times is read as planned. Without the times only a file with a digest is read: nothing else shows that
    it is equal.
    """
    names = ("a.jsonl", "b.csv", "c.parquet")
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    write_jsonl(first / "a.jsonl", [{"t": "a"}])
    (first / "b.csv").write_text("t\na\n")
    parquet.write_table(pa.table({"t": ["a"]}), first / "c.parquet")
    source = JobInput(url="u", text="{t}")
    whole = await spans_of(Place.opened(f"{first}/", (str(first),)), source)
    store = obstore.store.LocalStore(str(tmp_path))
    span_lists = [await spans_of(Place(store, "one/", name, digest="d"), source) for name in names]
    shutil.copytree(first, second, copy_function=shutil.copy2 if keeps_times else shutil.copyfile)
    for name, (span,) in zip(names, span_lists, strict=True):
        assert [row.text for row in await read(Place(store, "two/", name, digest="d"), span, source)] == ["a"]
    copy = Place.opened(f"{second}/", (str(second),))
    for span in whole:
        if keeps_times:
            assert [row.text for row in await read(copy, span, source)] == ["a"]
        else:
            with pytest.raises(InvalidInput) as caught:
                await read(copy, span, source)
            assert caught.value.reason == "input_changed"


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
async def test_columns_of_one_name_are_refused_by_name(tmp_path: Path, place: Place, name: str) -> None:
    if name == "a.csv":
        (tmp_path / name).write_text('t,"x",t\n1,2,3\n')
    else:
        columns = [pa.array([digit]) for digit in "123"]
        parquet.write_table(pa.Table.from_arrays(columns, ["t", "x", "t"]), tmp_path / name)
    (broken,) = [entry async for entry in plan(place, TEXT, 4)]
    assert isinstance(broken, Broken)
    assert broken.error.message == f"{name}: 2 columns have the name 't': name each column differently"


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


async def test_a_file_that_is_written_over_while_it_is_streamed_is_refused(tmp_path: Path, place: Place) -> None:
    """The open file has the new bytes, while the store has told the size and the time of the old ones."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"a" * 3 * PIECE_BYTES)
    entry = await find(place, "a.jsonl")

    async def streamed() -> None:
        async for _ in pieces(place, entry, 0, entry.size):
            with file.open("r+b") as same:
                same.write(b"b" * 3 * PIECE_BYTES)

    with pytest.raises(InvalidInput) as caught:
        await streamed()
    assert caught.value.reason == "input_changed"


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


async def test_a_column_that_no_object_of_json_has_is_named_and_one_that_some_have_is_not(
    tmp_path: Path, place: Place
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"title": "a"}, 7, {"title": "b", "t": "c"}])
    wrong = JobInput(url="u", text="{titel}", id="key", keep=("year",))
    (broken,) = [entry async for entry in plan(place, wrong, 4)]
    assert isinstance(broken, Broken)
    assert broken.error.param == "input.text"
    assert broken.error.message == "input.text: a.jsonl has no column 'titel'; it has title, t"
    copied = JobInput(url="u", text="{t}", keep=("year",))
    assert [row.text for row in await rows_of(place, copied)] == [None, None, "c"]


async def test_a_broken_page_is_found_when_its_rows_are_read(tmp_path: Path, place: Place) -> None:
    """One page has a broken header. The bytes of another page do not match its checksum."""
    texts = [f"text {number}" for number in range(1500)]
    options: dict[str, Any] = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    parquet.write_table(pa.table({"t": texts}), tmp_path / "a.parquet", row_group_size=500, **options)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[4:24] = b"\xff" * 20
    data[data.index(b"text 700")] = 0
    (tmp_path / "a.parquet").write_bytes(data)
    *broken, last = await spans_of(place, TEXT, 500)
    assert len(broken) == 2
    for span in broken:
        with pytest.raises(InvalidInput) as caught:
            await read(place, span, TEXT)
        assert caught.value.reason == "malformed"
    assert [row.text for row in await read(place, last, TEXT)] == texts[1000:]


@pytest.mark.parametrize("unique", [False, True])
async def test_a_row_group_of_many_texts_takes_the_memory_of_a_batch(
    tmp_path: Path, place: Place, unique: bool
) -> None:
    """A writer gives up its dictionary when it becomes large. Its values are then stored in pages without one."""
    texts = [os.urandom(500).hex() if unique else "x" * 1000 for _ in range(20_000)]
    parquet.write_table(pa.table({"t": texts, "part": range(20_000)}), tmp_path / "a.parquet")
    *_, last = await spans_of(place, JobInput(url="u", text="{t}"), 100)
    entry = await find(place, last.source)
    cut, before = Cut(last.first, last.rows, last.start, last.end), pa.total_allocated_bytes()
    read_rows = footers.read(place, entry, cut, ["t"], sizes.SpanSize(last))
    assert next(read_rows)["t"] == texts[last.first]
    assert pa.total_allocated_bytes() - before < 15 << 20


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


async def test_a_parquet_column_whose_name_is_not_utf8_is_refused(tmp_path: Path, place: Place) -> None:
    table = pa.table({"t": ["a"], "name": ["b"]})
    parquet.write_table(table, tmp_path / "a.parquet", store_schema=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole.replace(b"name", b"\xff\xfe\xfd\xfc"))
    (broken,) = [entry async for entry in plan(place, TEXT, 10)]
    assert isinstance(broken, Broken)
    assert broken.error.reason == "malformed"
    plans.check_file(tmp_path / "a.parquet", TEXT)


async def test_nested_texts_of_parquet_in_several_row_groups(tmp_path: Path, place: Place) -> None:
    own = [{"t": "a", "map": {"p": f"x{number}"}, "list": [{"q": f"y{number}"}]} for number in range(9)]
    parquet.write_table(pa.Table.from_pylist(own), tmp_path / "a.parquet", row_group_size=2)
    input_rows = await rows_of(place, JobInput(url="u", text="{t}", keep=("map", "list")), shard_rows=9)
    assert [{"t": row.text, **row.copied} for row in input_rows] == own


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


async def test_large_rows_in_pages_of_their_own_are_read_a_few_at_a_time(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of pages lie in different requests than their pages. A batch has no values of earlier batches."""
    sizes_of_batches: list[int] = []
    monkeypatch.setattr(footers, "_decoded_bytes", lambda array: sizes_of_batches.append(array.nbytes) or array.nbytes)
    monkeypatch.setattr(footers, "MAX_DECODED_BYTES", 1 << 19)
    monkeypatch.setattr(footers, "MAX_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(footers, "BUFFER_BYTES", 10)
    monkeypatch.setattr("sie_bulk_jobs.datasets.objects.READ_AHEAD_BYTES", 1)
    own = [{"t": os.urandom(50_000).hex(), "list": [f"{number}"] * number} for number in range(40)]
    pages_of_rows = {"data_page_size": 1, "write_batch_size": 1, "use_dictionary": False}
    parquet.write_table(pa.Table.from_pylist(own), tmp_path / "a.parquet", **pages_of_rows)
    input_rows = await rows_of(place, JobInput(url="u", text="{t}", keep=("list",)), 100)
    assert [{"t": row.text, **row.copied} for row in input_rows] == own
    assert max(sizes_of_batches) <= 1 << 19


@pytest.mark.parametrize(("window", "count"), [(1, 1), (3, 3), (30, 10)])
def test_the_pages_of_one_batch_count_together(window: int, count: int) -> None:
    """Ten pages of one value each, with 50 decoded bytes in one compressed byte."""
    column = (b"\x15\x00\x15\x64\x15\x02\x2c\x15\x02\x00\x00" + b"x") * 10
    chunk = pages.ChunkPages(0, len(column), values=10, window=window)
    chunk.note(0, column, lambda start, end: column[start:end])
    assert chunk.bytes == count * (50 - pages.RATIO)


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


async def test_the_footer_of_many_row_groups_is_read(tmp_path: Path, place: Place) -> None:
    table = pa.table({"t": [f"{number}" for number in range(2500)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    tail = (tmp_path / "a.parquet").read_bytes()[-8:-4]
    assert int.from_bytes(tail, "little") > footers.SMALL_FOOTER_BYTES
    assert len(await spans_of(place, TEXT, 500)) == 5


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


def test_structs_inside_a_footer_take_no_memory() -> None:
    """90,000 numbers, of which nothing is used: 12 MB if they were noted."""
    numbers = b"\x15\x02" * 100 + b"\x00"
    footer = (b"\x1c" + (b"\x1c" + numbers) * 30 + b"\x00") * 30 + b"\x00"
    tracemalloc.start()
    try:
        pages.check_footer(footer)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("empty", "is_refused"), [(pages.MAX_EMPTY_PAGES, False), (pages.MAX_EMPTY_PAGES + 1, True)])
def test_a_column_has_a_bounded_number_of_pages_without_values(empty: int, is_refused: bool) -> None:
    """Each header is parsed and noted. pyarrow skips pages of an index, such as these of 7 bytes."""
    index, data = b"\x15\x02\x15\x00\x15\x00\x00", b"\x15\x00\x15\x00\x15\x00\x2c\x15\x02\x00\x00"
    column = index * empty + data
    chunk = pages.ChunkPages(0, len(column), values=1, window=1)
    with pytest.raises(pages.PageFault) if is_refused else contextlib.nullcontext():
        chunk.note(0, column, lambda start, end: column[start:end])


@pytest.mark.parametrize("lines", [1, 2])
async def test_blank_lines_after_a_row_are_not_read(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    """A file of few rows may have any number of them."""
    monkeypatch.setattr(rows, "MAX_SPAN_BYTES", 1000)
    monkeypatch.setattr(plans, "SPAN_BYTES", 500)
    own = [{"t": f"{number}"} for number in range(lines)]
    for end in ("", json.dumps({"t": "last"})):
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, own)) + "\n" * 5000 + end)
        spans = await spans_of(place, TEXT)
        assert all(span.end - span.start < 100 for span in spans)
        read_rows = [row for span in spans for row in await read(place, span, TEXT)]
        assert [row.text for row in read_rows] == [*(row["t"] for row in own), *(["last"] if end else [])]


async def test_values_inside_an_extension_type_count(tmp_path: Path, place: Place) -> None:
    """The file says that its lists are tensors. Each number becomes an object all the same."""
    numbers = pa.FixedSizeListArray.from_arrays(pa.array([1.0] * 1_200_000), 300_000)
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float64(), [300_000]), numbers)
    parquet.write_table(pa.table({"t": ["a"] * 4, "n": tensors}), tmp_path / "a.parquet")
    source = JobInput(url="u", text="{t}", keep=("n",))
    first, *_ = await spans_of(place, source, 4)
    with pytest.raises(InvalidInput) as caught:
        await read(place, msgspec.structs.replace(first, rows=4), source)
    assert caught.value.reason == "too_large"


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


async def test_only_the_bytes_of_a_span_are_read(tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Parquet these are the bytes of the columns that templates name, in the row groups of the span."""
    wide = pa.array([os.urandom(2000) for _ in range(4000)])
    table = pa.table({"wide": wide, "t": [f"text {number}" for number in range(4000)], "also": wide})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    write_jsonl(tmp_path / "b.jsonl", [{"t": "x" * 1000}] * 4000)
    count = 0
    get, get_async = obstore.get, obstore.get_async

    def counted(options: Any) -> None:
        nonlocal count
        start, end = options["range"]
        count += end - start

    def get_counted(store: Any, path: str, *, options: Any) -> Any:
        counted(options)
        return get(store, path, options=options)

    async def get_async_counted(store: Any, path: str, *, options: Any) -> Any:
        counted(options)
        return await get_async(store, path, options=options)

    monkeypatch.setattr(obstore, "get", get_counted)
    monkeypatch.setattr(obstore, "get_async", get_async_counted)
    spans = await spans_of(place, TEXT, 1000)
    assert [span.start for span in spans[:4]] == [0, 1, 2, 3]
    for span, most in ((spans[2], 3 << 20), (spans[6], 1_100_000)):
        count = 0
        assert len(await read(place, span, TEXT)) == 1000
        assert count < most, "16 MB and 4 MB are there"


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


async def test_a_span_is_bounded_by_its_text_too(tmp_path: Path, place: Place) -> None:
    """The bound is for each format, because answers may take much more memory than rows."""
    write_jsonl(tmp_path / "a.jsonl", [{"t": "a" * 90}] * 20)
    parquet.write_table(pa.table({"t": [f"{number:090}" for number in range(20)]}), tmp_path / "b.parquet")
    planned = [entry async for entry in plan(place, TEXT, 1000, text_bytes=520)]
    for spans in planned:
        assert isinstance(spans, list)
        assert sum(span.rows for span in spans) == 20
        assert all(span.rows <= 6 for span in spans)


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


async def test_a_stream_that_is_cut_short_goes_on_where_it_ended(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store ends two answers early. All rows are read once."""
    write_jsonl(tmp_path / "a.jsonl", [{"t": f"{number}"} for number in range(1000)])
    get_async, cuts = obstore.get_async, 0

    async def cut_short(store: Any, path: str, *, options: Any) -> Any:
        nonlocal cuts
        start, end = options["range"]
        if end - start > 3000 and cuts < 2:
            cuts += 1
            end -= (end - start) // 2
        return await get_async(store, path, options={"range": (start, end)})

    monkeypatch.setattr(obstore, "get_async", cut_short)
    planned = [entry async for entry in plan(replace(place, patience=RetryPolicy(pause_s=0.001)), TEXT, 100)]
    monkeypatch.undo()
    assert cuts == 2
    (spans,) = planned
    assert isinstance(spans, list)
    texts = [row.text for span in spans for row in await read(place, span, TEXT)]
    assert texts == [f"{number}" for number in range(1000)]


async def test_a_footer_is_read_again_after_a_failure_of_the_store(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails once for each object. The plan goes on with the object, and not from the first one."""
    for number in range(5):
        parquet.write_table(pa.table({"t": ["x"] * 3}), tmp_path / f"{number}.parquet")
    read_footer, attempts = footers.footer, Counter[str]()

    def breaks_off(place: Place, entry: ObjectEntry, names: Any) -> Any:
        attempts[entry.source] += 1
        if attempts[entry.source] == 1:
            raise StoreError("the connection was reset")
        return read_footer(place, entry, names)

    monkeypatch.setattr(footers, "footer", breaks_off)
    planned = [entry async for entry in plan(replace(place, patience=RetryPolicy(pause_s=0.001)), TEXT, 100)]
    assert [span.source for spans in planned if isinstance(spans, list) for span in spans] == sorted(attempts)
    assert [*attempts.values()] == [2] * 5


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


def test_a_string_without_an_end_is_searched_once() -> None:
    line = b"{%s" % (b":" * (sizes.MAX_KEYS + 1)) + b'"' + b'\\"' * 30_000
    began_s = time.thread_time()
    with pytest.raises(sizes.TooManyValues):
        sizes.columns_of(line)
    assert time.thread_time() - began_s < 5


async def test_marks_in_texts_are_no_values(tmp_path: Path, place: Place) -> None:
    """A long text with more commas, colons and braces than a row may have values is a text."""
    text = ',:[{"\\' * 40_000
    write_jsonl(tmp_path / "a.jsonl", [{"t": text, "k": [text, {"x": text}]}])
    source = JobInput(url="u", text="{t}", keep=("k",))
    (row,) = await rows_of(place, source)
    assert (row.fault, row.text, row.copied["k"]) == (None, text, [text, {"x": text}])


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
async def test_a_span_has_as_many_rows_as_its_values_allow(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Many kept columns, and lists in them, make smaller spans, not failed ones."""
    monkeypatch.setattr(sizes, "MAX_SPAN_VALUES", 2000)
    monkeypatch.setattr(footers, "MAX_SPAN_VALUES", 2000)
    copied = tuple(f"k{number}" for number in range(20))
    own = [{"t": f"{number}", **dict.fromkeys(copied, "v")} for number in range(500)]
    if name == "a.csv":
        lines = [",".join(("t", *copied)), *(",".join(row.values()) for row in own)]
        (tmp_path / name).write_text("\n".join(lines))
    else:
        own = [{**row, "k0": [1.0] * 30} for row in own]
        if name == "a.jsonl":
            write_jsonl(tmp_path / name, own)
        else:
            parquet.write_table(pa.Table.from_pylist(own), tmp_path / name)
    source = JobInput(url="u", text="{t}", keep=copied)
    input_rows = await rows_of(place, source, 10_000)
    assert [row.text for row in input_rows] == [row["t"] for row in own]
    assert all(span.rows < 100 for span in await spans_of(place, source, 10_000))


async def test_a_span_of_more_values_than_its_sample_says_is_refused_with_the_remedy(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_SPAN_VALUES", 2000)
    monkeypatch.setattr(plans, "SAMPLE_ROWS", 2)
    write_jsonl(tmp_path / "a.jsonl", [{"t": "a", "k": [1] * (number // 10 * 100)} for number in range(40)])
    source = JobInput(url="u", text="{t}", keep=("k",))
    (span,) = await spans_of(place, source, 1000)
    with pytest.raises(InvalidInput, match="more than 2000 values: submit the job with fewer shard_rows") as caught:
        await read(place, span, source)
    assert (caught.value.reason, caught.value.param) == ("too_large", "shard_rows")


async def test_a_line_of_csv_with_many_fields_makes_no_more_than_the_header_has(tmp_path: Path, place: Place) -> None:
    for line in (b"," * 1_000_000, b'"x"' + b',"x"' * 300_000):
        (tmp_path / "a.csv").write_bytes(b"t,u\na,b\n%s\nc,d\n" % line)
        (span,) = await spans_of(place, TEXT)
        tracemalloc.start()
        try:
            before, bad, after = await read(place, span, TEXT)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (before.text, after.text) == ("a", "c")
        assert bad.fault is not None
        assert bad.fault.message == "the row has more fields than the header, which has 2"
        assert peak < 12 * len(line)


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


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 9223371331200000000], pa.timestamp("us")),
        pa.array([[0], [2**31 - 1]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
        pa.array([0, 2**63 - 1], pa.duration("s")),
        pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")),
    ],
)
async def test_a_value_that_python_lacks_is_an_error_that_names_its_column(
    tmp_path: Path, place: Place, values: pa.Array
) -> None:
    """Infinity in PostgreSQL is such a time."""
    parquet.write_table(pa.table({"t": ["a", "b"], "until.x": values}), tmp_path / "a.parquet")
    source = JobInput(url="u", text="{t}", keep=("until.x",))
    (span,) = await spans_of(place, source)
    with pytest.raises(InvalidInput, match=r"a\.parquet: column 'until\.x' has a value that cannot be read") as caught:
        await read(place, span, source)
    assert (caught.value.reason, caught.value.param) == ("malformed", "input.url")


async def test_times_and_durations_in_nanoseconds_are_read_in_microseconds(tmp_path: Path, place: Place) -> None:
    columns = {"at": pa.array([1_500], pa.timestamp("ns", "UTC")), "took": pa.array([1_500], pa.duration("ns"))}
    parquet.write_table(pa.table({"t": ["a"], **columns}), tmp_path / "a.parquet")
    (row,) = await rows_of(place, JobInput(url="u", text="{t}", keep=("at", "took")))
    assert msgspec.json.encode(row.copied) == b'{"at":"1970-01-01T00:00:00.000001Z","took":"PT0.000001S"}'


async def test_times_in_nanoseconds_within_lists_and_maps_are_read_in_microseconds(
    tmp_path: Path, place: Place
) -> None:
    at = pa.timestamp("ns", "UTC")
    columns = {
        "list": pa.array([[1_500]], pa.list_(at)),
        "pair": pa.array([[1_500, None]], pa.list_(at, 2)),
        "struct": pa.array(
            [{"a": [{"b": 1_500}], "c": "x"}], pa.struct({"a": pa.list_(pa.struct({"b": at})), "c": "string"})
        ),
        "map": pa.array([[("a", 1_500)]], pa.map_(pa.string(), pa.duration("ns"))),
    }
    parquet.write_table(pa.table({"t": ["a"], **columns}), tmp_path / "a.parquet")
    (row,) = await rows_of(place, JobInput(url="u", text="{t}", keep=(*columns,)))
    time = b'"1970-01-01T00:00:00.000001Z"'
    expected = b'{"list":[%b],"pair":[%b,null],"struct":{"a":[{"b":%b}],"c":"x"},"map":[["a","PT0.000001S"]]}'
    assert msgspec.json.encode(row.copied) == expected % (time, time, time)


async def test_a_value_that_could_not_be_encoded_again_is_a_fault_of_its_row(tmp_path: Path, place: Place) -> None:
    lines = [b'{"t":"a","k":%s}' % (b"[" * depth + b"]" * depth) for depth in (1, 700, 830, 5000)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    source = JobInput(url="u", text="{t}", keep=("k",))
    input_rows = await rows_of(place, source)
    assert [row.fault and row.fault.message for row in input_rows] == [None, None, *["the line is no valid JSON"] * 2]


async def test_rows_of_long_lists_are_read_a_few_at_a_time(tmp_path: Path, place: Place) -> None:
    lists = pa.ListArray.from_arrays(pa.array(range(0, 6_000_001, 50_000), pa.int32()), pa.array(np.zeros(6_000_000)))
    parquet.write_table(pa.table({"t": ["a"] * 120, "k": lists}), tmp_path / "a.parquet")
    source = JobInput(url="u", text="{t}", keep=("k",))
    spans = await spans_of(place, source, 1000)
    assert max(span.rows for span in spans) <= 10
    rows_read = await read(place, spans[-1], source)
    assert len(rows_read[-1].copied["k"]) == 50_000
