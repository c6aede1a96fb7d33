"""Work item in flight: one object with one stage, functions that join the outcomes of its inputs, and loads of models.

    preparing ──► waiting ──► sealed (in a batch) ──► running ──► settled
        ▲                                              │   │
        └─────────model evicted, or adapter lost───────┘   └──adapter crashed──► isolated ──► settled, or waiting

The inputs of an isolated work item run alone, one at a time. A work item may become settled in every stage: its result
was sent, or it was cancelled, refused or late. If a cancelled work item is in a running batch, the adapter stops the
item only if it generates text; otherwise the item runs, and its result is sent. If an isolated work item is cancelled,
its remaining inputs do not run.

`Inventory` has all work items in flight. It counts their tokens, and knows which models must not be evicted because
work items need them.

    delivery ──► add ──► keep_model (assigns it to a device) ──► count (its tokens that wait for the device)
    ──► let_go ──► remove

`Loading` loads models and LoRAs when work items need them, and carries out operators' requests to load or unload
models. All callers that need the same LoRA share one load, and work items wait at most HOLD_S seconds for it. A failed
load of a LoRA is not tried again for COOL_DOWN_S seconds. A caller that holds the lock `ModelState.lora_lock` (argument
`in_turn`) shares no load, and neither limit applies to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from sie_broker import CoreMessage, Delivery
from sie_contracts.errors import (
    CONFIG_CHANGED,
    UNDECODABLE,
    BundleConflict,
    ErrorInfo,
    GatewayTimeout,
    InvalidInput,
    LoraLoadFailed,
    LoraLoading,
    ModelLoadFailed,
    ModelLoading,
    ModelNotFound,
    NotReady,
    SIEError,
)
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire import ipc, messages
from sie_contracts.wire.messages import ArraySlice, Failed, Ok, Outcome, Stages, WorkItem
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Tasks, cancel_all
from sie_sidecar.batch import Queued
from sie_sidecar.link import AdapterGone, AdapterLinks
from sie_sidecar.models import ModelState, WorkerModels
from sie_sidecar.poison import Mark
from sie_sidecar.prepare.rows import TokenRow

if TYPE_CHECKING:
    from sie_runtime.spans import Span

_NO_DEVICE = -1
Stage = Literal["preparing", "waiting", "sealed", "running", "isolated", "settled"]


class Lease(msgspec.Struct, eq=False):
    """Message that the broker has leased to this worker: its last delivery, and the time of the last renewal. `place`:
    its pool and its sequence. `slot`: number of its record in the file of leased deliveries (`LeaseLedger`); 0 if none.
    """

    delivery: Delivery
    renewed_s: float
    place: tuple[str, int]
    slot: int = 0


@dataclass(eq=False)
class InFlight(Queued):
    """Work item from its delivery to its settlement. A time is 0 until its stage is reached. The key and
    the costs are set when the item is put into the queue of a device (`DeviceQueue.put`).

    `rows`: token sequences for the adapter. The first `shared` rows belong to all inputs. The other rows are in the
    order of the inputs: each input has the same number of rows, or the number in `chunked` if a text has chunks.
    """

    lease: Lease
    item: WorkItem
    received_s: float
    # latest possible end of the request's time limit: `due_s` and the possible error of the broker's clock
    deadline_s: float
    hosted: ModelState | None = None
    # catalogue entry of the model when the item was assigned to a device (`hosted`); no later entry may run the item
    entry: ModelEntry | None = None
    # fingerprint of the model that runs the item, set when the item's batch is sent
    fingerprint: str = ""
    layout: ipc.Layout = "text"
    rows: list[TokenRow] = field(default_factory=list)
    shared: int = 0
    chunked: tuple[ipc.ChunkedRows, ...] = ()
    refused: SIEError | None = None  # error if the item could not be prepared; the item then has no rows
    # index of an input -> the error because of which this input must not run
    unfit: Mapping[int, SIEError] = field(default_factory=dict)
    fetched_s: float = 0.0
    loaded_s: float = 0.0
    tokenised_s: float = 0.0
    reload_s: float = 0.0  # seconds of waiting for a model or LoRA after the work item was tokenised
    dispatched_s: float = 0.0
    started_s: float = 0.0
    stage: Stage = "preparing"
    settled: bool = False  # true as soon as the item has a result, is cancelled or returns to the queue
    given_up: SIEError | None = None  # error of work that is not tried again; the message becomes a dead letter
    # poison marks (`poison.Mark`) of the item's inputs that were refused because they have crashed adapters
    dead: list[Mark] = field(default_factory=list)
    is_coming: bool = False  # true from the item's delivery until the item is assigned to a device or settled
    payload_bytes: int = 0  # bytes of memory of inputs that were read from the payload store
    counted: int = 0  # tokens of the item that wait for a device now
    span: Span | None = None  # span of the item in a trace; None if the item is not traced

    def move(self, stage: Stage) -> None:
        """Move this work item to a stage. A settled work item stays settled."""
        if not self.settled:
            self.stage, self.settled = stage, stage == "settled"

    def waited_for_load(self, seconds: float) -> None:
        """Add seconds of waiting for a model or LoRA after tokenising; `loaded_s` covers a wait before tokenising."""
        if self.tokenised_s and not self.dispatched_s:
            self.reload_s += seconds

    @property
    def is_outdated(self) -> bool:
        """Return True if the catalogue entry of the model has changed since the item was assigned to a device."""
        return self.hosted is not None and self.hosted.resolved.entry is not self.entry

    def of_input(self, index: int) -> list[TokenRow]:
        """Return the rows of one input, without the first rows, which belong to all inputs."""
        if self.chunked:
            first = sum(described.rows for described in self.chunked[:index])
            return self.rows[first : first + self.chunked[index].rows]
        count = (len(self.rows) - self.shared) // len(self.item.inputs)
        first = self.shared + index * count
        return self.rows[first : first + count]

    @property
    def is_whole(self) -> bool:
        """Return True if certainly all inputs run: no input is unfit, and long inputs are truncated, not refused."""
        return self.item.options.truncate != "NONE" and not self.unfit

    def stopped(self) -> list[SIEError | None]:
        """Return for each input its error if it is unfit or too long and so does not run; None if the input runs."""
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
    return sum(not flight.settled for flight in flights)


def runnable(flight: InFlight) -> tuple[list[TokenRow], Sequence[int]]:
    """Return the rows to run, and the indexes of their inputs: all inputs without an error in `stopped`."""
    if flight.is_whole:
        return flight.rows, range(len(flight.item.inputs))
    inputs = [index for index, error in enumerate(flight.stopped()) if error is None]
    return [
        *flight.rows[: flight.shared],
        *(row for index in inputs for row in flight.of_input(index)),
    ] if inputs else [], inputs


def changed() -> NotReady:
    """Return the error for a work item whose model has a new catalogue entry. The error makes the gateway publish the
    work item again for the new entry.
    """
    return NotReady(
        "the model was changed or removed while this request was on its way", reason=CONFIG_CHANGED, retry_after_s=1
    )


def too_long(row: TokenRow) -> InvalidInput:
    """Return the error for an input that is longer than the limit and must not be truncated."""
    limit = len(row.ids)
    return InvalidInput(
        f"the input has {row.full} tokens, the limit is {limit}",
        reason="input_too_long",
        extras={"tokens": row.full, "limit": limit},
    )


def merge(flight: InFlight, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Return an outcome for each input: its error, or the next of `outcomes` if the input ran. A successful outcome
    says whether the input was truncated, whether its file has several images, and how long its sound is.
    """
    ran = iter(outcomes)
    errors = None if flight.is_whole else flight.stopped()
    shared = flight.rows[: flight.shared]
    outcomes_by_input: list[Outcome] = []
    for index in range(len(flight.item.inputs)):
        if errors is not None and (error := errors[index]) is not None:
            outcomes_by_input.append(Failed(error.info()))
            continue
        outcome = next(ran)
        if isinstance(outcome, Ok):
            is_truncated, is_first, sound_s = outcome.truncated, outcome.first_of_several, outcome.sound_s
            for row in (*shared, *flight.of_input(index)):
                is_truncated = is_truncated or row.full > len(row.ids)
                for image in row.images:
                    is_first = is_first or image.animated
                if row.sound is not None:
                    sound_s = row.sound.seconds
            if is_truncated or is_first or sound_s:
                outcome = msgspec.structs.replace(
                    outcome, truncated=is_truncated, first_of_several=is_first, sound_s=sound_s
                )
        outcomes_by_input.append(outcome)
    return tuple(outcomes_by_input)


def cut(outcomes: tuple[Outcome, ...], block: memoryview) -> tuple[tuple[Outcome, ...], bytes]:
    """Copy the arrays of a work item, which lie next to each other, from the `block` of its batch. Return the outcomes
    with new offsets, and the bytes of the arrays.
    """
    low, high = len(block), 0
    for outcome in outcomes:
        if isinstance(outcome, Ok):
            for piece in outcome.outputs.values():
                low = min(low, piece.offset)
                high = max(high, piece.offset + math.prod(piece.shape) * np.dtype(piece.dtype).itemsize)
    moved = tuple([_moved(outcome, -low) for outcome in outcomes]) if low and high else outcomes
    return moved, bytes(block[low:high])


def _moved(outcome: Outcome, by: int) -> Outcome:
    """Return the outcome with `by` added to the offsets of its arrays."""
    if not isinstance(outcome, Ok):
        return outcome
    outputs = {name: ArraySlice(piece.dtype, piece.shape, piece.offset + by) for name, piece in outcome.outputs.items()}
    return msgspec.structs.replace(outcome, outputs=outputs)


def only(flight: InFlight, index: int) -> InFlight:
    """Return a copy with only one of the inputs. The copy must not be settled: it has the lease of the original."""
    item = msgspec.structs.replace(flight.item, inputs=(flight.item.inputs[index],), first=flight.item.first + index)
    rows = [*flight.rows[: flight.shared], *flight.of_input(index)]
    return replace(flight, item=item, rows=rows, chunked=flight.chunked[index : index + 1], unfit={}, counted=0)


def joined(parts: Sequence[tuple[Outcome, bytes]]) -> tuple[tuple[Outcome, ...], bytes]:
    """Join outcomes whose arrays are in separate blocks of bytes. Return the outcomes and one block of all arrays."""
    outcomes: list[Outcome] = []
    start = 0
    for outcome, block in parts:
        outcomes.append(_moved(outcome, start))
        start += len(block)
    return tuple(outcomes), b"".join(block for _, block in parts)


def stages_of(flight: InFlight, now_s: float, done: ipc.BatchDone | None) -> Stages:
    """Return how long each stage of a work item took: fetching inputs, loading the model, tokenising, waiting for a
    batch, waiting for the device, running. `done` has the times that the adapter has measured. Waiting for a model or
    LoRA that was evicted after tokenising counts as loading.
    """
    fetched_s = flight.fetched_s or flight.received_s
    # a work item that is assigned to a device (`hosted`) but has no `loaded_s` still waits for the load
    loaded_s = flight.loaded_s or (fetched_s if flight.hosted is None else now_s)
    tokenised_s = flight.tokenised_s or loaded_s
    dispatched_s = flight.dispatched_s or tokenised_s
    inference_ms, postprocess_ms = (done.inference_ms, done.postprocess_ms) if done else (0.0, 0.0)
    # milliseconds of tokenising in the adapter: 0, except for some model families
    tokenised_there_ms = done.preprocess_ms if done else 0.0
    # `started_s` is too late if the message BatchStarted was read at the same time as the result. The wait is therefore
    # at most the total time minus the times that the adapter measured.
    max_ms = (now_s - dispatched_s) * 1000 - inference_ms - postprocess_ms - tokenised_there_ms
    # if the adapter tokenises the batch, `started_s` is before the wait for the device and does not measure this wait
    started_ms = math.inf if tokenised_there_ms else (flight.started_s - dispatched_s) * 1000
    return Stages(
        fetch_ms=(fetched_s - flight.received_s) * 1000,
        load_ms=(loaded_s - fetched_s + flight.reload_s) * 1000,
        preprocess_ms=(tokenised_s - loaded_s) * 1000 + tokenised_there_ms,
        batch_wait_ms=max(0.0, dispatched_s - tokenised_s - flight.reload_s) * 1000,
        device_wait_ms=max(0.0, min(started_ms, max_ms)),
        inference_ms=inference_ms,
        postprocess_ms=postprocess_ms,
        worker_ms=(now_s - flight.received_s) * 1000,
    )


class Inventory:
    """All work items from their delivery until they are removed."""

    def __init__(self, models: WorkerModels) -> None:
        self._models = models
        self._on_less: Callable[[], None] = lambda: None
        self._on_free: Callable[[str], None] = lambda consumer: None
        self._all: dict[Lease, InFlight] = {}
        # by device (_NO_DEVICE: not assigned yet): two lists [tokens, work items] of waiting work, for interactive and
        # for bulk work
        self._loads: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([0, 0], [0, 0]))
        self.coming: Counter[str] = Counter()  # by model: work items that are not assigned to a device yet

    def attach(self, on_less: Callable[[], None], on_free: Callable[[str], None]) -> None:
        """Set two callbacks. `on_less` is called when fewer tokens wait for a device. `on_free` is called with the name
        of a consumer that may deliver again.
        """
        self._on_less, self._on_free = on_less, on_free

    def __iter__(self) -> Iterator[InFlight]:
        """Iterate over a copy of the work items, in the order of delivery."""
        return iter(list(self._all.values()))

    def add(self, flight: InFlight) -> None:
        self._all[flight.lease] = flight
        flight.is_coming = True
        self.coming[flight.item.model] += 1
        self.count(flight, max(1, flight.item.cost))

    def keep_model(self, flight: InFlight, hosted: ModelState) -> None:
        """Assign a work item to a device. Until `let_go`, only `Loading.park` lets its model be evicted."""
        flight.entry = hosted.resolved.entry
        self._assign(flight, hosted)
        self._arrived(flight)
        hosted.came_in(flight.item.cost, flight.received_s)

    def move(self, flight: InFlight, hosted: ModelState) -> None:
        """Assign a work item to another device that hosts its model."""
        assert flight.hosted is not None
        self._models.devices[flight.hosted.device].let_go(flight.hosted, flight.item.cost)
        self._assign(flight, hosted)

    def _assign(self, flight: InFlight, hosted: ModelState) -> None:
        before = _NO_DEVICE if flight.hosted is None else flight.hosted.device
        for device, sign in ((before, -1), (hosted.device, 1)):
            load = self._loads[device][flight.bulk]
            load[0] += sign * flight.counted
            load[1] += sign * (flight.counted > 0)
        flight.hosted = hosted
        self._models.devices[hosted.device].add_items(hosted, cost=flight.item.cost)

    def _arrived(self, flight: InFlight) -> None:
        flight.is_coming = False
        self.coming[flight.item.model] -= 1
        if not self.coming[flight.item.model]:
            del self.coming[flight.item.model]

    def let_go(self, flight: InFlight) -> None:
        """Record that a work item is settled: it needs its model no more, and none of its tokens wait for a device."""
        self.count(flight, 0)
        if flight.is_coming:
            self._arrived(flight)
            # the consumer may have delivered no further item while this item waited for its model: it may deliver again
            self._on_free(flight.lease.delivery.consumer)
        if flight.hosted is not None:
            self._models.devices[flight.hosted.device].let_go(flight.hosted, flight.item.cost)
            # a consumer delivers only one work item of a model that is not loaded: it may deliver the next item now
            if flight.hosted.state != "loaded":
                self._on_free(flight.lease.delivery.consumer)
            flight.hosted = None

    def remove(self, flight: InFlight) -> None:
        """Remove a work item, and end its span. The caller has called `let_go` before."""
        if flight.span is not None:
            flight.span.end()
        del self._all[flight.lease]

    def written_ended(self, flight: InFlight) -> None:
        """Record the end of a work item that generates text. Its consumer may then deliver another item."""
        self._on_free(flight.lease.delivery.consumer)

    def count(self, flight: InFlight, cost: int) -> None:
        """Set the number of tokens of a work item that wait for a device. 0: the item was sent or has ended."""
        before = flight.counted
        if cost == before:
            return
        if cost < before:
            self._on_less()
        device = _NO_DEVICE if flight.hosted is None else flight.hosted.device
        load = self._loads[device][flight.bulk]
        flight.counted = cost
        load[0] += cost - before
        load[1] += (cost > 0) - (before > 0)

    def load(self, *, bulk: bool, devices: Collection[int] | None = None) -> tuple[int, int]:
        """Return the tokens and the number of work items that wait for a device. Bulk work counts only with `bulk`.
        `devices`: count only work for these devices, and work without a device yet.
        """
        cost = items = 0
        for device, loads in self._loads.items():
            if devices is None or device in devices or device == _NO_DEVICE:
                for waiting_cost, waiting_items in loads[: 1 + bulk]:
                    cost += waiting_cost
                    items += waiting_items
        return cost, items

    def ages(self) -> tuple[int, dict[str, float]]:
        """Return the number of tokens of all work at this worker, estimated for work that is not tokenised yet. Also
        return by model the age in seconds of its oldest work item that is assigned to a device.
        """
        cost, oldest_s = 0, dict[str, float]()
        now_s = time.monotonic()
        for flight in self._all.values():
            cost += sum(row.cost for row in flight.rows) or flight.item.cost
            if flight.hosted is not None:
                oldest_s[flight.hosted.name] = max(oldest_s.get(flight.hosted.name, 0.0), now_s - flight.received_s)
        return cost, oldest_s

    def pending_inputs(self) -> dict[str, int]:
        """Return by model the number of inputs that are assigned to a device and have no result yet."""
        counts: Counter[str] = Counter()
        for flight in self._all.values():
            if flight.hosted is not None and not flight.settled:
                counts[flight.hosted.name] += flight.item.count or len(flight.item.inputs)
        return counts


HOLD_S = 5.0
COOL_DOWN_S = 30.0
# largest number of entries of `LoraLoads._failures`, and of `ModelState.lora_digests` of each model. A full dict is
# emptied. Clients choose the names of LoRAs, and must not fill the memory with names
MAX_REMEMBERED = 1000
_Key = tuple[int, str, str]  # number of the device, residency (a model with one set of load options), LoRA


class LoraLoads:
    """Loads LoRAs into loaded models, and lists them in `ModelState.loras`. The adapter may unload a listed LoRA."""

    def __init__(self, links: AdapterLinks) -> None:
        self._links = links
        self._loads: dict[_Key, asyncio.Task[None]] = {}
        self._failures: dict[_Key, tuple[float, ErrorInfo]] = {}

    async def ensure(self, hosted: ModelState, name: str, *, in_turn: bool = False) -> None:
        """Load a LoRA if needed. With `in_turn`, the caller holds `lora_lock`, and waits without a limit. Raises
        LoraLoadFailed, ModelLoading, AdapterGone; without `in_turn`, LoraLoading after HOLD_S seconds.
        """
        if name in hosted.loras:
            return
        if in_turn:
            await self._request_lora(hosted, name)
            return
        failed_s, failure = self._failures.get((hosted.device, hosted.name, name), (0.0, None))
        if failure is not None and time.monotonic() - failed_s < COOL_DOWN_S:
            raise SIEError.from_info(failure)
        load = self._load_of(hosted, name)
        done, _ = await asyncio.wait([load], timeout=HOLD_S)
        if not done:
            shown = name[:200]
            raise LoraLoading(f"the LoRA {shown} is being loaded", extras={"lora_id": shown, "lora": shown})
        load.result()

    async def preload(self, hosted: ModelState) -> None:
        """Load the LoRAs of the model's profiles one by one, and log failures. For COOL_DOWN_S seconds after a
        LoraLoadFailed, requests for the LoRA get the same error.
        """
        for name in named(hosted.resolved):
            try:
                await asyncio.shield(self._load_of(hosted, name))
            except (SIEError, AdapterGone) as error:
                _logger.warning(
                    "a LoRA of a profile of %s could not be loaded: %s",
                    hosted.name,
                    error,
                    extra={"model": hosted.name},
                )

    async def stop(self) -> None:
        """Cancel the running loads. This also cancels the callers that wait for a load."""
        await cancel_all(self._loads.values())

    def _load_of(self, hosted: ModelState, name: str) -> asyncio.Task[None]:
        key = (hosted.device, hosted.name, name)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = asyncio.create_task(self._load(hosted, name), name="lora")
            # retrieve the exception, so that asyncio does not log it when no caller waits for this load any more
            load.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, hosted: ModelState, name: str) -> None:
        key = (hosted.device, hosted.name, name)
        try:
            async with hosted.lora_lock:
                pass
            await self._request_lora(hosted, name)
        except LoraLoadFailed as error:
            if len(self._failures) >= MAX_REMEMBERED:
                self._failures.clear()
            self._failures[key] = (time.monotonic(), error.info())
            raise
        finally:
            del self._loads[key]

    async def _request_lora(self, hosted: ModelState, name: str) -> None:
        digest = await self._links[hosted.device].ensure_lora(ipc.EnsureLora(hosted.name, name))
        if len(hosted.lora_digests) >= MAX_REMEMBERED:
            hosted.reset_loras()
        hosted.loras.add(name)
        hosted.lora_digests[name] = digest


def named(resolved: Resolved) -> list[str]:
    """Return the names of the LoRAs in all profiles of the model that share the residency of `resolved`."""
    entry = resolved.entry
    views = [Catalogue.resolve_profile(entry, profile, entry.id) for profile in ("default", *entry.profiles)]
    return list(
        dict.fromkeys(view.run.lora for view in views if view.run.lora and view.residency == resolved.residency)
    )


# seconds for which a model's work waits after a failed load, because the config service may restore an earlier revision
RESTORED_S = 10.0
_logger = logging.getLogger("sie.sidecar.loading")


class Loading:
    """Loads models for work items and operators, and unloads models for operators. `work` runs the loads that no caller
    waits for. `on_unloaded` is called with the id of a model that was unloaded.
    """

    def __init__(
        self,
        feed: CatalogueFeed,
        links: AdapterLinks,
        models: WorkerModels,
        inventory: Inventory,
        work: Tasks,
        on_unloaded: Callable[[str], None],
    ) -> None:
        self._feed = feed
        # resolved profiles of the models in `_catalogue`, by model and profile
        self._catalogue = feed.catalogue
        self._resolved: dict[tuple[str, str], Resolved] = {}
        self._links = links
        self.models = models
        self._inventory = inventory
        self.loras = LoraLoads(links)
        self._work = work
        self._on_unloaded = on_unloaded

    def revision(self, model: str) -> int:
        """Return the revision of the model in this worker's catalogue; 0 if the catalogue lacks the model."""
        return self._feed.catalogue.revisions.get(model, 0)

    async def renewed(self, item: WorkItem, within_s: float) -> None:
        """Wait at most `within_s` seconds for a catalogue with the item's model at the gateway's revision or later."""
        await self._feed.renewed(
            lambda catalogue: catalogue.revisions.get(item.model, 0) >= item.config_revision, max(0.0, within_s)
        )

    def find(self, item: WorkItem) -> ModelState | None:
        """Choose a device for the item. Return the model's state there; None if the catalogue lacks the item's
        revision.
        """
        catalogue = self._feed.catalogue
        if catalogue is not self._catalogue:
            self._catalogue = catalogue
            self._resolved.clear()
        entry, revision = catalogue.entries.get(item.model), catalogue.revisions.get(item.model, 0)
        if entry is None or entry.revision != item.revision or revision < item.config_revision:
            return None
        resolved = self._resolved.get((item.model, item.profile))
        if resolved is None:
            resolved = catalogue.resolve_profile(entry, item.profile, item.model)
            self._resolved[item.model, item.profile] = resolved
        return self.models.obtain(resolved, revision)

    async def restored(self, item: WorkItem, hosted: ModelState) -> bool:
        """Wait until the config service has replaced the catalogue entry that could not be loaded, for example by the
        entry before it. Return True if the catalogue then has a later revision of the model. Wait only if an earlier
        entry of the model was loaded here, and at most until RESTORED_S seconds after the failed load.
        """
        left_s = hosted.failed_s + RESTORED_S - time.monotonic()
        if hosted.refusal(time.monotonic()) is None or not 0 < hosted.loaded_revision < hosted.revision or left_s <= 0:
            return False
        refused = hosted.revision
        return await self._feed.renewed(lambda catalogue: catalogue.revisions.get(item.model, 0) > refused, left_s)

    def ahead(self, names: Iterable[str], *, for_work: bool = False) -> None:
        """Load these models (names or model:profile) in the background. Failures are logged. `for_work`: work waits for
        the models; if not, do not load a model while an operator's request to unload it is carried out.
        """
        for name in names:
            # an unknown model is ignored: this worker's catalogue may be older or newer than the gateway's
            with contextlib.suppress(ModelNotFound, BundleConflict):
                resolved = self._feed.catalogue.resolve(name)
                self._work.start(self._obtain_and_load(resolved, for_work=for_work), "load ahead")

    def copy(self, hosted: ModelState) -> None:
        if self._is_leaving(hosted.name):
            return
        _logger.info(
            "%s is also being loaded on device %d, because the devices that have loaded it are busy",
            hosted.name,
            hosted.device,
            extra={"model": hosted.name},
        )
        self._work.start(self._load(hosted), "load of a copy")

    def _is_leaving(self, name: str) -> bool:
        """Return True while an operator's request to unload the model is carried out on a device."""
        return any(state.leaves for state in self.models.find(name))

    async def _obtain_and_load(self, resolved: Resolved, *, for_work: bool) -> None:
        # `obtain` chooses a device also by the models that are being loaded there. A load counts only once its task has
        # begun, so `obtain` is called in this task and not by `ahead`, which starts all tasks first.
        hosted = self.models.obtain(resolved, self.revision(resolved.entry.id))
        if for_work or not self._is_leaving(hosted.name):
            await self._load(hosted)

    async def _load(self, hosted: ModelState) -> None:
        try:
            await self.models.device_of(hosted).ensure(hosted)
        except (SIEError, AdapterGone) as error:  # only logged, because no caller waits; later work gets the error
            _logger.warning(
                "the load of %s on device %d, for which no request waits, failed: %s",
                hosted.name,
                hosted.device,
                error,
                extra={"model": hosted.name},
            )

    async def ensure(
        self, hosted: ModelState, flights: Sequence[InFlight], *, past_gate: bool = False, in_turn: bool = False
    ) -> None:
        """Load the model and the LoRA of these work items if needed. Return early if all items were settled meanwhile.
        `in_turn`: the caller holds the lock `ModelState.lora_lock`. Raises SIEError; with `past_gate` also AdapterGone.

        If the device's adapter is lost, or if the load fails there but may succeed on another device, move the items to
        another device and try again. While no adapter is connected, wait for one. The attempts end at the last deadline
        of the items, so that an input that crashes every adapter does not run for ever.

        `past_gate`: the items have left the queue, and run even if the model is closed to new work. They stay on their
        device: raise AdapterGone instead of moving them, and the caller queues them again. If the device's adapter was
        lost, first wait AWAY_S seconds for its next adapter.
        """
        began_s = time.monotonic()
        try:
            await self._ensure(hosted, flights, past_gate=past_gate, in_turn=in_turn)
        finally:
            for flight in flights:
                flight.waited_for_load(time.monotonic() - began_s)

    async def _ensure(self, hosted: ModelState, flights: Sequence[InFlight], *, past_gate: bool, in_turn: bool) -> None:
        lora, items = flights[0].item.options.lora, functools.partial(unsettled, flights)
        until_s = max(flight.deadline_s for flight in flights)
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self.models.device_of(hosted).ensure(hosted, items, past_gate=past_gate)
                if not items():
                    return
                if lora:
                    await self.loras.ensure(hosted, lora, in_turn=in_turn)
            except TimeoutError:
                break
            except AdapterGone:
                link = self._links[hosted.device]
                if self._links.connected and not link.connected:
                    if not past_gate:
                        hosted = self.moved(hosted, flights)
                    elif not await link.is_back():
                        raise
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - time.monotonic()):
                        await (link.wait_connected() if past_gate else self._links.wait_connected())
            except ModelLoadFailed as error:
                chosen = self.models.obtain(hosted.resolved, hosted.revision)
                # if the load failed on the chosen device too, no connected device can load the model now: only a device
                # whose adapter was lost and comes back could load it
                if chosen.refusal(time.monotonic()) is not None:
                    if error.extras.get("permanent") or not await self._is_another_back():
                        raise
                elif past_gate:
                    raise AdapterGone(f"{hosted.name} was not loaded on device {hosted.device}") from error
                else:
                    hosted = self._move(flights, chosen)
            except ModelLoading:  # the model was evicted before its LoRA was loaded
                hosted.mark_unloaded()
            else:
                if hosted.state == "loaded":  # if the model was evicted meanwhile, the loop loads it again
                    return
        raise GatewayTimeout("the time limit of the request passed before its model was loaded")

    async def _is_another_back(self) -> bool:
        """Wait until AWAY_S seconds after the loss of the adapters. Return True as soon as an adapter is connected."""
        waits = [asyncio.create_task(link.is_back()) for link in self._links if not link.connected]
        try:
            for wait in asyncio.as_completed(waits):
                if await wait:
                    return True
            return False
        finally:
            await cancel_all(waits)

    def moved(self, hosted: ModelState, flights: Sequence[InFlight]) -> ModelState:
        """Assign these work items to a newly chosen device. Return the state of their model on the chosen device."""
        return self._move(flights, self.models.obtain(hosted.resolved, hosted.revision))

    def _move(self, flights: Sequence[InFlight], chosen: ModelState) -> ModelState:
        for flight in flights:
            if flight.hosted is not None:
                self._inventory.move(flight, chosen)
        return chosen

    def park(self, flight: InFlight) -> Callable[[], None]:
        """Allow the eviction of the model of a waiting work item. Return a function that forbids the eviction again.
        The caller must call this function before the item runs.
        """
        assert flight.hosted is not None
        count = functools.partial(unsettled, [flight])
        self.models.device_of(flight.hosted).park(flight.hosted, count)
        return functools.partial(flight.hosted.before_gate.remove, count)

    async def on_residency(self, message: CoreMessage) -> None:
        """Load or unload a model, as an operator requested. There is no reply: heartbeats report the state."""
        try:
            request = messages.decode_residency(message.data)
        except UNDECODABLE as error:
            _logger.error("a request to load or unload a model was ignored, because it could not be decoded: %s", error)
            return
        states = self.models.find(request.model)
        if request.action == "load":
            for hosted in states:
                hosted.retain()
            self.ahead([request.model])
            return
        for hosted in states:
            if hosted.state in ("loading", "loaded"):
                self._work.start(self._unload(hosted), "unload")

    async def _unload(self, hosted: ModelState) -> None:
        try:
            if await self.models.device_of(hosted).unload_when_idle(hosted):
                _logger.info("%s was unloaded at the request of an operator", hosted.name, extra={"model": hosted.name})
                self._on_unloaded(hosted.resolved.entry.id)
        except (AdapterGone, SIEError) as error:
            _logger.warning("%s could not be unloaded: %s", hosted.name, error, extra={"model": hosted.name})
