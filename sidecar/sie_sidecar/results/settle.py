"""Results leave the worker: sent as a request to the gateway's inbox, again until confirmed or the budget is over, and
only then acked.

result of a usual size ──► one request ──► taken, duplicate or unknown
larger ──► parts, one after the other, each again until confirmed ──► part ... part, taken
              last one confirmed as a mere part: the gateway misses some, or the whole is damaged; all of them again, a
              few times
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import msgspec

from sie_broker import BrokerUnavailable, Bus, NoResponder, PayloadTooBig
from sie_contracts.errors import GatewayTimeout, InternalFailure, SIEError
from sie_contracts.wire import ipc, messages
from sie_contracts.wire.messages import BatchNote, Failed, Fragment, Outcome, WorkItem, WorkResult
from sie_contracts.wire.trace_context import Context
from sie_runtime.current_trace import TRACE_ID, set_current
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks
from sie_sidecar.device.in_flight import InFlight, Inventory, changed, stages_of
from sie_sidecar.device.poison import refusal
from sie_sidecar.intake.leases import Lease, Leases
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.prepare.fetching import PayloadFetching
from sie_sidecar.results import spans
from sie_sidecar.results.dead_letters import DeadLetterWriter

CONFIRM_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
# of one message: 32 MiB at a broker of 8 MiB took 0.83 s, in parts of 1 MiB 0.20 s (nats-py 2.16, 2 busy cores)
MAX_BYTES = 1 << 20
MAX_ROUNDS = 3  # of sending all parts of one result


class ResultDelivery:
    """Answers held work."""

    def __init__(self, bus: Bus, leases: Leases, metrics: SidecarMetrics, clock: Callable[[], float]) -> None:
        self._bus = bus
        self.leases = leases
        self._metrics = metrics
        self._clock = clock

    async def answer(
        self,
        lease: Lease,
        item: WorkItem,
        result: WorkResult,
        deadline_s: float,
        before_ack: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Deliver a result and settle its message, `before_ack` in between.

        An error is sent only while the lease is ours: a superseded holder must not answer for the present one. A
        success always is.
        """
        verdict = await self._answer(lease, item, result, deadline_s)
        self._metrics.settlements.labels(verdict).inc()
        if verdict == "fenced":
            self.leases.drop(lease)
            return
        if before_ack is not None:
            await before_ack()
        failpoint("settle.before_ack")
        await self.leases.finish(lease)

    async def _answer(self, lease: Lease, item: WorkItem, result: WorkResult, deadline_s: float) -> str:
        only_errors = all(isinstance(outcome, Failed) for outcome in result.outcomes)
        fence = lease if only_errors else None
        if fence is not None and not self.leases.is_mine(fence):
            return "fenced"
        failpoint("settle.before_result")
        data = messages.encode(result)
        verdict = "part"
        if len(data) <= min(MAX_BYTES, self._bus.max_payload):
            try:
                verdict = await self._deliver(item, data, deadline_s, fence)
            except PayloadTooBig:  # the broker came back with a lower limit
                verdict = "part"
        if verdict == "part":
            verdict = await self._deliver_parts(item, data, deadline_s, fence)
        if verdict != "part":
            return verdict
        if only_errors:
            return "unconfirmed"
        error = InternalFailure(f"the result was damaged on its way {MAX_ROUNDS} times")
        return await self._answer(lease, item, failed(result, error), deadline_s)

    async def _deliver_parts(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Send a result that no message holds. `part`: it never was whole at the gateway."""
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
            except PayloadTooBig:  # the broker came back with a lower limit
                continue
            _logger.error(
                "request %s: a result of %d bytes was not whole at the gateway, it is sent again",
                item.request,
                len(data),
            )
        return verdict

    async def _deliver(self, item: WorkItem, data: bytes, deadline_s: float, fence: Lease | None) -> str:
        """Send one message until it is confirmed. Returns the verdict, `unconfirmed`, or `fenced` once the lease
        `fence` is not ours any more. Raises PayloadTooBig.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            timeout_s = CONFIRM_TIMEOUT_S if fence is None else min(CONFIRM_TIMEOUT_S, self.leases.left_s(fence))
            if timeout_s <= 0:
                return "fenced"
            try:
                answer = await self._bus.request(item.reply, data, timeout_s)
                return messages.decode_confirmation(answer).verdict
            except (NoResponder, BrokerUnavailable) as error:
                if self._clock() + pause_s >= deadline_s:
                    _logger.warning("a result of request %s was not confirmed in time: %s", item.request, error)
                    return "unconfirmed"
            except msgspec.DecodeError:
                _logger.error("request %s: its inbox answers with something else than a confirmation", item.request)
                return "unconfirmed"
            await asyncio.sleep(pause_s)  # between attempts at a gateway that is away
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def part_bytes(item: WorkItem, digest: str, size_bytes: int, message_bytes: int) -> int:
    """How much of a result a message of that size holds beside what says which part it is."""
    frame = Fragment(item.request, item.chunk, item.attempt, size_bytes, size_bytes, digest, b"")
    # the length of 4 GiB takes four bytes more than that of nothing
    return max(1, message_bytes - len(messages.encode(frame)) - 4)


def failed(result: WorkResult, error: SIEError) -> WorkResult:
    """The same chunk, with this error for every input."""
    info = error.info()
    return msgspec.structs.replace(result, outcomes=tuple(Failed(info) for _ in result.outcomes), block=b"")


HAND_BACK_DELAY_S = 0.5
_logger = logging.getLogger("sie.sidecar.settle")


class Settle:
    """Ends work items. Each is settled once: what comes later for the same one changes nothing."""

    def __init__(
        self,
        worker_id: str,
        settlement: ResultDelivery,
        dead_letters: DeadLetterWriter,
        inventory: Inventory,
        fetching: PayloadFetching | None,
        metrics: SidecarMetrics,
        work: Tasks,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._settlement = settlement
        self._leases = settlement.leases
        self._dead_letters = dead_letters
        self._inventory = inventory
        self._fetching = fetching
        self._metrics = metrics
        self._work = work
        self._clock = clock

    @contextlib.contextmanager
    def answering(self, flights: Sequence[InFlight], doing: str) -> Iterator[None]:
        """Answer the flights with an error that is raised within, so that no work item is lost with its task."""
        try:
            yield
        except SIEError as error:
            self.answer_all(flights, error)
        except Exception:
            _logger.exception("the worker failed while %s", doing)
            self.answer_all(flights, InternalFailure(f"the worker failed while {doing}"))

    def still_wanted(self, flights: Sequence[InFlight]) -> list[InFlight]:
        """Without what was cancelled, what is too late, and what was made for an entry that has changed; both of these
        are answered.
        """
        now_s = self._clock()
        self.answer_changed([flight for flight in flights if not flight.settled and flight.is_outdated])
        late = [flight for flight in flights if not flight.settled and now_s >= flight.deadline_s]
        if late:
            self._metrics.settlements.labels("late").inc(len(late))
            self.answer_all(late, GatewayTimeout("the budget of the request was over before it could run"))
        return [flight for flight in flights if not flight.settled and now_s < flight.deadline_s]

    def answer_changed(self, flights: Collection[InFlight]) -> None:
        """Their gateway understands them anew, by the entry as it is now."""
        if flights:
            self._metrics.settlements.labels("changed").inc(len(flights))
            self.answer_all(flights, changed())

    def answer_all(self, flights: Collection[InFlight], error: SIEError) -> None:
        """The same error for every input."""
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
        """One outcome per input, with their arrays in `block`. `done` and `note`: of the batch that it ran in."""
        if flight.settled:
            return
        flight.move("settled")
        item, hosted, now_s = flight.item, flight.hosted, self._clock()
        self._inventory.count(flight, 0)
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
        self._inventory.let_model_go(flight)  # a result that nobody confirms needs its lease, not its model
        self._work.start(self._answer(flight, result, hosted.name if hosted else "other"), "answer")

    async def _answer(self, flight: InFlight, result: WorkResult, name: str) -> None:
        if flight.item.traceparent or TRACE_ID.get() is not None:
            set_current(Context(flight.item.traceparent, flight.item.tracestate))
        try:
            await self._settlement.answer(flight.lease, flight.item, result, flight.deadline_s, self._burial(flight))
        finally:
            self._remove(flight)
            self._metrics.answered(name, flight.item.endpoint or flight.item.operation, result)

    def _burial(self, flight: InFlight) -> Callable[[], Awaitable[object]] | None:
        """Step between the client's answer and the ack of the message: work that was given up becomes a dead letter."""
        write = functools.partial(self._dead_letters.write, flight.lease.delivery)
        if flight.given_up is not None:
            return functools.partial(write, flight.given_up.info())
        if flight.dead:
            workers = tuple(worker for mark in flight.dead for worker in mark.workers)
            deaths = max(mark.deaths for mark in flight.dead)
            return functools.partial(write, refusal().info(), deaths=deaths, workers=workers)
        return None

    def bury(self, lease: Lease, error: SIEError) -> None:
        """Give up a message that nobody can read."""
        self._work.start(self._bury(lease, error), "bury")

    async def _bury(self, lease: Lease, error: SIEError) -> None:
        if self._leases.is_mine(lease):
            await self._dead_letters.write(lease.delivery, error.info())
        await self._leases.refuse(lease, error.message)

    async def hand_back(self, flight: InFlight) -> None:
        """Another worker may do better."""
        if not flight.settled:
            self._withdraw(flight, "handed_back")
            await self._leases.hand_back(flight.lease, HAND_BACK_DELAY_S)
            self._remove(flight)

    def cancel(self, flight: InFlight) -> None:
        """Nobody waits for it."""
        self._withdraw(flight, "cancelled")
        self._work.start(self._finish_cancelled(flight), "cancelled")

    def _withdraw(self, flight: InFlight, outcome: str) -> None:
        flight.move("settled")
        self._inventory.count(flight, 0)
        self._metrics.settlements.labels(outcome).inc()

    async def _finish_cancelled(self, flight: InFlight) -> None:
        failpoint("settle.before_cancelled_ack")
        await self._leases.finish(flight.lease)
        self._remove(flight)

    def _remove(self, flight: InFlight) -> None:
        if self._fetching is not None:
            self._fetching.let_go(flight)
        self._inventory.remove(flight)
