"""A work item in our hands, and how its outcomes are put together. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from sie_contracts import ipc
from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.messages import ArraySlice, Failed, Ok, Outcome, Stages, WorkItem
from sie_sidecar.batch import Job
from sie_sidecar.hosting import Hosted
from sie_sidecar.lease import Lease
from sie_sidecar.poison import Mark
from sie_sidecar.rows import Row


@dataclass(eq=False)
class Held:
    """A work item in our hands, with the marks from which its stages are told.

    `rows`: the first `shared` ones belong to all inputs, then each input has equally many, in order.
    """

    lease: Lease
    item: WorkItem
    received_s: float
    deadline_s: float
    hosted: Hosted | None = None
    layout: ipc.Layout = "text"
    rows: list[Row] = field(default_factory=list)
    shared: int = 0
    refused: SIEError | None = None  # why it has no rows
    fetched_s: float = 0.0
    loaded_s: float = 0.0
    tokenised_s: float = 0.0
    sealed_s: float = 0.0
    started_s: float = 0.0
    settled: bool = False  # its outcome is on its way, or nobody waits for one
    job: Job[Held] | None = None  # while it waits for the device
    given_up: SIEError | None = None  # why it becomes a dead letter
    dead: list[Mark] = field(default_factory=list)  # of its inputs that are poison
    payload_bytes: int = 0  # what its inputs take that came from the payload store
    counted: int = 0  # its share of the cost that waits for the device
    coming: bool = False  # hosting does not count it yet

    def of_input(self, index: int) -> list[Row]:
        """The rows that only this input has."""
        each = (len(self.rows) - self.shared) // len(self.item.inputs)
        first = self.shared + index * each
        return self.rows[first : first + each]

    def too_long(self) -> list[Row | None]:
        """For each input the row that would have to be cut and must not be, or None."""
        if self.item.options.truncate != "NONE":
            return [None] * len(self.item.inputs)
        common = next((row for row in self.rows[: self.shared] if row.truncated), None)
        return [common or next((row for row in self.of_input(index) if row.truncated), None) for index in range(len(self.item.inputs))]


def runnable(held: Held) -> tuple[list[Row], list[int]]:
    """The rows that go to the device, and the inputs they belong to: all, unless the client wants none of them cut."""
    if held.item.options.truncate != "NONE":
        return held.rows, list(range(len(held.item.inputs)))
    inputs = [index for index, row in enumerate(held.too_long()) if row is None]
    return [*held.rows[: held.shared], *(row for index in inputs for row in held.of_input(index))] if inputs else [], inputs


def too_long(row: Row) -> Failed:
    """The outcome of an input over the limit that must not be cut."""
    limit = len(row.ids)
    error = InvalidInput(
        f"the input has {row.full} tokens, the limit is {limit}", reason="input_too_long", extras={"tokens": row.full, "limit": limit}
    )
    return Failed(error.info())


def merge(held: Held, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """One outcome per input, told which were cut: of those that ran, and of those that were too long to run."""
    ran = iter(outcomes)
    common = any(row.truncated for row in held.rows[: held.shared])
    found: list[Outcome] = []
    for index, row in enumerate(held.too_long()):
        if row is not None:
            found.append(too_long(row))
            continue
        outcome = next(ran)
        if isinstance(outcome, Ok) and (common or any(each.truncated for each in held.of_input(index))):
            outcome = msgspec.structs.replace(outcome, truncated=True)
        found.append(outcome)
    return tuple(found)


def cut(outcomes: tuple[Outcome, ...], block: memoryview) -> tuple[tuple[Outcome, ...], bytes]:
    """These outcomes with a block of their own: consecutive items have consecutive slices."""
    slices = [piece for outcome in outcomes if isinstance(outcome, Ok) for piece in outcome.outputs.values()]
    if not slices:
        return outcomes, b""
    low = min(piece.offset for piece in slices)
    high = max(piece.offset + _size(piece) for piece in slices)
    moved = tuple(
        msgspec.structs.replace(
            outcome, outputs={name: ArraySlice(piece.dtype, piece.shape, piece.offset - low) for name, piece in outcome.outputs.items()}
        )
        if isinstance(outcome, Ok)
        else outcome
        for outcome in outcomes
    )
    return moved, bytes(block[low:high])


def only(held: Held, index: int) -> Held:
    """The same work with one of its inputs. It has the lease of the whole, and must not be settled."""
    item = msgspec.structs.replace(held.item, inputs=(held.item.inputs[index],), first=held.item.first + index)
    return replace(held, item=item, rows=[*held.rows[: held.shared], *held.of_input(index)], counted=0)


def joined(parts: Sequence[tuple[Outcome, bytes]]) -> tuple[tuple[Outcome, ...], bytes]:
    """Outcomes that each came with a block of their own, with one block for all of them."""
    found: list[Outcome] = []
    start = 0
    for outcome, block in parts:
        if isinstance(outcome, Ok):
            outputs = {name: ArraySlice(piece.dtype, piece.shape, piece.offset + start) for name, piece in outcome.outputs.items()}
            outcome = msgspec.structs.replace(outcome, outputs=outputs)
        found.append(outcome)
        start += len(block)
    return tuple(found), b"".join(block for _, block in parts)


def _size(piece: ArraySlice) -> int:
    return math.prod(piece.shape) * np.dtype(piece.dtype).itemsize


def stages_of(held: Held, now_s: float, done: ipc.BatchDone | None) -> Stages:
    """Contiguous marks: received, fetched, loaded, tokenised, sealed, started, answered. Of the last the adapter tells its own share."""
    fetched_s = held.fetched_s or held.received_s
    loaded_s = held.loaded_s or fetched_s
    tokenised_s = held.tokenised_s or loaded_s
    sealed_s = held.sealed_s or tokenised_s
    inference_ms, postprocess_ms = (done.inference_ms, done.postprocess_ms) if done else (0.0, 0.0)
    # the notice of the start may be read together with the result: what the adapter did is not waiting
    most_ms = (now_s - sealed_s) * 1000 - inference_ms - postprocess_ms
    return Stages(
        fetch_ms=(fetched_s - held.received_s) * 1000,
        load_ms=(loaded_s - fetched_s) * 1000,
        preprocess_ms=(tokenised_s - loaded_s) * 1000,
        batch_wait_ms=(sealed_s - tokenised_s) * 1000,
        device_wait_ms=max(0.0, min((held.started_s - sealed_s) * 1000, most_ms)),
        inference_ms=inference_ms,
        postprocess_ms=postprocess_ms,
        worker_ms=(now_s - held.received_s) * 1000,
    )
