"""Effects of the adapter's settings, from the variable through a real engine on the CPU, with a hub and weights that
the tests make.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from fake_adapter import toy_entry
from hub_stub import HubStub
from inprocess import settings_of
from object_stores import Place
from safetensors.torch import save_file
from unit.adapter import toys

from sie_adapter.engine.device import MemoryUse
from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.engine.engines import TORCH
from sie_adapter.engine.instrumentation import MAX_BATCHES, Instrumentation
from sie_adapter.loading.precision import bfloat16_lacks, resolve_precision
from sie_adapter.memory.residency import DeviceMemory, Permission, ResidentModels
from sie_adapter.packed.attention_backend import AttentionFacts, resolve_attention
from sie_adapter.server import AdapterServer
from sie_contracts.errors import ModelLoadFailed, ModelLoading
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.settings import SettingError
from sie_contracts.wire import ipc
from sie_contracts.wire.device_reports import RanBatch
from sie_contracts.wire.ipc import BatchDone, Group, Refused, Reply, RunBatch, frame
from sie_contracts.wire.messages import Failed
from sie_store.cluster import ClusterCache
from sie_store.weights.manifest import MANIFEST, describe, encode
from sie_store.weights.progress import FetchProgress

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_ENTRY = parse_entry(
    {
        "id": "org/model",
        "weights": {"hub": "org/model", "revision": COMMIT},
        "family": "text-encoder",
        "outputs": {"dense": 8},
        "max_tokens": 8,
    }
)


@contextlib.contextmanager
def engine_of(**environ: str) -> Iterator[AdapterEngine]:
    engine = AdapterEngine(settings_of(**{"SIE_DEVICE": "cpu", **environ}))
    try:
        yield engine
    finally:
        assert engine.stop(5)


def test_the_named_device_is_used_and_reported_and_an_absent_one_ends_the_start() -> None:
    """SIE_DEVICE: the adapter never falls back to another device."""
    with engine_of(SIE_DEVICE="CPU") as engine:
        assert engine.device == torch.device("cpu")
        assert engine.describe().device == "cpu"
        assert engine.loader.compute(None).device == torch.device("cpu")
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(SettingError, match=f"^SIE_DEVICE: {absent} (is not available here|needs )"):
        AdapterEngine(settings_of(SIE_DEVICE=absent))


AMPERE, TURING = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("backend", "capability", "is_16_bit", "expected"),
    [
        ("auto", AMPERE, True, "flash_attention_2"),
        ("auto", TURING, True, "sdpa"),
        ("auto", AMPERE, False, "sdpa"),
        ("flash_attention_2", AMPERE, True, "flash_attention_2"),
        ("flash_attention_2", TURING, True, "sdpa"),
        ("sdpa", AMPERE, True, "sdpa"),
        ("eager", AMPERE, True, "eager"),
    ],
)
def test_the_attention_backend_is_taken_where_the_device_can(
    backend: str, capability: tuple[int, int], is_16_bit: bool, expected: str
) -> None:
    """SIE_ATTENTION_BACKEND: sdpa replaces a backend that the device does not support."""
    facts = AttentionFacts("cuda", capability, flash_lacks="", is_16_bit=is_16_bit)
    assert resolve_attention(settings_of(SIE_ATTENTION_BACKEND=backend).attention_backend, facts)[0] == expected


def test_the_attention_backend_reaches_what_models_are_loaded_with() -> None:
    """SIE_ATTENTION_BACKEND."""
    for backend, expected in (("eager", "eager"), ("sdpa", "sdpa"), ("flash_attention_2", "sdpa"), ("auto", "sdpa")):
        with engine_of(SIE_ATTENTION_BACKEND=backend) as engine:
            assert engine.loader.compute(None).backend == expected


@pytest.mark.precision
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_the_default_precision_holds_for_models_without_their_own(precision: str) -> None:
    """SIE_DEFAULT_COMPUTE_PRECISION: a CPU without this precision reports which one it uses instead."""
    settings: Any = settings_of(SIE_DEFAULT_COMPUTE_PRECISION=precision)
    on_gpu, reason = resolve_precision(None, settings.default_compute_precision, "cuda", lacks="of a CPU")
    assert (str(on_gpu), reason) == (f"torch.{precision}", "")
    assert resolve_precision("float32", settings.default_compute_precision, "cuda", lacks="") == (torch.float32, "")
    with engine_of(SIE_DEFAULT_COMPUTE_PRECISION=precision) as engine:
        compute = engine.loader.compute(None)
        assert engine.loader.compute("float32").precision == "float32"
    served = "float32" if precision == "float32" or bfloat16_lacks() else "bfloat16"
    assert (compute.requested, compute.precision, bool(compute.precision_reason)) == (
        precision,
        served,
        served != precision,
    )


def snapshot(cache: Path) -> Path:
    """Write a complete snapshot of the entry's weights. Return its folder."""
    folder = cache / "hub" / "models--org--model" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / MANIFEST).write_bytes(encode(describe(folder, "org/model", COMMIT)))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    """A hub that notes every request and refuses it."""
    with HubStub(status=404).serving() as stub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stub.url)
        yield stub


def weights_of(entry: ModelEntry, **environ: str) -> Path | str:
    """Return the folder of the weights, or the class of the failure with its message."""
    with engine_of(**environ) as engine:
        try:
            return engine.loader.sources.folder(entry)
        except ModelLoadFailed as error:
            return f"{error.extras['error_class']}: {error.message}"


def test_weights_are_looked_up_in_the_local_cache_first(tmp_path: Path, hub: HubStub) -> None:
    """SIE_LOCAL_CACHE: it wins over HF_HOME. If it is empty and downloads are off, the failure is typed."""
    cached = snapshot(tmp_path / "a")
    full, empty = {"SIE_LOCAL_CACHE": str(tmp_path / "a")}, {"SIE_LOCAL_CACHE": str(tmp_path / "b")}
    assert weights_of(HUB_ENTRY, HF_HOME=str(tmp_path / "c"), **full) == cached
    missing = weights_of(HUB_ENTRY, HF_HOME=str(tmp_path / "a"), SIE_HF_FALLBACK="false", **empty)
    assert str(missing).startswith("NOT_FOUND: ")
    assert "SIE_LOCAL_CACHE" in str(missing)
    assert hub.asked == []


def test_the_local_cache_is_hf_home_where_it_is_not_set(tmp_path: Path, hub: HubStub) -> None:
    """HF_HOME: weights are read from there and downloaded to there."""
    cached = snapshot(tmp_path / "a")
    assert weights_of(HUB_ENTRY, HF_HOME=str(tmp_path / "a")) == cached
    assert hub.asked == []
    hub.status, hub.commit = 0, COMMIT
    hub.add("org/model", cached)
    assert weights_of(HUB_ENTRY, HF_HOME=str(tmp_path / "b")) == tmp_path / "b" / cached.relative_to(tmp_path / "a")


def test_weights_come_from_the_cluster_cache_before_the_hub(tmp_path: Path, hub: HubStub, place: Place) -> None:
    """SIE_CLUSTER_CACHE: weights are copied to the local cache, which serves them afterwards. Without the setting the
    hub is asked.
    """
    pushed = snapshot(tmp_path / "a")
    ClusterCache(place.url).push(pushed, describe(pushed, "org/model", COMMIT), FetchProgress("it"))
    cache = {"SIE_LOCAL_CACHE": str(tmp_path / "b")}
    weights_path = weights_of(HUB_ENTRY, SIE_CLUSTER_CACHE=place.url, **cache)
    assert weights_path == tmp_path / "b" / pushed.relative_to(tmp_path / "a")
    assert hub.asked == []
    ClusterCache(place.url).remove("org/model", COMMIT)
    assert weights_of(HUB_ENTRY, SIE_CLUSTER_CACHE=place.url, **cache) == weights_path
    empty = {"SIE_LOCAL_CACHE": str(tmp_path / "c")}
    missing = str(weights_of(HUB_ENTRY, SIE_CLUSTER_CACHE=place.url, SIE_HF_FALLBACK="false", **empty))
    assert re.match(
        rf"NOT_FOUND: .*the cluster cache {place.url} \(SIE_CLUSTER_CACHE\) has no org/model@{COMMIT}", missing
    )
    assert hub.asked == []
    assert str(weights_of(HUB_ENTRY, **empty)).startswith("NOT_FOUND: org/model@")
    assert hub.asked != []


def test_without_the_fallback_the_hub_is_never_asked(tmp_path: Path, hub: HubStub) -> None:
    """SIE_HF_FALLBACK: the failure names the variable. With the fallback the hub is asked for the pinned commit."""
    cache = {"SIE_LOCAL_CACHE": str(tmp_path)}
    refused = str(weights_of(HUB_ENTRY, SIE_HF_FALLBACK="false", **cache))
    assert refused.startswith("NOT_FOUND: ")
    assert "SIE_HF_FALLBACK" in refused
    assert hub.asked == []
    assert str(weights_of(HUB_ENTRY, **cache)).startswith("NOT_FOUND: org/model@")
    assert [request.path for request in hub.of("/api/models/")] == [f"/api/models/org/model/revision/{COMMIT}"]


def lora(folder: Path, seed: int) -> str:
    """Write a LoRA in PEFT's layout: random matrices of rank 2 for one layer of the toy BERT. Return its folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    layer = "base_model.model.encoder.layer.0.attention.self.query"
    matrices = {"lora_A": torch.randn(2, 32, generator=generator), "lora_B": torch.randn(32, 2, generator=generator)}
    save_file(
        {f"{layer}.{name}.weight": matrix for name, matrix in matrices.items()}, folder / "adapter_model.safetensors"
    )
    return str(folder)


def test_so_many_loras_are_kept_for_a_model_and_the_least_recently_used_goes(tmp_path: Path) -> None:
    """SIE_MAX_LORAS_PER_MODEL."""
    lora_limit = 2
    entry = toys.entry(toys.save(tmp_path / "base", "bert"))
    with engine_of(
        SIE_MODELS_DIR=str(tmp_path), SIE_DEFAULT_COMPUTE_PRECISION="float32", SIE_MAX_LORAS_PER_MODEL="2"
    ) as engine:
        resident = engine.residency.ensure(entry.id, entry)
        names = [lora(tmp_path / f"lora{seed}", seed) for seed in range(lora_limit + 1)]

        def vectors(name: str) -> bytes | str:
            reply = engine.execute(toy_batch(entry.id, name))
            return reply.block if isinstance(reply, BatchDone) else reply.error.code

        with torch.inference_mode():
            base = vectors("")
            for name in names[:lora_limit]:
                engine.ensure_lora(entry.id, name)
            first = vectors(names[0])
            engine.ensure_lora(entry.id, names[lora_limit])
            assert resident.weights.loras.names() == (*names[2:lora_limit], names[0], names[lora_limit])
            assert vectors(names[1]) == "LORA_LOADING"
            assert vectors(names[0]) == first != base
            assert len({vectors(name) for name in ("", names[0], names[lora_limit])}) == 3
            assert vectors("") == base


def toy_batch(model: str, lora: str) -> RunBatch:
    ids = np.arange(7, 12, dtype="<i4")
    return RunBatch("b", model, "encode", np.array([5], "<i4").tobytes(), ids.tobytes(), (Group(0, 1),), lora=lora)


def test_the_last_batches_are_described_and_bounded_and_nothing_is_without_the_setting(tmp_path: Path) -> None:
    """SIE_INSTRUMENTATION: each batch is described by its sizes, cost, padding, times and failures."""
    entry = toys.entry(toys.save(tmp_path / "base", "bert"))
    ids, lengths = np.arange(7, 90, dtype="<i4"), np.array([60, 23], "<i4")
    groups = (Group(0, 1), Group(1, 2))

    def ran(engine: AdapterEngine, **changes: Any) -> Reply:
        replies: list[Reply] = []
        batch = RunBatch("b", entry.id, "encode", lengths.tobytes(), ids.tobytes(), groups)
        job = DeviceJob(msgspec.structs.replace(batch, **changes), replies.append)
        engine.device_threads.submit(job)
        assert job.finished.wait(60)
        return replies[-1]

    def told(engine: AdapterEngine, count: int) -> tuple[RanBatch, ...]:
        """Return the described batches once there are `count`: a batch is counted after its answer."""
        until_s = time.monotonic() + 60
        while len(batches := engine.describe().batches or ()) < count:
            assert time.monotonic() < until_s
            time.sleep(0.002)
        return batches

    with engine_of(SIE_INSTRUMENTATION="true") as engine:
        assert engine.describe().batches == ()
        engine.residency.ensure(entry.id, entry)
        done = ran(engine)
        assert isinstance(done, BatchDone)
        told(engine, 1)
        assert isinstance(ran(engine, model="toy/absent", lora="org/lora"), Refused)
        told(engine, 2)
        assert isinstance(ran(engine, lengths=b"odd"), Refused)
        good, refused, malformed = sorted(told(engine, 3), key=lambda batch: batch.number)
        assert (good.number, good.model, good.operation, good.lora, good.failed) == (1, entry.id, "encode", False, 0)
        assert (good.rows, good.inputs, good.items) == (2, 2, 2)
        assert (good.tokens, good.longest, good.attention, good.padding) == (83, 60, 4129, done.padding)
        assert (good.inference_ms, good.postprocess_ms) == (round(done.inference_ms, 3), round(done.postprocess_ms, 3))
        assert good.inference_ms > 0
        assert good.wait_ms >= 0
        assert good.memory_bytes > 0
        assert (refused.number, refused.model, refused.lora, refused.failed, refused.inference_ms) == (
            2,
            "toy/absent",
            True,
            2,
            0,
        )
        assert (malformed.number, malformed.rows, malformed.failed) == (3, 0, 2)
    with engine_of() as engine:
        ran(engine)
        assert engine.describe().batches is None
        assert b"batches" not in frame(engine.describe())

    instrumentation = Instrumentation(lambda: 0)
    job = DeviceJob(toy_batch(entry.id, ""), lambda reply: None)
    padded = BatchDone("b", (Failed(ModelLoading("not loaded").info()),), b"", 1.0, padding=7)
    for _ in range(3 * MAX_BATCHES):
        instrumentation.ran(job, padded, 0, 0)
    assert [batch.number for batch in instrumentation.batches()] == list(
        range(2 * MAX_BATCHES + 1, 3 * MAX_BATCHES + 1)
    )
    assert {(batch.tokens, batch.padding, batch.failed) for batch in instrumentation.batches()} == {(5, 7, 1)}


class Toy:
    """Weights that take no memory."""

    tokenizer = b""
    memory_bytes = 0
    attention = precision = requested_precision = "toy"
    crossover_tokens = 0
    engine_choice = TORCH
    precision_reason = ""
    certificate: ClassVar[dict[str, str]] = {}


@pytest.mark.parametrize(
    ("variable", "percent", "evicted"),
    [
        ({}, 84.9, ()),
        ({}, 85.1, ("toy/a",)),
        ({"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": "90"}, 85.1, ()),
        ({"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": "90"}, 90.1, ("toy/a",)),
        ({"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": "100"}, 99.9, ()),
        ({"SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": "0"}, 5.0, ("toy/a", "toy/b")),
    ],
)
def test_the_least_recently_used_model_goes_when_memory_passes_the_threshold(
    variable: dict[str, str], percent: float, evicted: tuple[str, ...]
) -> None:
    """SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT: before a load, idle models are evicted while memory is above the
    threshold.
    """
    level = 0.0
    now_s = 0.0

    def memory(more_bytes: int) -> MemoryUse:
        return MemoryUse(
            round(1000 * (level if len(residency.describe()) == len(idle) else 10.0)) + more_bytes, 100_000
        )

    load: Any = lambda resolved: Toy()  # noqa: E731
    threshold_percent = settings_of(**variable).memory_pressure_threshold_percent
    residency = ResidentModels(load, DeviceMemory(memory, lambda: None, threshold_percent), lambda: now_s)
    idle = ("toy/a", "toy/b")
    for model in idle:
        now_s += 1
        residency.ensure(model, toy_entry(model))
    level = percent
    permission = residency.permission(idle)
    residency.ensure("toy/c", toy_entry("toy/c"), "default", permission)
    assert permission.dropped == evicted
    assert [loaded.model for loaded in residency.describe()] == [
        model for model in (*idle, "toy/c") if model not in evicted
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_as_many_batches_are_tokenised_at_once_as_there_are_preprocessor_workers(workers: int) -> None:
    """SIE_PREPROCESSOR_WORKERS: the bound holds for families that tokenise in the adapter, on any number of
    connections.
    """
    inside, peak, lock, opened = 0, 0, threading.Lock(), threading.Barrier(workers)

    class Family:
        def prepare(self, texts: tuple[str, ...], options: list[Any]) -> Any:
            nonlocal inside, peak
            with lock:
                inside += 1
                peak = max(peak, inside)
            opened.wait(30)
            with lock:
                inside -= 1

    with engine_of(SIE_PREPROCESSOR_WORKERS=str(workers)) as engine:
        message = RunBatch("b", "m", "extract", np.array([1], "<i4").tobytes(), b"", (Group(0, 1),), texts=("a",))
        with mock.patch.object(
            engine.residency, "use", return_value=contextlib.nullcontext(mock.Mock(weights=Family()))
        ):
            arguments = message, Permission((), 0.0), mock.Mock()
            threads = [threading.Thread(target=engine.prepare, args=arguments) for _ in range(3 * workers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert peak == workers


def test_texts_are_prepared_while_the_lane_runs_another_batch() -> None:
    """A batch holds the only lane. A second batch comes on another connection and is prepared without a free lane."""
    held, prepared, done = threading.Event(), threading.Event(), BatchDone("b", (), b"", 1.0)

    def hold(message: RunBatch) -> Reply:
        assert held.wait(30)
        return done

    class Busy:
        device_threads = DeviceThreads(1, hold)
        residency = mock.Mock()

        def prepare(self, message: RunBatch, permission: object, start: Callable[[], None]) -> None:
            start()
            if message.batch == "second":
                prepared.set()

        def writes(self, message: RunBatch) -> bool:
            return False

        def execute(self, message: RunBatch, permission: object) -> Reply:
            return hold(message)

    server = AdapterServer(mock.Mock(), Busy(), lambda: None, mock.Mock())  # type: ignore[arg-type]  # the server needs no more of it
    pairs = [socket.socketpair() for _ in range(2)]
    message = RunBatch("first", "m", "extract", np.array([1], "<i4").tobytes(), b"", (Group(0, 1),), texts=("a",))
    threads = [
        threading.Thread(target=server._run_batch, args=(theirs, msgspec.structs.replace(message, batch=name)))
        for (_, theirs), name in zip(pairs, ("first", "second"), strict=True)
    ]
    threads[0].start()
    while not Busy.device_threads.busy_s():
        time.sleep(0.001)
    threads[1].start()
    assert prepared.wait(30)
    assert not held.is_set()
    held.set()
    for thread, (ours, theirs), name in zip(threads, pairs, ("first", "second"), strict=True):
        thread.join(30)
        replies = [ipc.reply(bytes(ipc.receive_frame(ours))) for _ in range(2)]
        assert replies == [ipc.BatchStarted(name), done], "the start is told once"
        ours.close()
        theirs.close()
    assert Busy.device_threads.stop(5)
