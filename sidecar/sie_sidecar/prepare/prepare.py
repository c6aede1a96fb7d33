"""The second stage: from a delivered work item to one that can run. Its inputs are fetched, its model is loaded, its
texts are tokenised.

    group ──► entry as the gateway knew it? ──► model loaded ──► images, sounds ──► tokenised ──► returned
                 │  └──► older here: wait for it, then leave it to others  └──► tokenize, decode: answered
                 └──► newer here: its gateway asks anew
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

from sie_contracts.errors import InvalidInput, ModelLoadFailed, NotReady, SIEError
from sie_contracts.media.images import Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import WorkItem
from sie_sidecar.device.in_flight import InFlight, changed
from sie_sidecar.intake.pull import Source
from sie_sidecar.models.inventory import Inventory
from sie_sidecar.models.loading import Loading
from sie_sidecar.models.models import Hosted
from sie_sidecar.prepare import layouts, tokenizer_requests
from sie_sidecar.prepare.fetching import Fetching
from sie_sidecar.prepare.media_frames import Heard, Prepared
from sie_sidecar.prepare.media_pool import MediaPool
from sie_sidecar.prepare.rows import OF_QUERY, Seen, Work, effort_of
from sie_sidecar.prepare.tokens import TokenizerPool
from sie_sidecar.results.settle import Settle

# deliveries of work whose model nobody here knows: time enough for a catalogue that lags, not for one that moved on
MAX_HAND_BACKS = 5
CATCH_UP_S = 2.0  # for a worker's catalogue that is older than a gateway's


class Prepare:
    """Prepares groups of work items of one model and one truncation. What cannot run is answered or handed back."""

    def __init__(
        self,
        source: Source,
        loading: Loading,
        inventory: Inventory,
        settle: Settle,
        fetching: Fetching | None,
        tokenizers: TokenizerPool,
        media: MediaPool,
        clock: Callable[[], float],
    ) -> None:
        """`fetching`: None where this worker has no payload store."""
        self._source = source
        self._loading = loading
        self._inventory = inventory
        self._settle = settle
        self._fetching = fetching
        self._tokenizers = tokenizers
        self._media = media
        self._clock = clock
        self.tokenising = 0  # groups

    async def fetch(self, flight: InFlight) -> bool:
        """Get the inputs that its message could not hold. False if it is settled instead."""
        if self._fetching is None:
            if flight.lease.delivery.delivered < MAX_HAND_BACKS:
                await self._settle.hand_back(flight)
                return False
            error = NotReady("this worker has no SIE_PAYLOAD_STORE_URL to read the inputs of this request from")
            self._settle.answer_all([flight], error)
            return False
        with self._settle.answering([flight], "fetching the input"):
            await self._fetching.fetch(flight)
        if flight.settled:  # meanwhile, and removed before there was anything to give back
            self._fetching.let_go(flight)
            return False
        flight.fetched_s = self._clock()
        return True

    async def run(self, group: list[InFlight], together: int) -> list[InFlight]:
        """Those of the group that are ready to be dispatched. Raises SIEError, which is the answer to all of them.

        `together`: characters of all that was gathered with them, which bounds what may be tokenised on the event loop.
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
        if hosted.tokenizer is None or not is_tokenizers:
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
        loaded_s = self._clock()
        if is_tokenizers:
            await self._answer_by_tokenizer(group, hosted, loaded_s, together)
            return []
        self.tokenising += 1
        try:
            await self._tokenise(group, hosted, together)
        finally:
            self.tokenising -= 1
        for flight in group:
            flight.loaded_s, flight.tokenised_s = loaded_s, self._clock()
        return group

    async def _catch_up(self, group: Sequence[InFlight]) -> None:
        """A gateway's catalogue is newer than this worker's: wait for it, and until then leave such work to other
        workers.
        """
        consumers = {flight.lease.delivery.consumer for flight in group}
        until_s = min(self._clock() + CATCH_UP_S, max(flight.deadline_s for flight in group))
        with self._source.paused(consumers):
            await self._loading.renewed(group[0].item, until_s - self._clock())

    async def _not_ours(self, group: Sequence[InFlight]) -> None:
        """This worker's catalogue does not know the model, or not its revision. Another one's may."""
        for flight in group:
            if flight.lease.delivery.delivered < MAX_HAND_BACKS:
                await self._settle.hand_back(flight)
                continue
            flight.given_up = changed()
            self._settle.answer_all([flight], flight.given_up)

    async def _tokenise(self, group: Sequence[InFlight], hosted: Hosted, together: int) -> None:
        assert hosted.tokenizer is not None
        assert hosted.ready is not None
        operation = group[0].item.operation
        layout = hosted.ready.rows.get(operation)
        if layout is None:
            raise InvalidInput(f"{hosted.name} does not {operation}", reason="unsupported_task")
        if any(_has_files(flight.item) for flight in group):
            work = await asyncio.gather(*(self._work(flight.item, layout) for flight in group))
        else:  # without tasks, which would take 0.13 ms of a short text
            work = [Work(flight.item.inputs, flight.item.query, flight.item.options) for flight in group]
        effort = sum(effort_of(layout, each) for each in work)
        made = await self._tokenizers.run(
            effort, functools.partial(layouts.make, hosted.tokenizer, layout, work), together
        )
        for flight, each in zip(group, made, strict=True):
            flight.layout, flight.rows, flight.shared, flight.refused = (
                layout.layout,
                each.rows,
                each.shared,
                each.error,
            )
            flight.unfit = each.unfit

    async def _work(self, item: WorkItem, layout: Rows) -> Work:
        """With its images and sounds, as far as the model takes them."""
        images, sounds = await asyncio.gather(self._seen(item, layout.images), self._heard(item, layout.sounds))
        return Work(item.inputs, item.query, item.options, images, sounds)

    async def _seen(self, item: WorkItem, recipe: Recipe | None) -> Mapping[int, Seen | InvalidInput]:
        """The pixels of the inputs that have images, by their index, and of the query, or why they have none."""
        if recipe is None:
            return {}
        shown = {index: given.images for index, given in enumerate(item.inputs) if given.images}
        if item.query is not None and item.query.images:
            shown[OF_QUERY] = item.query.images
        found = await asyncio.gather(*(self._pixels(images, recipe) for images in shown.values()))
        return dict(zip(shown, found, strict=True))

    async def _heard(self, item: WorkItem, recipe: SoundRecipe | None) -> Mapping[int, Heard | InvalidInput]:
        """The features of the inputs that have a sound, by their index, or why they have none."""
        if recipe is None:
            return {}
        given = {index: each.audio for index, each in enumerate(item.inputs) if each.audio}
        found = await asyncio.gather(*(self._features(audio, recipe) for audio in given.values()))
        return dict(zip(given, found, strict=True))

    async def _features(self, audio: bytes, recipe: SoundRecipe) -> Heard | InvalidInput:
        try:
            return await self._media.prepare(audio, recipe)
        except InvalidInput as error:
            error.message, error.param = f"audio: {error.message}", "audio"
            return error

    async def _pixels(self, images: Sequence[bytes], recipe: Recipe) -> Seen | InvalidInput:
        found = await asyncio.gather(*(self._media.prepare(image, recipe) for image in images), return_exceptions=True)
        for place, each in enumerate(found):
            if isinstance(each, InvalidInput):
                each.message, each.param = f"images[{place}]: {each.message}", f"images[{place}]"
                return each
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, Prepared)]

    async def _answer_by_tokenizer(
        self, group: Sequence[InFlight], hosted: Hosted, loaded_s: float, together: int
    ) -> None:
        """Answer what needs no more than the tokenizer, which stays when the model is unloaded."""
        tokenizer = hosted.tokenizer
        assert tokenizer is not None

        async def answer(flight: InFlight) -> None:
            item = flight.item
            work = Work(item.inputs, None, item.options)
            flight.loaded_s, flight.fingerprint = loaded_s, hosted.fingerprint(item.profile, item.options)
            try:
                made = functools.partial(tokenizer_requests.answer, tokenizer, item.operation, work)
                outcomes = await self._tokenizers.run(tokenizer_requests.effort_of(work), made, together)
            except SIEError as error:
                self._settle.answer_all([flight], error)
                return
            flight.tokenised_s = self._clock()
            self._settle.answer(flight, outcomes)

        await asyncio.gather(*map(answer, group))


def _has_files(item: WorkItem) -> bool:
    for given in item.inputs:
        if given.images or given.audio:
            return True
    return item.query is not None and bool(item.query.images or item.query.audio)
