"""Streams and buckets whose files are damaged: what cannot be read, and what one bucket has of another that lost it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sie_cli.display import counted
from sie_cli.doctor.finding import CheckResult, Finding
from sie_cli.doctor.gateway import broker_options
from sie_cli.doctor.look import CheckSkipped, ClusterProbe
from sie_contracts.wire import topology

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

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


async def damage(look: ClusterProbe) -> CheckResult:
    """Check that every stream can be read, and that keys, catalogue and jobs have what their copies and shards have."""
    from sie_broker import BrokerError
    from sie_broker.nats.operator import damage as damage_of
    from sie_broker.nats.operator import streams

    broker = await look.stream_broker()
    where = await broker_options(look)
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
