"""Answers of rows, as a job keeps them until their shard is written: equal inputs are computed once.

inputs ──key──► unique inputs ──► cache ──► groups: by length, of one query ──► JobClient ──► Answer of each input
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sie_contracts.errors import ErrorInfo, SIEError
from sie_contracts.wire.messages import Failed, Ok, Operation
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.reply import Placed, array_of
from sie_gateway.inference.results import PlannedRequest
from sie_gateway.jobs.client import Halted, JobClient
from sie_store.datasets.answers import RowAnswer

MODEL_CHANGED = "MODEL_CHANGED"
GROUP_ITEMS = 256  # of a request
GROUP_BYTES = 256 << 10  # of texts; four bytes are a token, roughly
GROUP_FILES = 16  # of items with files
SHARD_BYTES = 256 << 20  # of the answers of a shard, as they are expected
TEXT_TOKENS, IMAGE_TOKENS = 512, 1024  # of an input, as they are expected
TOKEN_BYTES = 4  # of a text, roughly
_SIZES = {"float32": 4, "float16": 2}


class ModelInput(NamedTuple):
    """Input that a row gives to the model. `query`: of a score."""

    item: RequestItem
    query: str | None = None

    @property
    def digest(self) -> bytes:
        """16 bytes that no other input has (BLAKE2b)."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.query, self.item.text):
            text = b"" if part is None else part.encode()
            digest.update(b"%d:%d " % (part is not None, len(text)))
            digest.update(text)
        for file in self.item.files:
            digest.update(b"%d " % len(file))
            digest.update(file)
        return digest.digest()


class Bounds(NamedTuple):
    """Bounds of a shard: rows, and bytes of text, None without a bound of their own."""

    rows: int
    text_bytes: int | None


def bounds(understood: PlannedRequest, *, has_images: bool) -> Bounds:
    """How large a shard may be so that its answers take about SHARD_BYTES: all are in memory until it is written, and
    the vectors of its tokens take a hundred times as much as a text. Texts with many tokens are bounded by their bytes.
    """
    run, outputs = understood.options.run, understood.resolved.entry.outputs
    tokens = IMAGE_TOKENS if has_images else min(TEXT_TOKENS, understood.resolved.entry.max_tokens)
    size = _SIZES.get(run.dtype, 1)
    of_token = of_row = 0
    for output in run.outputs:
        width = outputs.get(output, 0)
        if output == "multivector":
            of_token += width * size
        elif output == "sparse":  # an index and a weight
            of_row += 8 * tokens
        elif run.muvera is not None:
            of_row += run.muvera.width(outputs.get("multivector", 0)) * size
        else:
            of_row += (run.dimensions or width) * size
    rows = SHARD_BYTES // max(1, of_row + of_token * tokens)
    text_bytes = SHARD_BYTES // of_token * TOKEN_BYTES if of_token and not has_images else None
    return Bounds(max(1, rows), text_bytes)


class RowValues:
    """Computes the values of inputs for one job. `spec`: the model, pinned to its profile."""

    def __init__(
        self,
        client: JobClient,
        spec: str,
        operation: Operation,
        params: Mapping[str, Any],
        fingerprint: str,
    ) -> None:
        """`fingerprint`: of all answers before, empty if there are none."""
        self._client = client
        self._spec = spec
        self._operation: Operation = operation
        self._params = params
        self.fingerprint = fingerprint

    async def answers_of(
        self, inputs: Sequence[ModelInput], on_done: Callable[[Sequence[int], Sequence[RowAnswer]], None]
    ) -> list[RowAnswer]:
        """The answer to each input. `on_done` is called with places whose answers are there. Raises SIEError for what
        no input can escape; Halted where the model is another one than before.
        """
        answers: list[RowAnswer | None] = [None] * len(inputs)

        async def ask(places: Sequence[int]) -> None:
            values = await self._compute([inputs[place] for place in places])
            for place, value in zip(places, values, strict=True):
                answers[place] = value
            on_done(places, values)

        groups = await asyncio.to_thread(grouped, inputs)
        try:
            async with asyncio.TaskGroup() as tasks:
                for places in groups:
                    tasks.create_task(ask(places))
        except* (SIEError, Halted) as errors:
            raise errors.exceptions[0] from errors
        return [value for value in answers if value is not None]

    async def _compute(self, inputs: Sequence[ModelInput]) -> list[RowAnswer]:
        query = None if inputs[0].query is None else RequestItem(inputs[0].query)
        items = [entry.item for entry in inputs]
        outcomes = await self._client.outcomes(self._spec, self._operation, self._params, items, query)
        for result, outcome in outcomes:
            if isinstance(outcome, Ok):
                self.check(result.fingerprint)
        return [value_of(placed) for placed in outcomes]

    def check(self, fingerprint: str) -> None:
        """Raises Halted for another one than that of the answers before; the first one counts."""
        if not self.fingerprint:
            self.fingerprint = fingerprint
        elif fingerprint and fingerprint != self.fingerprint:
            message = (
                f"the model changed while the job ran: its answers are of fingerprint {self.fingerprint}, and those of "
                f"now of {fingerprint}. Roll the model back and resume, or start another job"
            )
            raise Halted(ErrorInfo(MODEL_CHANGED, message))


def value_of(placed: Placed) -> RowAnswer:
    """An outcome without the message that it came in, which it would keep in memory."""
    result, outcome = placed
    if isinstance(outcome, Failed):
        return RowAnswer(error=outcome.error)
    assert isinstance(outcome, Ok)
    arrays = {name: array_of(result, outcome, name).copy() for name in outcome.outputs}
    return RowAnswer(None, outcome.tokens, outcome.truncated, arrays, outcome.score, outcome.data)


def grouped(inputs: Sequence[ModelInput]) -> list[list[int]]:
    """Places of the inputs of each request: inputs of one query, and of similar length, the longest first. So batches
    are full and need little filling, and no long text is left for the end.
    """
    by_query: dict[str | None, list[int]] = defaultdict(list)
    for place, entry in enumerate(inputs):
        by_query[entry.query].append(place)
    groups: list[list[int]] = []
    for places in by_query.values():
        places.sort(key=lambda place: -inputs[place].item.size)
        group: list[int] = []
        size = files = 0
        for place in places:
            item = inputs[place].item
            if group and (
                len(group) == GROUP_ITEMS or size + item.size > GROUP_BYTES or files + len(item.files) > GROUP_FILES
            ):
                groups.append(group)
                group, size, files = [], 0, 0
            group.append(place)
            size += item.size - item.file_bytes
            files += len(item.files)
        groups.append(group)
    return groups


class Unique(NamedTuple):
    """Inputs without repetition, and for each row the place of its input."""

    inputs: list[ModelInput]
    digests: list[bytes]
    places: list[int]


def unique(inputs: Sequence[ModelInput]) -> Unique:
    """Equal inputs once, in the order of their first occurrence."""
    place_of: dict[bytes, int] = {}
    inputs_once: list[ModelInput] = []
    digests: list[bytes] = []
    places: list[int] = []
    for entry in inputs:
        digest = entry.digest
        place = place_of.get(digest)
        if place is None:
            place = place_of[digest] = len(inputs_once)
            inputs_once.append(entry)
            digests.append(digest)
        places.append(place)
    return Unique(inputs_once, digests, places)


class PackedValue(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """A value as the cache keeps it. Only values without an error are kept."""

    arrays: dict[str, tuple[str, tuple[int, ...], bytes]]
    score: float | None = None
    data: dict[str, Any] | None = None
    tokens: int = 0
    truncated: bool = False


_decode = msgspec.msgpack.Decoder(PackedValue).decode


def pack(value: RowAnswer) -> bytes:
    """A value as bytes."""
    arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in value.arrays.items()}
    return msgspec.msgpack.encode(PackedValue(arrays, value.score, value.data, value.tokens, value.truncated))


def unpack(packed: bytes) -> RowAnswer:
    """The value of these bytes. Raises ValueError."""
    decoded = _decode(packed)
    arrays = {
        name: np.frombuffer(data, dtype=dtype).reshape(shape) for name, (dtype, shape, data) in decoded.arrays.items()
    }
    return RowAnswer(None, decoded.tokens, decoded.truncated, arrays, decoded.score, decoded.data)
