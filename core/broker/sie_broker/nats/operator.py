"""Compares the broker's streams and consumers with the topology of this version, and plans and applies the steps that
remove the differences. Commands of operators call this module.

    read_facts ──► Facts ──► plan (pure) ──► Steps ──► apply

If a setting cannot be changed in place, or if a change could lose work now, the step is a refusal with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sie_broker import BrokerUnavailable, Entry, UnsafeUpdate
from sie_broker.limits import check_room
from sie_broker.nats.api import (
    STREAM_EXISTS,
    ConsumerInfo,
    Refusal,
    StreamInfo,
    consumer_config,
    differences,
    limits_of,
    stream_config,
    update_of,
    version_of,
)
from sie_broker.nats.keyvalue import NatsKeyValue
from sie_broker.nats.queue import NatsAdministration
from sie_contracts.wire.topology import TOPOLOGY_VERSION, ConsumerSpec, StreamSpec, consumer_of

if TYPE_CHECKING:
    from sie_broker.nats import NatsBroker

# settings that the broker cannot change in place -> their names in the reason of a refusal
_FIXED = {
    "storage": "the storage of a stream",
    "retention": "the retention of a stream",
    "subjects": "the subjects of a stream",
    "filter_subject": "the filter of a consumer",
    "ack_policy": "the ack policy of a consumer",
}


@dataclass(frozen=True)
class FieldChange:
    field: str
    actual: Any
    expected: Any


@dataclass(frozen=True)
class Step:
    """Planned change of one stream or consumer. `reason`: text that explains why a consumer is created or a change is
    refused.
    """

    action: Literal["create", "update", "refuse"]
    kind: Literal["stream", "consumer"]
    name: str
    stream: str
    changes: tuple[FieldChange, ...] = ()
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """State of a stream and its consumers. `info` is None if the stream does not exist."""

    info: StreamInfo | None
    consumers: list[ConsumerInfo]
    counts: dict[str, int]  # subject -> number of messages


async def streams(broker: NatsAdministration) -> list[StreamInfo]:
    """Return all streams of the account, sorted by name. Raises BrokerError."""
    return sorted(await broker.stream_infos(), key=lambda info: str(info.config.get("name", "")))


async def read_facts(broker: NatsAdministration, stream: str) -> Facts:
    """Read the state of a stream and its consumers. Raises BrokerError."""
    info = next((row for row in await broker.stream_infos() if row.config.get("name") == stream), None)
    if info is None:
        return Facts(None, [], {})
    return Facts(info, await broker.consumer_infos(stream), await broker.subject_counts(stream, ">"))


async def damage(broker: NatsBroker, info: StreamInfo) -> str:
    """Return a text that describes the damage of a stream's files; empty if the checks detect none. A bucket counts as
    damaged if it does not have one entry for each key, or if two reads of all its entries fail while the broker replies
    to requests. In other streams, only the first message is read. Raises BrokerError.
    """
    name, state = str(info.config["name"]), info.state
    bucket = name.removeprefix("KV_")
    if bucket == name:
        if not state.messages or await broker.first_stored(name) is not None:
            return ""
        later = await broker.stream_state(name)  # messages may have been removed since `info` was read
        is_same = later.messages and later.first_sequence == state.first_seq
        return f"none of its {later.messages} messages can be read" if is_same else ""
    if state.num_subjects != state.messages:  # in an intact bucket, each key has exactly one message
        return f"it has {state.num_subjects} keys and {state.messages} entries"
    fault = ""
    for _ in range(2):
        try:
            await NatsKeyValue(broker, bucket).entries()
        except BrokerUnavailable as error:
            fault = str(error)
            await broker.stream_state(name)  # raises BrokerError if the broker does not reply at all
        else:
            return ""
    return fault


async def salvage(broker: NatsBroker, stream: str) -> list[Entry]:
    """Return the readable entries of a damaged bucket, in order of their revisions. Raises BrokerError."""
    bucket, prefix = stream.removeprefix("KV_"), f"$KV.{stream.removeprefix('KV_')}."
    entries: list[Entry] = []
    for subject in await broker.subject_counts(stream, ">"):
        try:
            entry = await NatsKeyValue(broker, bucket).get(subject.removeprefix(prefix))
        except Refusal:  # the message of this entry is damaged
            continue
        if entry is not None:
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.revision)


async def remake(broker: NatsBroker, info: StreamInfo) -> None:
    """Delete a stream with its messages, and create it again with the same configuration. Raises BrokerError."""
    name = str(info.config["name"])
    await broker.delete_stream(name)
    # the config service, on request of another process, may already have created the stream again
    await broker.find(f"STREAM.CREATE.{name}", info.config, StreamInfo, STREAM_EXISTS)


def plan(facts: Facts, spec: StreamSpec, ack_wait_s: float) -> list[Step]:
    """Return the steps that make the stream and its consumers match this version's topology, the stream first."""
    if facts.info is None:
        return [Step("create", "stream", spec.name, spec.name, config=stream_config(spec))]
    steps = [*_stream_step(facts, facts.info, spec)]
    for info in facts.consumers:
        steps += _consumer_step(info, spec.name, ack_wait_s)
    steps += _missing(facts, ack_wait_s)
    return steps


def _stream_step(facts: Facts, info: StreamInfo, spec: StreamSpec) -> Iterable[Step]:
    current, desired = info.config, stream_config(spec)
    changes = _changes(current, desired)
    reason = _newer(current) or _fixed(changes)
    lower_age = any(
        change.field == "max_age" and 0 < change.expected < (change.actual or float("inf")) for change in changes
    )
    if not reason and lower_age and info.state.messages:
        reason = "a shorter age would drop messages: let the queue run empty first"
    if not reason:
        try:
            check_room(spec, *limits_of(current), info.state.bytes, facts.counts)
        except UnsafeUpdate as error:
            reason = str(error)
    yield from _step("stream", spec.name, spec.name, current, desired, changes, reason)


def _consumer_step(info: ConsumerInfo, stream: str, ack_wait_s: float) -> Iterable[Step]:
    current = info.config
    spec = served_by(current.get("filter_subject", ""), ack_wait_s)
    if spec is None or spec.name != info.name:
        yield Step(
            "refuse",
            "consumer",
            info.name,
            stream,
            reason="not created by SIE: it takes messages that no worker then receives; delete this consumer",
        )
        return
    desired = consumer_config(spec)
    changes = _changes(current, desired)
    yield from _step("consumer", info.name, stream, current, desired, changes, _newer(current) or _fixed(changes))


def served_by(filter_subject: str, ack_wait_s: float) -> ConsumerSpec | None:
    """Return the consumer that this version creates for a filter subject; None if it creates no such consumer."""
    try:
        return consumer_of(f"{filter_subject[:-1]}x" if filter_subject.endswith(".*") else filter_subject, ack_wait_s)
    except ValueError:
        return None


def _missing(facts: Facts, ack_wait_s: float) -> Iterable[Step]:
    names = {info.name for info in facts.consumers}
    specs = {spec.name: spec for subject in facts.counts if (spec := served_by(subject, ack_wait_s)) is not None}
    for name in sorted(specs.keys() - names):
        spec = specs[name]
        yield Step(
            "create", "consumer", name, spec.stream, reason="its subject holds messages", config=consumer_config(spec)
        )


def _step(
    kind: Literal["stream", "consumer"],
    name: str,
    stream: str,
    current: dict[str, Any],
    desired: dict[str, Any],
    changes: tuple[FieldChange, ...],
    reason: str,
) -> Iterable[Step]:
    version = version_of(current)
    if version != TOPOLOGY_VERSION:
        changes = (FieldChange("topology version", version, TOPOLOGY_VERSION), *changes)
    if changes:
        yield Step("refuse" if reason else "update", kind, name, stream, changes, reason, update_of(current, desired))


def _changes(current: dict[str, Any], desired: dict[str, Any]) -> tuple[FieldChange, ...]:
    return tuple(FieldChange(name, current.get(name), desired[name]) for name in differences(current, desired))


def _newer(current: dict[str, Any]) -> str:
    version = version_of(current)
    return (
        f"topology {version} is newer than this version's {TOPOLOGY_VERSION}: use the newer `sie`"
        if version > TOPOLOGY_VERSION
        else ""
    )


def _fixed(changes: tuple[FieldChange, ...]) -> str:
    fixed = next((_FIXED[change.field] for change in changes if change.field in _FIXED), "")
    return (
        f"{fixed} cannot be changed in place: let the stream run empty, delete the stream or consumer, and start a "
        "gateway, which creates it again"
        if fixed
        else ""
    )


async def apply(broker: NatsAdministration, step: Step) -> None:
    """Create or update the stream or consumer of a step that is no refusal. Raises BrokerError."""
    if step.kind == "stream":
        await broker.api(f"STREAM.{step.action.upper()}.{step.name}", step.config, StreamInfo)
        return
    body = {"stream_name": step.stream, "action": step.action, "config": step.config}
    await broker.api(f"CONSUMER.CREATE.{step.stream}.{step.name}.{step.config['filter_subject']}", body, ConsumerInfo)
