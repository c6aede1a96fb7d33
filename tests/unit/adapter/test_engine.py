"""Replies of the engine to failures."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from unit.adapter.test_batch import FakeEncoder, message

from sie_adapter.engine import engine as engines
from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.engine.engines import TORCH
from sie_adapter.loading.loading import Loader
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_adapter.memory.residency import Permission, Resident
from sie_adapter.packed.packing import PackedBatch
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, BatchStarted, Refused, Reply, Rows, RunBatch
from sie_contracts.wire.messages import RunOptions


class Broken(FakeEncoder):
    failure: Exception = ValueError("a bug")

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        self.passes.append(len(packed.order))
        raise self.failure


@pytest.fixture
def lost() -> list[str]:
    return []


@pytest.fixture
def engine(lost: list[str], tmp_path: Path) -> Any:
    """An engine that stores its learnt limits in the folder of the test."""
    adapter_engine = AdapterEngine(Settings(device="cpu", local_cache=str(tmp_path)), lambda: lost.append("lost"))
    yield adapter_engine
    assert adapter_engine.stop(30)


def reply_of(
    engine: AdapterEngine, encoder: Any, sequences: Sequence[Sequence[int]] = ((1, 2),), **changes: Any
) -> Reply:
    entry = ModelEntry(id="m", weights=Weights(path="/w"), family="text-encoder", outputs={"dense": 4}, max_tokens=40)
    resolved = Catalogue.resolve_profile(entry, "default", "m")
    resident = Resident("m", resolved, encoder, 0.0, 0.0)
    engine.residency._residents["m"] = resident
    with torch.inference_mode():
        reply = engine.execute(message(list(map(list, sequences)), **changes))
    assert resident.running == 0
    return reply


def test_a_batch_is_answered_where_memory_cannot_be_given_back(
    engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(permission: Permission) -> None:
        permission.record_drop("other")
        raise OSError("the memory of the device cannot be read")

    monkeypatch.setattr(engine.residency, "relieve", fails)
    reply = reply_of(engine, FakeEncoder())
    assert isinstance(reply, BatchDone)
    assert reply.dropped == ("other",)


@pytest.mark.parametrize(("may_drop", "dropped"), [(("absent", "other"), ("other",)), ((), ())])
def test_a_batch_drops_only_what_it_may_and_its_reply_says_what(
    engine: AdapterEngine, may_drop: tuple[str, ...], dropped: tuple[str, ...]
) -> None:
    """The batch does not fit beside the other model. It drops that model, or it is split."""

    class Crowded(FakeEncoder):
        def forward(self, packed: PackedBatch) -> torch.Tensor:
            self.limit = 1 if "other" in engine.residency._residents else 3
            return super().forward(packed)

    neighbour_entry = ModelEntry(
        id="o", weights=Weights(path="/o"), family="text-encoder", outputs={"dense": 4}, max_tokens=40
    )
    resolved = Catalogue.resolve_profile(neighbour_entry, "default", "other")
    engine.residency._residents["other"] = Resident("other", resolved, FakeEncoder(), 0.0, 0.0)
    encoder = Crowded()
    reply = reply_of(engine, encoder, [[1], [2], [3]], may_drop=may_drop)
    assert isinstance(reply, BatchDone)
    assert np.frombuffer(reply.block, "<f4").reshape(3, 4)[:, 0].tolist() == [1, 2, 3]
    assert reply.dropped == dropped
    assert (encoder.passes == [3, 3]) == bool(dropped)


class Reader:
    """A family that reads texts by itself."""

    rows: ClassVar = {"encode": Rows("raw")}
    precision = "float32"
    engine_choice = TORCH

    def encode(self, texts: Sequence[str], options: RunOptions) -> list[dict[str, Any]]:
        return [{"dense": [float(len(text)), 0.0]} for text in texts]


def test_what_a_family_asks_for_decides_whether_it_gets_ids_or_texts(engine: AdapterEngine) -> None:
    done = reply_of(engine, FakeEncoder())
    assert isinstance(done, BatchDone)
    np.testing.assert_allclose(np.frombuffer(done.block, "<f4"), [1.5, 1, 2, 3])
    read = reply_of(engine, Reader(), texts=("abc",))
    assert isinstance(read, BatchDone)
    assert np.frombuffer(read.block, "<f4").tolist() == [3, 0]


@pytest.mark.parametrize("family", [FakeEncoder(layouts={"encode": "text"}), Reader()])
def test_an_operation_that_a_family_does_not_serve_is_refused(family: Any, engine: AdapterEngine) -> None:
    reply = reply_of(engine, family, operation="score", texts=("abc",))
    assert isinstance(reply, Refused)
    assert (reply.error.code, reply.error.reason) == ("INVALID_INPUT", "unsupported_task")


def test_a_bug_in_a_family_refuses_its_batch_without_its_text(engine: AdapterEngine, lost: list[str]) -> None:
    encoder = Broken()
    reply = reply_of(engine, encoder)
    assert encoder.passes == [1]
    assert isinstance(reply, Refused)
    assert reply.error.code == "INTERNAL_ERROR"
    assert "a bug" not in reply.error.message
    assert lost == []


def test_a_lost_device_ends_the_process(engine: AdapterEngine, lost: list[str]) -> None:
    """A CUDA context serves no request after a fatal error."""
    encoder = Broken()
    encoder.failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    reply_of(engine, encoder)
    assert lost == ["lost"]
    assert engines.DEVICE_LOST_STATUS == 70


class WarmedUp(FakeEncoder):
    """An encoder whose pass raises `failure` while the model `other` is loaded."""

    attention = "sdpa"
    memory_bytes = 0

    def __init__(self, engine: AdapterEngine, failure: Exception) -> None:
        super().__init__()
        self.engine, self.failure = engine, failure

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        if "other" in self.engine.residency._residents:
            raise self.failure
        return torch.zeros(1, self.width)


def loaded_beside_another(
    engine: AdapterEngine, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """Return the models that were dropped for the load."""
    entry = ModelEntry(id="m", weights=Weights(path="/w"), family="text-encoder", outputs={"dense": 4}, max_tokens=40)
    resolved = Catalogue.resolve_profile(entry, "default", "other")
    engine.residency._residents["other"] = Resident("other", resolved, FakeEncoder(), 0.0, 0.0)
    monkeypatch.setattr(Loader, "load", lambda *_: WarmedUp(engine, failure))
    monkeypatch.setattr(engine.residency, "_needed_bytes", lambda _: 0)
    permission = engine.residency.permission(("other",))
    engine.residency.ensure("m", entry, "default", permission)
    return permission.dropped


def test_a_warm_up_that_runs_out_of_memory_takes_the_room_of_another_model(
    engine: AdapterEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up evicts another model, as a load does. The load of the model does not fail."""
    failure = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    assert loaded_beside_another(engine, failure, monkeypatch) == ("other",)


def test_a_device_that_is_lost_while_a_model_is_warmed_up_ends_the_process(
    engine: AdapterEngine, lost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        loaded_beside_another(engine, failure, monkeypatch)
    assert lost == ["lost"]


def test_errors_of_the_device_are_told_apart_by_type() -> None:
    fatal = torch.AcceleratorError("CUDA error: device-side assert triggered")
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert is_device_fatal(fatal)
    assert not is_device_fatal(full)
    assert is_out_of_memory(full)
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory", "/weights"))
    assert is_out_of_memory(RuntimeError("can't start new thread"))
    assert not is_out_of_memory(OSError(errno.ENOENT, "No such file or directory", "/weights"))
    assert not is_out_of_memory(RuntimeError("out of memory, says a library"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    with pytest.raises(RuntimeError, match="primitive") as mixed:  # operands of two dtypes
        torch.ops.mkldnn._linear_pointwise(
            torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(16, 16), None, "none", [], ""
        )
    assert not is_out_of_memory(mixed.value)
    assert not is_out_of_memory(fatal)


def batch(name: str) -> RunBatch:
    return message([[1]], batch=name)


def test_stopping_finishes_what_runs_and_refuses_what_waits() -> None:
    running, release = threading.Event(), threading.Event()

    def execute(ran: RunBatch) -> Reply:
        running.set()
        assert release.wait(30)
        return BatchDone(ran.batch, (), b"", 1.0)

    lanes = DeviceThreads(1, execute)
    answers: dict[str, list[Reply]] = {"first": [], "second": []}
    jobs = [DeviceJob(batch(name), answers[name].append) for name in answers]
    for job in jobs:
        lanes.submit(job)
    assert running.wait(30)
    assert lanes.busy_s() > 0
    assert not lanes.stop(0.01)
    release.set()
    assert lanes.stop(30)
    assert answers["first"] == [BatchStarted("first"), BatchDone("first", (), b"", 1.0)]
    refused = answers["second"][0]
    assert isinstance(refused, Refused)
    assert refused.error.code == "SHUTTING_DOWN"
    assert lanes.busy_s() == 0
    assert all(job.finished.is_set() for job in jobs)


@pytest.mark.parametrize(
    ("message", "is_memory", "is_lost"),
    [
        ("CUDA error: out of memory", True, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True, False),
        ("CUDA error: no kernel image is available for execution on the device", False, False),
        ("CUDA error: an illegal memory access was encountered", False, True),
    ],
)
def test_what_a_cuda_error_leaves_of_the_context(message: str, is_memory: bool, is_lost: bool) -> None:
    """If a kernel of another card ended the process, it would end again at every load and never fall back."""
    error = torch.AcceleratorError(message)
    assert (is_out_of_memory(error), is_device_fatal(error)) == (is_memory, is_lost)


def test_the_end_waits_for_a_batch_that_generates_text_until_it_is_answered(engine: AdapterEngine) -> None:
    with engine.writing():
        assert not engine.stop(0.05)
    assert engine.stop(30)


def test_a_lane_outlives_a_mistake_of_its_caller() -> None:
    def answer(reply: Reply) -> None:
        raise RuntimeError("a bug in the caller")

    lanes = DeviceThreads(1, lambda ran: BatchDone(ran.batch, (), b"", 1.0))
    answers: list[Reply] = []
    jobs = [DeviceJob(batch("a"), answer), DeviceJob(batch("b"), answers.append)]
    for job in jobs:
        lanes.submit(job)
        assert job.finished.wait(30)
    assert len(answers) == 2
    assert lanes.stop(30)
