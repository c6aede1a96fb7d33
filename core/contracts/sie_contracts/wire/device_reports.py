"""Reports of an adapter about its device: parts of `ipc.Description`."""

from __future__ import annotations

import msgspec

from sie_contracts.wire.messages import Operation


class Shortages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of memory shortages of one model since the process started, and of the actions on them."""

    model: str
    recoveries_attempted: int = 0
    recoveries_succeeded: int = 0
    terminal_failures: int = 0
    cache_clears: int = 0
    evictions_triggered: int = 0
    batch_splits: int = 0


class TowerUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of images whose tower output was needed, since the process started. `hits`: the output was in memory, or
    another thread was computing it. `misses`: the output was computed. `held_bytes`: bytes of the outputs in memory.
    """

    hits: int = 0
    misses: int = 0
    held_bytes: int = 0


class RanBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sizes and times of a batch that the adapter ran.

    `number` counts the batches of this process, from 1. `ended`: wall time, seconds since 1970. `rows`: sequences on
    the device, from `inputs` inputs of `items` work items. `tokens`: cost of the rows, without the tokens with which
    the model pads them; `longest`: cost of the longest row; `attention`: sum of squared lengths. `wait_ms`: time in
    this process before a lane began to run the batch. `padding`, `inference_ms` and `postprocess_ms` as in BatchDone.
    `failed`: number of inputs whose outcome is an error; all inputs if the whole batch was refused. `memory_bytes`:
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
