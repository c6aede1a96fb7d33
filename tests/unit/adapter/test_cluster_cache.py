"""SIE_CLUSTER_CACHE: snapshots in a bucket are pushed, fetched, resumed and damaged, on servers of S3 and GCS."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from object_stores import BUCKET, S3, Faults, Moto, Place, Request, aws_environ, google_account
from selection import long_but

from sie_store.cluster import ClusterCache
from sie_store.weights.cache import LocalCache
from sie_store.weights.download import DownloadLimits
from sie_store.weights.manifest import MANIFEST, FetchFailed, FileFact, Manifest, decode, describe, encode, verify
from sie_store.weights.progress import FetchProgress
from sie_store.weights.push import Pushed, PushRefused

REPOSITORY, COMMIT = "org/model", "0123456789abcdef0123456789abcdef01234567"
PLACE = f"models--org--model/{COMMIT}"
LARGE = "model.safetensors"
SMALL_FILES = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "with space+%41.txt": b"?", "empty.txt": b""}
# A test whose result depends on the client's code alone runs on one store by default, and on all in the lane long.
on_one_store = pytest.mark.parametrize(
    "place", ["moto", *(pytest.param(store, marks=pytest.mark.long) for store in ("seaweed", "google"))], indirect=True
)
LIMITS = DownloadLimits(part_bytes=64 << 10, parts_at_once=4, stall_s=10, tries=3, pause_s=0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, data in {**SMALL_FILES, LARGE: os.urandom(1_000_003)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def opened(place: Place, limits: DownloadLimits = LIMITS) -> ClusterCache:
    return ClusterCache(place.url, limits)


def push(place: Place, folder: Path, *, force: bool = False, revision: str = COMMIT) -> Pushed:
    return opened(place).push(folder, describe(folder, REPOSITORY, revision), FetchProgress("it"), force=force)


def obtained(place: Place, cache: Path, limits: DownloadLimits = LIMITS, progress: FetchProgress | None = None) -> Path:
    """Fetch the snapshot from the bucket into a local cache, as a worker does."""
    fetch = opened(place, limits).fetch(REPOSITORY, COMMIT)
    assert fetch is not None
    return LocalCache(cache).obtain(REPOSITORY, COMMIT, fetch, f"{REPOSITORY}@{COMMIT}", progress=progress)


def files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# what is pushed is what is fetched


def test_what_one_node_pushes_another_one_fetches(place: Place, source: Path, tmp_path: Path) -> None:
    """Nested, empty and oddly named files arrive. The manifest of the local cache names the origin."""
    assert opened(place).fetch(REPOSITORY, COMMIT) is None
    assert push(place, source) == Pushed(5, 0, 1_000_003 + 5)
    progress = FetchProgress("it")
    folder = obtained(place, tmp_path / "cache", progress=progress)
    assert files_of(folder) == files_of(source)
    assert progress.state().done_bytes == progress.state().total_bytes == 1_000_008
    manifest = decode((folder / MANIFEST).read_bytes())
    assert (manifest.origin, verify(folder, manifest)) == ("cluster", [])
    (stored,) = opened(place).listed()
    assert (stored.repository, stored.revision, stored.bytes, stored.wrong) == (REPOSITORY, COMMIT, 1_000_008, {})
    assert opened(place).verify(stored, FetchProgress("it")) == []


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_large_file_goes_in_parts(moto: Moto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str) -> None:
    """moto can serve gs:// too, because a multipart upload through Google's XML API has the requests of S3."""
    Place.at(moto, monkeypatch)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(google_account(tmp_path / "account.json", moto.url)))
    place = Place(f"{scheme}://{BUCKET}/large-{scheme}", moto)
    source = tmp_path / "source"
    source.mkdir()
    (source / LARGE).write_bytes(os.urandom((8 << 20) + 5))
    moto.faults = Faults()
    assert push(place, source).bytes == (8 << 20) + 5
    assert len([path for path in moto.faults.writes() if path.endswith(LARGE)]) == 2
    assert files_of(obtained(place, tmp_path / "cache", DownloadLimits())) == files_of(source)
    assert push(place, source) == Pushed(0, 1, 0)


def test_the_manifest_is_written_last_and_a_second_push_writes_nothing(faulty: Place, source: Path) -> None:
    push(faulty, source)
    writes = faulty.server.faults.writes()
    assert [path.rpartition("/")[2] == MANIFEST for path in writes] == [False] * 5 + [True]
    assert push(faulty, source) == Pushed(0, 5, 0)
    assert faulty.server.faults.writes() == writes


def test_a_push_that_ended_early_goes_on_where_it_was(faulty: Place, source: Path) -> None:
    """One of the two objects in the bucket was left by another writer. It is not trusted, although it has the right
    size.
    """
    large = f"{PLACE}/{LARGE}"
    faulty.server.faults.refuse = lambda request: (
        ("503 Slow Down", "SlowDown") if request.method == "PUT" and large in request.path else None
    )
    with pytest.raises(FetchFailed, match="SlowDown") as caught:
        push(faulty, source)
    assert caught.value.error_class == "NETWORK"
    assert opened(faulty).fetch(REPOSITORY, COMMIT) is None
    (stored,) = opened(faulty).listed()
    assert stored.manifest is None
    assert "did not finish" in stored.wrong[MANIFEST]
    faulty.put(f"{PLACE}/config.json", b"[]")
    faulty.server.faults.refuse = lambda _: None
    before = len(faulty.server.faults.writes())
    assert push(faulty, source).written == 2 + sum(name > LARGE for name in SMALL_FILES)
    assert f"/{BUCKET}/{faulty.url.split('/', 3)[3]}/{PLACE}/config.json" in faulty.server.faults.writes()[before:]
    assert faulty.get(f"{PLACE}/config.json") == b"{}"


@on_one_store
def test_two_pushers_at_once_harm_nothing(place: Place, source: Path, tmp_path: Path) -> None:
    """One pusher leaves out a file that the others have. No file is lost, whichever push ends last."""
    less = tmp_path / "less"
    less.mkdir()
    (less / LARGE).write_bytes((source / LARGE).read_bytes())
    short = Manifest(
        REPOSITORY, COMMIT, describe(less, REPOSITORY, COMMIT).files, left_out=("config.json", "onnx/model.onnx")
    )
    with ThreadPoolExecutor(4) as threads:
        pushes = [threads.submit(push, place, source) for _ in range(3)]
        pushes.append(threads.submit(opened(place).push, less, short, FetchProgress("it")))
        for future in pushes:
            future.result()
    (stored,) = opened(place).listed()
    assert stored.wrong == {}
    assert stored.manifest is not None
    assert (set(stored.manifest.files), stored.manifest.left_out) == ({*SMALL_FILES, LARGE}, ("onnx/model.onnx",))
    assert files_of(obtained(place, tmp_path / "cache")) == files_of(source)


@pytest.mark.parametrize("is_more", [True, False], ids=["before its manifest", "before its last look"])
def test_a_removal_in_the_middle_of_a_push_leaves_it_whole(
    faulty: Place, source: Path, tmp_path: Path, is_more: bool
) -> None:
    """A push checks at its end that the objects on which it relied still exist."""
    push(faulty, source)
    remover = ClusterCache(faulty.url, LIMITS)
    lists = removals = 0

    def removed(request: Request) -> None:
        nonlocal lists, removals
        lists += request.path == f"/{BUCKET}"
        if not removals and (request.method == "PUT" and request.path.endswith("more.txt") if is_more else lists == 2):
            removals += 1
            remover.remove(REPOSITORY, COMMIT)

    if is_more:
        (source / "more.txt").write_text("more")
    faulty.server.faults.before = removed
    push(faulty, source)
    assert removals == 1
    assert files_of(obtained(faulty, tmp_path / "cache")) == files_of(source)


@on_one_store
def test_a_commit_has_one_content(place: Place, source: Path) -> None:
    push(place, source)
    (source / "config.json").write_text("[]")
    with pytest.raises(PushRefused, match=r"another content of config\.json, SHA-256 .* --force"):
        push(place, source)
    assert place.get(f"{PLACE}/config.json") == b"{}"
    assert push(place, source, force=True).written == 5
    assert place.get(f"{PLACE}/config.json") == b"[]"
    assert opened(place).verify(opened(place).stored(REPOSITORY, COMMIT), FetchProgress("it")) == []


# damaged snapshots


def missing(place: Place) -> None:
    place.delete(f"{PLACE}/{LARGE}")


def shorter(place: Place) -> None:
    place.put(f"{PLACE}/{LARGE}", place.get(f"{PLACE}/{LARGE}")[:100])


def longer(place: Place) -> None:
    place.put(f"{PLACE}/{LARGE}", place.get(f"{PLACE}/{LARGE}") + b"x")


def wrong(place: Place) -> None:
    data = bytearray(place.get(f"{PLACE}/{LARGE}"))
    data[500_000] ^= 1
    place.put(f"{PLACE}/{LARGE}", bytes(data))


def unreadable(place: Place) -> None:
    place.put(f"{PLACE}/{MANIFEST}", b"<html>")


def newer(place: Place) -> None:
    place.put(f"{PLACE}/{MANIFEST}", place.get(f"{PLACE}/{MANIFEST}").replace(b'"files"', b'"version": 2, "files"'))


def anothers(place: Place) -> None:
    place.put(f"{PLACE}/{MANIFEST}", encode(Manifest("org/other", COMMIT, {"a": FileFact(0, "0" * 64)})))


def escaping(place: Place) -> None:
    place.put(f"{PLACE}/{MANIFEST}", place.get(f"{PLACE}/{MANIFEST}").replace(b'"config.json"', b'"../../../x"'))


BROKEN = {
    missing: "NETWORK",
    shorter: "NETWORK",
    longer: "NETWORK",
    wrong: "NETWORK",
    unreadable: "INCOMPATIBLE",
    newer: "INCOMPATIBLE",
    anothers: "INCOMPATIBLE",
    escaping: "INCOMPATIBLE",
}


@pytest.mark.parametrize("broken", long_but(BROKEN, list(BROKEN)[:2]), ids=lambda broken: broken.__name__)
@on_one_store
def test_what_is_broken_is_a_typed_error_that_a_push_repairs(
    place: Place, source: Path, tmp_path: Path, broken: Callable[[Place], None]
) -> None:
    """The broken snapshot is not served. A push with `--force` repairs it."""
    push(place, source)
    broken(place)
    with pytest.raises(FetchFailed) as caught:
        obtained(place, tmp_path / "cache")
    assert caught.value.error_class == BROKEN[broken]
    assert LocalCache(tmp_path / "cache").find(REPOSITORY, COMMIT) is None
    (stored,) = opened(place).listed()
    assert opened(place).verify(stored, FetchProgress("it")), "the list or the check of it tells"
    push(place, source, force=True)
    assert files_of(obtained(place, tmp_path / "cache")) == files_of(source)


# time, memory and resumed fetches


def test_a_fetch_that_was_cut_goes_on_where_it_was(faulty: Place, source: Path, tmp_path: Path) -> None:
    """A byte that was written before two cuts is not read again."""
    push(faulty, source)
    for cut_after in (300_000, 500_000):
        faulty.server.faults = Faults(cut_after=cut_after)
        with pytest.raises(FetchFailed) as caught:
            obtained(faulty, tmp_path / "cache")
        assert caught.value.error_class == "NETWORK"
        assert LocalCache(tmp_path / "cache").find(REPOSITORY, COMMIT) is None
    (part,) = (tmp_path / "cache").rglob(f"{LARGE}.part")
    had = part.stat().st_size
    assert had > 300_000
    faulty.server.faults = Faults()
    assert files_of(obtained(faulty, tmp_path / "cache")) == files_of(source)
    assert first_read(faulty) == had


@on_one_store
def test_a_part_that_was_damaged_on_the_disk_is_read_again(place: Place, source: Path, tmp_path: Path) -> None:
    push(place, source)
    partial = tmp_path / "cache" / "hub" / "models--org--model" / "partial" / COMMIT
    partial.mkdir(parents=True)
    (partial / f"{LARGE}.part").write_bytes(b"damaged" * 1000)
    (partial / "config.json").write_bytes(b"[]")
    (partial / "empty.txt.part").write_bytes(b"too long")
    assert files_of(obtained(place, tmp_path / "cache")) == files_of(source)


def first_read(place: Place) -> int:
    """Return the lowest offset of the large file that was requested since the faults were set."""
    reads = (read for read in place.server.faults.reads() if read.path.endswith(LARGE))
    return min(int(read.range.removeprefix("bytes=").split("-")[0]) for read in reads)


def test_a_store_that_stands_still_ends_in_a_typed_error(
    seaweed: S3, monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    """The store keeps connections open and sends nothing, before the manifest and after it."""
    place = Place.at(seaweed, monkeypatch)
    push(place, source)
    limits = DownloadLimits(stall_s=0.2, tries=2, pause_s=0.01)
    fetch = opened(place, limits).fetch(REPOSITORY, COMMIT)
    assert fetch is not None
    seaweed.pause()
    try:
        began_s = time.monotonic()
        for call in (
            lambda: opened(place, limits).fetch(REPOSITORY, COMMIT),
            lambda: LocalCache(tmp_path).obtain(REPOSITORY, COMMIT, fetch, "it"),
            lambda: opened(place, limits).listed(),
            lambda: opened(place, limits).remove(REPOSITORY, COMMIT),
        ):
            with pytest.raises(FetchFailed, match=r"within 0\.2 s|nothing came for 0\.2 s") as caught:
                call()  # type: ignore[no-untyped-call]
            assert caught.value.error_class == "NETWORK"
        assert time.monotonic() - began_s < 60
    finally:
        seaweed.resume()
    assert files_of(LocalCache(tmp_path).obtain(REPOSITORY, COMMIT, fetch, "it")) == files_of(source)


def test_a_store_that_is_down_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for name, value in aws_environ(url).items():
            monkeypatch.setenv(name, value)
        cache = ClusterCache("s3://bucket", DownloadLimits(tries=2, pause_s=0.01, stall_s=3))
        with pytest.raises(FetchFailed, match="AWS_ENDPOINT_URL") as caught:
            cache.fetch(REPOSITORY, COMMIT)
    assert caught.value.error_class == "NETWORK"


@pytest.mark.parametrize("status", ["503 Slow Down", "429 Too Many Requests"])
def test_an_answer_that_may_be_another_one_later_is_asked_for_again(
    faulty: Place, source: Path, tmp_path: Path, status: str
) -> None:
    push(faulty, source)
    refused: set[Request] = set()

    def once(request: Request) -> tuple[str, str] | None:
        if request in refused:
            return None
        refused.add(request)
        return status, "SlowDown"

    faulty.server.faults = Faults(refuse=once)
    assert files_of(obtained(faulty, tmp_path / "cache")) == files_of(source)
    assert len(refused) > 15


# credentials and buckets


@pytest.mark.parametrize(("status", "code"), [("400 Bad Request", "ExpiredToken"), ("403 Forbidden", "AccessDenied")])
def test_credentials_that_expire_in_the_middle_are_a_typed_error(
    faulty: Place, source: Path, tmp_path: Path, status: str, code: str
) -> None:
    """A refused request is not repeated. With renewed credentials the next fetch succeeds."""
    push(faulty, source)
    faulty.server.faults = Faults(
        refuse=lambda request: (status, code) if len(faulty.server.faults.reads()) > 8 else None
    )
    with pytest.raises(
        FetchFailed, match=rf"access is refused \(status {status[:3]} {code}\): set credentials"
    ) as caught:
        obtained(faulty, tmp_path / "cache")
    assert caught.value.error_class == "NETWORK"
    assert len(faulty.server.faults.reads()) <= 9 + LIMITS.parts_at_once
    faulty.server.faults = Faults()
    assert files_of(obtained(faulty, tmp_path / "cache")) == files_of(source)
    faulty.server.faults.refuse = lambda _: (status, code)
    for call in (
        lambda: opened(faulty).listed(),
        lambda: push(faulty, source),
        lambda: opened(faulty).remove(REPOSITORY, COMMIT),
    ):
        with pytest.raises((FetchFailed, PushRefused), match="access is refused"):
            call()
