"""The small interface to the queue that gateway, sidecar and config service speak to.

Implementations: `nats` (JetStream, the cluster) and `memory` (one process: `sie serve --standalone`, and a fake for
tests that models ack wait, delays, delivery counts, limits and lost connections). One conformance suite runs against
both.

Delivery is at least once. Settlement is advisory for a stale holder: after `ack_wait` a message is delivered again
under a new holder, and an ack of the old holder still removes it, so whoever holds a message fences itself (see the
sidecar's `lease`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sie_contracts.topology import ConsumerSpec, StreamSpec

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


class BrokerError(Exception):
    """The broker refused, or could not be reached."""


class BrokerUnavailable(BrokerError):
    """No connection, or no answer in time. The operation may or may not have happened."""


class StreamFull(BrokerError):
    """The stream, or its share for this subject, is at its limit. The newest is refused; nothing stored was dropped."""


class PayloadTooBig(BrokerError):
    """The message is above the broker's `max_payload`, headers included. Nothing was sent."""


class NoResponder(BrokerError):
    """Nobody listens on the subject of a request: a fact, not a time-out."""


class TopologyMismatch(BrokerError):
    """A stream or consumer exists with other settings. `field` names the first that differs."""

    def __init__(self, name: str, field: str, found: object, wanted: object) -> None:
        super().__init__(f"{name}: {field} is {found!r} at the broker, this process needs {wanted!r}")
        self.field = field


class WrongRevision(BrokerError):
    """A compare-and-set lost: some key was written since the given revision. Nothing of the batch was stored."""


@dataclass(frozen=True)
class CoreMessage:
    """An at-most-once message. `reply` is empty unless somebody waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(frozen=True)
class Published:
    """The broker holds the message at `sequence`. `duplicate`: it already did, under the same message id."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True)
class StreamState:
    """`created` changes when the stream was lost and made anew. Counts include leased messages."""

    created: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int


@dataclass(frozen=True)
class ConsumerState:
    """A durable consumer as it is. `delivered` counts deliveries since it was made; `waiting` messages are neither
    leased nor gone.
    """

    name: str
    subject: str
    ack_wait_s: float
    version: int
    delivered: int
    waiting: int
    leased: int


@dataclass(frozen=True)
class Stored:
    """A message as a stream holds it. `sent_s` is the broker's wall clock when it was stored."""

    sequence: int
    subject: str
    data: bytes
    sent_s: float


@dataclass(frozen=True)
class Entry:
    """A key's value at a revision. Revisions grow over the whole bucket. `value` is None for a removed key (only in
    watches).
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Write:
    """One write of an atomic batch. `value` None removes. `expected`: the key's revision, 0 for "must not exist", None
    for "whatever".

    Raises ValueError for a key that no subject can hold, so that every implementation refuses the same ones.
    """

    key: str
    value: bytes | None
    expected: int | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"key {self.key[:70]!r}: expected tokens of letters, digits, -, _, = or /, joined by dots")


class Delivery(Protocol):
    """A leased message. `sent_s` is the broker's wall clock when it was first stored; `pending` what its consumer still
    holds back.

    `reply` names this delivery to `Broker.release`, also over a restart of this process.
    """

    reply: str
    data: bytes
    subject: str
    consumer: str
    sequence: int
    delivered: int
    sent_s: float
    pending: int

    async def ack(self) -> None:
        """Done: remove it."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Somebody else may do better, not before `delay_s`."""

    async def in_progress(self) -> None:
        """Restart its ack wait."""

    async def term(self, reason: str) -> None:
        """Never deliver it again; remove it."""


class Subscription(Protocol):
    async def stop(self) -> None:
        """Stop receiving; what has arrived is still handled before this returns."""


class Pulls(Protocol):
    """Open pulls of one process on many consumers of a stream.

    Every delivery arrives once, through the handler given at creation, which must not block. An open pull outlives its
    expiry, a reconnect and a lost status: it is issued again until it is filled or `want` lowers it.
    """

    def want(self, consumer: str, credit: int) -> None:
        """Have `credit` deliveries outstanding for `consumer`; each delivery uses one up. Lowering takes effect within
        5 s.
        """

    def outstanding(self, consumer: str) -> int:
        """Deliveries that the broker may still send for it."""

    async def stop(self) -> None:
        """Withdraw all pulls. Deliveries already on the wire reach the handler before this returns."""


class KeyValue(Protocol):
    """A replicated map with revisions."""

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, within: str = "") -> list[Entry]:
        """All live keys, sorted; those whose first parts are `within` if it is given ("model": "model.a", not
        "models.a").
        """

    async def since(self, revision: int) -> list[Entry]:
        """What was written after a revision, in order, removed keys too. A key that was written twice is there once, as
        it is now.

        A replica of the broker may answer that has not seen the last of it.
        """

    async def write(self, writes: list[Write]) -> int:
        """All or nothing, each key once at most. Returns the bucket's last revision. Raises WrongRevision,
        BrokerUnavailable.
        """

    async def epoch(self) -> str:
        """`created:last revision`: equal epochs mean equal contents, also over a bucket that was lost and made anew."""

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        """Call `handler` for each write after revision `after`, in order, across reconnects, each once.

        A write that another of its key has replaced may be left out: a bucket keeps the last one.
        """


class Broker(Protocol):
    """One connection. Operations wait for the broker at most their `timeout_s` and then raise BrokerUnavailable."""

    name: str
    max_payload: int

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None: ...

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Return when the broker has received all that was sent."""

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call `handler` after each re-established connection."""

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """At most once, to whoever listens now."""

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str = "",
        *,
        held_messages: int | None = None,
        held_bytes: int | None = None,
        on_dropped: Callable[[str], None] | None = None,
    ) -> Subscription:
        """Messages of one subscription are handled one after the other. An exception in `handler` is logged and the
        next one follows.

        What arrives while so many messages, or bytes, wait for `handler` is dropped; `on_dropped` is called with its
        subject. None: a limit that only a handler that stands still for long can reach.
        """

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """The first answer. Raises NoResponder at once, BrokerUnavailable at the time-out."""

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        """As owner: create, or update from an older topology version. Otherwise compare only. Raises TopologyMismatch.

        An update that would cost messages, because a subject holds nearly as many as it may from now on, is refused
        until they are done.
        """

    async def stream_state(self, stream: str) -> StreamState: ...

    async def delete_stream(self, stream: str) -> bool:
        """Remove it with its messages and consumers. False if there is none. Open pulls find nothing there any more,
        acks are void.
        """

    async def server_time(self, stream: str) -> float:
        """The wall clock, in seconds since 1970, of the server that stamps this stream's messages, at some moment of
        this call.
        """

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        """Messages per subject, waiting and leased, with or without consumers."""

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create; if it exists compare, and update only from an older topology version. Raises TopologyMismatch."""

    async def delete_consumer(self, stream: str, name: str) -> bool:
        """Remove a durable. False if there is none. What it held leased waits for its successor; acks of these leases
        are void.
        """

    async def consumers(self, stream: str) -> list[str]:
        """Names of all durable consumers."""

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        """All durable consumers. One moment each, not one for all of them."""

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        """Call `handler(name, exists)` when a consumer of the stream is created or deleted from now on. A hint:
        messages may be lost.
        """

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        """Store in the stream of `subject`, once per message id within the duplicate window. Raises StreamFull,
        BrokerUnavailable.
        """

    async def delete(self, stream: str, sequence: int) -> bool:
        """Remove a message, waiting or leased. False if it is gone already."""

    async def release(self, reply: str) -> None:
        """Have a delivery come again at once, as its `nak` would; void if it is settled. Raises ValueError for what
        names no delivery.

        For what an earlier process of the same holder left leased. Of a lease that has gone to somebody else it makes a
        second one.
        """

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> Stored | None:
        """The first message at `sequence` or above that falls under `subject`, waiting or leased; None if there is
        none.
        """

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls: ...

    async def key_value(
        self, bucket: str, *, storage: str = "file", replicas: int = 1, max_age_s: float = 0.0
    ) -> KeyValue:
        """Open a bucket, creating it if it is not there.

        In a new one keys are gone `max_age_s` after their last write (0: never), without a word to watches.
        """
