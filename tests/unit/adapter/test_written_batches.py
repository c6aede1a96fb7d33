"""Batches that generate text, at the socket of the adapter: a cancel or the end of the connection ends them."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest

from sie_adapter import server
from sie_adapter.engine.device_threads import DeviceThreads
from sie_adapter.server import AdapterServer
from sie_contracts.errors import InternalFailure
from sie_contracts.wire import ipc
from sie_contracts.wire.ipc import BatchDone, Refused, Reply, RunBatch

WAIT_S = 20
MESSAGE = RunBatch("b", "m", "extract", b"", b"", ())
CANCELLED = Refused(InternalFailure("cancelled").info(), "b")
DONE = BatchDone("b", (), b"", 1.0)


class Writing:
    """An engine whose batches run until `ends` is set or they are cancelled."""

    def __init__(self) -> None:
        self.residency = mock.Mock()
        self.device_threads = DeviceThreads(1, lambda message: DONE)
        self.ends = threading.Event()
        self.replies: list[Reply] = []
        self.done = DONE

    def writes(self, message: RunBatch) -> bool:
        return True

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def execute(self, message: RunBatch, permission: object, is_gone: Callable[[], bool]) -> Reply:
        is_cancelled = False
        while not is_cancelled and not self.ends.is_set():
            is_cancelled = is_gone()
        self.replies.append(CANCELLED if is_cancelled else self.done)
        return self.replies[-1]


@pytest.fixture
def engine() -> Iterator[Writing]:
    engine = Writing()
    yield engine
    assert engine.device_threads.stop(5)


@pytest.fixture
def ours(engine: Writing) -> Iterator[socket.socket]:
    """The client's end of a connection that a server attends to."""
    ours, theirs = socket.socketpair()
    adapter = AdapterServer(mock.Mock(), engine, lambda: None, mock.Mock())  # type: ignore[arg-type]  # a part of an engine
    attending = threading.Thread(target=adapter._attend, args=(theirs,))
    attending.start()
    yield ours
    ours.close()
    attending.join(WAIT_S)
    assert not attending.is_alive()


def received(ours: socket.socket) -> ipc.Reply:
    return ipc.reply(bytes(ipc.receive_frame(ours)))


def test_a_cancel_ends_it_and_the_connection_is_used_again(engine: Writing, ours: socket.socket) -> None:
    for _ in range(2):
        ours.sendall(ipc.frame(MESSAGE))
        assert received(ours) == ipc.BatchStarted("b")
        ours.sendall(ipc.frame(ipc.Cancel()))
        assert received(ours) == CANCELLED
    engine.ends.set()
    ours.sendall(ipc.frame(ipc.Cancel()))  # too late for the batch before it; no batch runs
    ours.sendall(ipc.frame(MESSAGE))
    assert [received(ours), received(ours)] == [ipc.BatchStarted("b"), DONE]


def test_a_sidecar_that_dies_ends_it(engine: Writing, ours: socket.socket) -> None:
    ours.sendall(ipc.frame(MESSAGE))
    assert received(ours) == ipc.BatchStarted("b")
    ours.close()
    for _ in range(1000):
        if engine.replies:
            break
        threading.Event().wait(0.01)
    assert engine.replies == [CANCELLED]


DEEP = functools.reduce(lambda inner, _: [inner], range(2000), [])


@pytest.mark.parametrize(
    "value",
    ["\ud800", 2**64, object(), DEEP],
    ids=["half of a surrogate pair", "an integer of 65 bits", "no plain value", "too many levels"],
)
def test_a_reply_that_cannot_be_encoded_is_refused_and_the_connection_is_used_again(
    value: object, engine: Writing, ours: socket.socket
) -> None:
    engine.ends.set()
    engine.done = BatchDone("b", ({"text": value},), b"", 1.0)  # type: ignore[arg-type]  # the fault
    for _ in range(2):
        ours.sendall(ipc.frame(MESSAGE))
        assert received(ours) == ipc.BatchStarted("b")
        refusal = received(ours)
        assert isinstance(refusal, Refused)
        assert "cannot be encoded" in refusal.error.message


def test_a_reply_without_memory_for_its_frame_is_refused_and_the_connection_is_used_again(
    engine: Writing, ours: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = ipc.frame

    def frame(message: Reply) -> bytes:
        if message is DONE:
            raise MemoryError
        return encoded(message)

    monkeypatch.setattr(server.ipc, "frame", frame)
    engine.ends.set()
    for _ in range(2):
        ours.sendall(encoded(MESSAGE))
        assert received(ours) == ipc.BatchStarted("b")
        assert isinstance(received(ours), Refused)


def test_a_connection_without_a_thread_is_closed_and_the_next_one_is_attended(
    engine: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_is_trusted", lambda connection: True)
    with socket.socket() as listener, socket.socket() as refused, socket.socket() as attended:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        adapter = AdapterServer(listener, engine, lambda: None, mock.Mock())  # type: ignore[arg-type]  # a part of an engine
        refused.connect(listener.getsockname())
        with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            adapter._accept()
        refused.settimeout(WAIT_S)
        assert refused.recv(1) == b""
        attended.connect(listener.getsockname())
        adapter._accept()
        engine.ends.set()
        attended.sendall(ipc.frame(MESSAGE))
        assert [received(attended), received(attended)] == [ipc.BatchStarted("b"), DONE]


def test_a_failed_accept_is_followed_by_a_pause(engine: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(server, "time", mock.Mock(sleep=pauses.append))
    with socket.socket() as listener:  # it does not listen, so `accept` fails
        AdapterServer(listener, engine, lambda: None, mock.Mock())._accept()  # type: ignore[arg-type]  # a part of an engine
    assert pauses == [server._FAILED_ACCEPT_S]
