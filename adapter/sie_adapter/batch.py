"""One batch from its bytes to its outcomes.

    RunBatch ──► Items ──► fit? ──► pack ──► forward ──► pool ──► finish, per output group ──► BatchDone

Each item has exactly one outcome at its own position. A bad item is a typed error and its mates are right. Out of memory halves the batch
by cost until it fits; an item that does not fit alone is RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from sie_adapter.device import give_memory_back
from sie_adapter.failure import is_out_of_memory
from sie_adapter.heads.pooling import POOLINGS, Pooling, finish, pool
from sie_adapter.packing import Int64, Items, MalformedBatch, Packed, items
from sie_contracts.errors import InferenceFailed, InternalFailure, InvalidInput, ResourceExhausted, SIEError
from sie_contracts.ipc import BatchDone, EpilogueGroup, RunBatch
from sie_contracts.messages import ArraySlice, Failed, Ok, Outcome

_logger = logging.getLogger("sie.adapter")


class Encoder(Protocol):
    """What a batch needs of a family."""

    max_tokens: int
    vocabulary: int
    width: int

    def pack(self, batch: Items, chosen: Int64) -> Packed: ...

    def forward(self, packed: Packed) -> Tensor: ...


class BatchRun:
    """The forward pass and the epilogues of one batch, on the thread that calls `run`, under inference mode."""

    def __init__(self, encoder: Encoder, device: torch.device, message: RunBatch, pooling: str) -> None:
        """`pooling` is the model's own, for a message without one. Raises InvalidInput or InternalFailure for what cannot be run at all."""
        chosen = message.pooling or pooling
        if message.operation != "encode":
            raise InvalidInput(f"operation {message.operation} is not served by {message.model}", reason="unsupported_operation")
        if chosen not in POOLINGS:
            raise InvalidInput(f"pooling is one of {', '.join(POOLINGS)}", reason="unsupported_pooling")
        if message.lora:
            raise InvalidInput(f"{message.model} has no LoRA of that name", reason="unsupported_lora")
        try:
            self._items = items(message.lengths, message.ids)
        except MalformedBatch as error:
            raise InternalFailure(str(error), reason="malformed_batch") from error
        _check_groups(message.epilogues, len(self._items.lengths))
        self._encoder = encoder
        self._device = device
        self._message = message
        self._pooling = cast(Pooling, chosen)
        self._errors: dict[int, SIEError] = {}
        self._pooled = torch.empty(0)

    def run(self) -> BatchDone:
        """Run the batch and account for every item. Raises what the device raises, other than running out of memory."""
        started = time.perf_counter()
        count = len(self._items.lengths)
        self._errors = _unfit(self._items, self._encoder)
        self._pooled = torch.full((count, self._encoder.width), torch.nan, dtype=torch.float32, device=self._device)
        self._forward(np.array([item for item in range(count) if item not in self._errors], np.int64))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        forwarded = time.perf_counter()
        outcomes, blocks = self._finish()
        done = time.perf_counter()
        return BatchDone(self._message.batch, tuple(outcomes), b"".join(blocks), 1e3 * (forwarded - started), 1e3 * (done - forwarded))

    def _forward(self, chosen: Int64) -> None:
        """Fill the pooled rows of the `chosen` items, or their errors."""
        if not len(chosen):
            return
        try:
            packed = self._encoder.pack(self._items, chosen)
            hidden = self._encoder.forward(packed)
            if len(hidden) != len(packed.ids):
                raise InternalFailure(f"the family gave {len(hidden)} states for {len(packed.ids)} tokens", reason="wrong_length")
            vectors = pool(hidden, torch.from_numpy(packed.bounds).to(self._device), packed.groups.tolist(), self._pooling)
            self._pooled[torch.from_numpy(packed.order).to(self._device)] = vectors
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # outside of the handler: its traceback holds the tensors of the failed pass
        give_memory_back(self._device)
        _logger.warning("out of memory with %d items of %d tokens", len(chosen), int(self._items.lengths[chosen].sum()))
        if len(chosen) == 1:
            self._errors[int(chosen[0])] = ResourceExhausted("the device has too little memory for this item alone", reason="out_of_memory")
            return
        for half in _halves(chosen, self._items.lengths):
            self._forward(half)

    def _finish(self) -> tuple[list[Outcome], list[bytes]]:
        outcomes: list[Outcome] = []
        blocks: list[bytes] = []
        offset = 0
        for group in self._message.epilogues:
            vectors, usable = self._finish_group(group)
            for item in range(group.start, group.stop):
                row = item - group.start
                error = self._errors.get(item) or _fault(group, self._encoder.width, usable=bool(usable[row]))
                if error is not None:
                    outcomes.append(Failed(error.info()))
                    continue
                outputs = {"dense": ArraySlice("<f4", (vectors.shape[1],), offset)}
                outcomes.append(Ok(outputs, tokens=int(self._items.lengths[item])))
                blocks.append(vectors[row].tobytes())
                offset += vectors[row].nbytes
        return outcomes, blocks

    def _finish_group(self, group: EpilogueGroup) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(group.start, group.stop)
        vectors, usable = finish(self._pooled[rows], group.dimensions, normalize=group.normalize)
        kept = usable.cpu().numpy()
        doubtful = [group.start + row for row in np.flatnonzero(~kept) if group.start + row not in self._errors]
        if doubtful and len(self._items.lengths) > 1:
            for item in doubtful:  # alone: a mate's overflow may be what was seen
                self._forward(np.array([item], np.int64))
            vectors, usable = finish(self._pooled[rows], group.dimensions, normalize=group.normalize)
            kept = usable.cpu().numpy()
        return np.ascontiguousarray(vectors.cpu().numpy(), "<f4"), kept


def _unfit(batch: Items, encoder: Encoder) -> dict[int, SIEError]:
    """Items that must not reach the device: an id out of range would end its context, a length out of range would read foreign rows."""
    low, high = batch.extremes()
    wrong = (batch.lengths < 1) | (batch.lengths > encoder.max_tokens) | (low < 0) | (high >= encoder.vocabulary)
    errors: dict[int, SIEError] = {}
    for item in np.flatnonzero(wrong).tolist():
        length = int(batch.lengths[item])
        if not 1 <= length <= encoder.max_tokens:
            reason = "no_tokens" if length < 1 else "too_long"
            errors[item] = InvalidInput(f"expected 1 to {encoder.max_tokens} tokens, got {length}", reason=reason)
        else:
            errors[item] = InvalidInput(f"a token id is not within the vocabulary of {encoder.vocabulary}", reason="token_out_of_range")
    return errors


def _check_groups(groups: tuple[EpilogueGroup, ...], count: int) -> None:
    ends = [0, *(group.stop for group in groups)]
    starts = [*(group.start for group in groups), count]
    if ends != starts or any(group.start > group.stop for group in groups):
        raise InternalFailure(f"the epilogue groups do not cover the {count} items in order", reason="malformed_batch")


def _fault(group: EpilogueGroup, width: int, *, usable: bool) -> SIEError | None:
    unknown = [name for name in group.outputs if name != "dense"]
    if unknown or not group.outputs:
        return InvalidInput("expected the output dense", reason="unsupported_output")
    if not 0 <= group.dimensions <= width:
        return InvalidInput(f"dimensions: expected at most {width}, got {group.dimensions}", reason="bad_dimensions")
    if not usable:
        return InferenceFailed("the model gave a vector that is not finite, or zero", reason="non_finite")
    return None


def _halves(chosen: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Two parts of about equal tokens, each of at least one item, the long items apart from the short ones."""
    ordered = chosen[np.argsort(lengths[chosen], kind="stable")]
    costs = np.cumsum(lengths[ordered])
    cut = int(np.searchsorted(costs, costs[-1] / 2)) or 1
    return ordered[: min(cut, len(ordered) - 1)], ordered[min(cut, len(ordered) - 1) :]
