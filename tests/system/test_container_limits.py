"""Faults that only a container's limits show: out of memory, full volumes, a bound on processes."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cgroups import Memory
from chaos.clients import Expected
from cluster import MODEL, until
from helm import workloads
from kubelet import Node
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
MAX_KILLS, ADVERSARIAL_S, RESTARTED_AFTER = 3, 180.0, 10
FREE_MIB = (96, 48, 24, 12)  # what the limit leaves above the memory that the adapter holds, until the kernel kills it
WORDS = "harbour kernel winter planet "
LARGE = [WORDS * 60] * 120  # one request, of more tokens than a batch may have


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expected_answers()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One pod of each workload, with disks of their own and a bound on processes. Models compute in float32: a batch in
    bfloat16 takes half the memory.
    """
    check_images()
    manifests = rendered(FILE, settings={"SIE_DEFAULT_COMPUTE_PRECISION": "float32"})
    disks = {
        (name, volume["name"]): DISK_BYTES
        for name, workload in workloads(manifests).items()
        for volume in workload["spec"]["template"]["spec"]["volumes"]
        if "tmp" in volume["name"]
    }
    with Node.started(secrets=SECRETS, disks=disks, processes=PROCESSES) as node:
        node.apply(manifests)
        yield node


async def test_it_serves_within_a_bound_on_processes(node: Node, expected: Expected) -> None:
    async with crowd(node, expected) as clients:
        await answers(clients, 2 * CLIENTS)
    for container in node.containers:
        assert int((container.cgroup("pids") / "pids.max").read_text()) == PROCESSES
        assert int((container.cgroup("pids") / "pids.current").read_text()) < PROCESSES


async def test_a_full_volume_neither_ends_a_container_nor_keeps_it_from_starting_again(
    node: Node, expected: Expected
) -> None:
    """Each /tmp is filled to the last byte; then each container is killed."""
    full = [container for container in node.containers if container.pod.workload != "sie-nats"]
    files = []
    for member in full:
        (mount,) = (mount["name"] for mount in member.told["volumeMounts"] if mount["mountPath"] == "/tmp")
        files.append(member.pod.volume(mount) / "filler")
        fill(files[-1])
    try:
        async with crowd(node, expected) as clients:
            await answers(clients, CLIENTS)
            for member in full:
                before = member.starts
                member.kill()
                await asyncio.to_thread(
                    until, lambda c=member, n=before: c.starts > n, WITHIN_S, f"{member.name} again"
                )
                await all_ready(node)
                await answers(clients, CLIENTS)
    finally:
        for file in files:
            file.unlink()


def fill(path: Path) -> None:
    done = subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4k"], capture_output=True, text=True, check=False)
    assert "No space left" in done.stderr


async def test_the_kernel_ends_an_adapter_and_no_client_notices(node: Node, expected: Expected) -> None:
    """The limit leaves less and less, in the end less than a batch takes. Every request whose inputs fit one by one is
    answered, also the large one. No input is called poison. The kernel kills the child that serves, or all of the
    container, which then has another control group.
    """
    (pod,) = node.of(WORKER)
    adapter = pod.container("adapter")
    url = node.url(GATEWAY, 8080)
    async with crowd(node, expected) as clients, httpx.AsyncClient(headers=CLIENT, timeout=200) as client:
        await answers(clients, CLIENTS)
        memory = Memory(adapter.cgroup("memory"))
        killed, ended = memory.kills(), len(adapter.exits)
        for free_mib in FREE_MIB:
            memory.limit(memory.unreclaimable() + (free_mib << 20))
            answer = await client.post(
                f"{url}/v1/encode/{MODEL}", json={"items": LARGE}, headers={"x-sie-timeout-ms": "150000"}
            )
            assert answer.status_code == 200, answer.text
            assert not [item for item in answer.json()["items"] if "error" in item]
            if is_killed := len(adapter.exits) > ended or memory.kills() > killed:
                break
        await answers(clients, CLIENTS)
    assert is_killed, "the limit was never met"
    assert {ending.status for ending in adapter.exits[ended:]} <= {137}
    assert not any("poison" in line for line in pod.container("worker-sidecar").log())


async def test_minutes_of_adversarial_batches_at_a_small_limit(expected: Expected) -> None:
    """The kernel kills at most MAX_KILLS times, and no request whose inputs fit one by one is refused. The learnt
    limits of batches outlive a restart of the container.
    """
    check_images()
    adapter_has = {"adapter": {"resources": {"limits": {"cpu": "2", "memory": "1536Mi"}}}}
    generator = random.Random(7)
    with Node.started(secrets=SECRETS) as node:
        await asyncio.to_thread(node.apply, rendered(FILE, workers={"common": adapter_has}))
        (pod,) = node.of(WORKER)
        adapter = pod.container("adapter")
        before, killed, request_count = adapter.starts, 0, 0
        url = f"{node.url(GATEWAY, 8080)}/v1/encode/{MODEL}"
        async with crowd(node, expected) as clients, httpx.AsyncClient(headers=CLIENT, timeout=200) as client:
            await answers(clients, CLIENTS)
            end_s = time.monotonic() + ADVERSARIAL_S
            while time.monotonic() < end_s or request_count < 2 * RESTARTED_AFTER:
                items = [WORDS * generator.randint(1, 90) for _ in range(generator.randint(1, 100))]
                answer = await client.post(url, json={"items": items}, headers={"x-sie-timeout-ms": "150000"})
                assert answer.status_code == 200, answer.text
                assert not [item for item in answer.json()["items"] if "error" in item]
                request_count += 1
                if request_count == RESTARTED_AFTER:
                    killed, again = Memory(adapter.cgroup("memory")).kills(), adapter.starts + 1
                    adapter.kill()
                    await asyncio.to_thread(until, lambda n=again: adapter.starts >= n, WITHIN_S, "it starts again")
                    await all_ready(node)
        killed += Memory(adapter.cgroup("memory")).kills()
        print(f"{request_count} requests, {killed} kills, starts {adapter.starts - before}, exits {adapter.exits}")
    assert killed <= MAX_KILLS
    assert adapter.starts - before == 1
