"""Real allocation failures on CUDA with a part of the card's memory: no client sees one, and learnt limits avoid the
next ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from unit.adapter import toys
from unit.adapter.allocation_failures import adversarial

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.memory.batch_limits import DeviceLimits
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, Group, RunBatch
from sie_contracts.wire.messages import Ok

CUDA = torch.device("cuda:0")
WIDTH, LONGEST, WIDEST = 64, 512, 8192
# room for the widest states of some 3,000 tokens; a batch has up to 16,384
HEADROOM_BYTES = 3 * 3000 * WIDEST * 4


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> ModelEntry:
    """A model of one layer whose activations are large compared with its weights."""
    folder = toys.save(
        tmp_path_factory.mktemp("wide") / "bert",
        "bert",
        hidden_size=WIDTH,
        intermediate_size=WIDEST,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
    )
    return toys.entry(folder, outputs={"dense": WIDTH}, max_tokens=LONGEST, load=LoadOptions(precision="float32"))


@contextmanager
def limited(bytes_more: int) -> Iterator[None]:
    """Limit this process to the memory that it holds and `bytes_more`."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + bytes_more) / total, CUDA)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


def failures() -> int:
    """Return how often torch's allocator has failed so far."""
    return int(torch.cuda.memory_stats(CUDA)["num_ooms"])


def encode(engine: AdapterEngine, lengths: list[int], seed: int) -> np.ndarray:
    """Return vectors [items, width]. Fail unless every item succeeded."""
    ids = np.random.default_rng(seed).integers(6, toys.VOCABULARY, sum(lengths), dtype=np.int32)
    group = Group(0, len(lengths))
    message = RunBatch("b", "m", "encode", np.array(lengths, "<i4").tobytes(), ids.tobytes(), (group,), pooling="mean")
    with torch.inference_mode():
        reply = engine.execute(message)
    assert isinstance(reply, BatchDone), reply
    assert all(isinstance(outcome, Ok) for outcome in reply.outcomes)
    return np.frombuffer(reply.block, np.float32).reshape(len(lengths), WIDTH)


def test_no_batch_fails_when_memory_does_and_what_was_learnt_outlives_the_engine(
    entry: ModelEntry, tmp_path: Path
) -> None:
    """The first engine tests its learnt limit again at every batch: allocations fail, and every vector is right. A
    second engine trusts the limit, and hardly any allocation fails.
    """
    settings = Settings(device="cuda", local_cache=str(tmp_path))
    engine = AdapterEngine(settings)
    now_s = time.time()
    engine.batch_limits = DeviceLimits(tmp_path / "sie" / "frontier.json", lambda: now_s)
    engine.residency.ensure("m", entry)
    generator = np.random.default_rng(0)
    batches = [adversarial(generator) for _ in range(60)]
    expected = [encode(engine, lengths, number) for number, lengths in enumerate(batches)]
    begun = failures()
    with limited(HEADROOM_BYTES):
        for number, lengths in enumerate(batches):
            now_s += 3000
            np.testing.assert_allclose(encode(engine, lengths, number), expected[number], atol=1e-4)
    assert failures() - begun >= 20
    engine.stop(5)
    engine.residency.release("m")
    del engine

    second = AdapterEngine(settings)
    second.residency.ensure("m", entry)
    begun = failures()
    with limited(HEADROOM_BYTES):
        for number, lengths in enumerate(batches):
            np.testing.assert_allclose(encode(second, lengths, number), expected[number], atol=1e-4)
    assert failures() - begun <= 3
    second.stop(5)


def test_a_model_that_does_not_fit_beside_an_idle_one_takes_its_place(tmp_path: Path) -> None:
    """The limit of the process counts, not the free memory of the card."""
    folder = toys.save(tmp_path / "bert", "bert", hidden_size=1024, intermediate_size=8192, num_hidden_layers=2)
    large = toys.entry(folder, outputs={"dense": 1024}, load=LoadOptions(precision="float32"))
    engine = AdapterEngine(Settings(device="cuda", local_cache=str(tmp_path)))
    resident = engine.residency.ensure("first", large)
    size = resident.weights.memory_bytes
    del resident
    with limited(size // 2 + (64 << 20)):  # room for half of its weights, and for activations
        permission = engine.residency.permission(("first",))
        engine.residency.ensure("second", large, "default", permission)
    assert permission.dropped == ("first",)
    engine.stop(5)
