"""CUDA graphs of small passes. Without a graph, a small pass waits for the launches of its kernels.

    batch ──► bucket ──┬─► first use: eager pass
                       ├─► second use: eager pass, capture, one replay that must nearly equal the eager pass
                       └─► later: inputs copied to their fixed addresses, one replay, states copied out

A graph computes one bucket: a number of tokens, a number of sequences and the length of the longest sequence. Padding
sequences fill a batch up to its bucket; their states are dropped. On an H200 with a slow host the 345 launches of a
pass of BERT large took 28 ms, and a replay of the same kernels 1.5 ms.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sie_adapter.engine.device import without_loads
from sie_adapter.memory.device_errors import is_out_of_memory
from sie_adapter.packed.packing import Int64, PackedBatch

_logger = logging.getLogger("sie.adapter")

# Numbers of tokens of the buckets. From 8 tokens on, padding at most doubles the size, which costs little time: a pass
# of BERT large with 128 tokens takes as long as one with 16, since both wait until weights are read from memory. There
# are no graphs above 1,024 tokens, where the kernels of large models take as long as their launches on a fast host.
_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_SEQUENCES = (8, 32)  # numbers of sequences of the buckets
# number of rows of a block of the attention kernel; a padding sequence has at most this number of tokens, so that it
# fits one block
_BLOCK = 128
# Largest number of graphs of a model. A graph costs memory: the driver keeps about a kilobyte for each of its kernels.
# The memory for activations is shared by all graphs.
_MOST_GRAPHS = 16
# lowest accepted cosine between a token's 16-bit states from the eager pass and from the replay; the model gets no
# graphs if a cosine is lower
_LEAST_COSINE = 0.999
_PAUSE_S = 60.0  # seconds without captures after memory ran out, or after graphs were dropped because memory was short
_WARM_UPS = 2  # number of passes that `CudaRecorder.record` runs before a capture
# number of failed captures after which this process captures no more graphs, since each failed capture stays in memory
_MOST_FAILED = 64


class Bucket(NamedTuple):
    """Sizes for which a graph is captured. `longest`: limit for the number of tokens of a sequence."""

    tokens: int
    sequences: int
    longest: int


def bucket_of(packed: PackedBatch) -> Bucket | None:
    """Return the smallest bucket into which a batch fits by its numbers of tokens and sequences; None if the batch is
    empty or too large, has other inputs than texts, or has tokens that are not attended to.
    """
    if packed.visible is not None or packed.features is not None or packed.axes is not None:
        return None
    count, sequences = len(packed.ids), len(packed.order)
    if not count or count > _TOKENS[-1] or sequences > _SEQUENCES[-1]:
        return None
    tokens = next(size for size in _TOKENS if count <= size)
    longest = _BLOCK if packed.groups[-1, 2] <= _BLOCK else tokens
    return Bucket(tokens, next(size for size in _SEQUENCES if sequences <= size), min(longest, tokens))


class StaticInputs:
    """Input tensors of a captured pass, at fixed addresses, filled by one copy. `tokens`: ids, positions and, if
    `has_types`, token types, int64 [rows, tokens]; `bounds`: int32, the offset of the first token of each sequence, and
    the end of the last one. Padding follows as further sequences of at most _BLOCK tokens.
    """

    def __init__(self, bucket: Bucket, device: torch.device, filler: int, first: int, *, has_types: bool) -> None:
        """`filler`: token id of padding. `first`: position id of padding."""
        rows = 3 if has_types else 2
        ends = 1 + bucket.sequences + -(-bucket.tokens // _BLOCK)
        at = 8 * rows * bucket.tokens
        self._bucket, self._filler, self._first = bucket, filler, first
        self._host = np.zeros(at + 4 * ends, np.uint8)
        self._rows = self._host[:at].view(np.int64).reshape(rows, bucket.tokens)
        self._ends = self._host[at:].view(np.int32)
        self._buffer = torch.zeros(len(self._host), dtype=torch.uint8, device=device)
        self.tokens = self._buffer[:at].view(torch.int64).view(rows, bucket.tokens)
        self.bounds = self._buffer[at:].view(torch.int32)

    def fill(self, packed: PackedBatch | None) -> None:
        """Copy a batch to the device, padded to the size of the bucket. If `packed` is None, copy only padding. Return
        as soon as the driver has copied the host's buffer, without waiting for the device.
        """
        rows, ends = self._rows, self._ends
        bounds = np.zeros(1, np.int32) if packed is None else packed.bounds
        count = int(bounds[-1])
        rows[:, count:] = 0
        rows[0, count:], rows[1, count:] = self._filler, self._first
        if packed is not None:
            rows[0, :count], rows[1, :count] = packed.ids, packed.positions
            if len(rows) > 2:
                rows[2, :count] = 0 if packed.types is None else packed.types
        filled = len(bounds)
        ends[:filled] = bounds
        ends[filled:] = np.minimum(count + _BLOCK * np.arange(1, len(ends) - filled + 1), self._bucket.tokens)
        self._buffer.copy_(torch.from_numpy(self._host), non_blocking=True)

    def layout(self, kernel: int) -> Int64:
        return np.array([[0, len(self._ends) - 1, self._bucket.longest, self._bucket.longest, kernel]], np.int64)


class CapturedPass(Protocol):
    """A forward pass in a CUDA graph. `output`: the tensor that each replay overwrites."""

    output: Tensor

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Recorder of CUDA graphs. Callers hold `lock` during a capture, and from a replay until its output is copied."""

    lock: threading.Lock

    def record(self, run: Callable[[], Tensor], pool: Any) -> CapturedPass | None:
        """Capture `run`, which reads and writes fixed addresses, as a CUDA graph. Return None if a capture is not
        possible now. Raises the errors of `run`.
        """

    def pool(self) -> Any:
        """Return a new memory pool for CUDA graphs that never run at the same time."""

    def join(self) -> None:
        """Make the current stream wait for the last replay. The caller must hold `lock`."""


@dataclass
class _CudaPass:
    graph: Any
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Recorder of a CUDA device. All graphs are captured on one stream, so they share the workspace that the CUDA
    libraries have for this stream. Two replays must therefore never run at the same time.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._last: Any = None
        # graphs of failed captures; they are not freed, because torch's allocator of pinned memory still uses them
        self._failed: list[Any] = []

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def join(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def record(self, run: Callable[[], Tensor], pool: Any) -> CapturedPass | None:
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            # warm-up: libraries choose their kernels and allocate their workspaces
            for _ in range(_WARM_UPS):
                run()
            self._stream.synchronize()
            with without_loads() as is_free:
                recording = self._capture(run, pool) if is_free and len(self._failed) < _MOST_FAILED else None
        before.wait_stream(self._stream)
        return recording

    def _capture(self, run: Callable[[], Tensor], pool: Any) -> CapturedPass:
        graph = torch.cuda.CUDAGraph()
        # the mode is thread_local, because other threads may allocate memory during the capture, e.g. to generate text
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            output = run()
            graph.capture_end()
        except BaseException:
            self._failed.append(graph)
            self._end_capture(graph, pool)
            raise
        return _CudaPass(graph, output)

    def _end_capture(self, graph: Any, pool: Any) -> None:
        """End a capture that failed. If CUDA returns no graph, torch keeps allocating in the capture's memory pool, and
        later refuses to return memory. Therefore this method ends the allocation.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            with contextlib.suppress(RuntimeError):  # raises if torch had already ended the allocation
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)


@functools.cache
def cuda_recorder(device: torch.device) -> CudaRecorder:
    return CudaRecorder(device)


class _ReadyPass(NamedTuple):
    inputs: StaticInputs
    recording: CapturedPass

    def replay(self, packed: PackedBatch) -> Tensor:
        self.inputs.fill(packed)
        self.recording.replay()
        return self.recording.output[: len(packed.ids)].clone()


Eager = Callable[[PackedBatch], Tensor]
RunStatic = Callable[[Tensor, Tensor, Int64], Tensor]  # pass to capture: (tokens, bounds, layout) -> states

_all: weakref.WeakSet[PassGraphs] = weakref.WeakSet()
_all_lock = threading.Lock()


class PassGraphs:
    """CUDA graphs of one model, at most _MOST_GRAPHS: beyond this number, the least recently used graph is dropped.
    `states` may be called on any thread.
    """

    def __init__(
        self,
        model: str,
        recorder: Recorder,
        device: torch.device,
        kernel: int,
        filler: int,
        first: int,
        has_types: bool,
    ) -> None:
        """`model`: name in the log. `kernel`: an `attention.Kernel`. `filler`, `first`: id and position of padding
        tokens.
        """
        self._model, self._recorder, self._kernel = model, recorder, kernel
        self._inputs = functools.partial(StaticInputs, device=device, filler=filler, first=first, has_types=has_types)
        self._pool: Any = None
        self._uses: Counter[Bucket] = Counter()
        self._captured: OrderedDict[Bucket, _ReadyPass] = OrderedDict()
        self._paused_until_s = 0.0
        # True after a capture that failed for another reason than memory, or after a wrong replay: the model gets no
        # more CUDA graphs
        self.is_eager = False
        with _all_lock:
            _all.add(self)

    def __len__(self) -> int:
        return len(self._captured)

    def states(self, packed: PackedBatch, eager: Eager, run: RunStatic) -> Tensor:
        """Return the states of a batch: by a replay if the batch's bucket has a graph and no other thread holds the
        recorder's lock, else by `eager`. `run`: the pass that is captured. Raises the errors of `eager`.
        """
        bucket = None if self.is_eager else bucket_of(packed)
        if bucket is None or not self._recorder.lock.acquire(blocking=False):
            return eager(packed)
        try:
            if (captured := self._captured.get(bucket)) is not None:
                self._captured.move_to_end(bucket)
                self._recorder.join()
                states = captured.replay(packed)
                packed.filled(bucket.tokens - len(packed.ids))
                return states
            states = eager(packed)
            self._uses[bucket] += 1
            if self._uses[bucket] > 1 and time.monotonic() >= self._paused_until_s:
                self._try(bucket, packed, states, run)
            return states
        finally:
            self._recorder.lock.release()

    def drop_all(self) -> bool:
        """Drop all CUDA graphs of the model because memory is short, and capture none for _PAUSE_S seconds. Return
        whether there was a graph.
        """
        with self._recorder.lock:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            had = bool(self._captured)
            self._captured.clear()
            self._pool = None
        return had

    def _try(self, bucket: Bucket, packed: PackedBatch, expected: Tensor, run: RunStatic) -> None:
        """Capture a graph for a bucket. If memory runs out, capture none for _PAUSE_S seconds. If the capture fails for
        another reason or a replay is wrong, later passes of the model run eagerly.
        """
        try:
            captured = self._capture(bucket, run)
            if captured is None:
                return
            # The capture ran on padding only. If the graph contains a value of the padding as a constant, a replay with
            # this batch gives other states than the eager pass.
            cosine = float(F.cosine_similarity(captured.replay(packed).float(), expected.float(), dim=1).min())
        except Exception as error:  # noqa: BLE001  model code, kernels and CUDA may raise anything
            expected.sum().item()  # this waits for the device, so that the error of a lost device is raised here
            if is_out_of_memory(error):
                self._paused_until_s = time.monotonic() + _PAUSE_S
                return
            self._stay_eager(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return
        if not cosine >= _LEAST_COSINE:
            self._stay_eager(f"the states from a graph and those from the eager pass have cosine {cosine:.6f}")
            return
        self._captured[bucket] = captured
        while len(self._captured) > _MOST_GRAPHS:
            dropped, _ = self._captured.popitem(last=False)
            del self._uses[dropped]

    def _capture(self, bucket: Bucket, run: RunStatic) -> _ReadyPass | None:
        self._recorder.join()
        inputs = self._inputs(bucket)
        inputs.fill(None)
        if self._pool is None:
            self._pool = self._recorder.pool()
        layout = inputs.layout(self._kernel)
        recording = self._recorder.record(lambda: run(inputs.tokens, inputs.bounds, layout), self._pool)
        return None if recording is None else _ReadyPass(inputs, recording)

    def _stay_eager(self, cause: str) -> None:
        self.is_eager = True
        self._captured.clear()
        _logger.warning("%s runs without CUDA graphs: %s", self._model, cause)


def drop_graphs() -> bool:
    """Drop the CUDA graphs of all models because memory is short. Return whether there was a graph."""
    with _all_lock:
        present = list(_all)
    return sum(graphs.drop_all() for graphs in present) > 0
