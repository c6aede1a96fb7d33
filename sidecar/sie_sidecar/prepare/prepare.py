"""Second stage of a worker: it prepares work items that were delivered. It reads large inputs from the payload store,
has the model loaded, and tokenises the texts.

    group ──► same revision of the model as at the gateway ──► model loaded ──► images, sounds ──► tokens ──► device
       │                                                             └──► operations tokenize, decode: send the result
       ├──► this worker's catalogue is older: wait, then return the work items to the queue for other workers
       └──► this worker's catalogue is newer: send an error, after which the gateway publishes the work again
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from sie_contracts.errors import InvalidInput, ModelLoadFailed, NotReady
from sie_contracts.media.images import Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import WorkItem
from sie_sidecar.in_flight import InFlight, Inventory, Loading, changed
from sie_sidecar.intake import WorkSource
from sie_sidecar.models import ModelState
from sie_sidecar.prepare import layouts, tokenizer_requests
from sie_sidecar.prepare.fetching import PayloadFetching
from sie_sidecar.prepare.media_frames import PreparedImage, SoundFeatures
from sie_sidecar.prepare.media_pool import MediaPool
from sie_sidecar.prepare.rows import OF_QUERY, ModelTokenizer, PreparedImages, TokenizerPool, WorkItemInput, effort_of
from sie_sidecar.settle import Settle

# a worker that lacks a work item's model or payload store returns the item to the queue so many times, then it sends an
# error; the number of deliveries does not count, because it grows also when workers die or drain
MAX_HAND_BACKS = 4
MAX_COUNTED = 4096  # items whose hand-backs are counted; one more replaces the oldest, whose count begins again
CATCH_UP_S = 2.0  # seconds to wait for a newer catalogue, if the gateway's catalogue is newer than this worker's


class Prepare:
    """Prepares groups of work items of one model. Items that cannot run get an error or return to the queue."""

    def __init__(
        self,
        source: WorkSource,
        loading: Loading,
        inventory: Inventory,
        settle: Settle,
        fetching: PayloadFetching | None,
        tokenizers: TokenizerPool,
        media: MediaPool,
    ) -> None:
        """Create the stage. `fetching` is None if this worker has no payload store."""
        self._source = source
        self._loading = loading
        self._inventory = inventory
        self._settle = settle
        self._fetching = fetching
        self._tokenizers = tokenizers
        self._media = media
        self.tokenising = 0  # number of groups of work items whose texts are being tokenised now
        # (request, chunk, attempt) of a work item -> number of times that this worker has handed it back
        self._hand_backs: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    async def fetch(self, flight: InFlight) -> bool:
        """Read the inputs of a work item from the payload store. Return False if the item is settled."""
        if self._fetching is None:
            if await self._handed_back(flight):
                return False
            error = NotReady("this worker cannot read the inputs of this request: its SIE_PAYLOAD_STORE_URL is not set")
            self._settle.answer_all([flight], error)
            return False
        with self._settle.answering([flight], "fetching the input"):
            await self._fetching.fetch(flight)
        # if the work item was settled during the read, nothing else releases the memory of its inputs
        if flight.settled:
            self._fetching.let_go(flight)
            return False
        flight.fetched_s = time.monotonic()
        return True

    async def run(self, group: list[InFlight], together: int) -> list[InFlight]:
        """Prepare a group and return the work items that can be dispatched. `together`: characters of all groups that
        were gathered at the same time; a small number lets texts be tokenised on the event loop. Raises SIEError, which
        is the error of all work items of the group.
        """
        group = self._settle.still_wanted(group)
        if not group:
            return []
        item = group[0].item
        if self._loading.revision(item.model) < item.config_revision:
            await self._catch_up(group)
            group = self._settle.still_wanted(group)
            if not group:
                return []
        if item.config_revision and self._loading.revision(item.model) > item.config_revision:
            self._settle.answer_changed(group)
            return []
        hosted = self._loading.find(item)
        if hosted is None:
            await self._not_ours(group)
            return []
        for flight in group:
            self._inventory.keep_model(flight, hosted)
        is_tokenizers = item.operation in tokenizer_requests.OPERATIONS
        if hosted.tokenizer is None if is_tokenizers else not hosted.is_ready(item.options.lora):
            try:
                await self._loading.ensure(hosted, group)
            except ModelLoadFailed:
                if not await self._loading.restored(item, hosted):
                    raise
                self._settle.answer_changed(self._settle.still_wanted(group))
                return []
            group = self._settle.still_wanted(group)
            if not group:
                return []
        hosted = group[0].hosted or hosted  # the model's state on another device, if the group was moved there
        loaded_s = time.monotonic()
        for flight in group:
            flight.loaded_s = loaded_s
        if is_tokenizers:
            await self._answer_by_tokenizer(group, hosted, together)
            return []
        self.tokenising += 1
        try:
            group = await self._tokenise(group, hosted, together)
        finally:
            self.tokenising -= 1
        for flight in group:
            flight.tokenised_s = time.monotonic()
        return group

    async def _catch_up(self, group: Sequence[InFlight]) -> None:
        """Wait for a catalogue as new as the gateway's. Meanwhile pull nothing from the consumers of this group."""
        consumers = {flight.lease.delivery.consumer for flight in group}
        until_s = min(time.monotonic() + CATCH_UP_S, max(flight.deadline_s for flight in group))
        with self._source.paused(consumers):
            await self._loading.renewed(group[0].item, until_s - time.monotonic())

    async def _not_ours(self, group: Sequence[InFlight]) -> None:
        """Return work items of an unknown model or revision to the queue; after MAX_HAND_BACKS, send an error."""
        for flight in group:
            if await self._handed_back(flight):
                continue
            flight.given_up = changed()
            self._settle.answer_all([flight], flight.given_up)

    async def _handed_back(self, flight: InFlight) -> bool:
        """Return a work item to the queue, for other workers. Return False if it was returned MAX_HAND_BACKS times."""
        item = flight.item
        key = (item.request, item.chunk, item.attempt)
        count = self._hand_backs.pop(key, 0)
        if count == MAX_HAND_BACKS:
            return False
        self._hand_backs[key] = count + 1
        if len(self._hand_backs) > MAX_COUNTED:
            self._hand_backs.popitem(last=False)
        await self._settle.hand_back(flight)
        return True

    async def _tokenise(self, group: Sequence[InFlight], hosted: ModelState, together: int) -> list[InFlight]:
        """Build the rows of each work item. Return the work items for `Dispatch`. If the rows of an item cannot be
        built, send an error for this item only, because the other items may be of other clients.
        """
        # read before the first `await`, because the model may be unloaded while this method waits
        tokenizer, ready = hosted.tokenizer, hosted.ready
        assert tokenizer is not None
        assert ready is not None
        operation = group[0].item.operation
        layout = ready.rows.get(operation)
        if layout is None:
            raise InvalidInput(f"{hosted.name} does not {operation}", reason="unsupported_task")
        if _has_files(group):
            decoded = await asyncio.gather(*(self._decoded(flight, layout) for flight in group))
            work = [entry for entry in decoded if entry is not None]
            if not work:
                return []
        else:  # without files, start no tasks: they would add 0.13 ms to the time of a short text
            work = [
                (flight, WorkItemInput(flight.item.inputs, flight.item.query, flight.item.options)) for flight in group
            ]
        try:
            await self._build_rows(work, tokenizer, layout, together)
        except Exception:
            if len(work) == 1:
                raise
        else:
            return [flight for flight, _ in work]
        for pair in work:  # the call for all items failed: call for each item alone, so that only the faulty item fails
            with self._settle.answering([pair[0]], "preparing the input"):
                await self._build_rows([pair], tokenizer, layout, together)
        return [flight for flight, _ in work if not flight.settled]

    async def _build_rows(
        self, work: Sequence[tuple[InFlight, WorkItemInput]], tokenizer: ModelTokenizer, layout: Rows, together: int
    ) -> None:
        inputs: list[WorkItemInput] = []
        effort = 0
        for _, item_input in work:
            inputs.append(item_input)
            effort += effort_of(layout, item_input)
        results = await self._tokenizers.run(
            effort, functools.partial(layouts.make, tokenizer, layout, inputs), together
        )
        for (flight, _), rows in zip(work, results, strict=True):
            flight.layout, flight.rows, flight.shared = layout.layout, rows.rows, rows.shared
            flight.refused, flight.unfit, flight.chunked = rows.error, rows.unfit, rows.chunked

    async def _decoded(self, flight: InFlight, layout: Rows) -> tuple[InFlight, WorkItemInput] | None:
        """Return the data from which the rows of a work item are built. Decode its images and sounds if the model reads
        images or sounds. If this fails, send the error for the work item, and return None.
        """
        item = flight.item
        with self._settle.answering([flight], "preparing the input"):
            images, sounds = await asyncio.gather(self._images(item, layout.images), self._sounds(item, layout.sounds))
            return flight, WorkItemInput(item.inputs, item.query, item.options, images, sounds)
        return None

    async def _images(self, item: WorkItem, recipe: Recipe | None) -> Mapping[int, PreparedImages | InvalidInput]:
        """Return the decoded images of each input and of the query, or the error of an unusable image, by index."""
        if recipe is None:
            return {}
        files = {index: source.images for index, source in enumerate(item.inputs) if source.images}
        if item.query is not None and item.query.images:
            files[OF_QUERY] = item.query.images
        pixels = await asyncio.gather(*(self._pixels(images, recipe) for images in files.values()))
        return dict(zip(files, pixels, strict=True))

    async def _sounds(self, item: WorkItem, recipe: SoundRecipe | None) -> Mapping[int, SoundFeatures | InvalidInput]:
        """Return the features of each input that has a sound, or the error of an unusable sound, by index."""
        if recipe is None:
            return {}
        sounds = {index: source.audio for index, source in enumerate(item.inputs) if source.audio}
        from_s = item.options.sound_from_s
        features = await asyncio.gather(*(self._features(audio, recipe, from_s) for audio in sounds.values()))
        return dict(zip(sounds, features, strict=True))

    async def _features(self, audio: bytes, recipe: SoundRecipe, from_s: float | None) -> SoundFeatures | InvalidInput:
        try:
            return await self._media.prepare(audio, recipe, from_s)
        except InvalidInput as error:
            error.message, error.param = f"audio: {error.message}", "audio"
            return error

    async def _pixels(self, images: Sequence[bytes], recipe: Recipe) -> PreparedImages | InvalidInput:
        outcomes = await asyncio.gather(
            *(self._media.prepare(image, recipe) for image in images), return_exceptions=True
        )
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, InvalidInput):
                outcome.message, outcome.param = f"images[{place}]: {outcome.message}", f"images[{place}]"
                return outcome
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, PreparedImage)]

    async def _answer_by_tokenizer(self, group: Sequence[InFlight], hosted: ModelState, together: int) -> None:
        """Run the operations tokenize and decode, and send their results. They need only the tokenizer, which may be in
        memory even if the model is not loaded.
        """
        tokenizer = hosted.tokenizer
        assert tokenizer is not None

        async def answer(flight: InFlight) -> None:
            item = flight.item
            work = WorkItemInput(item.inputs, None, item.options)
            flight.fingerprint = hosted.fingerprint(item.profile, item.options)
            work_call = functools.partial(tokenizer_requests.answer, tokenizer, item.operation, work)
            with self._settle.answering([flight], "preparing the input"):
                outcomes = await self._tokenizers.run(tokenizer_requests.effort_of(work), work_call, together)
                flight.tokenised_s = time.monotonic()
                self._settle.answer(flight, outcomes)

        await asyncio.gather(*map(answer, group))


def _has_files(group: Sequence[InFlight]) -> bool:
    for flight in group:
        query = flight.item.query
        for source in flight.item.inputs if query is None else (query, *flight.item.inputs):
            if source.images or source.audio:
                return True
    return False
