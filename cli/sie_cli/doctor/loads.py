"""The models that workers cannot load."""

from __future__ import annotations

from typing import Any

import msgspec

from sie_cli.display import counted
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.look import CheckSkipped, ClusterProbe

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


async def loads(look: ClusterProbe) -> CheckResult:
    """Failed loads of models on all workers: one finding for each worker and cause."""
    for gateway in await look.gateways():
        if gateway.is_sie and gateway.status == 200:
            answer = await look.get(gateway.url, "/v1/models", look.cluster.gateway_token)
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
