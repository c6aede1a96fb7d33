"""Files that are computed from weights and kept for the next load."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fetching import END_S

from sie_store.weights import derived, disk
from sie_store.weights.cache import LocalCache
from sie_store.weights.derived import DerivedFiles
from sie_store.weights.disk import DiskUsage, limited
from sie_store.weights.locks import try_lock
from sie_store.weights.manifest import FileFact, Manifest
from sie_store.weights.progress import FetchProgress

KEY = "k" * 32
FOLDER = "sie-derived"


@pytest.fixture
def files(tmp_path: Path) -> DerivedFiles:
    return DerivedFiles(tmp_path, KEY, is_kept=True)


def names(files: DerivedFiles) -> list[str]:
    assert files.folder is not None
    return sorted(path.name for path in files.folder.glob("*/*") if path.is_dir())


def aged(files: DerivedFiles, name: str, age_s: float) -> None:
    assert files.folder is not None
    manifest = files.folder / files.key / name / "manifest.json"
    now_s = manifest.stat().st_mtime
    os.utime(manifest, (now_s - age_s, now_s - age_s))


def test_what_is_kept_is_found_by_its_key_alone(files: DerivedFiles) -> None:
    files.keep("note", b"data")
    with files.writing("graph") as folder:
        (folder / "graph.bin").write_bytes(b"weights")
    assert files.read("note") == b"data"
    assert ((files.find("graph") or Path()) / "graph.bin").read_bytes() == b"weights"
    assert DerivedFiles(files.folder, "other", is_kept=True).read("note") is None
    assert DerivedFiles(files.folder, KEY).read("note") is None


@pytest.mark.parametrize("file", ["note", "manifest.json"])
@pytest.mark.parametrize("data", [b"", b"dat", b"datA", b'{"note": "0"}', b"\xff", None])
def test_a_changed_file_is_not_used_and_is_replaced(files: DerivedFiles, file: str, data: bytes | None) -> None:
    files.keep("note", b"data")
    path = (files.find("note") or Path()) / file
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    assert files.read("note") is None
    files.keep("note", b"new")
    assert files.read("note") == b"new"


def test_the_least_recently_used_entries_are_removed_above_the_limit(
    files: DerivedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc"):
        files.keep(name, bytes(1000))
        aged(files, name, 100 - number)
    assert files.read("a") == bytes(1000)  # a use
    monkeypatch.setattr(derived, "LIMIT_BYTES", 3500)
    files.keep("d", bytes(1000))
    assert names(files) == ["a", "c", "d"]


def test_an_entry_above_the_limit_is_not_kept_and_removes_no_other(
    files: DerivedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.keep("a", b"data")
    monkeypatch.setattr(derived, "LIMIT_BYTES", 1000)
    files.keep("large", bytes(1001))
    assert names(files) == ["a"]


def test_writers_of_one_entry_leave_one_whole_entry(files: DerivedFiles) -> None:
    barrier = threading.Barrier(8, timeout=END_S)

    def write(number: int) -> None:
        with files.writing("graph") as folder:
            for part in ("a", "b"):
                (folder / part).write_bytes(bytes([number]) * 1000)
            barrier.wait()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    found = files.find("graph")
    assert found is not None
    assert (found / "a").read_bytes() == (found / "b").read_bytes()
    assert files.folder is not None
    assert [path.name for path in files.folder.iterdir()] == [KEY]


def test_what_a_killed_process_has_left_is_removed_and_what_another_writes_is_not(files: DerivedFiles) -> None:
    code = (
        "import os, sys; from pathlib import Path; from sie_store.weights.derived import DerivedFiles\n"
        "with DerivedFiles(Path(sys.argv[1]), 'k', is_kept=True).writing('graph') as folder:\n"
        "    (folder / 'graph.bin').touch(); os.kill(os.getpid(), 9)"
    )
    assert files.folder is not None
    subprocess.run([sys.executable, "-c", code, str(files.folder)], timeout=END_S, check=False)
    (left,) = files.folder.iterdir()
    with files.writing("other") as others:
        (others / "graph.bin").touch()
        files.keep("note", b"data")
        assert not left.exists()
        assert others.exists()


def test_derived_files_are_removed_before_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated disk has 100 bytes, of which each derived file, each snapshot and each other byte takes one. Files
    are removed under the lock of the node.
    """
    others = 0

    def probe(_: Path) -> DiskUsage:
        used = others + len(list(tmp_path.glob(f"{FOLDER}/*/*"))) + len(list(tmp_path.glob("hub/*/snapshots/*")))
        return DiskUsage(used, 100 - used)

    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        (folder / "weights").touch()
        return Manifest("org/a", "a" * 40, {"weights": FileFact(0, hashlib.sha256().hexdigest())})

    def remove_oldest(folder: Path) -> bool:
        assert try_lock(tmp_path / "hub/.locks/sie.removal", shared=False) is None
        return remove(folder)

    remove = derived.remove_oldest
    monkeypatch.setattr(derived, "remove_oldest", remove_oldest)
    monkeypatch.setattr(derived, "FOLDER", FOLDER)
    monkeypatch.setattr(disk, "SPARE_BYTES", 0)
    cache: LocalCache = limited(tmp_path, 90.0, probe)
    snapshot = cache.obtain("org/a", "a" * 40, fetch, "org/a")
    files = DerivedFiles(tmp_path / FOLDER, KEY, is_kept=True)
    for name in "abc":
        files.keep(name, b"data")
    assert cache.relieve()
    assert names(files) == ["a", "b", "c"]
    others = 87
    assert cache.relieve()
    assert (len(names(files)), snapshot.exists()) == (2, True)
    others = 89
    assert cache.relieve()
    assert (names(files), snapshot.exists()) == ([], True)
    files.keep("a", b"data")
    cache.room(0)
    assert (names(files), snapshot.exists()) == ([], True)
    others = 90
    assert cache.relieve()
    assert not snapshot.exists()
