"""What only a container's limits show: the kernel ends what takes too much memory, full volumes, a bound on
processes.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chaos.clients import Expected
from cluster import MODEL, until
from helm import workloads
from kubelet import Container, Node
from kubelet.release import (
    CLIENT,
    CLIENTS,
    GATEWAY,
    MARKS,
    SECRETS,
    WITHIN_S,
    WORKER,
    all_ready,
    answers,
    check_images,
    crowd,
    expected_answers,
    rendered,
)

pytestmark = [pytest.mark.long, pytest.mark.serial, *MARKS]

FILE = "values-kind.yaml"
PROCESSES = 128  # threads count; a fifth of the lowest bound of a managed cluster
DISK_BYTES = 4 << 20
FREE_BYTES = 96 << 20  # that an adapter's limit leaves above what it holds
LARGE = ["harbour kernel winter planet " * 60] * 400  # in one request, of more tokens than several batches may have


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expected_answers()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One of each, on disks of their own, with a bound on processes."""
    check_images()
    found = rendered(FILE)
    disks = {
        (name, volume["name"]): DISK_BYTES
        for name, workload in workloads(found).items()
        for volume in workload["spec"]["template"]["spec"]["volumes"]
        if "tmp" in volume["name"]
    }
    with Node.started(secrets=SECRETS, disks=disks, processes=PROCESSES) as node:
        node.apply(found)
        yield node


async def test_it_serves_within_a_bound_on_processes(node: Node, expected: Expected) -> None:
    async with crowd(node, expected) as clients:
        await answers(clients, 2 * CLIENTS)
    for each in node.containers:
        assert int((each.cgroup("pids") / "pids.max").read_text()) == PROCESSES
        assert int((each.cgroup("pids") / "pids.current").read_text()) < PROCESSES


async def test_a_full_volume_neither_ends_a_container_nor_keeps_it_from_starting_again(
    node: Node, expected: Expected
) -> None:
    """What each has as /tmp, filled to the last byte; then each is killed."""
    full = [each for each in node.containers if each.pod.workload != "sie-nats"]
    files = []
    for each in full:
        (mount,) = (mount["name"] for mount in each.told["volumeMounts"] if mount["mountPath"] == "/tmp")
        files.append(each.pod.volume(mount) / "filler")
        fill(files[-1])
    try:
        async with crowd(node, expected) as clients:
            await answers(clients, CLIENTS)
            for each in full:
                before = each.starts
                each.kill()
                await asyncio.to_thread(until, lambda c=each, n=before: c.starts > n, WITHIN_S, f"{each.name} again")
                await all_ready(node)
                await answers(clients, CLIENTS)
    finally:
        for file in files:
            file.unlink()


def fill(path: Path) -> None:
    done = subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4k"], capture_output=True, text=True, check=False)
    assert "No space left" in done.stderr


async def test_the_kernel_ends_an_adapter_and_no_client_notices(node: Node, expected: Expected) -> None:
    """X3, P7. The limit leaves less than a large batch takes: whoever sends what fits is answered, also the large
    request itself, whose inputs fit one by one. No input is called poison.
    """
    (pod,) = node.of(WORKER)
    adapter = pod.container("adapter")
    url = node.url(GATEWAY, 8080)
    async with crowd(node, expected) as clients, httpx.AsyncClient(headers=CLIENT, timeout=200) as client:
        await answers(clients, CLIENTS)
        killed = kills(adapter)
        limit(adapter, held(adapter) + FREE_BYTES)
        for _ in range(3):
            answer = await client.post(
                f"{url}/v1/encode/{MODEL}", json={"items": LARGE}, headers={"x-sie-timeout-ms": "150000"}
            )
            assert answer.status_code == 200, answer.text
            assert not [item for item in answer.json()["items"] if "error" in item]
            print(f"kernel's kills {kills(adapter) - killed}, exits {adapter.exits}, held {held(adapter) >> 20} MiB")
        await answers(clients, CLIENTS)
    assert kills(adapter) > killed, "the limit was never met"
    assert not any("poison" in line for line in pod.container("worker-sidecar").log())


def held(container: Container) -> int:
    folder = container.cgroup("memory")
    name = "memory.current" if (folder / "memory.current").exists() else "memory.usage_in_bytes"
    return int((folder / name).read_text())


def limit(container: Container, size: int) -> None:
    folder = container.cgroup("memory")
    if (folder / "memory.max").exists():
        (folder / "memory.max").write_text(str(size))
    else:
        (folder / "memory.limit_in_bytes").write_text(str(size))


def kills(container: Container) -> int:
    folder = container.cgroup("memory")
    name = "memory.events" if (folder / "memory.events").exists() else "memory.oom_control"
    counters = dict(line.split() for line in (folder / name).read_text().splitlines())
    return int(counters["oom_kill"])
