"""The config service, its readers, the folder of models; clocks and versions of all parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import sie_contracts
from sie_cli.display import counted
from sie_cli.doctor.gateway import FORBIDDEN
from sie_cli.doctor.probe import CheckResult, CheckSkipped, ClusterProbe, Finding, NotApplicable
from sie_contracts.errors import SIEError
from sie_contracts.models.trust import is_bucket
from sie_contracts.settings import SettingError, public_url
from sie_contracts.wire.configs import ConfigEpoch, has_seen

DRIFT_S = 5.0  # that a write of the catalogue takes at most to everybody, on a busy machine


async def config(probe: ClusterProbe) -> CheckResult:
    """Check that the config service answers, and that all gateways and workers serve by its catalogue."""
    reply = await probe.config()
    url = await probe.config_url()
    fix = (
        "start it (`sie config`); where it is: SIE_CONFIG_SERVICE_URL of gateways and workers. They serve on by what "
        "they have"
    )
    if reply.trouble:
        return "", [Finding(f"no config service answers at {reply.url}: {reply.trouble}", fix)]
    if not reply.is_sie:
        return "", [Finding(f"what answers at {reply.url} is no config service", f"set SIE_CONFIG_SERVICE_URL: {fix}")]
    if reply.status in FORBIDDEN and probe.config_token is not None:
        wrong = f"the config service at {reply.url} refuses this token (status {reply.status})"
        return "", [
            Finding(
                wrong, "set SIE_CONFIG_READ_TOKEN (or SIE_ADMIN_TOKEN) to the value that it has at the config service"
            )
        ]
    if reply.status not in (200, *FORBIDDEN):
        return "", [
            Finding(
                f"the config service at {reply.url} answers {reply.status}",
                "its log says why; it needs the broker above all",
            )
        ]
    beats = await probe.heartbeats()
    end_s = time.monotonic() + DRIFT_S
    while True:
        epoch = probe.epoch_of(reply)
        gateways = {name: beat.config_epoch for name, beat in beats.gateways.items() if beat.config_epoch}
        workers = {
            name: (beat.bundle, beat.config_epoch)
            for name, beat in beats.workers.items()
            if not beat.leaving and beat.config_epoch
        }
        findings = drift(epoch, gateways, workers)
        if not findings or time.monotonic() > end_s:
            break
        beats.came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await beats.came.wait()
        reply = await probe.ask_config() if epoch else reply
    if epoch is not None:
        findings += await restored(probe, reply.url)
    says = f"{counted(len(gateways), 'gateway')} and {counted(len(workers), 'worker')}"
    if epoch is None:
        return (
            (
                f"{says} agree; the epoch at {public_url(url)} takes SIE_CONFIG_READ_TOKEN and SIE_CONFIG_SERVICE_URL "
                "to be read"
            ),
            findings,
        )
    return f"{says} serve by epoch {epoch.epoch}", findings


async def restored(probe: ClusterProbe, url: str) -> list[Finding]:
    """Models whose newest revision could not be loaded, so that the one before it serves again."""
    answer = await probe.get(url, "/v1/configs/models", probe.config_token)
    fix = "correct the entry and write it again (sie models history ID, sie models set ID)"
    models = msgspec.convert(answer.json().get("models", []), list[dict[str, Any]]) if answer.status == 200 else []
    return [Finding(f"{model['model_id']}: {model['note']}", fix) for model in models if model.get("note")]


def drift(
    epoch: ConfigEpoch | None, gateways: Mapping[str, str], workers: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    """List the gateways and workers that are behind the catalogue: gateways by name with their epoch, workers with
    their bundle and epoch.

    A worker is behind when a write that concerns its bundle is missing. Without `epoch`, the config service's word,
    gateways are compared with each other, and workers by the bucket alone: which writes concern them is not known then.
    """
    latest = epoch.epoch if epoch else max(gateways.values(), key=_writes, default="")
    findings = [
        _drifted(f"gateway {name}", stands, latest)
        for name, stands in sorted(gateways.items())
        if not has_seen(stands, latest)
    ]
    for name, (bundle, stands) in sorted(workers.items()):
        if epoch is not None:
            expected = epoch.bundles.get(bundle) or epoch.epoch
            if not has_seen(stands, expected):
                findings.append(_drifted(f"worker {name}", stands, expected))
        elif latest and stands.rpartition(":")[0] != latest.rpartition(":")[0]:
            findings.append(_drifted(f"worker {name}", stands, latest))
    return findings


def _writes(epoch: str) -> int:
    last = epoch.rpartition(":")[2]
    return int(last) if last.isdigit() else -1


def _drifted(name: str, stands: str, expected: str) -> Finding:
    return Finding(
        f"{name} serves by an older catalogue: epoch {stands}, wanted {expected}",
        f"restart {name}; that it follows again, compare its SIE_CONFIG_SERVICE_URL, SIE_CONFIG_READ_TOKEN and "
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS with the others'",
    )


async def models(probe: ClusterProbe) -> CheckResult:
    """The folder of models that the local `sie serve` reads: one file that is refused keeps all of it back."""
    from sie_config_service.overlay import Overlay

    access = probe.cluster.local()
    folder = access.models_dir if access is not None else ""
    if not folder or is_bucket(folder):
        raise NotApplicable("nothing that runs here reads a folder of models")
    if not await asyncio.to_thread(Path(folder).is_dir):  # the default one, which need not be there
        raise NotApplicable(f"there is no {folder}, so the models are those of the package")
    try:
        folders = await asyncio.to_thread(Overlay(dataclasses.replace(probe.settings, models_dir=folder)).folders)
    except (SIEError, SettingError, OSError) as error:
        fix = "mend or remove it; until then the models stay as they were before the last change of the folder"
        return "", [Finding(f"{folder}: {error}", fix)]
    return f"{counted(len(folders.files), 'model')} in {folder}", []


CLOCK_S = 2.0  # keys end, logs and request ids are stamped by wall clocks; ages of work are not


async def clock(probe: ClusterProbe) -> CheckResult:
    """Wall clocks of this machine, the gateways, the config service and the workers, against the broker's."""
    from sie_broker import BrokerError
    from sie_runtime.clock import BrokerClock

    connection = await probe.stream_broker()
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
    replies = [(f"the gateway at {reply.url}", reply) for reply in await probe.gateways()]
    with contextlib.suppress(NotApplicable, CheckSkipped):
        replies.append(("the config service", await probe.config()))
    clocks |= {
        f"the clock of {whose}": (reply.ahead_s + own_s, reply.margin_s + margin_s)
        for whose, reply in replies
        if reply.ahead_s is not None
    }
    workers: dict[str, float] = {}
    unseen = ""
    try:
        beats = await probe.heartbeats()
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


async def versions(probe: ClusterProbe) -> CheckResult:
    """One version of everything, but during an upgrade."""
    by_version: dict[str, list[str]] = defaultdict(list)
    by_version[sie_contracts.__version__].append("this `sie`")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        by_version[importlib.metadata.version("sie-cluster")].append("the installed package")
    for reply in await probe.gateways():
        if reply.is_sie:
            by_version[reply.version].append(f"gateway {reply.url}")
    missing = []
    try:
        reply = await probe.config()
        if reply.is_sie:
            by_version[reply.version].append("config service")
    except (NotApplicable, CheckSkipped):
        missing.append("config service")
    try:
        beats = await probe.heartbeats()
        for name, beat in sorted(beats.workers.items()):
            by_version[beat.version].append(f"sidecar {name}")
    except (NotApplicable, CheckSkipped):
        beats = None
        missing.append("sidecars")
    with contextlib.suppress(NotApplicable, CheckSkipped):
        for socket in await probe.sockets():
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
    """List the members with another version than the newest one."""
    newest = max(by_version, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return [
        Finding(
            f"{', '.join(whose)}: version {version}, others {newest}",
            f"finish the upgrade: pip install 'sie-cluster=={newest}' there, or its image with that tag, and restart",
        )
        for version, whose in sorted(by_version.items())
        if version != newest
    ]
