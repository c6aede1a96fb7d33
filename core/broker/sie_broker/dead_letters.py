"""Dead letters of a pool. A dead letter is a work message that no worker tries again, stored in a separate stream.

    sidecar ──► DEAD_{pool} ──► Letters: read, find, remove

A letter contains the client's inputs, or the keys of inputs in the payload store. The caller of this module decides
which inputs a user sees.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from sie_broker import Queue, StreamMessage, StreamState
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter, WorkItem

# number of sequences in the first range that `newest` reads, and largest number of letters in memory at a time
SPAN = 16


@dataclass(frozen=True)
class DeadLetterEntry:
    """Dead letter and its sequence in the stream. `item`: the work; None if it cannot be decoded."""

    sequence: int
    letter: DeadLetter
    item: WorkItem | None

    @property
    def model(self) -> str:
        return self.item.model if self.item else "?"

    @property
    def error(self) -> str:
        return f"{self.letter.error.code} {self.letter.error.reason}".strip()

    @property
    def inputs(self) -> int | None:
        """Return the number of inputs of the work; None if the work cannot be decoded."""
        return (self.item.count or len(self.item.inputs)) if self.item else None


def letter_stream(pool: str) -> str:
    """Return the name of the stream for a pool's dead letters."""
    return topology.dead_letter_stream(pool, replicas=1).name


class Letters:
    """Reader of a pool's dead letters. All methods call the broker, and may raise BrokerError.

    A letter that this version cannot decode is skipped, and `on_unreadable` is called with its sequence and the error.
    """

    def __init__(
        self, queue: Queue, pool: str, on_unreadable: Callable[[int, Exception], None] = lambda _sequence, _error: None
    ) -> None:
        self._queue = queue
        self._stream = letter_stream(pool)
        self._on_unreadable = on_unreadable

    async def state(self) -> StreamState:
        """Return the state of the stream: the number of letters, and their first and last sequence."""
        return await self._queue.stream_state(self._stream)

    async def all(self, after: int = 0) -> AsyncGenerator[DeadLetterEntry, None]:
        """Yield each letter above the sequence `after`, oldest first, including letters written meanwhile."""
        sequence = after + 1
        while (stored := await self._queue.first_stored(self._stream, sequence)) is not None:
            sequence = stored.sequence + 1
            if (letter := self._read(stored)) is not None:
                yield letter

    async def newest(self, before: int = 0) -> AsyncGenerator[DeadLetterEntry, None]:
        """Yield every letter below the sequence `before` (0: all), newest first.

        The broker finds the next stored message only in ascending order, so a range of SPAN sequences is read in
        ascending order and yielded in reverse. After a range without letters, the next range is twice as large. A large
        range with letters is halved before it is read, to limit the letters in memory.
        """
        state = await self.state()
        high = min(state.last_sequence, before - 1) if before else state.last_sequence
        span = SPAN
        while high >= max(1, state.first_sequence):
            low = max(1, state.first_sequence, high - span + 1)
            stored = await self._queue.first_stored(self._stream, low)
            if stored is None or stored.sequence > high:
                high, span = low - 1, span * 2
                continue
            if span > SPAN:
                span //= 2
                continue
            together = [stored]
            while stored.sequence < high:
                stored = await self._queue.first_stored(self._stream, stored.sequence + 1)
                if stored is None or stored.sequence > high:
                    break
                together.append(stored)
            for stored in reversed(together):
                if (letter := self._read(stored)) is not None:
                    yield letter
            high = low - 1

    async def at(self, sequence: int) -> DeadLetterEntry | None:
        """Return the letter with this sequence; None if it does not exist or cannot be decoded."""
        stored = await self._queue.first_stored(self._stream, sequence)
        return self._read(stored) if stored is not None and stored.sequence == sequence else None

    async def named(self, begin: str) -> list[DeadLetterEntry]:
        return [letter async for letter in self.all() if letter.letter.id.startswith(begin)]

    async def remove(self, letter: DeadLetterEntry) -> bool:
        """Remove a letter with its inputs. Return False if it does not exist any more."""
        return await self._queue.delete(self._stream, letter.sequence)

    def _read(self, stored: StreamMessage) -> DeadLetterEntry | None:
        try:
            letter = messages.decode_dead_letter(stored.data)
        except UNDECODABLE as error:
            self._on_unreadable(stored.sequence, error)
            return None
        try:
            item = messages.decode_work(letter.item)
        except UNDECODABLE:
            item = None
        return DeadLetterEntry(stored.sequence, letter, item)
