"""Reports of an adapter about its device: parts of `ipc.Description`."""

from __future__ import annotations

import msgspec

from sie_contracts.wire.messages import Operation


class Shortages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of a model's memory shortages and of the actions against them, since the process started."""

    model: str
    recoveries_attempted: int = 0
    recoveries_succeeded: int = 0
    terminal_failures: int = 0
    cache_clears: int = 0
    evictions_triggered: int = 0
    batch_splits: int = 0


class TowerUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Statistics of the cache of image encoder outputs, since the process started. `hits`: images whose output was in
    memory or was being computed by another thread. `misses`: images whose output was computed. `held_bytes`: bytes of
    the outputs in memory.
    """

    hits: int = 0
    misses: int = 0
    held_bytes: int = 0


class RanBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sizes and times of a batch that the adapter has run.

    `number`: number of the batch in this process, from 1. `ended`: end of the batch, in seconds since 1970. `rows`:
    sequences on the device; they come from `inputs` inputs of `items` work items. `tokens`: cost of the rows, without
    padding; `longest`: cost of the longest row; `attention`: sum of the squared lengths. `wait_ms`: time between the
    arrival at this process and the start of the batch. `padding`, `inference_ms` and `postprocess_ms`: see `BatchDone`.
    `failed`: number of inputs whose result is an error; all inputs if the whole batch was refused. `memory_bytes`:
    device memory in use after the batch.
    """

    number: int
    ended: float
    model: str
    operation: Operation
    rows: int
    inputs: int
    items: int
    tokens: int
    longest: int
    attention: int
    wait_ms: float
    lora: bool = False
    failed: int = 0
    padding: int = 0
    inference_ms: float = 0.0
    postprocess_ms: float = 0.0
    memory_bytes: int = 0
