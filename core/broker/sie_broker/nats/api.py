"""JetStream API: structs for its replies, exceptions for its error codes, and settings of streams and consumers."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from sie_broker import (
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    StreamFull,
    StreamState,
    TopologyMismatch,
    WrongRevision,
)
from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

# Largest number of pull requests that wait at one consumer. A busy worker has a few dozen, because each increase of its
# credit is a separate pull request. So the workers of a large pool would exceed the broker's default of 512.
_MAX_WAITING_PULLS = 8192

Row = TypeVar("Row")
_VERSION_KEY = "sie.topology"
_STORE_FAILED = 10077
NO_STREAM, NO_CONSUMER, NO_MESSAGE = 10059, 10014, (10037, 10043, 10057)
STREAM_EXISTS, CONSUMER_EXISTS = 10058, 10148
CONSUMER_GONE = {NO_CONSUMER, 10149}  # codes for a request about a consumer that does not exist or is being deleted
_WRONG_SEQUENCE, _BATCH_INCOMPLETE = {10071, 10164}, 10176
_SPEC_FIELDS = {
    "max_age": "max_age_s",
    "max_msgs_per_subject": "max_per_subject",
    "num_replicas": "replicas",
    "duplicate_window": "duplicate_window_s",
    "ack_wait": "ack_wait_s",
    "filter_subject": "subject",
}
# settings that are not compared: `metadata`, because the broker adds entries; `mem_storage`, because the broker refuses
# to change it for an existing consumer
_NEVER_COMPARED = {"metadata", "mem_storage"}
# settings that are not updated: the filter, because some server versions accept a filter that overlaps the filter of
# another consumer, and then deliver a message twice; the ack policy, because the broker refuses a change
NEVER_UPDATED = {"filter_subject", "ack_policy"}


# Settings by which a stream copies messages from other streams, or publishes its messages again on other subjects. They
# are None for all streams of SIE.
_TO_ITSELF = dict.fromkeys(("republish", "mirror", "sources", "subject_transform"))


class ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class ApiReply(msgspec.Struct):
    error: ApiError | None = None


class ApiState(msgspec.Struct):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    subjects: dict[str, int] = {}
    num_subjects: int = 0


class StreamInfo(msgspec.Struct):
    created: str
    config: dict[str, Any]
    state: ApiState
    total: int = 0
    ts: datetime | None = None  # wall clock of the stream's leader at the time of the reply


class Delivered(msgspec.Struct, frozen=True):
    consumer_seq: int = 0


class ConsumerInfo(msgspec.Struct):
    config: dict[str, Any]
    num_pending: int = 0
    num_ack_pending: int = 0
    name: str = ""
    delivered: Delivered = Delivered()


class ListPage(msgspec.Struct, Generic[Row]):
    """Part of a list of `total` streams or consumers."""

    total: int
    streams: list[Row] | None = None
    consumers: list[Row] | None = None


class ApiMessage(msgspec.Struct):
    seq: int
    time: datetime
    subject: str = ""
    data: bytes = b""
    hdrs: bytes = b""


class StoredAnswer(msgspec.Struct):
    message: ApiMessage


class Refusal(BrokerError):
    """Error of the JetStream API whose code has no exception class in `sie_broker`. `number`: the code."""

    def __init__(self, act: str, error: ApiError) -> None:
        super().__init__(f"{act}: {error.description} ({error.err_code})")
        self.number = error.err_code


def error_of(act: str, error: ApiError) -> BrokerError:
    full = "maximum" in error.description and "exceeded" in error.description
    if error.err_code == _STORE_FAILED or full:
        return StreamFull(f"{act}: {error.description}")
    if error.err_code in _WRONG_SEQUENCE:
        return WrongRevision(f"{act}: {error.description}")
    if error.code == 503 or error.err_code == _BATCH_INCOMPLETE:
        return BrokerUnavailable(f"{act}: {error.description}")
    return Refusal(act, error)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def stream_config(spec: StreamSpec) -> dict[str, Any]:
    # the broker refuses a duplicate window that is longer than the age limit of the messages
    window_s = min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "discard": "new" if spec.retention == "workqueue" else "old",
        "max_msgs_per_subject": spec.max_per_subject if spec.max_per_subject > 0 else -1,
        "discard_new_per_subject": spec.max_per_subject > 0,
        "max_bytes": spec.max_bytes if spec.max_bytes > 0 else -1,
        "max_age": nanoseconds(spec.max_age_s),
        "duplicate_window": nanoseconds(window_s),
        "storage": spec.storage,
        "num_replicas": spec.replicas,
        "allow_direct": True,
        "metadata": {_VERSION_KEY: str(spec.version)},
        **_TO_ITSELF,
    }


def consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "durable_name": spec.name,
        "filter_subject": spec.subject,
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(spec.ack_wait_s),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "max_waiting": _MAX_WAITING_PULLS,
        # The broker keeps the leases of a consumer in memory, and delivers leased messages again after a restart. With
        # leases in files, the broker would write the leases of each busy consumer ten times per second. For 200
        # consumers, these writes need 10 times the CPU time of the broker's other work (bench/broker.py).
        "mem_storage": True,
        "metadata": {_VERSION_KEY: str(spec.version)},
    }


def update_of(current: dict[str, Any], desired: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration for an update: `desired`, plus the settings and metadata that only `current` has."""
    config = {**current, **desired, "metadata": {**(current.get("metadata") or {}), **desired["metadata"]}}
    if "mem_storage" in desired:
        # the broker refuses to change this setting of an existing consumer
        config["mem_storage"] = current.get("mem_storage", False)
    return config


def limits_of(config: dict[str, Any]) -> tuple[int, int]:
    """Return the limits of messages per subject and of bytes in a stream's configuration; 0 or -1: no limit."""
    return config.get("max_msgs_per_subject", 0), config.get("max_bytes", 0)


def bucket_config(name: str, bucket: str) -> dict[str, Any]:
    """Return the settings that all buckets have in common. Storage, replicas, ages and duplicate window can differ."""
    return {
        "name": name,
        "subjects": [f"$KV.{bucket}.>"],
        "retention": "limits",
        "max_msgs_per_subject": 1,
        "discard": "new",
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_atomic": True,
        **_TO_ITSELF,
    }


def differences(current: dict[str, Any], desired: dict[str, Any]) -> list[str]:
    """Return the names of the settings in `desired` that differ in `current`, except _NEVER_COMPARED. A missing setting
    counts as zero or empty, because the broker omits zero and empty settings.
    """
    return [
        name
        for name, value in desired.items()
        if name not in _NEVER_COMPARED and current.get(name, type(value)()) != value
    ]


def difference(current: dict[str, Any], desired: dict[str, Any]) -> str | None:
    return next(iter(differences(current, desired)), None)


def version_of(config: dict[str, Any]) -> int:
    """Return the topology version in the metadata of a stream or consumer: the version of the process that last created
    or updated it; 0 if SIE has not created it.
    """
    text = (config.get("metadata") or {}).get(_VERSION_KEY, "")
    return int(text) if text.isdigit() else 0


def mismatch(name: str, field: str, current: dict[str, Any], desired: dict[str, Any]) -> TopologyMismatch:
    return TopologyMismatch(name, _SPEC_FIELDS.get(field, field), current.get(field), desired[field])


def state_of(info: StreamInfo) -> StreamState:
    state = info.state
    return StreamState(info.created, state.messages, state.bytes, state.first_seq, state.last_seq)


def consumer_state_of(info: ConsumerInfo) -> ConsumerState:
    config = info.config
    return ConsumerState(
        info.name,
        config.get("filter_subject", ""),
        config.get("ack_wait", 0) / 1e9,
        version_of(config),
        info.delivered.consumer_seq,
        info.num_pending,
        info.num_ack_pending,
    )
