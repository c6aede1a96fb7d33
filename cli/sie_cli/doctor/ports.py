"""The ports of probes and metrics on this machine."""

from __future__ import annotations

import asyncio

from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.gateway import READY_FIX
from sie_cli.doctor.look import ClusterProbe, NotApplicable
from sie_contracts.settings import BY_NAME


async def ports(look: ClusterProbe) -> CheckResult:
    """The ports of probes and metrics that this machine was told, or that its `sie serve` wrote down: that SIE answers,
    and is ready.

    The documented defaults are not looked at: whoever holds them may be anybody.
    """
    findings, notes = [], []
    addresses = [
        (f"http://127.0.0.1:{port}", name)
        for name, port in (
            ("SIE_GATEWAY_METRICS_PORT", look.settings.gateway_metrics_port),
            ("SIE_WORKER_METRICS_PORT", look.settings.worker_metrics_port),
        )
        if port and look.cluster.is_given(name)
    ]
    named = {url for url, _ in addresses}
    local = look.cluster.local()
    addresses += [(url, "") for url in (local.metrics_urls if local is not None else ()) if url not in named]
    for url, name in addresses:
        port = int(url.rpartition(":")[2])
        ready, metrics = await asyncio.gather(look.get(url, "/readyz"), look.get(url, "/metrics"))
        if ready.trouble and metrics.trouble:
            if await _is_open(port):
                findings.append(_taken(name, port, look.serve))
            elif name:
                notes.append(f"{port} is free")
            else:
                wrong = f"nothing listens on port {port}, which `sie serve` wrote down in {look.data_dir}"
                findings.append(Finding(wrong, f"run `{look.serve}` again: it takes the place of one that was killed"))
        elif b"\nsie_" not in metrics.body and not metrics.body.startswith(b"sie_"):
            findings.append(_taken(name, port, look.serve))
        elif ready.status != 200:
            reason = ready.body.decode(errors="replace").strip()[:300]
            findings.append(Finding(f"port {port}{f' ({name})' if name else ''}: {reason or 'not ready'}", READY_FIX))
        else:
            notes.append(f"{port} is ready")
    if not notes and not findings:
        raise NotApplicable(
            "neither SIE_GATEWAY_METRICS_PORT nor SIE_WORKER_METRICS_PORT is given, and no `sie serve` wrote its ports "
            "down"
        )
    return ", ".join(notes), findings


def _taken(name: str, port: int, serve: str) -> Finding:
    if not name:
        wrong = f"port {port}, which `sie serve` wrote down, is held by a program that is not SIE's"
        return Finding(wrong, f"run `{serve}` again: it takes other ports")
    row = BY_NAME[name]
    return Finding(
        f"port {port}, which {name} means, is held by a program that is not SIE's",
        f"end that program (`ss -ltnp 'sport = :{port}'` names it), or start the {row.components[0]} with {row.flag} "
        "and a free port",
    )


async def _is_open(port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
