"""The last stage: a work item gets its outcome, the client its answer, the message its settlement, and what the item
kept is free.

    outcomes, errors ──► result sent, confirmed ──► dead letter, if it was given up ──► acked ──► removed
    handed back, cancelled ──────────────────────────────────────────► nak, ack ────────► removed
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

import msgspec

from sie_contracts import ipc
from sie_contracts.errors import GatewayTimeout, InternalFailure, SIEError
from sie_contracts.messages import BatchNote, Failed, Outcome, WorkResult
from sie_contracts.trace_context import Context
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks
from sie_runtime.tracing import set_current
from sie_sidecar import spans
from sie_sidecar.deadletter import DeadLetters
from sie_sidecar.fetching import Fetching
from sie_sidecar.in_flight import InFlight, changed, stages_of
from sie_sidecar.inventory import Inventory
from sie_sidecar.lease import Lease
from sie_sidecar.metrics import Metrics
from sie_sidecar.poison import refusal
from sie_sidecar.settlement import Settlement

HAND_BACK_DELAY_S = 0.5
_logger = logging.getLogger("sie.sidecar.settle")


class Settle:
    """Ends work items. Each is settled once: what comes later for the same one changes nothing."""

    def __init__(
        self,
        worker_id: str,
        settlement: Settlement,
        dead_letters: DeadLetters,
        inventory: Inventory,
        fetching: Fetching | None,
        metrics: Metrics,
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
        """What fails within is the answer of these, so that no work item is lost with its task."""
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
        spans.settled(flight, stages, outcomes, note.id if note else "")
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
        set_current(Context(flight.item.traceparent, flight.item.tracestate))
        try:
            await self._settlement.answer(flight.lease, flight.item, result, flight.deadline_s, self._burial(flight))
        finally:
            self._remove(flight)
            self._metrics.answered(name, flight.item.endpoint or flight.item.operation, result)

    def _burial(self, flight: InFlight) -> Callable[[], Awaitable[object]] | None:
        """What is to be done once the client has its answer and before the message is acked: work that was given up is
        kept.
        """
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
