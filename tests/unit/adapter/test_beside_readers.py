"""Texts and pages at the sockets of one adapter do not wait for each other."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from unit.adapter.test_batch import FakeEncoder, message
from unit.adapter.test_reading import Sums, asked, expected

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.generation.reading import GeneratedText
from sie_adapter.memory.residency import Resident
from sie_adapter.packed.packing import PackedBatch
from sie_adapter.server import AdapterServer
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc
from sie_contracts.wire.ipc import BatchDone, BatchStarted, Group, Rows, RunBatch
from sie_contracts.wire.messages import Ok, RunOptions

WAIT_S = 20
PROMPT = asked(4, 9, most=12)
PAGE = RunBatch("p", "reader", "extract", np.array([1], "<i4").tobytes(), b"", (Group(0, 1),), texts=("",))


class Reader:
    """A reader each of whose pages has the prompt `PROMPT`."""

    def __init__(self, model: Sums) -> None:
        self.rows = {"extract": Rows("raw", writes=True)}
        self._model = model
        self._read: Callable[[Sequence[str]], list[GeneratedText]] | None = None

    def reading(self, read: Callable[..., list[GeneratedText]], is_gone: Callable[[], bool]) -> Reader:
        self._read = lambda texts: read(self._model, [PROMPT for _ in texts], is_gone)
        return self

    def extract(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> list[dict[str, Any]]:
        assert self._read is not None
        return [{"data": {"ids": output.ids}} for output in self._read(texts)]


class Gate:
    """Gate at which passes wait until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Semaphore(0), threading.Event()

    def __call__(self, *arguments: object) -> None:
        self.reached.release()
        assert self.opened.wait(WAIT_S)


class GatedEncoder(FakeEncoder):
    """An encoder whose passes wait at a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        self.gate()
        return super().forward(packed)


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(Settings(device="cpu"))
    yield engine
    assert engine.stop(5)


def put(engine: AdapterEngine, name: str, weights: Any) -> None:
    entry = ModelEntry(id=name, weights=Weights(path="/w"), family="text-encoder", outputs={"dense": 4}, max_tokens=40)
    resolved = Catalogue.resolve_profile(entry, "default", name)
    engine.residency._residents[name] = Resident(name, resolved, weights, 0.0, 0.0)


@contextlib.contextmanager
def connection(engine: AdapterEngine) -> Iterator[socket.socket]:
    """Yield the client's end of a connection that the adapter's server attends to."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S)
    attending = threading.Thread(
        target=AdapterServer(mock.Mock(), engine, lambda: None, mock.Mock())._attend, args=(theirs,)
    )
    attending.start()
    with ours:
        yield ours
    attending.join(WAIT_S)
    assert not attending.is_alive()


def begins(ours: socket.socket, batch: RunBatch) -> None:
    ours.sendall(ipc.frame(batch))
    assert received(ours) == BatchStarted(batch.batch)


def received(ours: socket.socket) -> ipc.Reply:
    return ipc.reply(bytes(ipc.receive_frame(ours)))


def test_a_text_waits_for_no_more_than_the_step_that_runs(engine: AdapterEngine) -> None:
    """Texts are answered while a step of a page does not end. After that step the page is completed without an
    error.
    """
    gate = Gate()
    put(engine, "reader", Reader(Sums(fails=gate)))
    put(engine, "m", FakeEncoder())
    with connection(engine) as page, connection(engine) as text:
        begins(page, PAGE)
        assert gate.reached.acquire(timeout=WAIT_S)
        for _ in range(3):
            begins(text, message([[1, 2]]))
            assert isinstance(received(text), BatchDone)
        assert not gate.reached.acquire(blocking=False)  # the same step still runs
        gate.opened.set()
        assert_read(received(page))


def test_texts_that_wait_for_a_lane_have_not_begun(engine: AdapterEngine) -> None:
    """The sidecar takes the inputs of a batch that has begun for a possible cause of the adapter's death."""
    gate = Gate()

    class Static:
        rows: ClassVar = {"encode": Rows("raw")}

        def encode(self, texts: Sequence[str], options: RunOptions) -> list[dict[str, Any]]:
            return [{"dense": [0.0]} for _ in texts]

    put(engine, "static", Static())
    with contextlib.ExitStack() as stack:
        lanes = [stack.enter_context(connection(engine)) for _ in range(len(engine.device_threads))]
        for number, text in enumerate(lanes):
            put(engine, f"m{number}", GatedEncoder(gate))
            begins(text, message([[1, 2]], model=f"m{number}"))
            assert gate.reached.acquire(timeout=WAIT_S)
        waiting = stack.enter_context(connection(engine))
        lengths = np.array([1], "<i4").tobytes()
        batch = RunBatch("s", "static", "encode", lengths, b"", (Group(0, 1),), texts=("a",))
        queued, submit = threading.Event(), engine.device_threads.submit

        def note(job: DeviceJob) -> None:
            submit(job)
            queued.set()

        with mock.patch.object(engine.device_threads, "submit", note):
            waiting.sendall(ipc.frame(batch))
            assert queued.wait(WAIT_S)
        assert not select.select([waiting], [], [], 0)[0]
        gate.opened.set()
        assert received(waiting) == BatchStarted("s")
        assert isinstance(received(waiting), BatchDone)
        for text in lanes:
            assert isinstance(received(text), BatchDone)


def assert_read(reply: ipc.Reply) -> None:
    assert isinstance(reply, BatchDone), reply
    (outcome,) = reply.outcomes
    assert isinstance(outcome, Ok)
    assert outcome.data == {"data": {"ids": expected(PROMPT).ids}}
