"""A release of the chart as tests install it: its values, its secret, and its clients."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import oracle
import pytest
from chaos.clients import Crowd, Expected
from cluster import MODEL, until
from helm import SECRET, Object, objects, template, workloads
from load import TEXTS

from kubelet import engine
from kubelet.node import Node

USERS = ("gateway", "config", "worker", "streams", "operator")
TOKENS = {
    "auth-tokens": "client-token",
    "config-read-token": "reader-token",
    "admin-token": "admin-token",
    "nats-route": "in-a-url",
    # passwords that a URL, a configuration of the server or a shell would misread without quotes
    **{f"nats-{user}": f"p@{user}/w:%41#? $(HOME)" for user in USERS},
}
SECRETS = {SECRET: TOKENS}
CHOSEN: dict[str, Any] = {"auth": {"mode": "static", "secretName": SECRET}}
CLIENT = {"Authorization": f"Bearer {TOKENS['auth-tokens']}"}
WORKER, GATEWAY, CONFIG, BROKER = "sie-worker-cpu", "sie-gateway", "sie-config", "sie-nats"
CLIENTS, PACE_S, BUDGET_S = 20, 0.5, 60.0
WITHIN_S = 300.0  # high enough for a busy machine


# marks of a module whose tests start containers, beside those of its lane
MARKS = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]


def expected_answers() -> Expected:
    """Return the reference vectors of the texts that clients send."""
    return Expected(MODEL, TEXTS, list(oracle.encode(TEXTS)))


def rendered(file: str, **values: Any) -> list[Object]:
    return objects(template(file, {**CHOSEN, **values}))


def check_images() -> None:
    """Skip the test if podman lacks an image of the chart."""
    images = {
        container["image"]
        for workload in workloads(rendered("values.yaml")).values()
        for container in workload["spec"]["template"]["spec"]["containers"]
    }
    absent = sorted(name for name in images if not engine.has_image(name))
    if absent:
        pytest.skip(f"podman has no image {', '.join(absent)}: docs/kubernetes.md says how to build them")


@asynccontextmanager
async def crowd(node: Node, expected: Expected, clients: int = CLIENTS) -> AsyncIterator[Crowd]:
    """Run clients that retry as the SDK does. Fail if a request fails or gets a wrong answer."""
    swarm = Crowd(
        [node.url(GATEWAY, 8080)],
        expected,
        clients=clients,
        pace_s=PACE_S,
        items=4,
        budget_s=BUDGET_S,
        token=TOKENS["auth-tokens"],
    )
    try:
        yield swarm
    finally:
        await swarm.stop()
    verdicts = Counter(outcome.verdict for outcome in swarm.outcomes)
    attempts = Counter((attempt.status, attempt.failure) for outcome in swarm.outcomes for attempt in outcome.attempts)
    longest_s = max((outcome.ended_s - outcome.started_s for outcome in swarm.outcomes), default=0.0)
    print(f"{dict(verdicts)}, attempts {dict(attempts)}, the longest {longest_s:.1f} s")
    assert verdicts.keys() == {"right"}, [outcome.detail for outcome in swarm.outcomes if outcome.verdict != "right"][
        :5
    ]
    assert swarm.unasked == 0


async def answers(swarm: Crowd, count: int, timeout_s: float = WITHIN_S) -> None:
    """Wait until `count` requests that were sent from now on have right answers."""
    now_s = time.monotonic()

    def enough() -> bool:
        return sum(outcome.started_s > now_s and outcome.verdict == "right" for outcome in swarm.outcomes) >= count

    await asyncio.to_thread(until, enough, timeout_s, f"{count} answers")


async def all_ready(node: Node, timeout_s: float = WITHIN_S) -> None:
    for pod in list(node.pods):
        await asyncio.to_thread(node.wait_ready, pod, timeout_s)
