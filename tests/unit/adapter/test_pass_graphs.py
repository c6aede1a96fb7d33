"""Graphs of small passes: buckets, padding, the comparison with the eager pass, and the limits. A recorder that runs
the pass again stands in for CUDA; tests/gpu has the real one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from unit.adapter import toys

from sie_adapter.packed import attention, lora, pass_graphs
from sie_adapter.packed.attention import Kernel, MaskPattern
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import Items, PackedBatch
from sie_adapter.packed.pass_graphs import Bucket, bucket_of, drop_graphs

FAMILIES = ("bert", "xlm-roberta", "modernbert", "qwen3", "mistral")
RAGGED = ((1,), (3, 9, 17, 40), (129, 1, 64), (2,) * 32, (200, 130, 90, 260))


@dataclass
class Rerun:
    """Recording that runs the pass again into the same tensor."""

    output: Tensor
    run: Callable[[], Tensor]

    def replay(self) -> None:
        self.output.copy_(self.run())


class RerunRecorder:
    """Recorder for a CPU. Each capture raises `fault`. Captures are possible while `is_free` is true. With `stale`, a
    replay returns the states of the capture.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.captures = 0
        self.fault: Exception | None = None
        self.is_free, self.stale = True, False

    def pool(self) -> Any:
        return object()

    def join(self) -> None:
        assert self.lock.locked()

    def record(self, run: Callable[[], Tensor], pool: Any) -> Rerun | None:
        if self.fault is not None:
            raise self.fault
        if not self.is_free:
            return None
        self.captures += 1
        output = run()
        return Rerun(output.clone(), (lambda: output) if self.stale else run)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RerunRecorder:
    """A recorder, with a variable-length kernel for the CPU."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, pattern: MaskPattern
    ) -> Tensor:
        lengths = np.diff(bounds.numpy())
        assert lengths.min() >= 0
        assert bounds[-1] == len(query)
        assert lengths.max() <= longest
        output = torch.empty(query.shape[:2] + value.shape[2:], dtype=query.dtype)
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if start < stop:
                parts = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value, output))
                queries, keys, values, into = parts
                attention._attend_in_blocks(queries, keys, values, scale, pattern, into)
        return output

    monkeypatch.setitem(attention._VARLEN, Kernel.VARLEN, attend)
    monkeypatch.setattr("sie_adapter.packed.backbone.filled_up", lambda packed, *_: packed)  # for CPUs only
    return RerunRecorder()


def backbone_of(folder: Path, kind: str, recorder: RerunRecorder) -> Backbone:
    backbone = toys.load(toys.save(folder / kind, kind)).backbone
    backbone._kernel = Kernel.VARLEN
    backbone.use_graphs(recorder)
    return backbone


def packed_of(backbone: Backbone, lengths: tuple[int, ...], seed: int = 0, **parts: Any) -> PackedBatch:
    ids = np.concatenate(toys.random_ids(list(lengths), seed=seed))
    return backbone.pack(Items(np.array(lengths), ids, **parts), np.arange(len(lengths)))


@pytest.fixture
def bert(tmp_path: Path, recorder: RerunRecorder) -> Backbone:
    return backbone_of(tmp_path, "bert", recorder)


def forward(backbone: Backbone, packed: PackedBatch) -> Tensor:
    with torch.inference_mode():
        return backbone.forward(packed)


def eager(backbone: Backbone, packed: PackedBatch) -> Tensor:
    with torch.inference_mode():
        return backbone._forward_eager(packed)


@pytest.mark.parametrize("kind", FAMILIES)
def test_replayed_states_equal_eager_states(kind: str, tmp_path: Path, recorder: RerunRecorder) -> None:
    backbone = backbone_of(tmp_path, kind, recorder)
    for lengths in RAGGED:
        for seed in range(3):
            packed = packed_of(backbone, lengths, seed)
            expected, got = eager(backbone, packed), forward(backbone, packed_of(backbone, lengths, seed))
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 if kind == "modernbert" else 1e-5)
    buckets = {bucket_of(packed_of(backbone, lengths)) for lengths in RAGGED}
    assert recorder.captures == len(buckets)
    assert backbone._graphs is not None
    assert not backbone._graphs.is_eager


def test_a_batch_gets_the_smallest_bucket_that_holds_it(bert: Backbone) -> None:
    for lengths, bucket in {
        (1,): Bucket(16, 8, 16),
        (17,): Bucket(32, 8, 32),
        (128,): Bucket(128, 8, 128),
        (129,): Bucket(192, 8, 192),
        (100, 100): Bucket(256, 8, 128),
        (2,) * 9: Bucket(32, 32, 32),
        (280, 280, 280, 184): Bucket(1024, 8, 1024),
    }.items():
        assert bucket_of(packed_of(bert, lengths)) == bucket
    assert bucket_of(packed_of(bert, (256,) * 4 + (1,))) is None
    assert bucket_of(packed_of(bert, (1,) * 33)) is None


def test_the_second_use_of_a_bucket_is_captured_and_padding_is_counted(bert: Backbone, recorder: RerunRecorder) -> None:
    captures, padding = [], []
    for _ in range(4):
        packed = packed_of(bert, (5, 6))
        forward(bert, packed)
        captures.append(recorder.captures)
        padding.append(packed.padding)
    assert captures == [0, 1, 1, 1]
    assert padding == [0, 0, 5, 5]


def test_a_model_whose_capture_fails_is_eager_with_one_line(
    bert: Backbone, recorder: RerunRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fault = RuntimeError("operation not permitted when stream is capturing")
    packed = packed_of(bert, (5,))
    with caplog.at_level(logging.WARNING, "sie.adapter"):
        for _ in range(4):
            assert torch.equal(forward(bert, packed), eager(bert, packed))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("BertModel runs without CUDA graphs: RuntimeError")


def test_a_graph_that_does_not_follow_its_inputs_is_not_used(
    bert: Backbone, recorder: RerunRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.stale = True
    packed = packed_of(bert, (5,))
    for _ in range(4):
        assert torch.equal(forward(bert, packed), eager(bert, packed))
    assert recorder.captures == 1
    assert "cosine" in caplog.text


def test_a_capture_without_memory_is_tried_again_later(bert: Backbone, recorder: RerunRecorder) -> None:
    recorder.fault = torch.OutOfMemoryError("CUDA out of memory")
    packed = packed_of(bert, (5,))
    for _ in range(3):
        forward(bert, packed)
    recorder.fault = None
    forward(bert, packed)
    assert recorder.captures == 0
    assert bert._graphs is not None
    bert._graphs._paused_until_s -= pass_graphs._PAUSE_S
    forward(bert, packed)
    assert recorder.captures == 1


def test_passes_with_a_lora_are_eager(bert: Backbone, recorder: RerunRecorder) -> None:
    packed = packed_of(bert, (5,))
    with lora.acting({}):
        for _ in range(3):
            forward(bert, packed)
    assert recorder.captures == 0


def test_the_least_recently_used_graph_is_dropped(
    bert: Backbone, recorder: RerunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_graphs, "_MOST_GRAPHS", 2)
    assert bert._graphs is not None
    for length in (5, 20, 5, 40):  # the graph of 20 tokens is the oldest
        for _ in range(2):
            forward(bert, packed_of(bert, (length,)))
    assert len(bert._graphs) == 2
    assert recorder.captures == 3
    forward(bert, packed_of(bert, (5,)))
    assert recorder.captures == 3
    for _ in range(2):
        forward(bert, packed_of(bert, (20,)))
    assert recorder.captures == 4


def test_graphs_are_dropped_when_memory_is_short(bert: Backbone, recorder: RerunRecorder) -> None:
    packed = packed_of(bert, (5,))
    for _ in range(2):
        forward(bert, packed)
    assert drop_graphs()
    assert not drop_graphs()
    assert torch.equal(forward(bert, packed), eager(bert, packed))
    assert recorder.captures == 1
