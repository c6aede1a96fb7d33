"""Snapshots that are removed from a disk that is nearly full, and those that never are."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from fetching import END_S
from unit.adapter import toys

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.models.entries import ModelEntry, RunDefaults, Weights
from sie_contracts.settings import Settings, load
from sie_store.configured import weight_sources
from sie_store.weights.cache import LocalCache
from sie_store.weights.disk import DiskUsage, limited
from sie_store.weights.manifest import MANIFEST, FetchFailed, FileFact, Manifest, decode, verify
from sie_store.weights.progress import FetchProgress
from sie_store.weights.sources import WeightSources

MIB = 1 << 20
TOTAL = 1000 * MIB  # bytes of the simulated disk
SIZE = 100 * MIB
NAME = "model.safetensors"
REVISION = "a" * 40


@dataclass
class Disk:
    """A simulated disk with `others_bytes` of other files. Sparse files in the folder count with their full size."""

    folder: Path
    others_bytes: int = 0

    def __call__(self, _: Path) -> DiskUsage:
        used = self.others_bytes + sum(path.stat().st_size for path in self.folder.rglob("*.safetensors*"))
        return DiskUsage(used, TOTAL - used)


def hollow(path: Path, size: int) -> None:
    """Write a sparse file of this size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def manifest(repository: str, size: int) -> Manifest:
    return Manifest(repository, REVISION, {NAME: FileFact(size, "0" * 64)})


def put(cache: LocalCache, repository: str, size: int = SIZE) -> Path:
    """Have the cache obtain a snapshot of so many bytes, and use it now."""

    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        progress.expect(size)
        (folder / NAME).unlink(missing_ok=True)
        hollow(folder / NAME, size)
        return manifest(repository, size)

    return cache.obtain(repository, REVISION, fetch, repository)


def there(cache: LocalCache) -> list[str]:
    """Return the repositories of all complete snapshots, sorted."""
    manifests = sorted(cache.hub.glob(f"models--*/snapshots/*/{MANIFEST}"))
    read = [(path.parent, decode(path.read_bytes())) for path in manifests]
    return [copy.repository for folder, copy in read if not verify(folder, copy, digests=False)]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, disk: Disk) -> LocalCache:
    """Return a cache of three snapshots of a tenth of the disk each. `org/b` was used longest ago."""
    local_cache = limited(tmp_path, 85.0, disk)
    for name in ("org/b", "org/a", "org/c"):
        put(local_cache, name)
    return local_cache


@contextlib.contextmanager
def settings_of(folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, **environ: str) -> Iterator[WeightSources]:
    """Yield the sources that a process has with these settings, on that disk."""

    def probe(path: Path) -> Any:
        usage = disk(path)
        return shutil._ntuple_diskusage(TOTAL, usage.used, usage.free)  # type: ignore[attr-defined]

    settings = load(environ={"SIE_LOCAL_CACHE": str(folder), "SIE_HF_FALLBACK": "false", **environ}).settings
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", probe)
        yield weight_sources(settings)


def test_without_a_download_the_disk_is_relieved_as_well(cache: LocalCache, disk: Disk) -> None:
    """SIE_DISK_PRESSURE_THRESHOLD_PERCENT, SIE_DISK_CACHE_ENABLED: the threshold holds for the present content of the
    disk. Snapshots in use stay.
    """
    disk.others_bytes = 540 * MIB
    assert cache.relieve()
    assert there(cache) == ["org/a", "org/b", "org/c"], "at 84 % nothing goes"
    disk.others_bytes = 560 * MIB
    assert limited(cache.folder, None, disk).relieve()
    assert there(cache) == ["org/a", "org/b", "org/c"], "with the disk cache off nothing goes"
    assert cache.relieve()
    assert there(cache) == ["org/a", "org/c"]
    disk.others_bytes = 900 * MIB
    with cache.lease("org/a", REVISION):
        assert not cache.relieve()
    assert there(cache) == ["org/a"]


@pytest.mark.parametrize(
    ("percent", "foreign_mib", "evicted_names"),
    [
        ("85", 440, []),
        ("85", 460, ["org/b"]),
        ("85", 540, ["org/b"]),
        ("85", 560, ["org/a", "org/b"]),
        ("90", 460, []),
        ("50", 0, []),
        ("100", 500, []),
        ("0", 0, ["org/a", "org/b", "org/c"]),
    ],
)
def test_what_was_used_longest_ago_goes_above_the_threshold(
    percent: str,
    foreign_mib: int,
    evicted_names: list[str],
    cache: LocalCache,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIE_DISK_PRESSURE_THRESHOLD_PERCENT: the threshold holds for the disk with the new weights. At 84 % no snapshot
    is removed, at 86 % one is.
    """
    disk.others_bytes = foreign_mib * MIB
    with settings_of(cache.folder, disk, monkeypatch, SIE_DISK_PRESSURE_THRESHOLD_PERCENT=percent) as sources:
        put(sources.cache, "org/new")
    assert there(cache) == sorted({"org/a", "org/b", "org/c", "org/new"} - set(evicted_names))


@pytest.mark.parametrize(
    ("limit", "evicted_names"),
    [(500, []), (450, ["org/b"]), (300, ["org/a", "org/b"]), (200, ["org/a", "org/b", "org/c"])],
)
def test_a_limit_below_the_disk_s_counts_the_cache_alone(
    limit: int, evicted_names: list[str], cache: LocalCache, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_DISK_CACHE_BYTES: the limit of a volume may be unknown to the file system. Here half of the disk is free."""
    disk.others_bytes = 200 * MIB
    with settings_of(cache.folder, disk, monkeypatch, SIE_DISK_CACHE_BYTES=str(limit * MIB)) as sources:
        put(sources.cache, "org/new")
        assert there(cache) == sorted({"org/a", "org/b", "org/c", "org/new"} - set(evicted_names))
        with pytest.raises(FetchFailed, match="no space on the disk"):
            put(sources.cache, "org/large", limit * MIB)


def test_without_the_disk_cache_nothing_is_removed(
    cache: LocalCache, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_DISK_CACHE_ENABLED: weights that do not fit are refused before a byte is fetched. The message names the
    setting.
    """
    disk.others_bytes = 620 * MIB
    with settings_of(cache.folder, disk, monkeypatch, SIE_DISK_CACHE_ENABLED="false") as sources:
        with pytest.raises(
            FetchFailed, match=r"no space.*100\.0 MiB are needed, 80\.0 are free.*SIE_DISK_CACHE_ENABLED"
        ) as raised:
            put(sources.cache, "org/new")
        assert raised.value.error_class == "NETWORK"  # a later try may have room
        assert there(cache) == ["org/a", "org/b", "org/c"]
    with settings_of(cache.folder, disk, monkeypatch) as sources:
        put(sources.cache, "org/new")
    assert there(cache) == ["org/c", "org/new"]


def test_what_is_in_use_never_goes(cache: LocalCache, disk: Disk) -> None:
    disk.others_bytes = 560 * MIB
    with cache.lease("org/b", REVISION):
        put(cache, "org/new")
        assert there(cache) == ["org/b", "org/new"]
        assert not cache.remove("org/b", REVISION)
    assert cache.remove("org/b", REVISION)


def test_nothing_goes_for_what_would_not_fit_anyway(cache: LocalCache, disk: Disk) -> None:
    disk.others_bytes = 640 * MIB
    with cache.lease("org/b", REVISION), pytest.raises(FetchFailed, match="SIE cannot remove enough of its files"):
        put(cache, "org/new", 4 * SIZE)
    assert there(cache) == ["org/a", "org/b", "org/c"]


def test_what_somebody_else_put_there_never_goes(cache: LocalCache, disk: Disk) -> None:
    """This holds for files of the hub's own client, and for those that SIE only completed and checked."""
    own = cache.place("own/model", REVISION) / NAME
    hollow(own, SIZE)
    hollow(cache.place("own/checked", REVISION) / NAME, SIZE)
    put(cache, "own/checked")
    disk.others_bytes = 490 * MIB
    put(cache, "org/new")
    assert there(cache) == ["org/new", "own/checked"]
    assert own.exists()


def test_what_is_left_of_a_fetch_goes_and_one_under_way_does_not(tmp_path: Path, disk: Disk) -> None:
    cache = limited(tmp_path, 85.0, disk)

    def broken(folder: Path, progress: FetchProgress) -> Manifest:
        hollow(folder / f"{NAME}.part", 3 * SIZE)
        raise FetchFailed("NETWORK", "the connection broke")

    with pytest.raises(FetchFailed):
        cache.obtain("org/left", REVISION, broken, "org/left")
    begun, go, failures = threading.Event(), threading.Event(), []

    def held(folder: Path, progress: FetchProgress) -> Manifest:
        begun.set()
        assert go.wait(END_S)
        return broken(folder, progress)

    def hold() -> None:
        try:
            cache.obtain("org/held", REVISION, held, "org/held")
        except FetchFailed as error:
            failures.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(END_S)
    disk.others_bytes = 460 * MIB
    put(cache, "org/new")
    go.set()
    thread.join(END_S)
    assert len(failures) == 1
    assert [path.parents[2].name for path in cache.hub.glob("models--*/partial/*/*.part")] == ["models--org--held"]


@contextlib.contextmanager
def held_up(cache: LocalCache) -> Iterator[None]:
    """Keep another download of SIZE bytes under way during the block."""
    begun, go = threading.Event(), threading.Event()

    def held(folder: Path, progress: FetchProgress) -> Manifest:
        progress.expect(SIZE)
        begun.set()
        assert go.wait(END_S)
        hollow(folder / NAME, SIZE)
        return manifest("org/held", SIZE)

    thread = threading.Thread(target=functools.partial(cache.obtain, "org/held", REVISION, held, "org/held"))
    thread.start()
    try:
        assert begun.wait(END_S)
        yield
    finally:
        go.set()
        thread.join(END_S)


@pytest.mark.parametrize("percent", [None, 85.0])
def test_what_others_have_to_come_is_not_free(percent: float | None, tmp_path: Path, disk: Disk) -> None:
    """Two downloads fit one by one, but not together. The second is refused before a byte of it is written."""
    cache = limited(tmp_path, percent, disk)
    disk.others_bytes = 850 * MIB
    message = r"200\.0 MiB are needed \(100\.0 of them by other fetches\), 150\.0 are free"
    with held_up(cache), pytest.raises(FetchFailed, match=message) as raised:
        put(cache, "org/new")
    assert raised.value.error_class == "NETWORK"
    assert there(cache) == ["org/held"]


def test_a_loaded_model_keeps_its_files_and_an_unloaded_one_does_not(tmp_path: Path) -> None:
    """The files are in use from before they are looked up until the unload, including the wait for memory."""
    folder = toys.save(tmp_path / "toy", "bert")
    cache = LocalCache(tmp_path / "cache")

    def fetch(partial: Path, progress: FetchProgress) -> Manifest:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for name, data in files.items():
            (partial / name).write_bytes(data)
        facts = {name: FileFact(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
        return Manifest("org/toy", REVISION, facts)

    cache.obtain("org/toy", REVISION, fetch, "org/toy")
    entry = ModelEntry(
        id="org/toy",
        weights=Weights(hub="org/toy", revision=REVISION),
        family="text-encoder",
        outputs={"dense": 32},
        max_tokens=32,
        run=RunDefaults(pooling="mean"),
    )
    engine = AdapterEngine(
        Settings(device="cpu", default_compute_precision="float32", local_cache=str(cache.folder), hf_fallback=False)
    )
    try:
        needed, candidate_lists = engine.residency._needed_bytes, []

        def looked_at(resolved: Any) -> int:
            needed_bytes = needed(resolved)
            candidate_lists.append(cache.candidates())
            return needed_bytes

        engine.residency._needed_bytes = looked_at
        engine.residency.ensure("org/toy", entry)
        assert candidate_lists == [[]]
        assert cache.candidates() == []
        engine.residency.release("org/toy")
        until(lambda: cache.candidates(), END_S, "the files may go")
    finally:
        engine.stop(10)
