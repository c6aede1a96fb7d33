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
import sys
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
from adapter_process import ENTRY, MODEL, Adapter, Client, Refusal, batch, running, start, stop, toy
from helm import container, rendered, variables
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from unit.adapter import toys

from sie_adapter.loading.precision import bfloat16_lacks
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Failed, Ok, RunOptions

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


WITHOUT_CUDA = """
import os, torch
asked = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "_lazy_init")}
vars(torch.cuda).update(dict.fromkeys(asked, lambda *_: os._exit(9)))
os.register_at_fork(after_in_child=lambda: vars(torch.cuda).update(asked))
"""
BACK_S = 1.0  # the promised time, without the load of a model; the test allows three times as much


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


def test_a_ragged_batch_equals_the_oracle(client: Client, tokenizer: Tokenizer) -> None:
    texts = [*oracle.ragged_texts(40, 1), "", "a"]
    assert np.abs(encode(client, tokenizer, texts) - oracle.encode(texts)).max() <= 1e-5


def test_a_text_is_the_same_alone_and_in_batches_of_any_size(client: Client, tokenizer: Tokenizer) -> None:
    """In batches of 2 to 64 random texts, each text has the vector that it has alone."""
    texts = oracle.ragged_texts(64, 7, longest=60)
    alone = np.stack([encode(client, tokenizer, [text])[0] for text in texts])
    rng = np.random.default_rng(8)
    for size in (2, 3, 5, 8, 13, 21, 34, 64):
        chosen = rng.permutation(64)[:size]
        got = encode(client, tokenizer, [texts[item] for item in chosen])
        assert oracle.cosines(got, alone[chosen]).min() >= 0.9999
        assert np.abs(got - alone[chosen]).max() <= 1e-5


@pytest.mark.long
@pytest.mark.precision
def test_bfloat16_is_near_float32_in_batches_of_any_size(client: Client, tokenizer: Tokenizer) -> None:
    """On a CPU without bfloat16 instructions the model runs in float32 and names the reason."""
    ready = client.load("mini-16", {**ENTRY, "load": {"precision": "bfloat16"}})
    loaded = ready.loaded
    assert (loaded.precision, loaded.precision_reason) == (
        "float32" if bfloat16_lacks() else "bfloat16",
        bfloat16_lacks(),
    )
    assert loaded.requested_precision == "bfloat16"
    texts = oracle.ragged_texts(64, 9, longest=200)
    expected = oracle.encode(texts)
    for size in (1, 2, 7, 64):
        got = encode(client, tokenizer, texts[:size], model="mini-16")
        assert oracle.cosines(got, expected[:size]).min() >= 0.999


def test_options_of_a_group_apply_to_its_items_only(client: Client, tokenizer: Tokenizer) -> None:
    texts = oracle.ragged_texts(4, 3)
    groups = (ipc.Group(0, 1), ipc.Group(1, 2, RunOptions(dimensions=64)), ipc.Group(2, 4, RunOptions(normalize=False)))
    done = client.run(batch(token_ids(tokenizer, texts), groups=groups))
    arrays = [outcome.outputs["dense"] for outcome in done.outcomes if isinstance(outcome, Ok)]
    got = [np.frombuffer(done.block, "<f4", array.shape[0], array.offset) for array in arrays]
    full = oracle.encode(texts)
    np.testing.assert_allclose(got[0], full[0], atol=1e-5)
    np.testing.assert_allclose(got[1], full[1][:64] / np.linalg.norm(full[1][:64]), atol=1e-5)
    np.testing.assert_allclose(got[3] / np.linalg.norm(got[3]), full[3], atol=1e-5)
    assert abs(np.linalg.norm(got[3]) - 1) > 0.01


def test_two_connections_at_once_get_their_own_vectors(adapter: Adapter, client: Client, tokenizer: Tokenizer) -> None:
    """Lanes share nothing but weights."""
    texts = [oracle.ragged_texts(12, seed, longest=40) for seed in range(4)]
    expected = [oracle.encode(part) for part in texts]
    worst: list[float] = []

    def ask(number: int) -> None:
        with adapter.connect() as own:
            worst.extend(
                float(np.abs(encode(own, tokenizer, texts[number]) - expected[number]).max()) for _ in range(3)
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 12
    assert max(worst) <= 1e-5


def test_an_overflow_is_an_error_of_its_item_and_the_mates_are_right(client: Client, tmp_path: Path) -> None:
    """The position embedding of the long item's last tokens is infinite."""
    folder = toys.save(tmp_path / "toy", "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.position_embeddings.weight"][270] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    client.load("toy", toy(folder, run={"pooling": "mean"}))
    sequences = [ids.tolist() for ids in toys.random_ids([5, 275, 9])]
    done = client.run(batch(sequences, "toy"))
    assert [type(outcome) for outcome in done.outcomes] == [Ok, Failed, Ok]
    failed = done.outcomes[1]
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.error.reason) == ("INFERENCE_ERROR", "non_finite")
    alone = vectors(client.run(batch([sequences[0], sequences[2]], "toy")))
    got = np.frombuffer(done.block, "<f4").reshape(2, 32)
    np.testing.assert_allclose(got, alone, atol=1e-5)


def test_items_out_of_range_are_errors_of_their_own(client: Client, tokenizer: Tokenizer) -> None:
    done = client.run(batch([token_ids(tokenizer, ["test"])[0], [101] * 257, [1 << 30]]))
    reasons = [outcome.error.reason for outcome in done.outcomes if isinstance(outcome, Failed)]
    assert reasons == ["too_long", "token_out_of_range"]
    np.testing.assert_allclose(np.frombuffer(done.block, "<f4")[:3], GOLDEN["test"], atol=1e-5)


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


def test_the_tokenizer_that_comes_with_a_model_makes_the_oracle_s_tokens(client: Client, tokenizer: Tokenizer) -> None:
    ready = client.load()
    assert ready.max_tokens == MAX_TOKENS
    sent = Tokenizer.from_str(ready.tokenizer.decode())
    assert sent.truncation is None
    assert sent.padding is None
    texts = [text for text in GOLDEN if len(text) < 100]
    assert [sent.encode(text).ids for text in texts] == token_ids(tokenizer, texts)


def test_eight_askers_make_one_load(adapter: Adapter) -> None:
    started = threading.Barrier(8)
    seconds: list[float] = []

    def ask() -> None:
        with adapter.connect() as own:
            started.wait()
            seconds.append(own.load("raced").load_s)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seconds) == 8
    assert len(set(seconds)) == 1  # each load has its own duration


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


def test_a_released_model_is_gone_and_a_changed_entry_is_served(client: Client, tmp_path: Path) -> None:
    """The entry of a loaded model changes its pooling from mean to cls. Vectors and fingerprint are then those of the
    new entry.
    """
    entry = toy(toys.save(tmp_path / "toy", "bert", marked=True))
    sequence = toys.random_ids([9])[0].tolist()
    first = client.load("passing", entry)
    mean = vectors(client.run(batch([sequence], "passing")))
    changed = client.load("passing", {**entry, "run": {"pooling": "cls"}})
    assert changed.loaded.fingerprint != first.loaded.fingerprint
    cls = vectors(client.run(batch([sequence], "passing")))
    assert np.abs(cls - mean).max() > 0.01
    np.testing.assert_allclose(cls, vectors(client.run(batch([sequence], "passing", pooling="cls"))), atol=1e-6)
    np.testing.assert_allclose(mean, vectors(client.run(batch([sequence], "passing", pooling="mean"))), atol=1e-6)
    assert client.ask(ipc.Release("passing")) == ipc.Done()
    assert refusal(client, batch([[101, 102]], "passing")).code == "MODEL_LOADING"


# the other verbs


def test_a_model_says_how_its_rows_are_made(client: Client, tmp_path: Path) -> None:
    assert client.load().rows == {"encode": ipc.Rows("text", tokens=True, chunks=True, pooling="mean")}
    folder = toys.save(tmp_path / "toy", "bert")
    late = toy(
        folder, outputs={"multivector": 32}, head={"query_length": 8, "document_marker": "w3", "document_length": 20}
    )
    ready = client.load("late", late)
    query, document = ipc.Side(limit=8), ipc.Side(marker=3, limit=20)
    encode, score = (
        ipc.Rows("text", query, document, tokens=True, vectors=32, chunks=True),
        ipc.Rows("sides", query, document, vectors=32),
    )
    assert ready.rows == {"encode": encode, "score": score}


def test_pairs_are_scored_like_the_stock_model(client: Client, tmp_path: Path) -> None:
    """The rows have the token types of a pair."""
    folder = toys.save(tmp_path / "toy", "bert", auto=AutoModelForSequenceClassification, num_labels=1, marked=True)
    ready = client.load("cross", toy(folder, family="cross-encoder", outputs={"score": 0}))
    assert ready.rows == {"score": ipc.Rows("pair")}
    sequences = [ids.tolist() for ids in toys.random_ids([12, 5, 30])]
    types = [[0] * 4 + [1] * (len(ids) - 4) for ids in sequences]
    message = batch(
        sequences,
        "cross",
        "score",
        types=bytes(kind for kinds in types for kind in kinds),
        groups=(ipc.Group(0, 3, RunOptions(outputs=())),),
    )
    done = client.run(message)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = [
            model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0, 0]
            for ids, kinds in zip(sequences, types, strict=True)
        ]
    expected = torch.sigmoid(torch.stack(logits)).tolist()
    assert len({round(score, 4) for score in expected}) == 3
    np.testing.assert_allclose(
        [outcome.score for outcome in done.outcomes if isinstance(outcome, Ok)], expected, atol=1e-5
    )
    assert done.block == b""


def test_a_query_is_scored_against_its_documents_and_a_bad_one_fails_only_its_own(
    client: Client, tmp_path: Path
) -> None:
    client.load("late", toy(toys.save(tmp_path / "toy", "bert"), outputs={"multivector": 32}))
    rows = [ids.tolist() for ids in toys.random_ids([4, 9, 6])]
    options = RunOptions(outputs=("multivector",))
    done = client.run(
        batch([*rows, [1 << 20], rows[1]], "late", "score", groups=(ipc.Group(0, 3, options), ipc.Group(3, 5, options)))
    )
    scores = [outcome.score if isinstance(outcome, Ok) else outcome.error.reason for outcome in done.outcomes]
    encoded = client.run(batch(rows, "late", groups=(ipc.Group(0, 3, options),)))
    query, *documents = [
        np.frombuffer(encoded.block, "<f4").reshape(-1, 32)[first:last] for first, last in ((0, 4), (4, 13), (13, 19))
    ]
    expected = [(query @ document.T).max(1).sum() for document in documents]
    np.testing.assert_allclose(scores[:2], expected, rtol=1e-5)
    assert scores[2:] == ["token_out_of_range"]


def test_entities_come_with_their_place_in_the_text(client: Client, tmp_path: Path) -> None:
    labels = {0: "O", 1: "B-x", 2: "I-x"}
    numbers = {label: number for number, label in labels.items()}
    folder = toys.save(
        tmp_path / "toy", "bert", auto=AutoModelForTokenClassification, id2label=labels, label2id=numbers
    )
    ready = client.load("ner", toy(folder, family="token-classifier", outputs={"entities": 0}))
    assert ready.rows == {"extract": ipc.Rows("spans")}
    text = "w7 é w9 w20 w33"
    places = [(0, 2), (3, 4), (5, 7), (8, 11), (12, 15)]
    ids = [7, 119, 9, 20, 33]
    offsets = np.array(places, "<i4").tobytes()
    done = client.run(
        batch(
            [ids], "ner", "extract", texts=(text,), offsets=offsets, groups=(ipc.Group(0, 1, RunOptions(outputs=())),)
        )
    )
    (outcome,) = done.outcomes
    assert isinstance(outcome, Ok)
    assert outcome.data is not None
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        kinds = model(input_ids=torch.tensor([ids])).logits[0].argmax(1).tolist()
    tagged = {place for place, kind in zip(places, kinds, strict=True) if kind}
    entities = outcome.data["entities"]
    assert entities
    assert {
        (start, end)
        for start, end in places
        for entity in entities
        if entity["start"] <= start and end <= entity["end"]
    } == tagged
    assert all(entity["text"] == text[entity["start"] : entity["end"]] for entity in entities)


def test_a_lora_that_is_not_there_is_refused(client: Client) -> None:
    assert refusal(client, ipc.EnsureLora(MODEL, "/nowhere")).code == "LORA_LOAD_FAILED"
    assert refusal(client, batch([[101, 102]], lora="absent")).code == "LORA_LOADING"


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


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the adapter serves in one process")
def test_a_killed_adapter_is_replaced_by_a_fork(tmp_path: Path) -> None:
    """The process that serves is killed with SIGKILL. Within a second another one answers at the same path with the
    same vectors. A fork is possible because the imports did not use CUDA and left no thread. SIGTERM ends the adapter
    with status 0, and the socket is gone.
    """
    began = time.perf_counter()
    adapter = start(tmp_path / "a.sock", spare=True, before=WITHOUT_CUDA)
    try:
        adapter.wait_for("adapter ready")
        start_s = time.perf_counter() - began
        with adapter.connect() as client:
            victim = client.ask(ipc.Describe()).pid
            ready = client.load()
            before = encode(client, Tokenizer.from_buffer(ready.tokenizer), ["test"])
            assert victim != adapter.process.pid
            os.kill(victim, signal.SIGKILL)
            killed = time.perf_counter()
            with pytest.raises((EOFError, OSError)):
                client.receive()
        with adapter.connect() as client:
            assert client.ask(ipc.Describe()).pid not in (victim, adapter.process.pid)
            assert time.perf_counter() - killed < max(3 * BACK_S, start_s / 2), "it is no start"
            client.load()
            np.testing.assert_allclose(
                encode(client, Tokenizer.from_buffer(ready.tokenizer), ["test"]), before, atol=1e-6
            )
        adapter.process.send_signal(signal.SIGTERM)
        assert adapter.process.wait(60) == 0
        assert not adapter.path.exists()
    finally:
        stop(adapter)


def test_a_second_adapter_on_a_socket_that_is_served_gives_up(adapter: Adapter) -> None:
    status, log = start(adapter.path).ended()
    assert status == 1
    assert f"another adapter serves on {adapter.path}" in log
    with adapter.connect() as client:
        assert isinstance(client.ask(ipc.Ping()), ipc.Pong)


def test_a_signal_lets_the_running_batch_finish(tmp_path: Path) -> None:
    """After SIGTERM the running batch is answered. Then the process ends with status 0 and removes its socket."""
    with running(tmp_path / "a.sock") as adapter:
        with adapter.connect() as client:
            client.load()
            client.send(batch([[101, *[2003] * 250, 102]] * 16))
            assert isinstance(client.receive(), ipc.BatchStarted)
            adapter.process.send_signal(signal.SIGTERM)
            assert len(vectors_of(client)) == 16
        assert adapter.process.wait(60) == 0
        assert not adapter.path.exists()


def vectors_of(client: Client) -> NDArray[np.float32]:
    done = client.receive()
    assert isinstance(done, ipc.BatchDone)
    return vectors(done)


def test_drain_ends_the_process_and_an_absent_device_never_starts(tmp_path: Path) -> None:
    with running(tmp_path / "a.sock") as adapter:
        with adapter.connect() as client:
            assert client.ask(ipc.Drain()) == ipc.Done()
        assert adapter.process.wait(60) == 0
    status, log = start(tmp_path / "b.sock", SIE_DEVICE=f"cuda:{torch.cuda.device_count()}").ended()
    assert status != 0
    assert "SIE_DEVICE" in log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_adapter_of_the_chart_without_its_gpu_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    """The error comes before the socket, whose folder does not exist here. Probes of the chart would take the socket as
    ready.
    """
    pod_variables = variables(container(rendered("values-gpu.yaml"), "sie-worker-gpu", "adapter"))
    environ = {name: value for name, value in pod_variables.items() if isinstance(value, str)}
    here = {"SIE_IPC_SOCKET_PATH": str(tmp_path / "no folder" / "s"), "SIE_LOCAL_CACHE": str(tmp_path), "HOME": "/tmp"}
    status, log = start(tmp_path / "a.sock", **{**environ, **here}).ended()
    assert status == 2
    (line,) = log.splitlines()
    assert line.startswith("error: SIE_DEVICE: cuda needs a ")
