"""From a delivery to work that can run: gathered, its inputs fetched, its model's entry and copy there, its texts
tokenised.

    arrived ─► grouped ─► entry as the gateway knew it? ─► model loaded ─► tokenised ─► waiting for the device
                  │              │  └─► older here: wait for it, then leave it to others     │
                  │              └─► newer here: its gateway asks anew                       └─► tokenize, decode: reply
                  └─► large inputs come from the payload store, each work item by itself
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

from sie_contracts import ipc
from sie_contracts.errors import GatewayTimeout, InternalFailure, InvalidInput, ModelLoading, NotReady, SIEError
from sie_contracts.messages import BatchNote, Outcome
from sie_contracts.settings import Settings
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Tasks
from sie_sidecar import layouts, tokenise
from sie_sidecar.batch import Limits
from sie_sidecar.fetching import Fetching
from sie_sidecar.held import Held, changed
from sie_sidecar.hosting import Hosting
from sie_sidecar.inventory import Inventory
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.loras import Loras
from sie_sidecar.metrics import Metrics
from sie_sidecar.models import Hosted
from sie_sidecar.pulling import Pulling
from sie_sidecar.quantum import quantum_of
from sie_sidecar.rows import Work, effort_of
from sie_sidecar.tokens import TokenizerPool
from sie_store.payloads import PayloadStore

# deliveries of work whose model nobody here knows: time enough for a catalogue that lags, not for one that moved on
MAX_HAND_BACKS = 5
CHARACTERS_PER_TOKEN = 4  # of the gateway's estimate of a cost
CATCH_UP_S = 2.0  # for a worker's catalogue that is older than a gateway's
_logger = logging.getLogger("sie.sidecar.preparing")


class Desk(Protocol):
    """What preparing needs of the worker that holds the work."""

    pulling: Pulling
    inventory: Inventory

    def load(self, names: Iterable[str]) -> None:
        """Load these, each a model or model:profile, beside everything else."""

    def still_wanted(self, group: list[Held]) -> list[Held]:
        """Those of them that are to run; others are answered."""

    def enqueue(self, held: Held) -> None:
        """It is tokenised."""

    def answer_all(self, group: list[Held], error: SIEError) -> None: ...

    def answer_changed(self, group: list[Held]) -> None: ...

    def settle(
        self,
        held: Held,
        outcomes: tuple[Outcome, ...],
        block: bytes,
        done: ipc.BatchDone | None,
        note: BatchNote | None,
    ) -> None: ...

    async def hand_back(self, held: Held) -> None: ...

    def refill_soon(self) -> None: ...

    def wake(self) -> None: ...


class Preparing:
    """What is on its way to the device. One task runs `run`; `work` keeps those of single groups."""

    def __init__(
        self,
        settings: Settings,
        desk: Desk,
        feed: CatalogueFeed,
        link: AdapterLink,
        hosting: Hosting,
        loras: Loras,
        limits: Limits,
        metrics: Metrics,
        work: Tasks,
        clock: Callable[[], float],
        store: PayloadStore | None,
    ) -> None:
        self.arrived: list[Held] = []
        self.tokenising = 0
        self.behind: set[str] = set()  # consumers of models whose newest entries this worker waits for
        self.fetching = Fetching(store, clock) if store is not None else None
        self.quantum = quantum_of(settings)
        self._desk = desk
        self._feed = feed
        self._link = link
        self._hosting = hosting
        self._loras = loras
        self._limits = limits
        self._metrics = metrics
        self._work = work
        self._clock = clock
        self._tokenizers = TokenizerPool(settings.preprocessor_workers)
        self._arrival = asyncio.Event()

    def add(self, held: Held) -> None:
        """It was delivered."""
        self.arrived.append(held)
        self._arrival.set()

    @property
    def is_under_way(self) -> bool:
        """Whether something may be about to wait for the device."""
        return bool(self.arrived or self.tokenising)

    def close(self) -> None:
        self._tokenizers.close()

    async def run(self) -> None:
        """Prepare what arrives, in groups."""
        while True:
            await self._gather()
            arrived, self.arrived = [held for held in self.arrived if not held.settled], []
            self._metrics.gathered.observe(len(arrived))
            groups: dict[tuple[str | int, ...], list[Held]] = defaultdict(list)
            for held in arrived:
                if held.item.payload:
                    # its model's load waits for no store: what can run now may be behind it
                    self._desk.load([f"{held.item.model}:{held.item.profile}"])
                    self._work.start(self._fetch(held), "fetch")
                    continue
                item, options = held.item, held.item.options
                cut = (options.truncate, options.max_tokens, options.document_tokens)
                key = (item.model, item.profile, item.config_revision, item.operation, options.lora, *cut)
                groups[key].append(held)
            together = CHARACTERS_PER_TOKEN * sum(held.item.cost for group in groups.values() for held in group)
            for group in groups.values():
                self._work.start(self._prepare(group, together), "prepare")
            self._desk.refill_soon()

    async def _gather(self) -> None:
        """Wait for a delivery, then for those that are on their way, so that they are tokenised in one call."""
        await self._arrival.wait()
        began_s = last_s = self._clock()
        while (left_s := self.quantum.until_s(began_s, last_s) - self._clock()) > 0 and self._is_more_coming():
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                break
            last_s = self._clock()
        self._arrival.clear()

    def _is_more_coming(self) -> bool:
        """Whether what has arrived may get company: not if it fills a batch, nor if the broker told with it that this
        was all.
        """
        if (
            len(self.arrived) >= self._limits.requests
            or sum(held.item.cost for held in self.arrived) >= self._limits.cost
        ):
            return False
        told = {held.lease.delivery.consumer: held.lease.delivery.pending for held in self.arrived}
        return self.tokenising > 0 or (any(told.values()) and self._desk.pulling.more_expected())

    async def _fetch(self, held: Held) -> None:
        """Get the inputs that its message could not hold, beside all other work, then prepare it by itself."""
        if self.fetching is None:
            if held.lease.delivery.delivered < MAX_HAND_BACKS:
                await self._desk.hand_back(held)
            else:
                self._desk.answer_all(
                    [held], NotReady("this worker has no SIE_PAYLOAD_STORE_URL to read the inputs of this request from")
                )
            return
        try:
            await self.fetching.fetch(held)
        except SIEError as error:
            self._desk.answer_all([held], error)
            return
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("fetching failed")
            self._desk.answer_all([held], InternalFailure("the worker failed while fetching the input"))
            return
        if held.settled:  # meanwhile, and let go before there was anything to give back
            self.fetching.let_go(held)
            return
        held.fetched_s = self._clock()
        await self._prepare([held])

    async def _prepare(self, group: list[Held], together: int = 0) -> None:
        """Bring work items of one model and one truncation to the waiting queue, or answer them with why not.

        `together`: characters of all that was gathered with them, which bounds what may be tokenised on the event loop.
        """
        try:
            group = self._desk.still_wanted(group)
            if not group:
                return
            revision = group[0].item.config_revision
            if self._revision(group) < revision:
                await self._catch_up(group)
                group = self._desk.still_wanted(group)
                if not group:
                    return
            if revision and self._revision(group) > revision:
                self._desk.answer_changed(group)
                return
            hosted = self._host(group)
            if hosted is None:
                await self._not_ours(group)
                return
            is_tokenizers = group[0].item.operation in tokenise.OPERATIONS
            if hosted.tokenizer is None or not is_tokenizers:
                count = functools.partial(wanted, group)
                await self.ensure_ready(
                    hosted, group[0].item.options.lora, count, until_s=max(held.deadline_s for held in group)
                )
                group = self._desk.still_wanted(group)
            if not group:
                return
            loaded_s = self._clock()
            if is_tokenizers:
                await self._answer_by_tokenizer(group, hosted, loaded_s, together)
                return
            self.tokenising += 1
            try:
                await self._tokenise(group, hosted, together)
            finally:
                self.tokenising -= 1
            for held in group:
                held.loaded_s = loaded_s
                held.tokenised_s = self._clock()
                self._desk.enqueue(held)
        except SIEError as error:
            self._desk.answer_all(group, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("preparing failed")
            self._desk.answer_all(group, InternalFailure("the worker failed while preparing the input"))
        self._desk.wake()

    def _revision(self, group: list[Held]) -> int:
        """Of the group's model in this worker's catalogue, 0: it has none."""
        return self._feed.catalogue.revisions.get(group[0].item.model, 0)

    async def _catch_up(self, group: list[Held]) -> None:
        """A gateway's catalogue is newer than this worker's: wait for it, and until then leave such work to other
        workers.
        """
        item, consumers = group[0].item, {held.lease.delivery.consumer for held in group}
        until_s = min(self._clock() + CATCH_UP_S, max(held.deadline_s for held in group))
        self.behind.update(consumers)
        for consumer in consumers:
            self._desk.pulling.refill_one(consumer)
        try:
            await self._feed.renewed(
                lambda catalogue: catalogue.revisions.get(item.model, 0) >= item.config_revision,
                max(0.0, until_s - self._clock()),
            )
        finally:
            self.behind.difference_update(consumers)
            self._desk.pulling.refill_all()

    async def _not_ours(self, group: list[Held]) -> None:
        """This worker's catalogue does not know the model, or not its revision. Another one's may."""
        for held in group:
            if held.lease.delivery.delivered < MAX_HAND_BACKS:
                await self._desk.hand_back(held)
                continue
            held.given_up = changed()
            self._desk.answer_all([held], held.given_up)

    def _host(self, group: list[Held]) -> Hosted | None:
        """The residency for this work, or None if this worker's catalogue does not know that revision of the model."""
        item = group[0].item
        entry = self._feed.catalogue.entries.get(item.model)
        if entry is None or entry.revision != item.revision or self._revision(group) < item.config_revision:
            return None
        hosted = self._hosting.of(self._feed.catalogue.resolve_profile(entry, item.profile, item.model))
        for held in group:
            held.hosted, held.entry = hosted, hosted.resolved.entry
            self._hosting.take(hosted)
            self._desk.inventory.known(held)
            hosted.came_in(held.item.cost, held.received_s)
        return hosted

    async def ensure_ready(
        self,
        hosted: Hosted,
        lora: str,
        items: Callable[[], int],
        *,
        past_gate: bool = False,
        in_turn: bool = False,
        until_s: float,
    ) -> None:
        """As Hosting.ensure, over any number of adapters, until `until_s`: what ends every adapter must not run for
        ever, nor keep its place while a load does not end. Once none of the `items` are left it returns. Raises
        SIEError.
        """
        while (left_s := until_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._hosting.ensure(hosted, items, past_gate=past_gate)
                if not items():
                    return
                if lora:
                    await self._loras.ensure(hosted, lora, in_turn=in_turn)
            except TimeoutError:
                break
            except AdapterGone:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - self._clock()):
                        await self._link.wait_connected()
            except ModelLoading:  # evicted before its LoRA came
                hosted.unload()
            else:
                if hosted.state == "loaded":  # else it went while its LoRA came
                    return
        raise GatewayTimeout("the budget of the request was over before its model was loaded")

    async def _tokenise(self, group: list[Held], hosted: Hosted, together: int) -> None:
        assert hosted.tokenizer is not None
        assert hosted.ready is not None
        operation = group[0].item.operation
        layout = hosted.ready.rows.get(operation)
        if layout is None:
            raise InvalidInput(f"{hosted.name} does not {operation}", reason="unsupported_task")
        work = [Work(held.item.inputs, held.item.query, held.item.options) for held in group]
        effort = sum(effort_of(layout, each) for each in work)
        made = await self._tokenizers.run(
            effort, functools.partial(layouts.make, hosted.tokenizer, layout, work), together
        )
        for held, each in zip(group, made, strict=True):
            held.layout, held.rows, held.shared, held.refused = layout.layout, each.rows, each.shared, each.error
            held.unfit = each.unfit

    async def _answer_by_tokenizer(self, group: list[Held], hosted: Hosted, loaded_s: float, together: int) -> None:
        """Answer what needs no more than the tokenizer, which stays when the model is unloaded."""
        tokenizer = hosted.tokenizer
        assert tokenizer is not None

        async def answer(held: Held) -> None:
            work = Work(held.item.inputs, None, held.item.options)
            held.loaded_s, held.fingerprint = loaded_s, hosted.fingerprint(held.item.profile, held.item.options.lora)
            try:
                made = functools.partial(tokenise.answer, tokenizer, held.item.operation, work)
                outcomes = await self._tokenizers.run(tokenise.effort_of(work), made, together)
            except SIEError as error:
                self._desk.answer_all([held], error)
                return
            held.tokenised_s = self._clock()
            self._desk.settle(held, outcomes, b"", None, None)

        await asyncio.gather(*map(answer, group))


def wanted(group: list[Held]) -> int:
    """How many of them still need their model."""
    return sum(not held.settled for held in group)
