"""Steps when device memory runs out, and counters of the steps. The sidecar exports the counters, because this process
has no port for metrics.

  work ──► out of memory ──► free caches ──► evict models ──► halve the batch ──► refuse items that do not fit alone
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

import torch

from sie_adapter.engine.device import give_memory_back
from sie_adapter.memory.device_errors import is_out_of_memory, is_primitive_refused
from sie_adapter.packed.packing import Int64
from sie_contracts.errors import ResourceExhausted
from sie_contracts.wire.device_reports import Shortages

Remedy = Literal[
    "recoveries_attempted",
    "recoveries_succeeded",
    "terminal_failures",
    "cache_clears",
    "evictions_triggered",
    "batch_splits",
]
# Ways in which memory was freed after a failed allocation. `load_ended` (the load of a model ended) has no counter,
# because nothing was dropped.
Relief = Literal["cache_clears", "evictions_triggered", "load_ended"]


class OomCounters:
    """Counters of each `Remedy` for a lack of memory, by model, since the process started. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # model -> counters of the remedies for this model; the counters stay after the model is unloaded or evicted
        self._counts: dict[str, Counter[str]] = {}

    def count(self, model: str, remedy: Remedy) -> None:
        with self._lock:
            self._counts.setdefault(model, Counter())[remedy] += 1

    def all(self) -> tuple[Shortages, ...]:
        with self._lock:
            return tuple(Shortages(model, **counts) for model, counts in self._counts.items())


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


# oneDNN up to 3.13 stores the error of its code generator per thread and never clears the error. After one failed
# allocation, every primitive of a new shape therefore fails on that thread, even with free memory.
class ThreadState(threading.local):
    """`is_unusable`: oneDNN ran out of memory on this thread, and would fail again for every new shape."""

    is_unusable = False


thread_state = ThreadState()


def on_usable_thread(
    work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Call `work` on this thread, or on a new thread if this one is unusable. Raises the errors of `work`."""
    if thread_state.is_unusable:
        return on_new_thread(work, *arguments, **named)
    try:
        return work(*arguments, **named)
    except RuntimeError as error:
        ran_out(error)
        raise


def ran_out(error: RuntimeError | MemoryError) -> bool:
    """Return whether this error means that memory ran out. Record whether this thread remains usable."""
    thread_state.is_unusable = is_primitive_refused(error)
    return is_out_of_memory(error)


def on_new_thread(work: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
    """Call `work` on a new thread, with this thread's inference mode and number of torch threads. Raises the errors of
    `work`. If no memory is left for a thread, raises a RuntimeError for which `is_out_of_memory` is true.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    is_inference, threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode(is_inference):
                results.append(work(*arguments, **named))
        except BaseException as error:  # noqa: BLE001  # raised again on the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name=f"{threading.current_thread().name}-new", daemon=True)
    thread.start()
    thread.join()
    if errors:
        # pop, so that `errors` does not keep the error, whose frames refer to the tensors of a failed pass
        raise errors.pop()
    return results.pop()


_logger = logging.getLogger("sie.adapter")
Items = Int64  # indices of items in a batch


def halved(items: Items) -> tuple[Items, Items]:
    return items[: len(items) // 2], items[len(items) // 2 :]


def exhausted() -> ResourceExhausted:
    return ResourceExhausted("the device has too little memory for this item alone", reason="out_of_memory")


@dataclass(frozen=True)
class OomRecovery:
    """Steps when memory of a device runs out. `make_room` frees memory and returns the method (`Relief`), or None if
    nothing can be freed. `count` is called with the name of a counter to increment.
    """

    device: torch.device
    make_room: Callable[[], Relief | None]
    count: Callable[[Remedy], None] = lambda remedy: None

    def run(
        self,
        work: Callable[[Items], None],
        items: Items,
        refuse: Callable[[int], None],
        *,
        halves: Callable[[Items], tuple[Items, Items]] = halved,
        failed: Callable[[Items], None] = lambda items: None,
        is_tried: bool = False,
    ) -> None:
        """Run `work` on `items`, which may be empty, in as many parts as memory requires. Call `refuse` for each item
        that does not fit alone, and `failed` for each part that did not fit although no more memory could be freed.
        `is_tried`: the caller already ran the work on all items, and memory ran out. Raises the errors of `work`,
        except a lack of memory.
        """
        refused = 0

        def refusing(item: int) -> None:
            nonlocal refused
            refused += 1
            self.count("terminal_failures")
            refuse(item)

        if self._ran_out(work, items, refusing, halves, failed, is_tried=is_tried):
            self.count("recoveries_attempted")
            if not refused:
                self.count("recoveries_succeeded")

    def _ran_out(
        self,
        work: Callable[[Items], None],
        items: Items,
        refuse: Callable[[int], None],
        halves: Callable[[Items], tuple[Items, Items]],
        failed: Callable[[Items], None],
        *,
        is_tried: bool = False,
    ) -> bool:
        if not len(items):
            return False
        tries = 0
        is_last = False
        while (is_tried and not tries) or not self._fits(work, items):
            tries += 1
            give_memory_back(self.device)
            self.count("cache_clears")
            _logger.warning("a pass of %d items ran out of memory, so memory is freed for another try", len(items))
            if (relief := self.make_room()) is not None:
                if relief != "load_ended":
                    self.count(relief)
                continue
            failed(items)
            if len(items) > 1:
                self.count("batch_splits")
                for half in halves(items):
                    self._ran_out(work, half, refuse, halves, failed)
                return True
            if is_last:
                refuse(int(items[0]))
                return True
            gc.collect()
            is_last = True
        return tries > 0

    @staticmethod
    def _fits(work: Callable[[Items], None], items: Items) -> bool:
        # A separate function frees the tensors of a failed pass: its frame is freed when the function returns. In an
        # `except` block of the caller, the traceback would still refer to these tensors.
        try:
            on_usable_thread(work, items)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True
