"""Records of the last MAX_BATCHES batches and their durations, for tuning, if SIE_INSTRUMENTATION is set.

    a batch ran ──► Instrumentation.ran ──► ring ──► Description ──► `/ws/status` of the worker

A record has the name of the model, sizes and times, and no part of an input.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from sie_adapter.engine.device_threads import DeviceJob
from sie_contracts.wire.device_reports import RanBatch
from sie_contracts.wire.ipc import BatchDone, Reply
from sie_contracts.wire.messages import Failed

MAX_BATCHES = 100


class Instrumentation:
    def __init__(self, used_bytes: Callable[[], int]) -> None:
        """Create an empty buffer. `used_bytes` returns the bytes of the device that are in use now."""
        self._used_bytes = used_bytes
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ring: deque[RanBatch] = deque(maxlen=MAX_BATCHES)

    def ran(self, job: DeviceJob, reply: Reply, began_ns: int, ended_ns: int) -> None:
        message = job.message
        # `lengths` may have any number of bytes, because batches that were refused as malformed are recorded too
        lengths = np.frombuffer(message.lengths, "<i4", len(message.lengths) // 4).astype(np.int64)
        due = sum(group.due for group in message.groups)
        done = reply if isinstance(reply, BatchDone) else None
        record = RanBatch(
            number=0,
            ended=ended_ns / 1e9,
            model=message.model,
            operation=message.operation,
            rows=len(lengths),
            inputs=due,
            items=len(message.groups),
            tokens=int(lengths.sum()),
            longest=int(lengths.max(initial=0)),
            attention=int(np.square(lengths).sum()),
            wait_ms=max(0.0, round((began_ns - job.made_ns) / 1e6, 3)),
            lora=bool(message.lora),
            failed=sum(isinstance(outcome, Failed) for outcome in done.outcomes) if done else due,
            padding=done.padding if done else 0,
            inference_ms=round(done.inference_ms, 3) if done else 0.0,
            postprocess_ms=round(done.postprocess_ms, 3) if done else 0.0,
            memory_bytes=self._used_bytes(),
        )
        with self._lock:
            self._ring.append(msgspec.structs.replace(record, number=next(self._numbers)))

    def batches(self) -> tuple[RanBatch, ...]:
        """Return the last batches, the newest at the end."""
        with self._lock:
            return tuple(self._ring)
