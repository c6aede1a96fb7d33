"""Thousands of images leave nothing behind in any process that they pass through."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, running
from image_files import encoded, picture
from local_models import LocalModels

from sie_client import SIEClient

CLIP = "test/clip"


IMAGES, BATCH, CLIENTS = 20_000, 50, 4


MIB = 1 << 20


def memory(cluster: Cluster) -> dict[str, int]:
    """Return the bytes of the largest process of each kind."""
    assert cluster.process is not None
    sizes: dict[str, int] = defaultdict(int)
    for process in psutil.Process(cluster.process.pid).children(recursive=True):
        argv = process.cmdline()
        kinds = ("gateway", "sidecar", "adapter", "sie_sidecar.prepare.media_worker")
        for kind in (kind for kind in kinds if kind in argv):
            sizes[kind] = max(sizes[kind], process.memory_info().rss)
    return dict(sizes)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_thousands_of_images(tmp_path: Path, every_family: LocalModels) -> None:
    """Each image has pixels that no image before had: cached outputs are replaced too."""
    arguments = ["--models-dir", str(every_family.folder), "--model-filter", CLIP, "--no-spare"]
    samples: list[dict[str, int]] = []
    with running(tmp_path, *arguments) as cluster, SIEClient(cluster.url, timeout_s=300) as client:

        def ask(first: int) -> int:
            files = [encoded(picture(96, 64, seed), "JPEG") for seed in range(first, first + BATCH)]
            return len(client.encode(CLIP, [{"images": [file]} for file in files]))

        with ThreadPoolExecutor(CLIENTS) as clients:
            for start in range(0, IMAGES, IMAGES // 20):
                assert sum(clients.map(ask, range(start, start + IMAGES // 20, BATCH))) == IMAGES // 20
                samples.append(memory(cluster))
    print({kind: [sample[kind] // MIB for sample in samples] for kind in samples[0]})
    assert len(samples[0]) == 4
    for kind in samples[0]:
        first, rest = (max(sample[kind] for sample in part) for part in (samples[:5], samples[5:]))
        assert rest < 1.1 * first + 8 * MIB, f"{kind}: {[sample[kind] // MIB for sample in samples]} MiB"
