"""Work item in flight: one object with one stage, and functions that join its outcomes. The module does no I/O and has
no clock.

    preparing ──► waiting ──► sealed ──► running ──► settled
        ▲                                 │   ▲
        └── model evicted, adapter gone ◄─┘   └── isolated: one of its inputs was in a batch that killed an adapter

A work item can be settled in any stage: cancelled, late, refused or answered. A cancelled item that runs is still
answered, unless its answer is written token by token: this answer is stopped by the adapter.

`Inventory` has all work items in flight, their cost, and their resources: credit, and models that must not be evicted.

    delivery ──► add ──► keep_model (from now on its device counts it) ──► count (cost that waits for the device)
    ──► let_model_go ──► remove
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from sie_broker import Delivery
from sie_contracts.errors import CONFIG_CHANGED, InvalidInput, NotReady, SIEError
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Outcome, Stages, WorkItem
from sie_sidecar.batching.batch import BatchEntry
from sie_sidecar.device.poison import Mark
from sie_sidecar.models.models import ModelState, WorkerModels
from sie_sidecar.prepare.rows import TokenRow

if TYPE_CHECKING:
    from sie_runtime.spans import Span

_NO_DEVICE = -1
Stage = Literal["preparing", "waiting", "sealed", "running", "isolated", "settled"]


class Lease:
    """Delivery that is leased to this worker."""

    __slots__ = ("delivery", "renewed_s", "slot")

    def __init__(self, delivery: Delivery, now_s: float, slot: int) -> None:
        self.delivery = delivery
        self.renewed_s = now_s
        self.slot = slot  # slot in the ledger; 0 if the lease has no slot


@dataclass(eq=False)
class InFlight:
    """Work item from its delivery to its settlement. The times are the times of its marks; `dispatched_s` is set when
    its batch is sent.

    `rows`: the first `shared` rows belong to all inputs. After them, each input has the same number of rows, in order;
    if a text has chunks, those that `chunked` describes.
    """

    lease: Lease
    item: WorkItem
    received_s: float
    deadline_s: float  # time after which the work item is certainly late
    # end of the item's budget; earlier than `deadline_s` by the uncertainty of the broker's clock
    due_s: float = math.inf
    hosted: ModelState | None = None
    # entry of the work item's model when `hosted` was set, None until then; the work item never runs with another entry
    entry: ModelEntry | None = None
    # fingerprint of the loaded model that runs this item; set when the item is sent to the device
    fingerprint: str = ""
    layout: ipc.Layout = "text"
    rows: list[TokenRow] = field(default_factory=list)
    shared: int = 0
    chunked: tuple[ipc.ChunkedRows, ...] = ()
    refused: SIEError | None = None  # reason why the work item has no rows
    unfit: Mapping[int, SIEError] = field(default_factory=dict)  # reason for each input that must not run, by index
    fetched_s: float = 0.0
    loaded_s: float = 0.0
    tokenised_s: float = 0.0
    reload_s: float = 0.0  # seconds of waiting for loads between `tokenised_s` and `dispatched_s`
    dispatched_s: float = 0.0
    started_s: float = 0.0
    stage: Stage = "preparing"
    settled: bool = False  # true if the outcome is being sent, or if no request waits for it
    batch_entry: BatchEntry[InFlight] | None = None  # set while the work item waits for the device
    given_up: SIEError | None = None  # reason why the work item becomes a dead letter
    dead: list[Mark] = field(default_factory=list)  # marks of the inputs that are poison
    payload_bytes: int = 0  # bytes of its inputs that were read from the payload store
    counted: int = 0  # cost of this work item that is counted as waiting for the device
    span: Span | None = None  # span of the work item; None if it is not traced

    def move(self, stage: Stage, batch_entry: BatchEntry[InFlight] | None = None) -> None:
        """Enter a stage. `batch_entry` is set only for `waiting`. After `settled` there is no other stage."""
        self.batch_entry = batch_entry
        if not self.settled:
            self.stage, self.settled = stage, stage == "settled"

    def waited_for_load(self, seconds: float) -> None:
        """Add time in which the work item waited for a model or a LoRA. A wait before it was tokenised follows from its
        times instead.
        """
        if self.tokenised_s and not self.dispatched_s:
            self.reload_s += seconds

    @property
    def is_outdated(self) -> bool:
        """True if the entry of its model has changed since the work item was accepted."""
        return self.hosted is not None and self.hosted.resolved.entry is not self.entry

    def of_input(self, index: int) -> list[TokenRow]:
        """Return the rows of this input alone."""
        if self.chunked:
            first = sum(described.rows for described in self.chunked[:index])
            return self.rows[first : first + self.chunked[index].rows]
        count = (len(self.rows) - self.shared) // len(self.item.inputs)
        first = self.shared + index * count
        return self.rows[first : first + count]

    @property
    def is_whole(self) -> bool:
        """True if all inputs run."""
        return self.item.options.truncate != "NONE" and not self.unfit

    def stopped(self) -> list[SIEError | None]:
        """Return for each input the reason why it does not run, or None. An input does not run if the model does not
        accept it, or if it is too long and must not be truncated.
        """
        if self.is_whole:
            return [None] * len(self.item.inputs)
        common = next((row for row in self.rows[: self.shared] if row.truncated), None)
        return [self.unfit.get(index) or self._too_long(common, index) for index in range(len(self.item.inputs))]

    def _too_long(self, common: TokenRow | None, index: int) -> SIEError | None:
        if self.item.options.truncate != "NONE":
            return None
        row = common or next((row for row in self.of_input(index) if row.truncated), None)
        return None if row is None else too_long(row)


def unsettled(flights: Iterable[InFlight]) -> int:
    """Return the number of work items that still need their model."""
    return sum(not flight.settled for flight in flights)


def runnable(flight: InFlight) -> tuple[list[TokenRow], list[int]]:
    """Return the rows for the device, and the inputs that they belong to: all except stopped inputs."""
    if flight.is_whole:
        return flight.rows, list(range(len(flight.item.inputs)))
    inputs = [index for index, error in enumerate(flight.stopped()) if error is None]
    return [
        *flight.rows[: flight.shared],
        *(row for index in inputs for row in flight.of_input(index)),
    ] if inputs else [], inputs


def changed() -> NotReady:
    """Return the refusal of work that was planned with an old entry of its model. The gateway of the work plans it
    again.
    """
    return NotReady(
        "the model was changed or removed while this request was on its way", reason=CONFIG_CHANGED, retry_after_s=1
    )


def too_long(row: TokenRow) -> InvalidInput:
    """Return the error for an input that is above the limit and must not be truncated."""
    limit = len(row.ids)
    return InvalidInput(
        f"the input has {row.full} tokens, the limit is {limit}",
        reason="input_too_long",
        extras={"tokens": row.full, "limit": limit},
    )


def merge(flight: InFlight, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Return one outcome per input, both for inputs that ran and for stopped inputs. If an input was truncated, its
    outcome is marked.
    """
    ran = iter(outcomes)
    common = any(row.truncated for row in flight.rows[: flight.shared])
    outcomes_by_input: list[Outcome] = []
    for index, error in enumerate(flight.stopped()):
        if error is not None:
            outcomes_by_input.append(Failed(error.info()))
            continue
        outcome = next(ran)
        if isinstance(outcome, Ok):
            rows = flight.of_input(index)
            if common or any(row.truncated for row in rows):
                outcome = msgspec.structs.replace(outcome, truncated=True)
            if any(image.animated for row in rows for image in row.images):
                outcome = msgspec.structs.replace(outcome, first_of_several=True)
            if (sound := next((row.sound for row in rows if row.sound is not None), None)) is not None:
                outcome = msgspec.structs.replace(outcome, sound_s=sound.seconds)
        outcomes_by_input.append(outcome)
    return tuple(outcomes_by_input)


def cut(outcomes: tuple[Outcome, ...], block: memoryview) -> tuple[tuple[Outcome, ...], bytes]:
    """Return these outcomes with a separate block: consecutive items have consecutive slices of the common block."""
    slices = [piece for outcome in outcomes if isinstance(outcome, Ok) for piece in outcome.outputs.values()]
    if not slices:
        return outcomes, b""
    low = min(piece.offset for piece in slices)
    high = max(piece.offset + _size(piece) for piece in slices)
    moved = tuple(
        msgspec.structs.replace(
            outcome,
            outputs={
                name: ArraySlice(piece.dtype, piece.shape, piece.offset - low)
                for name, piece in outcome.outputs.items()
            },
        )
        if isinstance(outcome, Ok)
        else outcome
        for outcome in outcomes
    )
    return moved, bytes(block[low:high])


def only(flight: InFlight, index: int) -> InFlight:
    """Return the same work with one of its inputs. It has the lease of the whole work item, and must not be settled."""
    item = msgspec.structs.replace(flight.item, inputs=(flight.item.inputs[index],), first=flight.item.first + index)
    rows = [*flight.rows[: flight.shared], *flight.of_input(index)]
    return replace(flight, item=item, rows=rows, chunked=flight.chunked[index : index + 1], unfit={}, counted=0)


def joined(parts: Sequence[tuple[Outcome, bytes]]) -> tuple[tuple[Outcome, ...], bytes]:
    """Join outcomes with separate blocks to outcomes with one common block."""
    outcomes: list[Outcome] = []
    start = 0
    for outcome, block in parts:
        if isinstance(outcome, Ok):
            outputs = {
                name: ArraySlice(piece.dtype, piece.shape, piece.offset + start)
                for name, piece in outcome.outputs.items()
            }
            outcome = msgspec.structs.replace(outcome, outputs=outputs)
        outcomes.append(outcome)
        start += len(block)
    return tuple(outcomes), b"".join(block for _, block in parts)


def _size(piece: ArraySlice) -> int:
    return math.prod(piece.shape) * np.dtype(piece.dtype).itemsize


def stages_of(flight: InFlight, now_s: float, done: ipc.BatchDone | None) -> Stages:
    """Return the durations between consecutive marks: received, fetched, loaded, tokenised, sealed, started, answered.
    The adapter reports its part of the last duration. Loads between tokenised and sealed are loads of models or LoRAs
    that were evicted in that time.
    """
    fetched_s = flight.fetched_s or flight.received_s
    # work with a model that was not loaded until now has waited for its load
    loaded_s = flight.loaded_s or (fetched_s if flight.hosted is None else now_s)
    tokenised_s = flight.tokenised_s or loaded_s
    dispatched_s = flight.dispatched_s or tokenised_s
    inference_ms, postprocess_ms = (done.inference_ms, done.postprocess_ms) if done else (0.0, 0.0)
    # time of tokenising in the adapter, for a family that tokenises there
    tokenised_there_ms = done.preprocess_ms if done else 0.0
    # the start notice may be read only together with the result: the adapter's own time is not waiting time
    max_ms = (now_s - dispatched_s) * 1000 - inference_ms - postprocess_ms - tokenised_there_ms
    return Stages(
        fetch_ms=(fetched_s - flight.received_s) * 1000,
        load_ms=(loaded_s - fetched_s + flight.reload_s) * 1000,
        preprocess_ms=(tokenised_s - loaded_s) * 1000 + tokenised_there_ms,
        batch_wait_ms=max(0.0, dispatched_s - tokenised_s - flight.reload_s) * 1000,
        device_wait_ms=max(0.0, min((flight.started_s - dispatched_s) * 1000, max_ms)),
        inference_ms=inference_ms,
        postprocess_ms=postprocess_ms,
        worker_ms=(now_s - flight.received_s) * 1000,
    )


class Inventory:
    """All work items, from their delivery until they are removed."""

    def __init__(
        self,
        models: WorkerModels,
        on_less: Callable[[], None],
        on_free: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Create an empty inventory. `on_less` is called when less work waits for the device. `on_free` is called with
        a consumer whose work item delayed other work.
        """
        self._models = models
        self._on_less = on_less
        self._on_free = on_free
        self._clock = clock
        self._all: dict[Lease, InFlight] = {}
        # cost and number of work items that are not at their device yet, interactive and bulk; by device, and for those
        # that have none yet
        self._loads: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([0, 0], [0, 0]))
        self._coming: Counter[str] = Counter()  # number of deliveries that no device counts yet, by model

    def __iter__(self) -> Iterator[InFlight]:
        """Iterate over a copy, in the order of delivery."""
        return iter(list(self._all.values()))

    def add(self, flight: InFlight) -> None:
        self._all[flight.lease] = flight
        self._coming[flight.item.model] += 1
        self.count(flight, max(1, flight.item.cost))

    def is_coming(self, model: str) -> bool:
        """Return True if work of this model was delivered but is not counted by a device yet."""
        return model in self._coming

    def keep_model(self, flight: InFlight, hosted: ModelState) -> None:
        """Record that the work item needs this model, which must not be evicted from now on."""
        flight.entry = hosted.resolved.entry
        self._assign(flight, hosted)
        self._arrived(flight)
        hosted.came_in(flight.item.cost, flight.received_s)

    def move(self, flight: InFlight, hosted: ModelState) -> None:
        """Note that the work item needs its model on another device."""
        assert flight.hosted is not None
        self._models.device_of(flight.hosted).let_go(flight.hosted, flight.item.cost)
        self._assign(flight, hosted)

    def _assign(self, flight: InFlight, hosted: ModelState) -> None:
        cost = flight.counted
        self._add(flight, -cost)
        flight.hosted = hosted
        self._add(flight, cost)
        self._models.device_of(hosted).add_items(hosted, cost=flight.item.cost)

    def _arrived(self, flight: InFlight) -> None:
        self._coming[flight.item.model] -= 1
        if not self._coming[flight.item.model]:
            del self._coming[flight.item.model]

    def let_model_go(self, flight: InFlight) -> None:
        """Record that the work item no longer needs its model."""
        if flight.hosted is not None:
            self._models.device_of(flight.hosted).let_go(flight.hosted, flight.item.cost)
            # the load of the model failed: the next work item may be pulled and wait for it
            if flight.hosted.state != "loaded":
                self._on_free(flight.lease.delivery.consumer)
            flight.hosted = None

    def remove(self, flight: InFlight) -> None:
        """Remove a settled work item, together with its message."""
        if flight.span is not None:
            flight.span.end()
        del self._all[flight.lease]
        if flight.entry is None:
            self._arrived(flight)
            # no other work of its model was pulled while this work item was in transit
            self._on_free(flight.lease.delivery.consumer)
        self.let_model_go(flight)

    def written_ended(self, flight: InFlight) -> None:
        """Record that a written work item has ended, so that its consumer may deliver one more."""
        self._on_free(flight.lease.delivery.consumer)

    def count(self, flight: InFlight, cost: int) -> None:
        """Set the tokens of the work item that wait for the device; 0 once it is at the device or has ended."""
        if cost < flight.counted:
            self._on_less()
        self._add(flight, cost - flight.counted)

    def _add(self, flight: InFlight, cost: int) -> None:
        """Add to the tokens of the work item that wait for its device."""
        device = _NO_DEVICE if flight.hosted is None else flight.hosted.device
        load, before = self._loads[device][flight.item.priority == "bulk"], flight.counted
        flight.counted = before + cost
        load[0] += cost
        load[1] += (flight.counted > 0) - (before > 0)

    def load(self, *, bulk: bool, devices: Collection[int] | None = None) -> tuple[int, int]:
        """Return the tokens and the work items that wait for a device. With `bulk` they include bulk work. `devices`:
        only work for these devices, and work that has no device yet.
        """
        cost = items = 0
        for device, loads in self._loads.items():
            if devices is None or device in devices or device == _NO_DEVICE:
                for waiting_cost, waiting_items in loads[: 1 + bulk]:
                    cost += waiting_cost
                    items += waiting_items
        return cost, items

    def ages(self) -> tuple[int, dict[str, float]]:
        """Return the tokens of all work, estimated until it is tokenised, and for each model the seconds since its
        oldest delivery.
        """
        cost, oldest_s = 0, dict[str, float]()
        now_s = self._clock()
        for flight in self._all.values():
            cost += sum(row.cost for row in flight.rows) or flight.item.cost
            if flight.hosted is not None:
                oldest_s[flight.hosted.name] = max(oldest_s.get(flight.hosted.name, 0.0), now_s - flight.received_s)
        return cost, oldest_s

    def pending_inputs(self) -> dict[str, int]:
        """Return the number of inputs in flight without an answer, by model."""
        counts: Counter[str] = Counter()
        for flight in self._all.values():
            if flight.hosted is not None and not flight.settled:
                counts[flight.hosted.name] += flight.item.count or len(flight.item.inputs)
        return counts
