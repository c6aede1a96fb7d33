"""Threads on which oneDNN makes no primitive any more, and work that runs in their place.

oneDNN up to 3.13 keeps the error of its code generator by thread and never clears it (its pull request 5907 does):
after one allocation that failed, every primitive of a shape that is new fails on that thread, however much memory there
is by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from sie_adapter.memory.failure import is_primitive_refused

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _State(threading.local):
    is_spoilt = False


_state = _State()


def is_spoilt() -> bool:
    """Whether oneDNN refused a primitive to `unspoilt` on this thread."""
    return _state.is_spoilt


def unspoilt(work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs) -> Result:
    """Call `work` here, or on a thread of its own once this one is spoilt. Raises what it raises."""
    if _state.is_spoilt:
        return afresh(work, *arguments, **named)
    try:
        return work(*arguments, **named)
    except RuntimeError as error:
        _state.is_spoilt = is_primitive_refused(error)
        raise


def afresh(work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs) -> Result:
    """Call `work` on a thread of its own, with this one's mode and threads of torch. Raises what it raises, and a
    RuntimeError that `is_out_of_memory` knows where there is no room for the thread.
    """
    results: list[Result] = []
    errors: list[BaseException] = []
    is_inference, threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode(is_inference):
                results.append(work(*arguments, **named))
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=run, name=f"{threading.current_thread().name}-afresh", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()  # nothing here holds it any more: its frames hold the tensors of a failed pass
    return results.pop()
