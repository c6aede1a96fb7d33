"""A real adapter process watches its disk while it serves, and removes unused weights when other files fill the
disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_process import running
from cluster import until

from sie_store.weights.cache import LocalCache
from sie_store.weights.manifest import FileFact, Manifest
from sie_store.weights.progress import FetchProgress

LOOKS_OFTEN = "from sie_store.weights import disk; disk.LOOK_S = 0.1"
REVISION = "a" * 40
NAME = "model.safetensors"
MIB = 1 << 20


def put(cache: LocalCache, repository: str) -> Path:
    """Put a snapshot of 1 MiB into the cache and return its folder."""

    def fetch(folder: Path, progress: FetchProgress) -> Manifest:
        progress.expect(MIB)
        (folder / NAME).write_bytes(bytes(MIB))
        return Manifest(repository, REVISION, {NAME: FileFact(MIB, "0" * 64)})

    return cache.obtain(repository, REVISION, fetch, repository)


@pytest.mark.long
def test_weights_that_nobody_uses_go_when_the_disk_fills_while_serving(tmp_path: Path) -> None:
    """A volume of 10 MiB has three snapshots of 1 MiB, of which one is in use. Another file of 6 MiB raises its use
    above SIE_DISK_PRESSURE_THRESHOLD_PERCENT. The older of the unused snapshots is removed; the other two stay.
    """
    cache = LocalCache(tmp_path / "cache")
    snapshots = [put(cache, name) for name in ("org/used", "org/old", "org/new")]
    environ = {"SIE_DISK_CACHE_BYTES": str(10 * MIB)}
    with running(tmp_path / "a.sock", before=LOOKS_OFTEN, **environ) as adapter, cache.lease("org/used", REVISION):
        assert all(folder.exists() for folder in snapshots), "3 of 10 MiB is below the threshold"
        (cache.folder / "somebody-else.bin").write_bytes(bytes(6 * MIB))
        assert "removed org/old@" in adapter.wait_for("from the local cache")
        until(lambda: not snapshots[1].exists(), 30, "the snapshot that was used longest ago is gone")
        assert adapter.process.poll() is None
    assert [folder.exists() for folder in snapshots] == [True, False, True]
