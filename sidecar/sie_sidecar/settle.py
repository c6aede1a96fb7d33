"""End of work items. `Settle` builds one result for each work item. `ResultDelivery` sends the result as a request to
the gateway's inbox, and repeats the request until the gateway confirms the result or the deadline passes. Only then it
acknowledges the message. `Leases` renews the leases of the messages.

    Settle.answer ──task──► Settle._answer ──► ResultDelivery.send ──► _send ──► _deliver: one message
                                                                         └──► _deliver_parts ──► _deliver: each part

    results that are ready together, for one gateway ──► `_together`: one request ──► a verdict on each result
    result that fits into a message ──► one request ──► verdict: taken, duplicate or unknown
    larger result ──► parts, one after the other, each repeated until confirmed ──► verdict on the last part: taken
                      if that verdict is `part`, the gateway lacks parts or the data is damaged: all parts are sent
                      again, MAX_ROUNDS times in all

`unknown`: the gateway has no request that waits for this result.

`LeaseLedger` records the leased deliveries in a file that outlives the process. If the process is killed, the next
process returns these deliveries to the queue at once, before their leases have ended.

    delivery leased ──► record in a slot of the file ──► lease ended: slot cleared
    process killed  ──► the next process reads the slots and returns the deliveries

The file is mapped into memory and has its full size from the start. A record is at most 512 bytes and is written
without a system call. If the process dies, the kernel keeps the record. A disk that becomes full later does no harm.
After a crash of the machine, the file is not needed: the leases have ended when the machine runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sie_broker import BrokerError, BrokerUnavailable, Bus, Delivery, NoResponder, PayloadTooBig, Queue
from sie_contracts.errors import UNDECODABLE, GatewayTimeout, InternalFailure, SIEError
from sie_contracts.wire import ipc, messages
from sie_contracts.wire.messages import BatchNote, Failed, Fragment, Ok, Outcome, WorkItem, WorkResult, WorkResults
from sie_contracts.wire.trace_context import Context
from sie_runtime.current_trace import TRACE_ID, set_current
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks, Trouble
from sie_sidecar import spans
from sie_sidecar.dead_letters import DeadLetterWriter
from sie_sidecar.in_flight import InFlight, Inventory, Lease, changed, stages_of
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.poison import refusal
from sie_sidecar.prepare.fetching import PayloadFetching

CONFIRM_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# largest number of bytes of a result that is sent as one message, and of one part of a larger result. To send 32 MiB
# took 0.20 s in parts of 1 MiB, and 0.83 s in parts of 8 MiB (nats-py 2.16, two busy cores)
MAX_BYTES = 1 << 20
GROUP_BYTES = 4 << 10  # bytes of a message that are reserved for the frame of results that are sent together
MAX_SILENT = 256  # largest number of gateways without confirmations that a sidecar remembers for its log
MAX_ROUNDS = 3  # maximum number of times that all parts of one result are sent


@dataclass(eq=False)
class _ReadyResults:
    """Results for one gateway that are sent in one message. `nbytes`: sum of their sizes."""

    requests: list[str] = field(default_factory=list)
    results: list[bytes] = field(default_factory=list)
    verdicts: list[asyncio.Future[str]] = field(default_factory=list)
    nbytes: int = 0


class ResultDelivery:
    """Sends results to gateways, then acknowledges their messages."""

    def __init__(self, bus: Bus, leases: Leases, metrics: SidecarMetrics) -> None:
        self._bus = bus
        self.leases = leases
        self._metrics = metrics
        # subject of a gateway -> its state, only while it confirms no results
        self._silent: dict[str, Trouble] = {}
        # subject of a gateway -> its results that are ready in this iteration of the event loop
        self._ready: dict[str, _ReadyResults] = {}

    async def send(
        self,
        lease: Lease,
        item: WorkItem,
        result: WorkResult,
        deadline_s: float,
        before_ack: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Send a result by `_send`, call `before_ack`, and acknowledge the message. `Settle._answer` calls this for
        every work item. If every input failed and the lease ends before the gateway confirms (verdict `fenced`), do not
        acknowledge: another worker may process the message and succeed.
        """
        verdict = await self._send(lease, item, result, deadline_s)
        self._metrics.settlements.labels(verdict).inc()
        if verdict == "fenced":
            self.leases.drop(lease)
            return
        if before_ack is not None:
            await before_ack()
        failpoint("settle.before_ack")
        await self.leases.finish(lease)

    async def _send(self, lease: Lease, item: WorkItem, result: WorkResult, deadline_s: float) -> str:
        """Encode a result and send it by `_deliver`; if it is too large for one message, send it in parts. Return the
        verdict: a string such as `fenced` or `unconfirmed`. If the parts arrived damaged MAX_ROUNDS times, send an
        error in place of the result.
        """
        only_errors = Ok not in map(type, result.outcomes)
        fence = lease if only_errors else None
        if fence is not None and not self.leases.is_mine(fence):
            return "fenced"
        failpoint("settle.before_result")
        data = messages.encode(result)
        if fence is None and item.together and (verdict := await self._together(item, data)):
            return verdict
        verdict = "part"
        if len(data) <= min(MAX_BYTES, self._bus.max_payload):
            # after a reconnect, the broker's limit may be lower: the result is then sent in parts
            with contextlib.suppress(PayloadTooBig):
                verdict = await self._deliver(item, data, deadline_s, fence)
        if verdict == "part":
            verdict = await self._deliver_parts(item, data, deadline_s, fence)
        if verdict != "part":
            return verdict
        if only_errors:
            return "unconfirmed"
        error = InternalFailure(f"the result was damaged on its way to the gateway {MAX_ROUNDS} times")
        return await self._send(lease, item, failed(result, error), deadline_s)

    async def _together(self, item: WorkItem, data: bytes) -> str:
        """Send a result in one message with the results for the same gateway that are ready in this iteration of the
        event loop: those of a batch. The first of them sends the message, once. Return the gateway's verdict on the
        result; empty if the result is the only one, or if the gateway confirmed nothing: `_deliver` then sends it.
        """
        gateway, limit = item.reply.rpartition(".")[0], min(MAX_BYTES, self._bus.max_payload) - GROUP_BYTES
        group, size = self._ready.get(gateway), len(data) + len(item.request)
        if group is None or group.nbytes + size > limit:
            group = self._ready[gateway] = _ReadyResults()
        verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        group.requests.append(item.request)
        group.results.append(data)
        group.verdicts.append(verdict)
        group.nbytes += size
        if len(group.verdicts) == 1:
            verdicts: Sequence[str] = ()
            try:
                try:
                    await asyncio.sleep(0)
                finally:  # a result that joined a group later would wait for ever
                    if self._ready.get(gateway) is group:
                        del self._ready[gateway]
                if len(group.verdicts) > 1:
                    verdicts = await self._request_together(item.reply, gateway, group)
            finally:
                for waiting, answer in zip(group.verdicts, verdicts or [""] * len(group.verdicts), strict=True):
                    if not waiting.done():
                        waiting.set_result(answer)
        return await verdict

    async def _request_together(self, subject: str, gateway: str, group: _ReadyResults) -> Sequence[str]:
        """Send the results of a group in one request. Return the verdicts; none if the gateway confirmed nothing."""
        data = messages.encode(WorkResults(tuple(group.requests), tuple(group.results)))
        try:
            verdicts = messages.decode_confirmations(await self._bus.request(subject, data, CONFIRM_TIMEOUT_S)).verdicts
        except (NoResponder, BrokerUnavailable, PayloadTooBig, *UNDECODABLE) as error:
            _logger.debug("the results of %d requests are sent one by one: %s", len(group.requests), error)
            return ()
        self._silent.pop(gateway, None)
        return verdicts if len(verdicts) == len(group.requests) else ()

    async def _deliver_parts(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Cut an encoded result into parts for `_send`, and send each part by `_deliver`. Return the verdict on the
        last part; `part` if the gateway lacks parts after MAX_ROUNDS.
        """
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        view = memoryview(data)
        verdict = "part"
        for _ in range(MAX_ROUNDS):
            size = part_bytes(item, digest, len(data), min(MAX_BYTES, self._bus.max_payload))
            count = -(-len(data) // size)
            try:
                for index in range(count):
                    piece = view[index * size : (index + 1) * size]
                    part = Fragment(item.request, item.chunk, item.attempt, index, count, digest, piece)  # type: ignore[arg-type]
                    failpoint("settle.between_parts")
                    verdict = await self._deliver(item, messages.encode(part), deadline_s, fence)
                    if verdict != "part":
                        return verdict
            except PayloadTooBig:  # after a reconnect, the broker's limit is lower: send smaller parts
                continue
            _logger.error(
                "request %s: its result of %d bytes did not arrive complete at the gateway", item.request, len(data)
            )
        return verdict

    async def _deliver(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Send one message (a result or a part) as a request, until the gateway confirms it, and return the gateway's
        verdict. Return `unconfirmed` at the deadline, for an unreadable verdict, or if `item.reply` is not a subject.
        With `fence`, return `fenced` if that lease ends before the gateway confirms. Raises PayloadTooBig.
        """
        pause_s = FIRST_PAUSE_S
        gateway = item.reply.rpartition(".")[0]
        while True:
            timeout_s = CONFIRM_TIMEOUT_S if fence is None else min(CONFIRM_TIMEOUT_S, self.leases.left_s(fence))
            if timeout_s <= 0:
                return "fenced"
            try:
                answer = await self._bus.request(item.reply, data, timeout_s)
            except (NoResponder, BrokerUnavailable) as error:
                if time.monotonic() + pause_s >= deadline_s:
                    self._unconfirmed(gateway, error)
                    return "unconfirmed"
            except ValueError as error:
                _logger.error("request %s: its result cannot be sent: %s", item.request, error)
                return "unconfirmed"
            else:
                self._silent.pop(gateway, None)
                break
            await asyncio.sleep(pause_s)  # no busy loop while the gateway is unreachable
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        try:
            return messages.decode_confirmation(answer).verdict
        except UNDECODABLE:
            _logger.error("request %s: the gateway's confirmation of the result could not be decoded", item.request)
            return "unconfirmed"

    def _unconfirmed(self, gateway: str, error: BrokerError) -> None:
        """Log that a gateway confirms no results, once until it confirms one: after its death, all of its results that
        are on their way end here.
        """
        if gateway not in self._silent:
            if len(self._silent) >= MAX_SILENT:
                self._silent.pop(next(iter(self._silent)))
            self._silent[gateway] = Trouble(_logger, f"a gateway (inbox {gateway[-32:-24]}) confirms no results")
        self._silent[gateway].met(error)


def part_bytes(item: WorkItem, digest: str, size_bytes: int, message_bytes: int) -> int:
    """Return how many bytes of a result fit into a part whose encoded message has at most `message_bytes` bytes."""
    frame = Fragment(item.request, item.chunk, item.attempt, size_bytes, size_bytes, digest, b"")
    # msgpack writes the length of `data` before the data; this takes up to four bytes more than the length 0 in `frame`
    return max(1, message_bytes - len(messages.encode(frame)) - 4)


def failed(result: WorkResult, error: SIEError) -> WorkResult:
    """Return a result for the same inputs as `result` in which every input has this error."""
    info = error.info()
    return msgspec.structs.replace(result, outcomes=tuple(Failed(info) for _ in result.outcomes), block=b"")


HAND_BACK_DELAY_S = 0.5
_logger = logging.getLogger("sie.sidecar.settle")


class Settle:
    """Ends work items: sends their result, cancels them or returns them to the queue. `answer` and `hand_back` do
    nothing for a settled item. Callers must not `cancel` a settled item.
    """

    def __init__(
        self,
        worker_id: str,
        results: ResultDelivery,
        dead_letters: DeadLetterWriter,
        inventory: Inventory,
        fetching: PayloadFetching | None,
        metrics: SidecarMetrics,
        work: Tasks,
    ) -> None:
        self._worker_id = worker_id
        self._results = results
        self._leases = results.leases
        self._dead_letters = dead_letters
        self._inventory = inventory
        self._fetching = fetching
        self._metrics = metrics
        self._work = work

    @contextlib.contextmanager
    def answering(self, flights: Sequence[InFlight], doing: str) -> Iterator[None]:
        """Context manager: if its block raises an exception, send an error for each of the work items, so that no
        request waits in vain.
        """
        try:
            yield
        except SIEError as error:
            self.answer_all(flights, error)
        except Exception:
            _logger.exception("an unexpected error was raised while %s", doing)
            self.answer_all(flights, InternalFailure(f"the worker failed while {doing}"))

    def still_wanted(self, flights: Sequence[InFlight]) -> list[InFlight]:
        """Return the work items that should run, without settled items. Send an error for each item that is past its
        deadline or whose model has a new catalogue entry.
        """
        now_s = time.monotonic()
        wanted: list[InFlight] = []
        late: list[InFlight] = []
        outdated: list[InFlight] = []
        for flight in flights:
            if not flight.settled:
                (outdated if flight.is_outdated else late if now_s >= flight.deadline_s else wanted).append(flight)
        if outdated:
            self.answer_changed(outdated)
        if late:
            self._metrics.settlements.labels("late").inc(len(late))
            self.answer_all(late, GatewayTimeout("the time limit of the request passed before its work could run"))
        return wanted

    def answer_changed(self, flights: Collection[InFlight]) -> None:
        """Send an error for each work item, because its model has a new catalogue entry. On this error, the gateway
        publishes the work item again for the new entry.
        """
        self._metrics.settlements.labels("changed").inc(len(flights))
        self.answer_all(flights, changed())

    def answer_all(self, flights: Collection[InFlight], error: SIEError) -> None:
        """Send the same error for every input of these work items."""
        info = error.info()
        for flight in flights:
            self.answer(flight, (Failed(info),) * (flight.item.count or len(flight.item.inputs)))

    def answer(
        self,
        flight: InFlight,
        outcomes: tuple[Outcome, ...],
        block: bytes = b"",
        done: ipc.BatchDone | None = None,
        note: BatchNote | None = None,
    ) -> None:
        """Settle a work item, when a stage has its outcomes and their arrays (`block`): build its result, release its
        model, and start the task `_answer`, which sends the result. `done`, `note`: the adapter's report on the item's
        batch, and the sidecar's note about this batch; None if the item was in no batch.
        """
        if flight.settled:
            return
        flight.move("settled")
        item, hosted, now_s = flight.item, flight.hosted, time.monotonic()
        stages = stages_of(flight, now_s, done)
        if flight.span is not None:
            spans.settled(flight.span, stages, outcomes, note.id if note else "")
        batch = msgspec.structs.replace(
            note or BatchNote(),
            deliveries=flight.lease.delivery.delivered,
            padding=done.padding if done else 0,
            swapped=hosted.swapped if hosted else False,
            engine=done.engine if done else "",
        )
        fingerprint = flight.fingerprint or (hosted.fingerprint(item.profile, item.options) if hosted else "")
        result = WorkResult(
            item.request,
            item.chunk,
            self._worker_id,
            outcomes,
            block,
            item.attempt,
            item.revision,
            fingerprint,
            stages,
            batch,
        )
        self._let_go(flight)
        self._work.start(self._answer(flight, result, hosted.name if hosted else "other"), "answer")

    async def _answer(self, flight: InFlight, result: WorkResult, name: str) -> None:
        """Task that `answer` starts: send the result by `ResultDelivery.send`, in the trace of the request, with a dead
        letter if one is needed. Then remove the work item and count it. `name`: model in metrics.
        """
        if flight.item.traceparent or TRACE_ID.get() is not None:
            set_current(Context(flight.item.traceparent, flight.item.tracestate))
        burial = self._burial(flight) if flight.dead or flight.given_up is not None else None
        try:
            await self._results.send(flight.lease, flight.item, result, flight.deadline_s, burial)
        finally:
            self._inventory.remove(flight)
            self._metrics.answered(name, flight.item.endpoint or flight.item.operation, result)

    def _burial(self, flight: InFlight) -> Callable[[], Awaitable[object]]:
        """Return the function that writes a dead letter after the result is sent."""
        write = functools.partial(self._dead_letters.write, flight.lease.delivery)
        if flight.given_up is not None:
            return functools.partial(write, flight.given_up.info())
        workers = tuple(worker for mark in flight.dead for worker in mark.workers)
        deaths = max(mark.deaths for mark in flight.dead)
        return functools.partial(write, refusal().info(), deaths=deaths, workers=workers)

    def bury(self, lease: Lease, error: SIEError) -> None:
        """Store an undecodable message as a dead letter, and terminate the message."""
        self._work.start(self._bury(lease, error), "bury")

    async def _bury(self, lease: Lease, error: SIEError) -> None:
        if self._leases.is_mine(lease):
            await self._dead_letters.write(lease.delivery, error.info())
        await self._leases.refuse(lease, error.message)

    async def hand_back(self, flight: InFlight) -> None:
        """Return the message of a work item to the queue, for another worker."""
        if not flight.settled:
            self._withdraw(flight, "handed_back")
            await self._leases.hand_back(flight.lease, HAND_BACK_DELAY_S)
            self._inventory.remove(flight)

    def cancel(self, flight: InFlight) -> None:
        """Acknowledge the message of a work item for which no request waits any more."""
        self._withdraw(flight, "cancelled")
        self._work.start(self._finish_cancelled(flight), "cancelled")

    def _withdraw(self, flight: InFlight, outcome: str) -> None:
        flight.move("settled")
        self._metrics.settlements.labels(outcome).inc()
        self._let_go(flight)

    async def _finish_cancelled(self, flight: InFlight) -> None:
        failpoint("settle.before_cancelled_ack")
        await self._leases.finish(flight.lease)
        self._inventory.remove(flight)

    def _let_go(self, flight: InFlight) -> None:
        """Release the model and the inputs of a settled work item. The rest of its settlement needs only the lease."""
        # before `fetched_s` is set, a read may be in progress: it uses the memory until it ends (`Prepare.fetch`)
        if self._fetching is not None and flight.fetched_s:
            self._fetching.let_go(flight)
        self._inventory.let_go(flight)


# maximum number of leases in the file. A lease beyond this number is not recorded: if the process is killed, the broker
# redelivers its message only after the ack wait
SLOTS = 4096
SLOT_BYTES = 512
_MAGIC = b"SIElease"
_HEADER = struct.Struct("<8sd")  # fields: magic bytes, and the broker's time at the last renewal of all leases
# fields: checksum of the other fields and of the ack subject, length of the ack subject in bytes, and the broker's time
# at the delivery
_SLOT = struct.Struct("<IHd")
_EMPTY = bytes(_SLOT.size)
_SIZE = (1 + SLOTS) * SLOT_BYTES
_leases_logger = logging.getLogger("sie.sidecar.leases")


class LeaseLedger:
    """File with the leased deliveries of a worker, written by one process at a time. `now_s`: the broker's clock."""

    def __init__(self, path: Path, file: int, now_s: Callable[[], float]) -> None:
        self.path = path
        self._file = file
        self._now_s = now_s
        self._map = mmap.mmap(file, _SIZE)
        self._free = list(range(SLOTS, 0, -1))

    def put(self, reply: str) -> int:
        """Record a delivery by its ack subject. Return the record's number for `clear`; 0 if no slot is free."""
        data = reply.encode()
        if not self._free or len(data) > SLOT_BYTES - _SLOT.size:
            return 0
        slot = self._free.pop()
        held_s, at = self._now_s(), slot * SLOT_BYTES
        self._map[at : at + _SLOT.size + len(data)] = _SLOT.pack(_checksum(held_s, data), len(data), held_s) + data
        return slot

    def clear(self, slot: int) -> None:
        """Clear the record of a delivery whose lease has ended. `slot`: number of the record, 0 if there is none."""
        if slot:
            self._map[slot * SLOT_BYTES : slot * SLOT_BYTES + _SLOT.size] = _EMPTY
            self._free.append(slot)

    def renewed(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, self._now_s())

    def take_over(self, within_s: float) -> list[str]:
        """Return the ack subjects of an earlier process's deliveries, the oldest first, and clear the file. Skip leases
        that were last renewed more than `within_s` seconds ago, because another worker may have the message. Log the
        number of damaged records.
        """
        readable: list[tuple[float, str]] = []
        broken = 0
        _, renewed_s = _HEADER.unpack_from(self._map)
        for at in range(SLOT_BYTES, _SIZE, SLOT_BYTES):
            checksum, length, held_s = _SLOT.unpack_from(self._map, at)
            if not checksum and not length:
                continue
            data = self._map[at + _SLOT.size : at + _SLOT.size + length]
            if length > SLOT_BYTES - _SLOT.size or checksum != _checksum(held_s, data):
                broken += 1
            elif self._now_s() - max(held_s, renewed_s) < within_s:
                readable.append((held_s, data.decode()))
        if broken:
            _leases_logger.warning(
                "%s: %d records are damaged; their messages are redelivered only when the leases of these messages end",
                self.path,
                broken,
            )
        self._map[:] = bytes(_SIZE)
        self.renewed()
        return [reply for _, reply in sorted(readable)]

    def close(self) -> None:
        """Close the file, and remove it if no delivery is leased."""
        if len(self._free) == SLOTS:
            self.path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._file)


def _checksum(held_s: float, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<d", held_s))) or 1


def _reserve(file: int) -> None:
    """Write every byte of an empty file, so that the disk has room for all of it. Otherwise, on a full disk, writing to
    the mapped memory would raise a signal that ends the process.
    """
    empty = _HEADER.pack(_MAGIC, 0.0).ljust(_SIZE, b"\0")
    if os.pwrite(file, empty, 0) < _SIZE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_ledger(path: Path, now_s: Callable[[], float]) -> LeaseLedger | None:
    """Open or create the file. If that fails, log it and return None: the worker can run without a ledger."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        if size != _SIZE or os.pread(file, len(_MAGIC), 0) != _MAGIC:
            if size:
                _leases_logger.warning("%s is not a file of leased deliveries and is replaced by a new one", path)
                os.ftruncate(file, 0)
            _reserve(file)
        return LeaseLedger(path, file, now_s)
    except OSError as error:
        _leases_logger.warning(
            "%s: %s; if this process is killed, its work is delivered again only when its leases end",
            path,
            error.strerror or error,
        )
        if file >= 0:
            os.close(file)
        return None


FENCE = 0.8  # part of ack_wait after which a lease that was not renewed counts as lost


class Leases:
    """Leased deliveries of this worker, also recorded in `ledger` if there is one."""

    def __init__(
        self,
        ack_wait_s: float,
        is_alive: Callable[[], bool],
        clock: Callable[[], float],
        ledger: LeaseLedger | None = None,
        flushed: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """Create the object without leases. `is_alive` returns True if an adapter replies to pings. `flushed(seconds)`
        returns when the broker has received all sent data, and raises BrokerError after these seconds.
        """
        self._ack_wait_s = ack_wait_s
        self._ledger = ledger
        self._is_alive = is_alive
        self._flushed = flushed
        self._clock = clock
        # the key is (pool, sequence), because the stream of each pool has its own sequences
        self._held: dict[tuple[str, int], Lease] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def hold(self, delivery: Delivery) -> Lease | None:
        """Return a lease of the delivered message. If this worker has one already, renew it and return None."""
        place = (delivery.subject.split(".", 3)[2], delivery.sequence)
        lease = self._held.get(place)
        # another message may have the same sequence, because a stream that was lost and created again starts at 1
        is_held = lease is not None and lease.delivery.data == delivery.data
        if lease is not None and is_held:
            lease.delivery, lease.renewed_s = delivery, self._clock()
            if self._ledger:
                self._ledger.clear(lease.slot)
        else:
            lease = self._held[place] = Lease(delivery, self._clock(), place)
            self.empty.clear()
        if self._ledger:
            lease.slot = self._ledger.put(delivery.reply)
        return None if is_held else lease

    async def hand_back_left(self, queue: Queue) -> int:
        """Hand back to the queue, for any worker, all messages that a killed process of this worker had leased. Return
        their number.
        """
        left = self._ledger.take_over(FENCE * self._ack_wait_s) if self._ledger else []
        count = 0
        for reply in left:
            failpoint("settle.before_release")
            try:
                await queue.release(reply)
                count += 1
            except ValueError as error:
                _leases_logger.warning("the file of leased deliveries has an invalid ack subject: %s", error)
            except BrokerError as error:
                _leases_logger.warning(
                    "work of the killed process was not returned to the queue and waits until its leases end: %s", error
                )
                break
        return count

    def all(self) -> list[Lease]:
        return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def is_mine(self, lease: Lease) -> bool:
        """Return True if the lease has certainly not ended, so no other worker can have the message."""
        return self.left_s(lease) > 0

    def left_s(self, lease: Lease) -> float:
        """Return the seconds for which `is_mine` remains True without a renewal."""
        return lease.renewed_s + FENCE * self._ack_wait_s - self._clock()

    def drop(self, lease: Lease) -> None:
        """Remove a lease from this object. Nothing is sent to the broker."""
        if self._ledger:
            self._ledger.clear(lease.slot)
            lease.slot = 0
        if self._held.get(lease.place) is lease:
            del self._held[lease.place]
            if not self._held:
                self.empty.set()

    async def finish(self, lease: Lease, settle: Callable[[], Awaitable[None]] | None = None) -> None:
        """Acknowledge a message whose result was sent, or for which no request waits; with `settle`, call that."""
        self.drop(lease)
        try:
            await (settle or lease.delivery.ack)()
        except BrokerError as error:
            _leases_logger.warning(
                "the ack or nak of a message could not be sent, so the broker will deliver the message again: %s", error
            )

    async def hand_back(self, lease: Lease, delay_s: float = 0.0) -> None:
        """Return a message to the queue for another worker, if this worker still has the lease."""
        if self.is_mine(lease):
            await self.finish(lease, functools.partial(lease.delivery.nak, delay_s))
        else:
            self.drop(lease)

    async def refuse(self, lease: Lease, reason: str) -> None:
        """Terminate a message that no worker can process, if this worker still has the lease."""
        if self.is_mine(lease):
            await self.finish(lease, functools.partial(lease.delivery.term, reason))
        else:
            self.drop(lease)

    async def renew_all(self) -> None:
        """Renew all leases if an adapter replies to pings. If none does, let the leases end, so that other workers get
        the work. A lease that may have ended is not renewed, because another worker may have the message. When the
        broker confirms that it has received the renewals, count the leases as renewed at the time of sending. Without a
        confirmation, do not count them, because a dead connection loses renewals.
        """
        if not self._held or not self._is_alive():
            return
        sent_s, renewed = self._clock(), []
        try:
            for lease in list(self._held.values()):
                if self._held.get(lease.place) is lease and self.is_mine(lease):
                    await lease.delivery.in_progress()
                    renewed.append(lease)
            if self._flushed is not None:
                await self._flushed(self._ack_wait_s / 3)
        except BrokerError as error:
            _leases_logger.warning("the leases of this worker's messages could not be renewed: %s", error)
            return
        for lease in renewed:
            lease.renewed_s = max(lease.renewed_s, sent_s)
        if self._ledger:
            self._ledger.renewed()

    async def run(self) -> None:
        """Renew the leases every third of the ack wait, so that one lost renewal does no harm. Runs until cancelled."""
        due_s = self._clock()
        while True:
            due_s = max(due_s + self._ack_wait_s / 3, self._clock())
            await asyncio.sleep(due_s - self._clock())
            await self.renew_all()
