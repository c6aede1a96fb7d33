"""Who is refused by a real cluster: nobody whom an idle or slow machine can answer; above capacity those that it cannot, with a turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from cluster import MODEL, Cluster, running

pytestmark = pytest.mark.serial
PERIOD_S = 0.1


def cgroup() -> Path | None:
    """A new control group of version 2 or 1 that limits processor time, None where none can be made."""
    for parent, quota in ((Path("/sys/fs/cgroup"), "cpu.max"), (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us")):
        folder = parent / f"sie-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / quota).exists():
                return folder
            folder.rmdir()
    return None


@contextlib.contextmanager
def limited(cluster: Cluster, cores: float) -> Iterator[None]:
    """All processes of the cluster have this many cores in all: by a control group, or by stopping them for a part of the time."""
    assert cluster.process is not None
    folder = cgroup()
    if folder is None:
        with stopping(os.getpgid(cluster.process.pid), cores / (os.cpu_count() or 1)):
            yield
        return
    own = psutil.Process(cluster.process.pid)
    pids = [own.pid, *(child.pid for child in own.children(recursive=True))]
    try:
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{int(cores * 1e5)} 100000")
        else:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 1e5)))
        yield
    finally:
        for pid in [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]:
            with contextlib.suppress(OSError):  # it has ended
                (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


@contextlib.contextmanager
def stopping(group: int, share: float) -> Iterator[None]:
    over = threading.Event()

    def turn() -> None:
        while not over.is_set():
            os.killpg(group, signal.SIGSTOP)
            over.wait(PERIOD_S * (1 - share))
            os.killpg(group, signal.SIGCONT)
            over.wait(PERIOD_S * share)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def at_once(client: httpx.AsyncClient, url: str, count: int, **headers: str) -> list[httpx.Response]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def one(number: int) -> httpx.Response:
        return await client.post(f"{url}/v1/encode/{MODEL}", content=msgspec.json.encode({"items": [f"word{number}"]}), headers=sent)

    return await asyncio.gather(*map(one, range(count)))


def codes(answers: list[httpx.Response]) -> Counter[str]:
    return Counter("200" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}" for answer in answers)


@pytest.mark.timeout(180)
async def test_as_many_requests_at_once_as_may_be_in_progress_are_all_answered_by_a_fresh_server(tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=512)) as client:
            assert codes(await at_once(client, cluster.url, 512)) == {"200": 512}


@pytest.mark.timeout(300)
async def test_a_slow_machine_refuses_nothing_that_it_can_answer(tmp_path: Path) -> None:
    """Four tenths of a core for all processes, one request to warm up, then 40, 40 and 200 with budgets of 10 s: an estimate from batches
    of one text, of a worker without work, refused nearly all of them."""
    with running(tmp_path, "--no-spare") as cluster:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=256)) as client:
            with limited(cluster, 0.4):
                assert codes(await at_once(client, cluster.url, 1)) == {"200": 1}
                found = [codes(await at_once(client, cluster.url, count, x_sie_timeout_ms="10000")) for count in (40, 40, 200)]
    assert [each["200"] for each in found] == [40, 40, 200], found
