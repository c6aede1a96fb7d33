"""The gateways, their workers, and models that workers cannot load."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from sie_cli.cluster import BROKER_URL, GATEWAY_URL, SOURCE
from sie_cli.display import counted
from sie_cli.doctor.probe import CheckResult, CheckSkipped, ClusterProbe, Finding, NotApplicable, ProbeResult
from sie_contracts.settings import public_url

FORBIDDEN = (401, 403)
READY_FIX = (
    "mend what it names: the findings of broker, gateway and sockets say how; its log says since when, that of "
    "nats-server why it ended a connection"
)


async def gateway(probe: ClusterProbe) -> CheckResult:
    """Check that each gateway answers, lets this user read, and has workers that are well."""
    findings: list[Finding] = []
    replies = await probe.gateways()
    if not probe.cluster.is_given(GATEWAY_URL) and replies[0].trouble:
        instead = f"start one (`{probe.serve}`), or say where it is: --data-dir or --url"
        raise CheckSkipped(f"no gateway at {replies[0].url} ({replies[0].trouble}): {instead}")
    if not probe.cluster.is_given(GATEWAY_URL) and not replies[0].is_sie:
        raise CheckSkipped(
            f"what answers at {replies[0].url}, where a gateway is by default, is not SIE's: name a gateway with --url"
        )
    for reply in replies:
        if reply.trouble:
            fix = f"start it (`sie gateway`, `{probe.serve}`), or give its address: --url, not {reply.url}"
            findings.append(Finding(f"no gateway answers at {reply.url}: {reply.trouble}", fix))
        elif not reply.is_sie:
            fix = "end that program or start the gateway with another --port; --url says where to look"
            findings.append(Finding(f"what answers at {reply.url} is no gateway of SIE", fix))
        elif reply.status in FORBIDDEN:
            findings.append(_refused(reply, await broker_options(probe)))
        elif reply.status != 200:
            findings.append(
                Finding(
                    f"{reply.url}/health answers {reply.status}", "read the gateway's log: this route always answers"
                )
            )
        elif probe.cluster.local() is None:  # else the check of ports looks
            findings += _not_ready(reply, await probe.get(reply.url, "/readyz"))
    health = await probe.health()
    findings += _workers(health)
    cluster = health.get("cluster", {})
    return (
        (
            f"{counted(len(replies), 'gateway')}, {counted(cluster.get('worker_count', 0), 'healthy worker')}, "
            f"{counted(cluster.get('models_loaded', 0), 'model')} loaded"
        ),
        findings,
    )


def _not_ready(reply: ProbeResult, ready: ProbeResult) -> list[Finding]:
    if ready.status != 503:
        return []
    return [Finding(f"the gateway at {reply.url} is {ready.body.decode(errors='replace')[:300]}", READY_FIX)]


def _refused(reply: ProbeResult, at_broker: str) -> Finding:
    return Finding(
        f"the gateway at {reply.url} does not let this token read (status {reply.status})",
        "set SIE_API_KEY to a token with scope read: one of the gateway's own or, if it has SIE_AUTH_MODE=token, "
        f"one that `sie keys create NAME --scopes read{at_broker}` prints",
    )


async def broker_options(probe: ClusterProbe) -> str:
    """The options by which a command finds the broker; none where it is not known."""
    if probe.cluster.sources.get(BROKER_URL) == SOURCE:
        return f" --data-dir {shlex.quote(str(probe.data_dir))}"
    try:
        return f" --url {public_url(await probe.broker_url())}"
    except (NotApplicable, CheckSkipped):
        return ""


def _workers(health: Mapping[str, object]) -> list[Finding]:
    findings = [
        Finding(
            f"worker {info['name']} ({info['pool']}.{info['gpu']}.{info['bundle']}) is not healthy",
            "GET /readyz on its SIE_WORKER_METRICS_PORT says why; `sie doctor` on its machine looks at its socket",
        )
        for info in _infos(health, "unhealthy_workers")
    ]
    if health and not findings and not _infos(health, "workers"):
        fix = (
            "start one: `sie sidecar` and `sie adapter` with one SIE_IPC_SOCKET_PATH, or raise the replicas of a worker"
            " pool"
        )
        findings.append(Finding("no worker is there: requests wait or are refused", fix))
    return findings


def _infos(health: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    return msgspec.convert(health.get(key, []), list[dict[str, Any]])


_ROOM = "give it a larger worker, or fewer models beside it"
_ENTRY = (
    "change its entry (sie models set ID), or make the revision before it the newest again (sie models history ID, "
    "sie models rollback ID REVISION)"
)
_FIXES = {
    "OOM": _ROOM,
    "NETWORK": "make the source of its weights reachable from the worker, which tries again by itself",
    "GATED": "accept the licence at the hub and set HF_TOKEN of the workers",
    "DEPENDENCY": "install the package that it names beside the adapter",
    "UNKNOWN": f"the log of the adapter has the traceback; {_ENTRY}",
}


async def loads(probe: ClusterProbe) -> CheckResult:
    """Failed loads of models on all workers: one finding for each worker and cause."""
    for gateway in await probe.gateways():
        if gateway.is_sie and gateway.status == 200:
            answer = await probe.get(gateway.url, "/v1/models", probe.cluster.gateway_token)
            break
    else:
        raise CheckSkipped("no gateway tells which models its workers have")
    if answer.status != 200:
        raise CheckSkipped(f"{gateway.url}/v1/models answers {answer.trouble or answer.status}")
    models = msgspec.convert(answer.json().get("models", []), list[dict[str, Any]])
    # the profiles that share a copy of the weights fail together: one finding for all of them
    failed: dict[tuple[str, str, str], list[str]] = {}
    for model in models:
        for host in model["hosts"]:
            if host["state"] == "failed" and host["error"] is not None:
                error = host["error"]
                failed.setdefault((host["worker"], error["code"], error["message"]), []).append(model["id"])
    findings = [
        Finding(f"worker {worker} cannot load {', '.join(names)}: {code}: {message}", _FIXES.get(code, _ENTRY))
        for (worker, code, message), names in failed.items()
    ]
    loaded = sum(1 for model in models if model["loaded"])
    return f"{counted(loaded, 'model')} loaded", findings
