"""Buckets: maps with revisions, stored as streams with one message per key. A watch reads the entries in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

from sie_broker import BrokerError, BrokerUnavailable, Entry, KeyValue, Subscription, Write, WrongRevision
from sie_broker.limits import API_TIMEOUT_S, STOP_TIMEOUT_S
from sie_broker.nats.api import (
    NO_MESSAGE,
    ApiReply,
    ConsumerInfo,
    StoredAnswer,
    bucket_config,
    difference,
    mismatch,
    nanoseconds,
)
from sie_broker.nats.client import JetStream, NatsDelivery, publish_ack
from sie_broker.nats.transport import FIRST_RETRY_S, MAX_RETRY_S
from sie_broker.tasks import guarded
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import DUPLICATE_WINDOW_S

log = logging.getLogger("sie.broker")

_WATCH_CREDIT = 256  # largest number of entries that a watch has requested and not yet handled
_WATCH_KEPT_S = 30.0  # seconds without a pull after which the broker deletes the consumer of a read or watch
_READ_CHECK_S = 1.0  # seconds without entries after which a read asks the broker whether it has all entries
_WATCH_CHECK_S = 5.0  # seconds without entries after which a watch asks the broker whether it missed entries
_NAME = str.maketrans(dict.fromkeys(". */\\>\t", "-"))


class NatsKeyValue:
    """Bucket, stored in the stream `KV_<bucket>` with one message per key. The message of a removed key is a marker. A
    marker expires after `removed_age_s` seconds. With 0, a marker expires like any other message of the bucket.
    """

    def __init__(self, jetstream: JetStream, bucket: str, removed_age_s: float = 0.0) -> None:
        self._jetstream = jetstream
        self._removal = {"KV-Operation": "DEL"}
        if removed_age_s:
            self._removal["Nats-TTL"] = f"{max(1, round(removed_age_s))}s"  # the broker refuses a TTL below one second
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str) -> Entry | None:
        entry = await self._last(key)
        return entry if entry is not None and entry.value is not None else None

    async def _last(self, key: str) -> Entry | None:
        # The leader of the stream is read, because a replica may lack the last write of this process.
        query = {"last_by_subj": self._prefix + key}
        stored = await self._jetstream.find(f"STREAM.MSG.GET.{self._stream}", query, StoredAnswer, *NO_MESSAGE)
        if stored is None:
            return None
        removed = b"\r\nKV-Operation:" in stored.message.hdrs
        return Entry(key, None if removed else stored.message.data, stored.message.seq)

    async def entries(self, within: str = "") -> list[Entry]:
        entries = await self._read(1, within)
        return sorted((entry for entry in entries if entry.value is not None), key=lambda entry: entry.key)

    async def since(self, revision: int) -> list[Entry]:
        return sorted(await self._read(revision + 1), key=lambda entry: entry.revision)

    async def _read(self, first: int, within: str = "") -> list[Entry]:
        """Return the last entry of each key that was written at revision `first` or later, including removed keys."""
        entries: dict[str, Entry] = {}
        complete: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        count = 0  # number of deliveries that have arrived

        def arrived(delivery: NatsDelivery) -> None:
            nonlocal count
            count = delivery.consumer_sequence
            entry = self.entry(delivery)
            entries[entry.key] = entry
            if not delivery.pending and not complete.done():
                complete.set_result(True)
            elif not pulls.outstanding(delivery.consumer):
                pulls.want(delivery.consumer, delivery.pending)

        def broken() -> None:
            if not complete.done():
                complete.set_result(False)

        async with self._jetstream.reading:
            reader, pending = await self.open_reader(first, within)
            pulls = self._jetstream.open_pulls(self._stream, arrived, broken)
            try:
                if pending:
                    pulls.want(reader, pending)
                    await self._progress(reader, complete, lambda: count)
            finally:
                await pulls.stop()
                await self.close_reader(reader)
        return list(entries.values())

    async def _progress(self, reader: str, complete: asyncio.Future[bool], arrived: Callable[[], int]) -> None:
        """Wait until a read is complete. `arrived` returns the number of deliveries so far. An entry that expires or is
        purged during the read never arrives. So after _READ_CHECK_S without a delivery, ask the broker whether entries
        are left. Raises BrokerUnavailable after API_TIMEOUT_S without a delivery, or if deliveries may be lost.
        """
        quiet_s = 0.0
        while not complete.done():
            before = arrived()
            await asyncio.wait({complete}, timeout=_READ_CHECK_S)
            if complete.done() or arrived() != before:
                quiet_s = 0.0
                continue
            quiet_s += _READ_CHECK_S
            info = await self._jetstream.api(f"CONSUMER.INFO.{self._stream}.{reader}", {}, ConsumerInfo)
            if not info.num_pending and info.delivered.consumer_seq == arrived():
                return
            if quiet_s >= API_TIMEOUT_S:
                raise BrokerUnavailable(
                    f"{self._stream}: {before} entries were read, then none for {API_TIMEOUT_S} s; if that persists, "
                    f"the stream's files are damaged: run `sie repair {self._stream}`"
                )
        if not complete.result():
            raise BrokerUnavailable(
                f"{self._stream}: the connection or the consumer was lost after {arrived()} entries were read"
            )

    async def write(self, writes: list[Write]) -> int:
        if not writes or len({write.key for write in writes}) != len(writes):
            raise ValueError("a batch must write at least one key, and each key only once")
        expected = [write.expected for write in writes]
        while True:
            try:
                return await self._commit(writes, expected)
            except WrongRevision:
                # A removed key may have a marker with a revision. The broker then refuses a write that expects revision
                # 0, so the next attempt expects the revision of the marker.
                marks = [await self._mark(write) for write in writes]
                if marks == expected:
                    raise
                expected = marks

    async def _mark(self, write: Write) -> int | None:
        if write.expected != 0:
            return write.expected
        last = await self._last(write.key)
        return last.revision if last is not None and last.value is None else 0

    async def _commit(self, writes: list[Write], expected: list[int | None]) -> int:
        await self._jetstream.reach(API_TIMEOUT_S)
        batch = secrets.token_hex(16)
        for number, (write, revision) in enumerate(zip(writes, expected, strict=True), 1):
            headers = {} if revision is None else {"Nats-Expected-Last-Subject-Sequence": str(revision)}
            if write.value is None:
                headers |= self._removal
            if len(writes) > 1:
                headers |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            subject = self._prefix + write.key
            if number < len(writes):
                await self._jetstream.post(subject, write.value or b"", headers=headers)
        if len(writes) > 1:
            headers["Nats-Batch-Commit"] = "1"
        answer = await self._jetstream.roundtrip(subject, writes[-1].value or b"", API_TIMEOUT_S, headers)
        return publish_ack(subject, answer).seq

    async def purge(self, within: str) -> None:
        purged = {"filter": f"{self._prefix}{within}.>"}
        await self._jetstream.api(f"STREAM.PURGE.{self._stream}", purged, ApiReply)

    async def erase(self, entry: Entry) -> None:
        purged = {"filter": f"{self._prefix}{entry.key}", "seq": entry.revision + 1}
        await self._jetstream.api(f"STREAM.PURGE.{self._stream}", purged, ApiReply)

    async def epoch(self) -> str:
        state = await self._jetstream.stream_state(self._stream)
        return f"{state.created}:{state.last_sequence}"

    async def reaches(self, revision: int) -> bool:
        query = {"seq": max(1, revision), "next_by_subj": f"{self._prefix}>"}
        return (
            await self._jetstream.find(f"STREAM.MSG.GET.{self._stream}", query, StoredAnswer, *NO_MESSAGE) is not None
        )

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        watch = _KeyValueWatch(self._jetstream, self, self._stream, handler, after)
        try:
            await watch.open()
        except BrokerError:
            await watch.stop()
            raise
        return watch

    async def open_reader(self, first: int, within: str = "") -> tuple[str, int]:
        """Create a reader: a consumer that begins at revision `first`. Return (name, number of entries to deliver)."""
        name = f"{self._jetstream.name}-{secrets.token_hex(6)}".translate(_NAME)
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "ack_policy": "none",
            "filter_subject": f"{self._prefix}{within}.>" if within else f"{self._prefix}>",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": nanoseconds(_WATCH_KEPT_S),
        }
        verb = f"CONSUMER.CREATE.{self._stream}.{name}"
        info = await self._jetstream.api(
            verb, {"stream_name": self._stream, "action": "create", "config": config}, ConsumerInfo
        )
        return name, info.num_pending

    async def close_reader(self, name: str) -> None:
        try:
            await self._jetstream.delete_consumer(self._stream, name)
        except BrokerError as error:
            log.info(
                "stream %s: consumer %s was not deleted; the broker drops it after %s s: %s",
                self._stream,
                name,
                _WATCH_KEPT_S,
                error,
            )

    def entry(self, delivery: NatsDelivery) -> Entry:
        removed = delivery.headers is not None and "KV-Operation" in delivery.headers
        return Entry(delivery.subject[len(self._prefix) :], None if removed else delivery.data, delivery.sequence)


class _KeyValueWatch:
    """Watch of a bucket. It reads the entries in order from a consumer, the reader. If it may have missed entries, it
    creates a new reader that begins after the last handled revision.
    """

    def __init__(
        self,
        jetstream: JetStream,
        bucket: NatsKeyValue,
        stream: str,
        handler: Callable[[Entry], Awaitable[None]],
        after: int,
    ) -> None:
        self._jetstream = jetstream
        self._bucket = bucket
        self._stream = stream
        self._handler = handler
        self._last = after
        self._created = ""
        self._reader = ""
        self._read = 0
        # (last handled revision, last revision of the bucket) at the last check that found missing entries
        self._checked = (0, 0)
        self._held: deque[NatsDelivery] = deque()  # at most _WATCH_CREDIT deliveries that are not handled yet
        self._retry_s = 0.0
        self._stopping = False
        self._wake = asyncio.Event()
        self._pulls = jetstream.open_pulls(stream, self._arrived, self._broken)
        self._task = jetstream.own(self._run(), f"watch of {stream}")

    async def open(self) -> None:
        state = await self._jetstream.stream_state(self._stream)
        if self._created and self._created != state.created:
            self._last = 0  # another process has deleted the bucket and created a new one, so all entries are new
        self._reader, pending = await self._bucket.open_reader(self._last + 1)
        if not pending:
            # the bucket has no entries after `_last`, so the watch continues after the last revision of the bucket
            self._last = max(self._last, state.last_sequence)
        self._created = state.created
        self._read = 0
        self._retry_s = 0.0
        self._pulls.want(self._reader, _WATCH_CREDIT)

    async def stop(self) -> None:
        self._stopping = True
        await self._pulls.stop()
        self._wake.set()
        await asyncio.wait({self._task}, timeout=STOP_TIMEOUT_S)
        self._task.cancel()
        if self._reader:
            await self._bucket.close_reader(self._reader)

    def _arrived(self, delivery: NatsDelivery) -> None:
        if delivery.consumer != self._reader:
            return
        self._read += 1
        if delivery.consumer_sequence != self._read:
            self._broken()
            return
        self._held.append(delivery)
        self._wake.set()

    def _broken(self) -> None:
        if self._reader:
            self._pulls.want(self._reader, 0)
            self._reader = ""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            silent = not await self._woken()
            while self._held:
                entry = self._bucket.entry(self._held.popleft())
                self._last = entry.revision
                await guarded(f"the handler of a watch of {self._stream}", self._handler(entry))
                if self._reader and self._pulls.outstanding(self._reader) + len(self._held) <= _WATCH_CREDIT // 2:
                    self._pulls.want(self._reader, _WATCH_CREDIT - len(self._held))
            if self._stopping:
                return
            if self._created and not self._reader:
                await self._reopen()
            elif silent and self._reader:
                await self._check()

    async def _woken(self) -> bool:
        try:
            async with asyncio.timeout(_WATCH_CHECK_S):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True

    async def _check(self) -> None:
        """Check for missed entries. A broker that has crashed may never answer the pull requests of this watch."""
        try:
            state = await self._jetstream.stream_state(self._stream)
            is_behind = state.created != self._created or state.last_sequence > self._last
            if is_behind and state.created == self._created and not await self._bucket.reaches(self._last + 1):
                # these entries never arrive, because they have expired or were lost with a damaged file
                log.info("stream %s: the entries after revision %d do not exist any more", self._stream, self._last)
                self._last, is_behind = state.last_sequence, False
        except BrokerError as error:
            log.info("the watch of stream %s could not check for missed entries: %s", self._stream, error)
            return
        if not is_behind:
            return
        if state.created != self._created or (not self._held and self._checked == (self._last, state.last_sequence)):
            log.warning(
                "the watch of stream %s missed the entries after revision %d and reads them now",
                self._stream,
                self._last,
            )
            await self._pulls.retire()  # the present inbox may never get these entries
        # The missing entries may still arrive. They count as missed if neither the last handled revision nor the last
        # revision of the bucket has changed at the next check.
        self._checked = (self._last, state.last_sequence)

    async def _reopen(self) -> None:
        try:
            await self.open()
        except BrokerError as error:
            if not self._retry_s:
                log.warning("the watch of stream %s cannot continue yet: %s", self._stream, error)
            self._retry_s = min(MAX_RETRY_S, max(FIRST_RETRY_S, self._retry_s * 2))
            spread = 0.5 + secrets.randbelow(1000) / 1000
            asyncio.get_running_loop().call_later(self._retry_s * spread, self._wake.set)


class NatsStore(JetStream):
    async def key_value(
        self,
        bucket: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> KeyValue:
        name = f"KV_{bucket}"
        desired = bucket_config(name, bucket)
        window_s = min(DUPLICATE_WINDOW_S, max_age_s or DUPLICATE_WINDOW_S)
        chosen = {
            "storage": storage,
            "num_replicas": replicas,
            "duplicate_window": nanoseconds(window_s),
            "max_age": nanoseconds(max_age_s),
            "allow_msg_ttl": removed_age_s > 0,
        }
        request = StreamRequest(
            name, storage=storage, replicas=replicas, max_age_s=max_age_s, removed_age_s=removed_age_s
        )
        info = await self.create_stream(request, {**desired, **chosen})
        if info is None:
            raise BrokerUnavailable(f"{name} was deleted by another process while it was opened")
        field = difference(info.config, desired)
        if field is not None:
            raise mismatch(name, field, info.config, desired)
        return NatsKeyValue(self, bucket, removed_age_s if info.config.get("allow_msg_ttl") else 0.0)
