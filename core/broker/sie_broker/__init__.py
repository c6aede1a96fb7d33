"""The interface to the message broker: what gateway, sidecar and config service need of it, as protocols.

    Bus              send, request, subscribe: messages that are delivered at most once
    Queue            publish, pulls, counts, delete: messages that are stored in streams
    Administration   a Queue that also creates, updates and deletes streams and consumers
    Store            buckets: replicated maps with revisions
    Broker           all of them, over one connection

Code that uses the broker takes the narrowest of them.

Implementations: `nats` (NATS JetStream, for a cluster) and `memory` (inside one process, for `sie serve --standalone`
and as a fake in tests that models ack wait, delays, delivery counts, limits and lost connections). One conformance
suite, `tests/contract/broker`, runs against both.

Delivery is at least once. After `ack_wait` a message is delivered again, to another holder, and an ack of the former
holder still removes it. So each holder must fence itself (see the sidecar's `lease`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


class BrokerError(Exception):
    """The broker refused, or could not be reached."""


class BrokerUnavailable(BrokerError):
    """No connection, or no answer in time. The operation may or may not have happened."""


class StreamFull(BrokerError):
    """The stream, or its share for this subject, is at its limit. The new message is refused; no stored one is lost."""


class PayloadTooBig(BrokerError):
    """The message is above the broker's `max_payload`, headers included. Nothing was sent."""


class NotPermitted(BrokerUnavailable):
    """The broker does not let this user publish there. Its permissions may be changed while processes run."""


class NoResponder(BrokerError):
    """Nobody listens on the subject of a request. The broker said so; it is not a time-out."""


class TopologyMismatch(BrokerError):
    """A stream or consumer exists with other settings. `field` names the first that differs."""

    def __init__(self, name: str, field: str, found: object, wanted: object) -> None:
        super().__init__(f"{name}: {field} is {found!r} at the broker, this process needs {wanted!r}")
        self.field = field


class WrongRevision(BrokerError):
    """A compare-and-set failed: a key was written after the given revision. Nothing of the batch was stored."""


@dataclass(frozen=True)
class CoreMessage:
    """A message delivered at most once. `reply` is empty unless the sender waits for an answer."""

    subject: str
    data: bytes
    reply: str = ""


@dataclass(frozen=True)
class Published:
    """The broker stores the message at `sequence`. `duplicate`: it was stored before, under the same message id."""

    sequence: int
    duplicate: bool = False


@dataclass(frozen=True)
class StreamState:
    """`created` changes when the stream was lost and created again. Counts include leased messages."""

    created: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int


@dataclass(frozen=True)
class ConsumerState:
    """The state of a durable consumer. `delivered` counts deliveries since it was created; `waiting` messages are
    neither leased nor removed.
    """

    name: str
    subject: str
    ack_wait_s: float
    version: int
    delivered: int
    waiting: int
    leased: int


@dataclass(frozen=True)
class StreamMessage:
    """A message as a stream stores it. `sent_s` is the broker's wall clock when it was stored."""

    sequence: int
    subject: str
    data: bytes
    sent_s: float


@dataclass(frozen=True)
class Entry:
    """A key's value at a revision. Revisions grow over the whole bucket. `value` is None for a removed key, which only
    `since` and `watch` show.
    """

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True)
class Write:
    """One write of an atomic batch. `value` None removes the key. `expected` is the key's revision, 0 for "must not
    exist", None for "any".

    Raises ValueError for a key that cannot be part of a subject, so that every implementation refuses the same keys.
    """

    key: str
    value: bytes | None
    expected: int | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"key {self.key[:70]!r}: expected tokens of letters, digits, -, _, = or /, joined by dots")


class Delivery(Protocol):
    """A leased message. `sent_s` is the broker's wall clock when it was first stored. `pending` is the number of
    messages that the consumer has not delivered yet.

    `reply` names this delivery to `Queue.release`, also after a restart of this process.
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
        """The message is done: remove it."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Deliver it again, to any holder, not before `delay_s`."""

    async def in_progress(self) -> None:
        """Restart its ack wait."""

    async def term(self, reason: str) -> None:
        """Never deliver it again; remove it."""


class Subscription(Protocol):
    async def stop(self) -> None:
        """Stop receiving. Messages that have arrived are handled before this returns."""


class Pulls(Protocol):
    """The open pulls of one process on many consumers of a stream.

    Every delivery arrives once, through the handler given at creation, which must not block. An open pull outlives its
    expiry, a reconnect and a lost status: it is issued again until it is filled or `want` lowers it.
    """

    def want(self, consumer: str, credit: int) -> None:
        """Keep `credit` deliveries outstanding for `consumer`; each delivery uses one up. A lower credit takes effect
        within 5 s.
        """

    def outstanding(self, consumer: str) -> int:
        """Deliveries that the broker may still send for this consumer."""

    async def stop(self) -> None:
        """Withdraw all pulls. Deliveries already on the wire reach the handler before this returns."""


class KeyValue(Protocol):
    """A replicated map with revisions."""

    async def get(self, key: str) -> Entry | None: ...

    async def entries(self, within: str = "") -> list[Entry]:
        """All live keys, sorted. With `within`, only the keys below it ("model" gives "model.a", not "models.a")."""

    async def since(self, revision: int) -> list[Entry]:
        """The keys written after a revision, removed keys too, in order of their revisions. A key that was written
        twice appears once, with its last value.

        A replica of the broker may answer that has not applied the last writes.
        """

    async def write(self, writes: list[Write]) -> int:
        """Write all or nothing; a key may appear once. Returns the bucket's last revision. Raises WrongRevision,
        BrokerUnavailable.
        """

    async def purge(self, within: str) -> None:
        """Remove the keys below `within` as if they had never been: watches and `since` do not report it."""

    async def epoch(self) -> str:
        """`created:last revision`. Equal epochs mean equal contents, also if the bucket was lost and created again."""

    async def reaches(self, revision: int) -> bool:
        """Whether the leader still has a write at `revision` or after it. The last writes of a bucket may be gone: they
        expired, or a file of the broker was damaged.
        """

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        """Call `handler` for each write after revision `after`, once, in order, across reconnects.

        A write that a later write of the same key has replaced may be skipped: a bucket keeps the last one.
        """


class Connection(Protocol):
    """One connection. Operations wait for the broker at most their `timeout_s` and then raise BrokerUnavailable."""

    name: str
    max_payload: int
    owns_streams: bool  # it asks no owner of streams for those that it makes
    troubles: dict[str, str]  # why a bucket or stream cannot be used at present, by its name: for readiness

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None: ...

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Return when the broker has received all that was sent."""

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        """Call `handler` after each re-established connection."""


class Bus(Connection, Protocol):
    """Messages that are delivered at most once, to those who listen now."""

    async def send(self, subject: str, data: bytes, reply: str = "") -> None: ...

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
        """The messages of one subscription are handled one after the other. An exception in `handler` is logged, and
        the next message follows.

        While `held_messages` messages or `held_bytes` bytes wait for `handler`, a new message is dropped, and
        `on_dropped` is called with its subject. None: a limit that only a handler that blocks for long can reach.
        """

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """The first answer. Raises NoResponder at once, BrokerUnavailable at the time-out."""


class Queue(Connection, Protocol):
    """Messages that are stored in streams and delivered at least once: what publishers and consumers need."""

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        """Store in the stream of `subject`, once per message id within the duplicate window. Raises StreamFull,
        BrokerUnavailable.
        """

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls: ...

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        """Messages per subject, waiting and leased, with or without consumers."""

    async def stream_state(self, stream: str) -> StreamState: ...

    async def delete(self, stream: str, sequence: int) -> bool:
        """Remove a message, waiting or leased. False if it does not exist any more."""

    async def release(self, reply: str) -> None:
        """Deliver a leased message again at once, as its `nak` would. No effect if it is settled. Raises ValueError for
        a `reply` that names no delivery.

        It is for the leases that an earlier process of the same holder left. If the lease has gone to another holder,
        the message is then leased twice.
        """

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> StreamMessage | None:
        """The first message at `sequence` or above whose subject matches `subject`, waiting or leased; None if there is
        none.
        """

    async def server_time(self, stream: str) -> float:
        """The wall clock, in seconds since 1970, of the server that stamps this stream's messages, read during this
        call.
        """

    async def consumers(self, stream: str) -> list[str]:
        """Names of all durable consumers."""

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        """Call `handler(name, exists)` when a consumer of the stream is created or deleted from now on. A hint:
        messages may be lost.
        """


class Administration(Queue, Protocol):
    """A queue whose streams and consumers can be created, updated and deleted."""

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        """Ensure a stream. The owner creates it, or updates it from an older topology version; any other process
        compares only. Raises TopologyMismatch.

        An update that could drop messages, because a subject holds nearly as many as its new limit, is refused until
        they are done.
        """

    async def delete_stream(self, stream: str) -> bool:
        """Delete it with its messages and consumers. False if there is none. Open pulls then deliver nothing, and acks
        have no effect.
        """

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        """Create; if it exists compare, and update only from an older topology version. Raises TopologyMismatch."""

    async def delete_consumer(self, stream: str, name: str) -> bool:
        """Delete a durable consumer. False if there is none. Its leased messages wait for its successor; acks of these
        leases have no effect.
        """

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        """All durable consumers. Each state is read at its own moment."""


class Store(Connection, Protocol):
    """Buckets."""

    async def key_value(
        self,
        bucket: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> KeyValue:
        """Open a bucket; create it if it does not exist.

        In a new bucket a key expires `max_age_s` after its last write (0: never), and a removed key is not known as
        removed any more after `removed_age_s` (0: always). Watches do not report that.
        """


class Broker(Bus, Administration, Store, Protocol):
    """All of it, over one connection."""
