"""Files over HTTP at a gateway in this process: forms, owners, the list, expiry, a full store, and the clean-up after
aborted uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from inprocess import GatewayProcess, InProcess, until
from object_stores import Place

from sie_broker.memory import MemoryServer
from sie_broker.record import LeaderLease, RecordBucket
from sie_bulk_jobs.file_objects import open_files
from sie_bulk_jobs.gateway.files import (
    ABANDONED_S,
    UPLOADS_AT_ONCE,
    UPLOADS_OF_A_KEY,
    FileDescription,
    FileStore,
    new_id,
)
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse, UseBound
from sie_bulk_jobs.records import FileRecord
from sie_contracts.errors import NotFound, PayloadTooLarge, QueueUnavailable, RateLimited, ResourceExhausted
from sie_contracts.wire import topology
from sie_store.object_stores import RESERVE_SHARE, ObjectMissing, StoreFull
from sie_store.payloads import open_store

ADMIN, ONE, OTHER = "admin-token-of-a-test", "token-of-one", "token-of-another"
TOKENS = {"SIE_AUTH_MODE": "static", "SIE_ADMIN_TOKEN": ADMIN, "SIE_AUTH_TOKENS": f"{ONE},{OTHER}"}
PATH = "/v1/files"


@pytest.fixture
async def gateway(cluster: InProcess, tmp_path: Path) -> GatewayProcess:
    return await cluster.gateway(SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"), **TOKENS)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def objects(tmp_path: Path) -> list[str]:
    """Return the paths of all objects in the store."""
    return everything(tmp_path / "store")


def by(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def uploaded(
    gateway: GatewayProcess, data: bytes = b"data", *, token: str = ONE, purpose: str = "batch"
) -> httpx.Response:
    form = {"purpose": purpose}
    return await gateway.client.post(PATH, data=form, files={"file": ("a.jsonl", data)}, headers=by(token))


MANY = RecordUse(1000, 1 << 30)


def file_usage(of_key: RecordUse = MANY, in_all: RecordUse = MANY) -> OwnerUsage:
    names = ("SIE_FILES_PER_KEY", "SIE_FILES_BYTES_PER_KEY"), ("SIE_MAX_FILES", "SIE_MAX_FILES_BYTES")
    return OwnerUsage(
        UseBound(of_key, names[0]),
        UseBound(in_all, names[1]),
        kinds=("files", "bytes"),
        remedy="delete some",
        reason="files",
    )


async def store_of(
    cluster: InProcess, folder: Path, ahead_s: float = 0.0, usage: OwnerUsage | None = None, **limits: int
) -> FileStore:
    """Return the store of a further gateway, whose clock is `ahead_s` ahead."""
    broker = cluster.server.connect("further")
    jobs = JobsBucket(broker, 1)
    lease = LeaderLease(RecordBucket(broker, topology.LEASES_BUCKET), "further")
    files = open_files(str(folder))
    store = FileStore(jobs, files, lease, usage or file_usage(), lambda: time.time() + ahead_s, **limits)
    await jobs.follow()
    return store


def records(server: MemoryServer) -> list[FileRecord]:
    entries = server.buckets[topology.JOBS_BUCKET].entries.values()
    return [msgspec.msgpack.decode(entry.value, type=FileRecord) for entry in entries if entry.value is not None]


# forms


@pytest.mark.parametrize("first", ["fields", "file"])
async def test_fields_may_stand_before_the_file_and_behind_it(gateway: GatewayProcess, first: str) -> None:
    fields = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\njobs\r\n'
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa4.csv"\r\n\r\na\r\n--y\r\n\r\n'
    body = (fields + file if first == "fields" else file + fields) + b"--x--\r\n"
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    headers = {"content-type": "multipart/form-data; boundary=x", **by(ONE)}
    answer = await gateway.client.post(PATH, content=sent(), headers=headers)
    assert answer.status_code == 200, answer.text
    record = answer.json()
    assert (record["filename"], record["purpose"], record["bytes"]) == ("ä.csv", "jobs", 8)
    content = await gateway.client.get(f"{PATH}/{record['id']}/content", headers=by(ONE))
    assert content.content == b"a\r\n--y\r\n"
    assert content.headers["x-content-type-options"] == "nosniff"


FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n'
PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
ANCHOR = PURPOSE.replace(b"purpose", b"expires_after[anchor]").replace(b"batch", b"created_at")
SECONDS = PURPOSE.replace(b"purpose", b"expires_after[seconds]").replace(b"batch", b"100")
END = b"--x--\r\n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (PURPOSE + END, "file"),
        (FILE + END, "purpose"),
        (FILE + PURPOSE.replace(b"batch", b"fine-tune") + END, "purpose"),
        (FILE + PURPOSE.replace(b"batch", b"batch_output") + END, "purpose"),
        (FILE.replace(b"abc", b"") + PURPOSE + END, "file"),
        (FILE + FILE + PURPOSE + END, "file"),
        (FILE + PURPOSE + PURPOSE + END, "purpose"),
        (FILE.replace(b'"file"', b'"other"') + PURPOSE + END, "other"),
        (FILE.replace(b'; filename="a"', b"") + PURPOSE + END, "file"),
        (FILE + PURPOSE + PURPOSE.replace(b"purpose", b"wrong") + END, "wrong"),
        (FILE + PURPOSE + PURPOSE.replace(b"purpose", b"expires_after[seconds]") + END, "expires_after[anchor]"),
        (FILE + PURPOSE + ANCHOR + SECONDS.replace(b"100", b"0" * 8 + b"1" * 200) + END, "expires_after[seconds]"),
        (FILE + PURPOSE.replace(b"batch", b"b" * 5000) + END, "purpose"),
        (FILE.replace(b'"a"', b'"' + b"a" * 300 + b'"') + PURPOSE + END, "file"),
        (FILE.replace(b'"a"', b'"\xff"') + PURPOSE + END, "body"),
        (FILE + PURPOSE, "body"),
        (PURPOSE + FILE, "body"),
        (b"no form", "body"),
        (b"", "body"),
    ],
)
async def test_what_is_wrong_in_a_form_is_named_and_nothing_of_it_stays(
    cluster: InProcess, gateway: GatewayProcess, tmp_path: Path, body: bytes, param: str
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x", **by(ONE)}
    answer = await gateway.client.post(PATH, content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == "invalid_input", "as OpenAI spells it"
    assert (objects(tmp_path), records(cluster.server)) == ([], [])


# owners and lists


async def test_a_body_is_the_file_where_the_query_names_its_purpose(gateway: GatewayProcess) -> None:
    query = {"purpose": "batch", "filename": "a.jsonl"}
    answer = await gateway.client.post(PATH, params=query, content=b"data", headers=by(ONE))
    assert answer.status_code == 200, answer.text
    stored = answer.json()
    assert (stored["filename"], stored["purpose"], stored["bytes"]) == ("a.jsonl", "batch", 4)
    assert (await gateway.client.get(f"{PATH}/{stored['id']}/content", headers=by(ONE))).content == b"data"
    for wrong in ({"purpose": "fine-tune", "filename": "a"}, {"purpose": "batch"}, {**query, "filename": "a\nb"}):
        refused = await gateway.client.post(PATH, params=wrong, content=b"data", headers=by(ONE))
        assert refused.status_code == 400, refused.text


async def test_a_key_sees_its_own_files_and_an_administrator_all(gateway: GatewayProcess) -> None:
    mine = (await uploaded(gateway)).json()["id"]
    theirs = (await uploaded(gateway, token=OTHER)).json()["id"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        refused = await gateway.client.request(method, f"{PATH}/{theirs}{path}", headers=by(ONE))
        unknown = await gateway.client.request(method, f"{PATH}/{new_id()}{path}", headers=by(ONE))
        assert refused.status_code == unknown.status_code == 404
        assert refused.json()["error"]["message"] == unknown.json()["error"]["message"], "one cannot tell which it is"

    async def listed(token: str) -> set[str]:
        return {record["id"] for record in (await gateway.client.get(PATH, headers=by(token))).json()["data"]}

    assert (await listed(ONE), await listed(OTHER), await listed(ADMIN)) == ({mine}, {theirs}, {mine, theirs})
    assert (await gateway.client.delete(f"{PATH}/{theirs}", headers=by(ADMIN))).json()["deleted"]
    assert await listed(OTHER) == set()


async def test_a_list_comes_in_pages_in_either_order(gateway: GatewayProcess) -> None:
    file_ids = [(await uploaded(gateway, purpose=("batch", "jobs")[number % 2])).json()["id"] for number in range(7)]

    async def pages(**query: str | int) -> list[list[str]]:
        id_pages = list[list[str]]()
        while True:
            answer = (await gateway.client.get(PATH, params=query, headers=by(ONE))).json()
            ids = [record["id"] for record in answer["data"]]
            assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            id_pages.append(ids)
            if not answer["has_more"]:
                return id_pages
            query["after"] = answer["last_id"]

    newest = file_ids[::-1]
    assert await pages() == [newest]
    assert await pages(limit=3) == [newest[:3], newest[3:6], newest[6:]]
    assert await pages(limit=7) == [newest]
    assert await pages(limit=4, order="asc") == [file_ids[:4], file_ids[4:]]
    assert await pages(purpose="jobs", limit=2) == [[file_ids[5], file_ids[3]], [file_ids[1]]]
    assert await pages(purpose="user_data") == [[]]
    await gateway.client.delete(f"{PATH}/{file_ids[3]}", headers=by(ONE))
    assert await pages(after=file_ids[3]) == [newest[4:]], "a page begins behind a file that is gone"


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=x", "after=file-1"])
async def test_a_wrong_parameter_of_the_list_is_named(gateway: GatewayProcess, query: str) -> None:
    answer = await gateway.client.get(f"{PATH}?{query}", headers=by(ONE))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


# limits


def open_in(folder: Path) -> int:
    """Return how many open files this process has in a folder."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed in the meantime
            count += descriptor.readlink().is_relative_to(folder)
    return count


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the open files of a process are read from /proc")
async def test_a_download_that_its_client_leaves_closes_the_file(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Some clients leave before they read, others while they read. The collector of reference cycles is off."""
    file = (await uploaded(gateway, bytes(32 << 20))).json()["id"]
    gc.disable()
    try:
        for piece in (0, 1 << 20):
            for _ in range(3):
                async with gateway.client.stream("GET", f"{PATH}/{file}/content", headers=by(ONE)) as answer:
                    await until(lambda: open_in(tmp_path), "the file is open")
                    if piece:
                        await anext(answer.aiter_bytes(piece))
        await until(lambda: not open_in(tmp_path), "the file is closed", 10)
    finally:
        gc.enable()


async def test_an_upload_that_is_too_long_is_refused_and_an_output_is_not(cluster: InProcess, tmp_path: Path) -> None:
    store = await store_of(cluster, tmp_path / "store", max_bytes=1000)

    async def data(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"a" * 100

    assert (await store.receive("one", data(10), about)).bytes == 1000
    with pytest.raises(PayloadTooLarge) as caught:
        await store.receive("one", data(11), about)
    assert caught.value.extras["limit"] == 1000
    assert len(objects(tmp_path)) == len(records(cluster.server)) == 1
    # an output is longer than its input: the answers of a batch would be lost
    output = await store.create("one", FileDescription("out.jsonl", "batch_output"), data(11), new_id())
    assert (output.bytes, output.state) == (1100, "ready")


async def test_a_form_that_is_announced_as_too_long_is_refused_before_it_is_read(
    cluster: InProcess, gateway: GatewayProcess, tmp_path: Path
) -> None:
    announced = {"content-type": "multipart/form-data; boundary=x", "content-length": str(600 << 20), **by(ONE)}
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(gateway.url).port)
    head = "".join(f"{name}: {value}\r\n" for name, value in {"host": "127.0.0.1", **announced}.items())
    writer.write(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode())
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert (objects(tmp_path), records(cluster.server)) == ([], [])


def about() -> FileDescription:
    return FileDescription("a", "batch")


async def pieces(count: int = 1, size: int = 1) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(size)


@pytest.mark.parametrize(
    ("setting", "limit", "accepted"),
    [
        ("SIE_FILES_PER_KEY", 2, [200, 200, 429]),
        ("SIE_MAX_FILES", 1, [200, 429]),
        ("SIE_FILES_BYTES_PER_KEY", 1 << 20, [200, 429]),
        ("SIE_MAX_FILES_BYTES", 1 << 20, [200, 429]),
    ],
)
async def test_a_gateway_bounds_files_by_its_settings(
    setting: str, limit: int, accepted: list[int], cluster: InProcess, tmp_path: Path
) -> None:
    """SIE_FILES_PER_KEY, SIE_FILES_BYTES_PER_KEY, SIE_MAX_FILES, SIE_MAX_FILES_BYTES: the refusal names the setting."""
    gateway = await cluster.gateway(SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"), **TOKENS, **{setting: str(limit)})
    answers = [await uploaded(gateway, bytes(600 << 10)) for _ in accepted]
    assert [answer.status_code for answer in answers] == accepted
    body = answers[-1].json()
    assert (body["code"], body["error"]["reason"]) == ("RATE_LIMITED", "files")
    assert f"{limit} " in body["error"]["message"]
    assert setting in body["error"]["message"]
    expected = 200 if "PER_KEY" in setting else 429
    assert (await uploaded(gateway, bytes(600 << 10), token=OTHER)).status_code == expected


async def test_uploads_of_a_key_take_neither_the_places_of_others_nor_those_of_outputs(
    cluster: InProcess, tmp_path: Path
) -> None:
    store = await store_of(cluster, tmp_path / "store")
    end = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await end.wait()

    uploads = [asyncio.create_task(store.receive("one", slow(), about)) for _ in range(UPLOADS_OF_A_KEY)]
    await until(lambda: len(records(cluster.server)) == UPLOADS_OF_A_KEY, "all are begun")
    with pytest.raises(RateLimited, match=f"this key has {UPLOADS_OF_A_KEY} uploads at once"):
        await store.receive("one", pieces(), about)
    assert (await store.receive("two", pieces(), about)).bytes == 1
    assert (await store.create("one", FileDescription("b", "batch_output"), pieces(), new_id())).bytes == 1
    free_places = UPLOADS_AT_ONCE - UPLOADS_OF_A_KEY
    uploads += [asyncio.create_task(store.receive(f"key {number}", slow(), about)) for number in range(free_places)]
    await until(lambda: len(records(cluster.server)) == UPLOADS_AT_ONCE + 2, "all places are taken")
    with pytest.raises(ResourceExhausted, match=f"this gateway has {UPLOADS_AT_ONCE} uploads at once"):
        await store.receive("two", pieces(), about)
    assert (await store.create("one", FileDescription("b", "batch_output"), pieces(), new_id())).bytes == 1
    ended = uploads.pop()
    ended.cancel()  # as the end of a connection does
    await asyncio.wait({ended})
    assert (await store.receive("two", pieces(), about)).bytes == 1
    end.set()
    for done in await asyncio.gather(*uploads[:3]):
        assert done.state == "ready"
    assert (await store.receive("one", pieces(), about)).bytes == 1


async def test_a_form_that_breaks_off_leaves_nothing(
    cluster: InProcess, gateway: GatewayProcess, tmp_path: Path
) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ONE}\r\ncontent-length: 99999999\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(gateway.url).port)
    writer.write(head.encode() + b"content-type: multipart/form-data; boundary=x\r\n\r\n" + FILE[:-2])
    writer.write(b"a" * (20 << 20))
    await writer.drain()
    await until(lambda: [record.state for record in records(cluster.server)] == ["writing"], "a record")
    await until(lambda: objects(tmp_path), "a part of an object")
    assert (await gateway.client.get(PATH, headers=by(ONE))).json()["data"] == []
    writer.close()
    await until(lambda: not records(cluster.server) and not objects(tmp_path), "nothing is left")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "store"
    with disk(folder, "16m"):
        yield folder


async def test_a_full_disk_is_told_and_nothing_of_the_file_is_left(
    cluster: InProcess, small_disk: Path, tmp_path: Path
) -> None:
    gateway = await cluster.gateway(SIE_PAYLOAD_STORE_URL=str(small_disk))
    answer = await uploaded(gateway, bytes(32 << 20))
    assert (answer.status_code, answer.json()["code"]) == (503, "RESOURCE_EXHAUSTED"), answer.text
    assert answer.json()["error"]["reason"] == "store_full"
    assert (objects(tmp_path), records(cluster.server)) == ([], [])
    assert (await uploaded(gateway, b"small")).status_code == 200


async def test_files_leave_room_for_payloads_and_payloads_for_the_queue(
    cluster: InProcess, small_disk: Path, tmp_path: Path
) -> None:
    """Files and payloads share the disk with the queue. Files leave two reserves free, payloads one."""
    store, payloads = await store_of(cluster, small_disk), open_store(str(small_disk))
    assert payloads is not None
    free = shutil.disk_usage(small_disk).free
    reserve = int(shutil.disk_usage(small_disk).total * RESERVE_SHARE)
    with pytest.raises(ResourceExhausted) as caught:
        await store.receive("one", pieces(16, 1 << 20), about)
    assert caught.value.reason == "store_full"
    await until(lambda: shutil.disk_usage(small_disk).free == free, "nothing of it is left, open files included")
    await store.receive("one", pieces(1, free - 2 * reserve - (64 << 10)), about)
    with pytest.raises(ResourceExhausted):
        await store.receive("one", pieces(1, 128 << 10), about)
    await payloads.put(bytes(reserve), period=1, timeout_s=10)
    with pytest.raises(StoreFull, match="must stay free"):
        await payloads.put(bytes(256 << 10), period=1, timeout_s=10)
    assert shutil.disk_usage(small_disk).free >= reserve


@contextlib.contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# clean-up


async def test_an_expired_file_is_not_served_and_then_removed(
    cluster: InProcess, gateway: GatewayProcess, tmp_path: Path
) -> None:
    permanent_file = (await uploaded(gateway)).json()
    assert permanent_file["expires_at"] is None
    form = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "100"}
    answer = await gateway.client.post(PATH, data=form, files={"file": ("a", b"a")}, headers=by(ONE))
    expiring_file = answer.json()
    assert expiring_file["expires_at"] == pytest.approx(expiring_file["created_at"] + 100, abs=1)
    owner = next(record.owner for record in records(cluster.server))
    store = await store_of(cluster, tmp_path / "store")
    assert (await store.find(expiring_file["id"], owner.__eq__)).expires_s
    assert await store.clean() == 0
    later = await store_of(cluster, tmp_path / "store", 101)
    with pytest.raises(NotFound):
        await later.find(expiring_file["id"], owner.__eq__)
    listed, _ = later.page(owner.__eq__, limit=9, newest_first=True)
    assert [record.id for record in listed] == [permanent_file["id"]]
    assert await later.clean() == 1
    assert objects(tmp_path) == [f"files/{permanent_file['id']}"]
    assert [record.id for record in records(cluster.server)] == [permanent_file["id"]]
    assert await later.clean() == 0


async def test_what_a_killed_writer_left_is_removed_when_nobody_can_be_writing_it(
    cluster: InProcess, tmp_path: Path
) -> None:
    """The clean-up removes the record and the unfinished objects of the writer."""
    store = await store_of(cluster, tmp_path / "store")
    held = asyncio.Event()

    async def data() -> AsyncIterator[bytes]:
        yield bytes(20 << 20)
        await held.wait()

    writing = asyncio.create_task(store.receive("one", data(), about))
    await until(lambda: objects(tmp_path), "a part of an object")
    (draft,) = records(cluster.server)
    (tmp_path / "store" / "files" / f"{draft.id}#7").write_bytes(b"of a killed process")
    assert await (await store_of(cluster, tmp_path / "store", ABANDONED_S - 60)).clean() == 0
    later = await store_of(cluster, tmp_path / "store", ABANDONED_S + 1)
    assert await later.clean() == 1
    assert (objects(tmp_path), records(cluster.server)) == ([], [])
    held.set()
    with pytest.raises(QueueUnavailable):  # a writer that still lives must not complete a file that was removed
        await writing
    assert (objects(tmp_path), records(cluster.server)) == ([], [])


async def test_a_removal_that_stops_half_way_is_completed(cluster: InProcess, tmp_path: Path) -> None:
    """The store fails after the record was marked. The file is not served, and the next clean-up removes it."""
    store = await store_of(cluster, tmp_path / "store")

    async def data() -> AsyncIterator[bytes]:
        yield b"abc"

    record = await store.receive("one", data(), about)
    assert record.sha256 == hashlib.sha256(b"abc").hexdigest()
    path = tmp_path / "store" / "files" / record.id
    path.unlink()
    path.mkdir()
    (path / "a").touch()  # a folder cannot be removed as an object
    await store.remove(record)
    with pytest.raises(NotFound):
        await store.find(record.id, "one".__eq__)
    assert [entry.state for entry in records(cluster.server)] == ["removing"]
    (path / "a").unlink()
    path.rmdir()
    path.write_bytes(b"abc")
    assert await store.clean() == 1
    assert (objects(tmp_path), records(cluster.server)) == ([], [])


# buckets


@pytest.mark.parametrize("place", ["moto", "seaweed"], indirect=True)  # Google's emulator has no multipart uploads
async def test_a_bucket_holds_a_file_whole_or_not_at_all(place: Place) -> None:
    """The file has several parts, and a writer that fails leaves none."""
    store, file = open_files(place.url), new_id()
    assert store is not None
    blocks = [bytes([number]) * (5 << 20) for number in range(4)]

    async def data(fails: bool) -> AsyncIterator[bytes]:
        for block in blocks:
            yield block
        if fails:
            raise KeyError("no more")

    with pytest.raises(KeyError):
        await store.put(file, data(True), 60)
    with pytest.raises(ObjectMissing):
        await store.open(file)
    await store.put(file, data(False), 60)
    content = b"".join([piece async for piece in await store.open(file)])
    assert hashlib.sha256(content).digest() == hashlib.sha256(b"".join(blocks)).digest()
    assert await store.range(file, (5 << 20) - 1, (5 << 20) + 1) == b"\x00\x01"
    for _ in range(2):
        await store.remove(file)
    with pytest.raises(ObjectMissing):
        await store.open(file)


# other modules


async def test_a_writer_that_is_repeated_makes_a_file_once(cluster: InProcess, tmp_path: Path) -> None:
    store, name = await store_of(cluster, tmp_path / "store"), new_id()
    reads = 0

    async def data() -> AsyncIterator[bytes]:
        nonlocal reads
        reads += 1
        yield b"0123456789"

    first = await store.create("one", FileDescription("out.jsonl", "batch_output"), data(), name)
    assert await store.create("one", FileDescription("out.jsonl", "batch_output"), data(), name) == first
    assert reads == 1
    # two concurrent writers that both find no file
    name = new_id()
    first, again = await asyncio.gather(
        *(store.create("one", FileDescription("out.jsonl", "batch_output"), data(), name) for _ in range(2)),
        return_exceptions=True,
    )
    first = first if isinstance(first, FileRecord) else again  # one may fail because the other has written the file
    assert isinstance(first, FileRecord)
    assert await store.create("one", FileDescription("out.jsonl", "batch_output"), data(), name) == first
    assert await store.range(first, 2, 5) == b"234"
    assert b"".join([piece async for piece in await store.open(first)]) == b"0123456789"
