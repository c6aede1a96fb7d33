"""Gateways, and the workers that they know."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from sie_cli.cluster import BROKER_URL, GATEWAY_URL, SOURCE
from sie_cli.display import counted
from sie_cli.doctor.finding import Finding, Found
from sie_cli.doctor.look import Absent, Blind, Look, Told
from sie_contracts.settings import public_url

FORBIDDEN = (401, 403)
READY_FIX = (
    "mend what it names: the findings of broker, gateway and sockets say how; its log says since when, that of "
    "nats-server why it ended a connection"
)


async def gateway(look: Look) -> Found:
    """That each gateway answers, lets this user read, and has workers that are well."""
    findings: list[Finding] = []
    tolds = await look.gateways()
    if not look.cluster.is_given(GATEWAY_URL) and tolds[0].trouble:
        instead = f"start one (`{look.serve}`), or say where it is: --data-dir or --url"
        raise Blind(f"no gateway at {tolds[0].url} ({tolds[0].trouble}): {instead}")
    if not look.cluster.is_given(GATEWAY_URL) and not tolds[0].is_sie:
        raise Blind(
            f"what answers at {tolds[0].url}, where a gateway is by default, is not SIE's: name a gateway with --url"
        )
    for told in tolds:
        if told.trouble:
            fix = f"start it (`sie gateway`, `{look.serve}`), or give its address: --url, not {told.url}"
            findings.append(Finding(f"no gateway answers at {told.url}: {told.trouble}", fix))
        elif not told.is_sie:
            fix = "end that program or start the gateway with another --port; --url says where to look"
            findings.append(Finding(f"what answers at {told.url} is no gateway of SIE", fix))
        elif told.status in FORBIDDEN:
            findings.append(_refused(told, await broker_options(look)))
        elif told.status != 200:
            findings.append(
                Finding(f"{told.url}/health answers {told.status}", "read the gateway's log: this route always answers")
            )
        elif look.cluster.local() is None:  # else the check of ports looks
            findings += _not_ready(told, await look.get(told.url, "/readyz"))
    health = await look.health()
    findings += _workers(health)
    cluster = health.get("cluster", {})
    return (
        (
            f"{counted(len(tolds), 'gateway')}, {counted(cluster.get('worker_count', 0), 'healthy worker')}, "
            f"{counted(cluster.get('models_loaded', 0), 'model')} loaded"
        ),
        findings,
    )


def _not_ready(told: Told, ready: Told) -> list[Finding]:
    if ready.status != 503:
        return []
    return [Finding(f"the gateway at {told.url} is {ready.body.decode(errors='replace')[:300]}", READY_FIX)]


def _refused(told: Told, at_broker: str) -> Finding:
    return Finding(
        f"the gateway at {told.url} does not let this token read (status {told.status})",
        "set SIE_AUTH_TOKEN to a token with scope read: one of the gateway's own or, if it has SIE_AUTH_MODE=token, "
        f"one that `sie keys create NAME --scopes read{at_broker}` prints",
    )


async def broker_options(look: Look) -> str:
    """The options by which a command finds the broker; none where it is not known."""
    if look.cluster.sources.get(BROKER_URL) == SOURCE:
        return f" --data-dir {shlex.quote(str(look.data_dir))}"
    try:
        return f" --url {public_url(await look.broker_url())}"
    except (Absent, Blind):
        return ""


def _workers(health: Mapping[str, object]) -> list[Finding]:
    found = [
        Finding(
            f"worker {info['name']} ({info['pool']}.{info['gpu']}.{info['bundle']}) is not healthy",
            "GET /readyz on its SIE_WORKER_METRICS_PORT says why; `sie doctor` on its machine looks at its socket",
        )
        for info in _infos(health, "unhealthy_workers")
    ]
    if health and not found and not _infos(health, "workers"):
        fix = (
            "start one: `sie sidecar` and `sie adapter` with one SIE_IPC_SOCKET_PATH, or raise the replicas of a worker"
            " pool"
        )
        found.append(Finding("no worker is there: requests wait or are refused", fix))
    return found


def _infos(health: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    return msgspec.convert(health.get(key, []), list[dict[str, Any]])
