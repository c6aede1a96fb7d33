"""What all parts of a cluster have to agree on: wall clocks and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections import defaultdict
from collections.abc import Mapping

import sie_contracts
from sie_cli.display import counted
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.look import CheckSkipped, ClusterProbe, NotApplicable

CLOCK_S = 2.0  # keys end, logs and request ids are stamped by wall clocks; ages of work are not


async def clock(look: ClusterProbe) -> CheckResult:
    """Wall clocks of this machine, the gateways, the config service and the workers, against the broker's."""
    from sie_broker import BrokerError
    from sie_runtime.clock import BrokerClock

    connection = await look.stream_broker()
    try:
        names = [str(info.config["name"]) for info in await connection.stream_infos()]
        if not names:
            raise CheckSkipped("the broker has no stream yet, whose time could be asked")
        measured = BrokerClock(connection, names[0])
        await measured.measure()
    except BrokerError as error:
        raise CheckSkipped(f"the broker does not tell its time: {error}") from error
    own_s, margin_s = measured.ahead_s() or 0.0, measured.margin_s
    clocks = {f"this machine's clock (host {os.uname().nodename})": (own_s, margin_s)}
    replies = [(f"the gateway at {reply.url}", reply) for reply in await look.gateways()]
    with contextlib.suppress(NotApplicable, CheckSkipped):
        replies.append(("the config service", await look.config()))
    clocks |= {
        f"the clock of {whose}": (reply.ahead_s + own_s, reply.margin_s + margin_s)
        for whose, reply in replies
        if reply.ahead_s is not None
    }
    workers: dict[str, float] = {}
    unseen = ""
    try:
        beats = await look.heartbeats()
        workers = {
            name: beat.clock_ahead_s for name, beat in sorted(beats.workers.items()) if beat.clock_ahead_s is not None
        }
    except (NotApplicable, CheckSkipped):
        unseen = ", not seen: workers"
    clocks |= {f"the clock of worker {name}": (ahead_s, 0.0) for name, ahead_s in workers.items()}
    says = (
        f"{counted(len(clocks), 'clock')} within {max(abs(ahead_s) for ahead_s, _ in clocks.values()):.3f} s of the "
        f"broker's{unseen}"
    )
    return says, [
        _off(whose, ahead_s) for whose, (ahead_s, margin_s) in clocks.items() if abs(ahead_s) - margin_s > CLOCK_S
    ]


def _off(whose: str, ahead_s: float) -> Finding:
    way = "ahead of" if ahead_s > 0 else "behind"
    fix = (
        "synchronise that machine, of a pod its node: `timedatectl set-ntp true`, then `chronyc makestep`; if all are "
        "off, the broker's own"
    )
    return Finding(f"{whose} is {abs(ahead_s):.1f} s {way} the broker's", fix)


async def versions(look: ClusterProbe) -> CheckResult:
    """One version of everything, but during an upgrade."""
    by_version: dict[str, list[str]] = defaultdict(list)
    by_version[sie_contracts.__version__].append("this `sie`")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        by_version[importlib.metadata.version("sie-cluster")].append("the installed package")
    for reply in await look.gateways():
        if reply.is_sie:
            by_version[reply.version].append(f"gateway {reply.url}")
    missing = []
    try:
        reply = await look.config()
        if reply.is_sie:
            by_version[reply.version].append("config service")
    except (NotApplicable, CheckSkipped):
        missing.append("config service")
    try:
        beats = await look.heartbeats()
        for name, beat in sorted(beats.workers.items()):
            by_version[beat.version].append(f"sidecar {name}")
    except (NotApplicable, CheckSkipped):
        beats = None
        missing.append("sidecars")
    with contextlib.suppress(NotApplicable, CheckSkipped):
        for socket in await look.sockets():
            if socket.description is not None:
                by_version[socket.description.version].append(f"adapter {socket.path}")
    if sum(map(len, by_version.values())) <= 2:
        raise CheckSkipped("nothing of the cluster answers")
    findings = skew(by_version)
    if beats is not None:
        findings += [
            Finding(
                f"what {subject} announces cannot be read by this version",
                "use the `sie` of the newest version in the cluster",
            )
            for subject in sorted(beats.unreadable)
        ]
    unseen = f", not seen: {', '.join(missing)}" if missing else ""
    return f"all {sie_contracts.__version__}{unseen}", findings


def skew(by_version: Mapping[str, list[str]]) -> list[Finding]:
    """Who has another version than the newest one."""
    newest = max(by_version, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return [
        Finding(
            f"{', '.join(whose)}: version {version}, others {newest}",
            f"finish the upgrade: pip install 'sie-cluster=={newest}' there, or its image with that tag, and restart",
        )
        for version, whose in sorted(by_version.items())
        if version != newest
    ]
