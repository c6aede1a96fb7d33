"""The real adapter process over its socket, with real MiniLM weights: vectors, faults of the peer, and the life of the
process.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from adapter_process import ENTRY, MODEL, Adapter, Client, Refusal, batch, running, start
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Ok

MAX_TOKENS = 256

GOLDEN = {  # model-notes 12A: sentence-transformers 6.2 in float32, first three numbers
    "test": (0.011573, 0.025136, -0.036702),
    "What is Deep Learning?": (-0.077851, -0.033280, 0.019743),
    "Deep Learning is...": (-0.019065, -0.093105, 0.055280),
    "": (-0.118838, 0.048299, -0.002548),
    "First line.\nSecond line.": (-0.037936, 0.048721, -0.009999),
    "Zürich, 東京 and 😀": (0.073833, 0.040385, 0.088571),
    " ".join(["retrieval"] * 400): (-0.032249, 0.003895, -0.011342),
}


@pytest.fixture(scope="module")
def adapter() -> Iterator[Adapter]:
    # not below pytest's own folder, which other users cannot enter
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "a.sock") as process:
        yield process


@pytest.fixture
def client(adapter: Adapter) -> Iterator[Client]:
    with adapter.connect() as connected:
        connected.load()
        yield connected


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    encoder = Tokenizer.from_file(str(oracle.model_folder() / "tokenizer.json"))
    encoder.enable_truncation(MAX_TOKENS)
    encoder.no_padding()
    return encoder


def token_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def vectors(done: ipc.BatchDone) -> NDArray[np.float32]:
    arrays = [outcome.outputs["dense"] for outcome in done.outcomes if isinstance(outcome, Ok)]
    assert len(arrays) == len(done.outcomes)
    return np.stack([np.frombuffer(done.block, array.dtype, array.shape[0], array.offset) for array in arrays])


def encode(client: Client, tokenizer: Tokenizer, texts: list[str], **changes: Any) -> NDArray[np.float32]:
    return vectors(client.run(batch(token_ids(tokenizer, texts), **changes)))


# vectors


def test_golden_vectors(client: Client, tokenizer: Tokenizer) -> None:
    got = encode(client, tokenizer, list(GOLDEN))
    np.testing.assert_allclose(got[:, :3], list(GOLDEN.values()), atol=1e-5)


# questions


def test_the_adapter_describes_itself(adapter: Adapter, client: Client) -> None:
    description = client.ask(ipc.Describe())
    assert description.protocol == ipc.PROTOCOL
    assert description.pid == adapter.process.pid
    assert description.device == "cpu"
    assert 0 < description.memory_used_bytes < description.memory_total_bytes
    model = next(model for model in description.models if model.model == MODEL)
    assert (model.revision, model.precision, model.attention) == (ENTRY["weights"]["revision"], "float32", "sdpa")
    assert model.memory_bytes > 80_000_000


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (batch([[101, 102]], "absent"), "MODEL_LOADING"),
        (ipc.RunBatch("b", MODEL, "score", b"", b"", ()), "INVALID_INPUT"),
        (ipc.RunBatch("b", MODEL, "encode", b"\1\0\0\0", b"", (ipc.Group(0, 1),)), "INTERNAL_ERROR"),
        (ipc.EnsureReady("x", {"id": "x"}), "VALIDATION_ERROR"),
        (ipc.EnsureReady("x", {**ENTRY, "weights": {"path": "/nowhere"}}), "MODEL_LOAD_FAILED"),
        (ipc.EnsureReady("x", {**ENTRY, "family": "ner"}), "MODEL_LOAD_FAILED"),
        (ipc.EnsureReady("x", ENTRY, profile="none"), "MODEL_NOT_FOUND"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_its_code(
    request_: ipc.Request, code: str, client: Client
) -> None:
    assert refusal(client, request_).code == code
    assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


def refusal(client: Client, request: ipc.Request) -> ErrorInfo:
    """Return the error of a request that must fail."""
    client.send(request)
    if isinstance(request, ipc.RunBatch):
        assert client.receive() == ipc.BatchStarted(request.batch)
    with pytest.raises(Refusal) as raised:
        client.receive()
    return raised.value.error


@pytest.mark.serial
def test_pings_are_quick_while_large_batches_and_a_load_run(adapter: Adapter, client: Client) -> None:
    """The p99 is below 60 ms on the control connection."""
    large = batch([[101, *[2003] * 250, 102]] * 8)
    finished = threading.Event()

    def work() -> None:
        with adapter.connect() as own:
            own.run(large)
            own.load("beside")
            own.run(large)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    seconds, busy = [], 0.0
    while not finished.is_set():
        started = time.perf_counter()
        pong = client.ask(ipc.Ping())
        seconds.append(time.perf_counter() - started)
        busy = max(busy, pong.busy_s)
    thread.join()
    assert busy > 0
    assert len(seconds) > 100
    assert np.percentile(seconds, 99) < 0.06


# faults of the peer


def is_closed(connection: socket.socket) -> bool:
    """Return True if the adapter ends the connection. Raise TimeoutError if it sends and closes nothing."""
    connection.settimeout(30.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_frame_cut_at_any_byte_ends_its_connection_and_nothing_else(adapter: Adapter, client: Client) -> None:
    whole = ipc.frame(batch([[101, 2003, 102]]))
    for cut in range(1, len(whole)):
        with adapter.connect() as broken:
            broken.connection.sendall(whole[:cut])
            broken.connection.shutdown(socket.SHUT_WR)
            assert is_closed(broken.connection)
    assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


@pytest.mark.parametrize("head", [0, (1 << 32) - 1, ipc.MAX_FRAME_BYTES, ipc.MAX_REQUEST_BYTES + 1])
def test_a_lying_length_ends_its_connection_at_once(head: int, adapter: Adapter, client: Client) -> None:
    with adapter.connect() as broken:
        broken.connection.sendall(struct.pack(">I", head))
        assert is_closed(broken.connection)
    assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


def test_bytes_that_are_no_request_end_their_connection(adapter: Adapter, client: Client) -> None:
    """Random bodies, and replies where requests belong."""
    rng = np.random.default_rng(5)
    bodies = [rng.bytes(int(rng.integers(1, 60))) for _ in range(150)]
    frames = [struct.pack(">I", len(body)) + body for body in bodies] + [
        ipc.frame(ipc.Done()),
        struct.pack(">I", 1) + b"\xc0",
    ]
    for frame in frames:
        with adapter.connect() as broken:
            broken.connection.sendall(frame)
            assert is_closed(broken.connection)
    assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


def test_a_peer_that_leaves_during_its_batch_does_no_harm(
    adapter: Adapter, client: Client, tokenizer: Tokenizer
) -> None:
    for _ in range(4):
        with adapter.connect() as leaving:
            leaving.send(batch([[101, *[2003] * 60, 102]] * 16))
    np.testing.assert_allclose(encode(client, tokenizer, ["test"])[0, :3], GOLDEN["test"], atol=1e-5)


def test_another_user_is_refused_even_if_the_socket_file_lets_it_in(adapter: Adapter, client: Client) -> None:
    """Only root can run a client as another user. Other users check only that their own connection is served."""
    mode = stat.S_IMODE(adapter.path.stat().st_mode)
    assert mode == 0o600
    if os.getuid() != 0:
        assert isinstance(client.ask(ipc.Ping()), ipc.Pong)
        return
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(30); "
        "print(s.recv(1))"
    )
    adapter.path.parent.chmod(0o755)
    adapter.path.chmod(0o777)
    try:
        command = ["/usr/bin/python3", "-c", code, str(adapter.path)]
        answer = subprocess.run(
            command, user=65534, group=65534, extra_groups=[], capture_output=True, text=True, check=False
        )
    finally:
        adapter.path.chmod(0o600)
        adapter.path.parent.chmod(0o700)
    assert answer.stdout.strip() == "b''", answer.stderr


# the life of the process


def test_a_second_adapter_on_a_socket_that_is_served_gives_up(adapter: Adapter) -> None:
    status, log = start(adapter.path).ended()
    assert status == 1
    assert f"another adapter serves on {adapter.path}" in log
    with adapter.connect() as client:
        assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


def test_drain_ends_the_process_and_an_absent_device_never_starts(tmp_path: Path) -> None:
    with running(tmp_path / "a.sock") as adapter:
        with adapter.connect() as client:
            assert client.ask(ipc.Drain()) == ipc.Done()
        assert adapter.process.wait(60) == 0
    status, log = start(tmp_path / "b.sock", SIE_DEVICE=f"cuda:{torch.cuda.device_count()}").ended()
    assert status != 0
    assert "SIE_DEVICE" in log


def test_a_signal_lets_the_running_batch_finish(adapter: Adapter) -> None:
    """After SIGTERM the running batch is answered. Then the process ends with status 0 and removes its socket. This is
    the last test of the adapter that the others share.
    """
    with adapter.connect() as client:
        client.load()
        client.send(batch([[101, *[2003] * 250, 102]] * 16))
        assert isinstance(client.receive(), ipc.BatchStarted)
        adapter.process.send_signal(signal.SIGTERM)
        done = client.receive()
        assert isinstance(done, ipc.BatchDone)
        assert len(vectors(done)) == 16
    assert adapter.process.wait(60) == 0
    assert not adapter.path.exists()
