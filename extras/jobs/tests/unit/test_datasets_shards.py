"""Parts of an output in real stores: each is written once and whole. Inputs are read from these stores too."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import obstore
import pyarrow as pa
import pytest
from object_stores import Place as Bucket
from pyarrow import parquet

from sie_bulk_jobs.datasets import manifests, plans, rows
from sie_bulk_jobs.datasets.answers import About, RowAnswer, shard_of
from sie_bulk_jobs.datasets.parts import encode
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.rows import InputRow
from sie_bulk_jobs.datasets.shards import PartDamaged, claim, existing, pieces_of, put_once
from sie_bulk_jobs.file_objects import FileObjects
from sie_bulk_jobs.gateway.storage import JobStorage
from sie_contracts.api.jobs import JobInput, JobManifest, OutputFormat
from sie_contracts.errors import ErrorInfo, InvalidInput
from sie_store import durable
from sie_store.object_stores import PIECE_BYTES, ObjectMissing, RetryPolicy, StoreError

NAME = "part-00000.parquet"
FAST = RetryPolicy(tries=3, pause_s=0.001)
EMPTY = msgspec.convert(JobManifest.EXAMPLE | {"parts": []}, JobManifest)


@pytest.fixture(params=["folder", "moto", "seaweed", "google"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return a URL of its own in each kind of store."""
    if request.param == "folder":
        return str(tmp_path)
    return Bucket.at(request.getfixturevalue(request.param), monkeypatch).url


def output(url: str) -> Place:
    return Place.opened(f"{url}/out", (url,), is_output=True)


def part(fingerprint: str = "f00d", count: int = 4, format: OutputFormat = "parquet") -> bytes:
    own = [InputRow(f"r{number}") for number in range(count)]
    vector = {"dense": np.arange(8, dtype=np.float32)}
    answers = [RowAnswer(tokens=3, arrays=vector) for _ in own[1:]] + [RowAnswer(ErrorInfo("INVALID_INPUT", "no text"))]
    return encode(shard_of(About("job-1", 0, "org/model", fingerprint), own, answers), format)


async def test_a_part_is_read_in_pieces(url: str) -> None:
    place, data = output(url), os.urandom(3 * PIECE_BYTES + 7)
    await obstore.put_async(place.store, place.folder + "part", data)
    size, pieces = await pieces_of(place, "part")
    parts = [piece async for piece in pieces]
    assert (size, b"".join(parts)) == (len(data), data)
    assert max(map(len, parts)) <= 2 * PIECE_BYTES
    with pytest.raises(ObjectMissing):
        await pieces_of(place, "none")


@pytest.mark.parametrize("format", ["parquet", "jsonl", "npy"])
async def test_a_part_is_written_once_and_what_is_there_is_taken_over(url: str, format: OutputFormat) -> None:
    place, data = output(url), part("one", format=format)
    assert await existing(place, "part", format) is None
    record = await put_once(place, "part", data, format)
    assert (record.rows, record.failed, record.tokens, record.codes) == (4, 1, 9, {"INVALID_INPUT": 1})
    assert (record.bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert await put_once(output(url), "part", part("two", 7, format), format) == record, "what is there counts"
    assert await existing(place, "part", format) == record
    assert bytes(obstore.get(place.store, "out/part").bytes()) == data


async def test_of_many_writers_at_once_one_wins_and_all_say_what_is_there(url: str) -> None:
    parts = [part(f"writer {number}", 3 + number) for number in range(6)]
    records = await asyncio.gather(*(put_once(output(url), NAME, data, "parquet") for data in parts))
    assert len({record.sha256 for record in records}) == 1
    data = bytes(obstore.get(output(url).store, f"out/{NAME}").bytes())
    assert data in parts
    assert records[0].sha256 == hashlib.sha256(data).hexdigest()
    assert records[0].rows == parquet.read_table(pa.BufferReader(data)).num_rows


async def test_a_folder_belongs_to_one_owner(url: str) -> None:
    place = output(url)
    for _ in range(2):  # a second leader of the same job may claim it too
        await claim(place, "job-1 7.5")
    with pytest.raises(InvalidInput) as caught:
        await claim(place, "job-1 8.5")
    assert (caught.value.reason, caught.value.param) == ("output_in_use", "output.url")


async def test_a_put_whose_answer_is_lost_is_taken_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is stored, but its writer gets an error and tries again."""
    put_async, lost = obstore.put_async, 0

    async def put_and_lose(*arguments: Any, **options: Any) -> Any:
        nonlocal lost
        answer = await put_async(*arguments, **options)
        if not lost:
            lost += 1
            raise OSError("connection reset")
        return answer

    monkeypatch.setattr(obstore, "put_async", put_and_lose)
    data = part()
    record = await put_once(replace(output(url), patience=FAST), NAME, data, "parquet")
    assert (lost, record.sha256) == (1, hashlib.sha256(data).hexdigest())


async def test_an_object_that_is_no_part_is_neither_taken_over_nor_replaced(url: str) -> None:
    place = output(url)
    obstore.put(place.store, f"out/{NAME}", b"of somebody else")
    with pytest.raises(PartDamaged):
        await existing(place, NAME, "parquet")
    with pytest.raises(PartDamaged):
        await put_once(place, NAME, part(), "parquet")
    assert bytes(obstore.get(place.store, f"out/{NAME}").bytes()) == b"of somebody else"


async def one_piece() -> AsyncIterator[bytes]:
    yield b"data"


@pytest.mark.parametrize(
    ("key", "write"),
    [
        ("out/.sie-job", lambda place: claim(place, "job-1")),
        (f"out/{NAME}", lambda place: put_once(place, NAME, part(), "parquet")),
        (f"jobs/1/{NAME}", lambda place: put_once(Place(place.store, "jobs/1/"), NAME, part(), "parquet")),
        ("out/manifest.json", lambda place: manifests.write(place, EMPTY)),
        ("files/file-1", lambda place: FileObjects(place.store).put("file-1", one_piece(), 60)),
        ("jobs/job-1/plan", lambda place: JobStorage(place.store, "job-1", Any).put_once("plan", b"plan")),
    ],
)
async def test_an_object_that_a_record_calls_complete_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, write: Callable[[Place], Awaitable[Any]]
) -> None:
    """So are the folders in its path. Another leader, which may find the object there, waits for the disk too."""
    synced: list[Path] = []

    def sync(path: Path) -> None:
        assert path.exists()
        synced.append(path.relative_to(tmp_path))

    monkeypatch.setattr(durable, "sync", sync)
    for _ in range(2):
        synced.clear()
        await write(output(str(tmp_path)))
        assert synced == [Path(key), *Path(key).parents]


async def test_inputs_are_planned_and_read_in_each_store(url: str) -> None:
    """URLs and stores write some of the names in other ways. The manifest of another job is among the inputs."""
    store = output(url).store
    lines = b"".join(b'{"t": "%d"}\n' % number for number in range(2500))
    table = pa.BufferOutputStream()
    parquet.write_table(pa.table({"t": [f"p{number}" for number in range(50)]}), table, row_group_size=20)
    for name, data in {
        "in/a b/100% ü#1.jsonl": lines,
        "in/b.parquet": table.getvalue().to_pybytes(),
        "in/c.csv": b't,u\r\n"x\r\ny",1\r\nz,2',
        "in/empty.jsonl": b"",
        "in/manifest.json": b"{}",
        "in2/other.jsonl": lines,
    }.items():
        obstore.put(store, name, data)
    place, source = Place.opened(f"{url}/in/", (url,)), JobInput(url="u/", text="{t}")
    planned = [entry async for entry in plans.plan(place, source, 1000)]
    assert not [entry for entry in planned if isinstance(entry, plans.Broken)]
    spans = [span for entry in planned if isinstance(entry, list) for span in entry]
    input_rows = [row for span in spans for row in await rows.read(place, span, source)]
    texts = [str(number) for number in range(2500)] + [f"p{number}" for number in range(50)] + ["x\r\ny", "z"]
    assert [row.text for row in input_rows] == texts
    assert input_rows[0].id == "a b/100% ü#1.jsonl#0"
    path = "in/a%20b/100%25%20%C3%BC%231.jsonl" if "://" in url else "in/a b/100% ü#1.jsonl"
    file_place = Place.opened(f"{url}/{path}", (url,))
    (single,) = [entry async for entry in plans.plan(file_place, source, 5000)]
    assert isinstance(single, list)
    assert [row.text for row in await rows.read(file_place, single[0], source)] == texts[:2500]


async def test_an_object_that_changes_while_it_is_read_is_refused(url: str) -> None:
    store = output(url).store
    obstore.put(store, "in/a.jsonl", b'{"t": "old"}\n')
    place, source = Place.opened(f"{url}/in/a.jsonl", (url,)), JobInput(url="u", text="{t}")
    (planned,) = [entry async for entry in plans.plan(place, source, 10)]
    assert isinstance(planned, list)
    obstore.put(store, "in/a.jsonl", b'{"t": "new"}\n')
    with pytest.raises(rows.InvalidInput) as caught:
        await rows.read(place, planned[0], source)
    assert caught.value.reason == "input_changed"
    obstore.delete(store, "in/a.jsonl")
    with pytest.raises(rows.InvalidInput) as caught:
        await rows.read(place, planned[0], source)
    assert caught.value.reason == "input_missing"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.getuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("a file system can be mounted only by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def test_a_full_disk_is_an_error_and_leaves_nothing_under_the_name_of_a_part(small_disk: Path) -> None:
    """A smaller part is written, and so is the same part after there is room."""
    place = output(str(small_disk))
    filler = small_disk / "filler"
    filler.write_bytes(os.urandom(650_000))
    data, random = part(), np.random.default_rng(1)
    answers = [RowAnswer(arrays={"dense": random.random(256, np.float32)}) for _ in range(300)]
    large = encode(
        shard_of(About("job-1", 0, "m", "f"), [InputRow(f"r{number}") for number in range(300)], answers), "parquet"
    )
    assert len(large) > 250_000
    with pytest.raises(StoreError):
        await put_once(replace(place, patience=FAST), NAME, large, "parquet")
    assert files(small_disk) == {"filler"}
    assert await existing(place, NAME, "parquet") is None
    await put_once(replace(place, patience=FAST), "part-00001.parquet", data, "parquet")
    filler.unlink()
    record = await put_once(replace(place, patience=FAST), NAME, large, "parquet")
    assert record.sha256 == hashlib.sha256((small_disk / "out" / NAME).read_bytes()).hexdigest()
