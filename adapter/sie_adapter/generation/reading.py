"""Loop of the models that generate text. A row is one input of a model, for example a page. It has the present prompt
and the tokens generated so far. One thread runs the steps of all rows, and adds and removes rows between two steps.

    read (any thread) ──► rows wait ──► begin: image and prompt ──► slots ──► step, step, ... ──► GeneratedText, per row

In each iteration, for each model that has rows, the thread removes rows for which no client waits any more, begins some
of the waiting rows, then adds one token to each row. So a short text does not wait for a long text, and the loop runs
at most one step for a disconnected client. The text of a row does not depend on the other rows. If the text of a prompt
ends and the row has a further prompt (a long sound has one for each window), the row waits again, behind all others.

The loop does not occupy the device threads: passes of other models run between the steps. On a CPU the loop's thread
has a lower priority than the device threads. While those are busy, the loop's thread gets only a part of a core.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sie_adapter.engine.device import give_memory_back
from sie_adapter.families.extraction import scores_not_finite
from sie_adapter.generation.greedy import Finish, Rules, best
from sie_adapter.generation.slots import DecoderSlots, Fits, RowStart, SlotsFull, unbounded
from sie_adapter.memory.device_errors import cancelled, is_device_fatal, is_out_of_memory
from sie_adapter.memory.oom import on_usable_thread
from sie_contracts.errors import InferenceFailed, ShuttingDown, SIEError

_logger = logging.getLogger("sie.adapter")

MAX_ROWS = 16  # largest number of rows of one model that run at the same time
# Niceness that is added for the loop's thread. A niceness of 3 halves the thread's weight in the scheduler of Linux: on
# two cores with two busy device threads, the thread gets a third of a core, or a quarter if gateway, sidecar and broker
# are also busy. With a niceness of 5 it would get a quarter of a core, or a sixth.
_NICENESS = 3
_CLOSED_S = 1.0  # seconds without new rows after a row did not fit into memory; the end of another row ends this wait

P_contra = TypeVar("P_contra", bound="GenerationPrompt", contravariant=True)


class GenerationPrompt(Protocol):
    """Prompt from which a model generates text. The loop reads only these attributes; a model may add others."""

    @property
    def rules(self) -> Rules: ...

    def following(self, written: GeneratedText) -> GenerationPrompt | None:
        """Return the next prompt of the row (for a sound: the next window), or None after the last prompt. `written`:
        the text that the model generated from this prompt. Must not raise.
        """


class GenerationModel(Protocol[P_contra]):
    """Model that generates text. Only the loop's thread calls the model, in inference mode. `together`: the largest
    number of prompts that one call of `begin` gets.
    """

    together: int

    def begin(self, prompts: Sequence[P_contra]) -> list[RowStart]:
        """Run the model over the images and prompts of new rows, and return the rows."""

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        """Return the scores of the next token after `ids` [rows, 1], float32 [rows, vocabulary]."""


class GeneratedText(NamedTuple):
    """Tokens that were generated for a prompt, the end token included, and the reason why generation ended."""

    ids: list[int]
    finish: Finish


@dataclass(eq=False)
class _GenerationCall:
    """State of one call of `read`, which waits until all of its rows have ended. `left`: number of unfinished rows."""

    is_gone: Callable[[], bool]
    left: int
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def ended(self) -> None:
        self.left -= 1
        if not self.left:
            self.done.set()

    def fail(self, error: BaseException) -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()


@dataclass(eq=False)
class _GenerationRow:
    call: _GenerationCall
    prompt: GenerationPrompt
    ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: InferenceFailed | None = None

    def add(self, token: int) -> bool:
        """Append a token. The token -1 stands for scores that are not finite: it sets `error`. Return True if the text
        of the present prompt has ended, so that the row must leave its slot. If the row has a further prompt, `waits`
        is then True: the row waits for a new slot.
        """
        if token < 0:
            self.error = scores_not_finite()
            self.call.ended()
            return True
        self.ids.append(token)
        self.finish = self.prompt.rules.finish(self.ids)
        if self.finish is None:
            return False
        following = self.prompt.following(GeneratedText(self.ids, self.finish))
        if following is None:
            self.call.ended()
        else:
            self.prompt, self.ids, self.finish = following, [], None
        return True

    def written(self) -> GeneratedText | InferenceFailed:
        """Return the text of a row that has ended, or its error."""
        if self.error is not None:
            return self.error
        assert self.finish is not None
        return GeneratedText(self.ids, self.finish)

    @property
    def waits(self) -> bool:
        """Return True if the row has left its slot and waits to continue with another prompt."""
        return self.finish is None and self.error is None and not self.call.done.is_set()


class _Loop:
    """Loop that generates text with one model. A row is a prompt with its generated tokens. `_rows[i]` uses slot i of
    the KV cache `_slots`.
    """

    def __init__(
        self,
        model: GenerationModel[Any],
        device: torch.device,
        fits: Fits = unbounded,
        shed: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = model
        self.waiting: deque[_GenerationRow] = deque()
        self._device = device
        self._fits = fits
        self._shed = shed
        self._rows: list[_GenerationRow] = []
        self._beginning: list[_GenerationRow] = []
        self._slots = DecoderSlots(fits)
        self._most = MAX_ROWS
        self._ended = 0  # number of rows that ended after the last change of `_most`
        self._closed_until_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._rows and not self.waiting

    def turn(self) -> None:
        """Run one iteration of the loop for this model. Raise no error: the callers of failed rows get the errors."""
        error = self._failure(self._advance)
        if error is not None:
            rows = [*self._rows, *self._beginning]
            self._rows, self._beginning, self._slots = [], [], DecoderSlots(self._fits)
            if is_out_of_memory(error) and len(rows) > 1:
                error = self._failure(lambda: self._again(rows))
            if error is not None:
                for row in rows:
                    row.call.fail(error)
        if not self._rows:
            self._slots = DecoderSlots(self._fits)

    def _advance(self) -> None:
        self._leave()
        on_usable_thread(self._begin)
        on_usable_thread(self._step)

    def _failure(self, work: Callable[[], None]) -> Exception | None:
        """Call `work`. Return its error, or None. The error has no traceback, which would keep tensors in memory."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, SIEError) and not is_out_of_memory(error) and not is_device_fatal(error):
                _logger.exception("a model that generates text failed; the requests of its rows get the error")
            return error.with_traceback(None)
        return None

    def fail(self, error: SIEError) -> None:
        for row in (*self._rows, *self.waiting):
            row.call.fail(error)
        self._rows, self._slots = [], DecoderSlots(self._fits)
        self.waiting.clear()

    def _again(self, rows: list[_GenerationRow]) -> None:
        """Restart all rows after an out-of-memory error. At most half of them run at the same time, until `_widen`
        raises this limit.
        """
        self._most, self._ended = max(1, len(rows) // 2), 0
        _logger.warning(
            "out of memory with %d texts at a time: these texts start again, at most %d at a time",
            len(rows),
            self._most,
        )
        self._shed()
        give_memory_back(self._device)
        self._wait(rows)

    def _leave(self) -> None:
        for call in {row.call for row in (*self._rows, *self.waiting)}:
            if not call.done.is_set() and call.is_gone():
                call.fail(cancelled())
        self._drop([slot for slot, row in enumerate(self._rows) if row.call.done.is_set()])
        self.waiting = deque(row for row in self.waiting if not row.call.done.is_set())

    def _drop(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            self._slots.remove(slot)
            self._rows[slot] = self._rows[-1]
            self._rows.pop()
        if slots:
            self._closed_until_s = 0.0

    def _places(self) -> int:
        places = min(self.model.together, self._most - len(self._rows), len(self.waiting))
        if places < 1 or time.monotonic() < self._closed_until_s:
            return 0
        while places and not self._slots.has_room(places, self._longest(places)):
            places -= 1
        if not places:
            self._close()
        return places

    def _longest(self, rows: int) -> int:
        return max(len(self.waiting[number].prompt.rules.prompt) for number in range(rows))

    def _close(self) -> None:
        self._closed_until_s = time.monotonic() + _CLOSED_S

    def _wait(self, rows: Sequence[_GenerationRow]) -> None:
        """Put these rows back at the head of the waiting rows. Later, each generates its text again from its prompt."""
        for row in rows:
            row.ids.clear()
        self.waiting.extendleft(reversed(rows))

    def _begin(self) -> None:
        places = self._places()
        if not places:
            return
        self._beginning = [self.waiting.popleft() for _ in range(places)]
        try:
            begun = self.model.begin([row.prompt for row in self._beginning])
        except Exception as error:  # only the calls of these new rows fail; rows of other calls continue
            if is_out_of_memory(error) or is_device_fatal(error):
                raise
            if not isinstance(error, SIEError):
                _logger.exception("reading %d prompts failed; their requests get the error", len(self._beginning))
            for row in self._beginning:
                row.call.fail(error.with_traceback(None))
            begun = []
        for beginning in begun:
            row = self._beginning[0]
            scores = row.prompt.rules.chosen((), beginning.logits.float())
            if not row.add(best(scores[None])[0]):
                try:
                    self._slots.add(beginning)
                except SlotsFull:
                    self._wait(self._beginning)
                    self._close()
                    break
                self._rows.append(row)
            elif row.waits:
                self.waiting.append(row)
            self._beginning.pop(0)
        self._beginning = []

    def _step(self) -> None:
        if not self._rows:
            return
        self._ready()
        ids = torch.tensor([[row.ids[-1]] for row in self._rows], device=self._device)
        scores = self.model.step(ids, self._slots)
        self._slots.advance()
        for number, row in enumerate(self._rows):
            if row.prompt.rules.processors:
                scores[number] = row.prompt.rules.chosen(row.ids, scores[number])
        tokens = best(scores)
        ended = [slot for slot, row in enumerate(self._rows) if row.add(tokens[slot])]
        self.waiting.extend(row for slot in ended if (row := self._rows[slot]).waits)
        self._drop(ended)
        self._widen(len(ended))

    def _ready(self) -> None:
        """Prepare the slots for a step. While the rows together need too much memory, remove the row with the fewest
        tokens; this row restarts later.
        """
        while True:
            try:
                self._slots.ready()
                return
            except SlotsFull as error:
                _logger.info("%s: the text with the fewest tokens is dropped and generated again later", error)
                slot = min(range(len(self._rows)), key=lambda slot: len(self._rows[slot].ids))
                self._wait([self._rows[slot]])
                self._drop([slot])
                self._close()

    def _widen(self, ended: int) -> None:
        """Raise the limit `_most` of rows at a time by one, up to MAX_ROWS, after `_most` rows have ended."""
        self._ended += ended
        if self._ended >= self._most:
            self._most, self._ended = min(MAX_ROWS, self._most + 1), 0


class Readings:
    """Thread of one device that generates text for all models that write text. A step computes one token for each row
    of a model. The thread runs from the first `read` to `stop`. `shed`: function that drops cached outputs and CUDA
    graphs when memory is short.
    """

    def __init__(
        self,
        device: torch.device,
        fits: Fits = unbounded,
        *,
        torch_threads: int = 1,
        shed: Callable[[], object] = lambda: None,
    ) -> None:
        """`fits`: function that returns True if the rows of a model may use a given number of additional bytes."""
        self._device = device
        self._fits = fits
        self._shed = shed
        self._torch_threads = torch_threads
        self._loops: dict[int, _Loop] = {}  # only the generating thread uses this map
        self._joining: list[tuple[GenerationModel[Any], list[_GenerationRow]]] = []
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = self._stopped = False
        self._turn_since_s = 0.0

    def read(
        self, model: GenerationModel[P_contra], prompts: Sequence[P_contra], is_gone: Callable[[], bool] = lambda: False
    ) -> list[GeneratedText | InferenceFailed]:
        """Return the generated tokens for each prompt, in order, or InferenceFailed if its scores are not finite.
        `is_gone` is called between two steps: when it returns True, the client has disconnected, and the generation
        stops.

        Raises the first error of a prompt: an error of the model, an out-of-memory error of a single row,
        InternalFailure for a disconnected client, or ShuttingDown.
        """
        call = _GenerationCall(is_gone, len(prompts))
        rows = [_GenerationRow(call, prompt) for prompt in prompts]
        if not rows:
            return []
        with self._news:
            if self._stopping:
                raise ShuttingDown("the adapter is stopping")
            self._joining.append((model, rows))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reading", daemon=True)
                self._thread.start()
            self._news.notify()
        call.done.wait()
        if call.error is not None:
            raise call.error
        return [row.written() for row in rows]

    def busy_s(self) -> float:
        """Return the seconds since the present iteration of the loop began, 0 if the thread is idle. Does not block."""
        since_s = self._turn_since_s
        return time.monotonic() - since_s if since_s else 0.0

    def stop(self, timeout_s: float) -> bool:
        """Refuse new rows and complete the present rows within `timeout_s` seconds. After this time, fail the
        unfinished rows. Return True if all rows were completed.
        """
        with self._news:
            self._stopping = True
            self._news.notify()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        if not thread.is_alive():
            return True
        with self._news:
            self._stopped = True
        return False

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        if self._device.type == "cpu":
            _step_back()
        with torch.inference_mode():
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._loops or self._joining or self._stopping)
                    self._join()
                    is_stopped = self._stopped
                if not self._loops:
                    return
                self._turn(is_stopped=is_stopped)

    def _join(self) -> None:
        """Add the new rows to the loops of their models. This is a method of its own, because a local variable of
        `_run` would keep a row in memory during waits, for example the features of a long sound.
        """
        for model, rows in self._joining:
            loop = _Loop(model, self._device, self._fits, self._shed)
            self._loops.setdefault(id(model), loop).waiting.extend(rows)
        self._joining = []

    def _turn(self, *, is_stopped: bool) -> None:
        for loop in self._loops.values():
            self._turn_since_s = time.monotonic()
            if is_stopped:
                loop.fail(ShuttingDown("the adapter is stopping"))
            loop.turn()
        self._turn_since_s = 0.0
        self._loops = {number: loop for number, loop in self._loops.items() if not loop.is_idle}


def _step_back() -> None:
    """Lower the scheduling priority of this thread. Only Linux has a priority for each thread."""
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
    except OSError as error:
        _logger.info("the priority of the thread that generates text could not be lowered: %s", error)
