"""Trace of this worker's work for `sie bench replay`: numbers of tokens and times, without any text. It is written only
if the option --record-trace names a file.

The work items of a batch are written after the batch ran, so the lines are in the order of batches. The line of a work
item has the time at which it was published, by the broker's clock.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import BinaryIO

import msgspec

from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import BatchNote
from sie_sidecar.batching.batch import Batch
from sie_sidecar.device.in_flight import InFlight, runnable

_logger = logging.getLogger("sie.sidecar.recording")
_encode = msgspec.json.Encoder().encode


class Recording:
    """Writer of a trace file. If a write fails, the trace ends and an error is logged; the worker goes on."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Open the file to append to it. Raises OSError."""
        self._file: BinaryIO | None = path.open("ab", buffering=0)
        self._settings: dict[str, float] | None = {
            "max_wait_ms": settings.batcher_coalesce_ms,
            "max_batch_cost": settings.max_batch_cost,
            "max_batch_requests": settings.batcher_max_batch_requests,
            "pipeline_depth": settings.rust_pipeline_depth,
            "bulk_max_overtakes": settings.bulk_max_overtakes,
            "min_quantum_ms": settings.adaptive_min_quantum_ms,
            "max_quantum_ms": settings.adaptive_max_quantum_ms,
            "target_p50_ms": settings.adaptive_target_p50_ms,
        }

    def ran(self, batch: Batch[InFlight], note: BatchNote, done: BatchDone, lanes: int) -> None:
        """Write a line for each work item of a batch, and a line for the time of the batch. `lanes`: number of batches
        that the device runs at the same time.
        """
        if self._file is None:
            return
        lines: list[object] = []
        if self._settings is not None:
            lines.append({"settings": {**self._settings, "lanes": lanes}})
            self._settings = None
        for entry in batch.entries:
            item = entry.work.item
            line = {
                "at": round(entry.work.lease.delivery.sent_s, 6),
                "tokens": [max(1, row.cost) for row in runnable(entry.work)[0]],  # an empty text may have no token
                "model": batch.key.residency,
                "priority": item.priority,
            }
            lines.append({**line, "lora": batch.key.lora} if batch.key.lora else line)
        seconds = round((done.preprocess_ms + done.inference_ms + done.postprocess_ms) / 1000, 6)
        lines.append({"ran": {"tokens": note.tokens, "attention": note.attention, "seconds": seconds}})
        try:
            self._file.write(b"".join(_encode(line) + b"\n" for line in lines))
        except OSError as error:
            _logger.error("the trace file could not be written, so the trace ends: %s", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


current: Recording | None = None  # None while no trace is written


def begin(path: Path, settings: Settings) -> None:
    """Write the batches of this process to a trace from now on. Raises OSError."""
    global current
    current = Recording(path, settings)


def end() -> None:
    global current
    if current is not None:
        current.close()
    current = None
