"""CUDA graphs of small passes: replays equal eager passes, also for models in turn, with LoRAs, after a failed capture
and after an unload.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.adapter import toys

from sie_adapter.engine.device import give_memory_back
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed import lora
from sie_adapter.packed.packing import Items, PackedBatch
from sie_adapter.packed.pass_graphs import CudaRecorder, cuda_recorder, drop_graphs
from sie_contracts.models.entries import LoadOptions
from sie_contracts.settings import Settings

CUDA = torch.device("cuda:0")
KINDS = ("bert", "xlm-roberta", "modernbert", "qwen3", "mistral")
RAGGED = ((1,), (5,), (3, 9, 17, 40), (129, 1, 64), (2,) * 32, (250, 250, 1), (200, 130, 90, 260))
LEAST_COSINE = 0.999


@pytest.fixture
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(Settings(device=CUDA.type))
    yield engine
    assert engine.stop(10)
    for model in engine.residency.describe():
        engine.residency.release(model.model)


def load(engine: AdapterEngine, folder: Path, kind: str) -> Any:
    """Load a random model in 16 bits and return its backbone, which has graphs."""
    path = toys.save(folder / kind, kind, initializer_range=0.05)
    entry = toys.entry(path, load=LoadOptions(precision="bfloat16", engine="torch"))
    backbone: Any = engine.residency.ensure(entry.id, entry).weights.backbone  # type: ignore[attr-defined]
    if backbone._graphs is None:  # an old card, or grouped heads with an old torch
        pytest.skip(f"{kind} runs here with the kernel {backbone._kernel.name}, of which there are no graphs")
    return backbone


def packed_of(backbone: Any, lengths: tuple[int, ...], seed: int = 0) -> PackedBatch:
    ids = np.concatenate(toys.random_ids(list(lengths), seed=seed))
    packed: PackedBatch = backbone.pack(Items(np.array(lengths), ids), np.arange(len(lengths)))
    return packed


def cosine(backbone: Any, lengths: tuple[int, ...], seed: int) -> float:
    """Return the worst cosine of a token between a pass with graphs and an eager pass."""
    with torch.inference_mode():
        expected = backbone._forward_eager(packed_of(backbone, lengths, seed))
        got = backbone.forward(packed_of(backbone, lengths, seed))
    return float(F.cosine_similarity(got.float(), expected.float(), dim=1).min())


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_states_equal_eager_states(kind: str, engine: AdapterEngine, tmp_path: Path) -> None:
    backbone = load(engine, tmp_path, kind)
    for seed in range(4):
        for lengths in RAGGED:
            assert cosine(backbone, lengths, seed) >= LEAST_COSINE
    assert not backbone._graphs.is_eager
    assert len(backbone._graphs) >= 5


def test_models_in_turn_keep_their_states(engine: AdapterEngine, tmp_path: Path) -> None:
    backbones = [load(engine, tmp_path, kind) for kind in KINDS[:3]]
    for seed in range(6):
        for backbone in backbones:
            for lengths in RAGGED[:4]:
                assert cosine(backbone, lengths, seed) >= LEAST_COSINE
    assert all(len(backbone._graphs) for backbone in backbones)


def test_replays_on_several_streams_do_not_mix(engine: AdapterEngine, tmp_path: Path) -> None:
    backbone = load(engine, tmp_path, "bert")
    for seed in range(8):
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            assert cosine(backbone, (3, 9, 17, 40), seed) >= LEAST_COSINE


def test_passes_with_a_lora_are_eager(engine: AdapterEngine, tmp_path: Path) -> None:
    backbone = load(engine, tmp_path, "bert")
    with lora.acting({}):
        for seed in range(3):
            assert cosine(backbone, (5,), seed) >= LEAST_COSINE
    assert len(backbone._graphs) == 0


def test_a_failed_capture_leaves_allocator_and_device_usable(
    engine: AdapterEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture fails because the pass reads a value from the device."""
    backbone = load(engine, tmp_path, "bert")
    run = backbone._run

    def reading(*arguments: Any, **named: Any) -> Tensor:
        states: Tensor = run(*arguments, **named)
        states.sum().item()
        return states

    monkeypatch.setattr(backbone, "_run", reading)
    for seed in range(3):
        assert cosine(backbone, (5,), seed) >= LEAST_COSINE
    assert backbone._graphs.is_eager
    give_memory_back(CUDA)
    second_model = load(engine, tmp_path, "xlm-roberta")
    for seed in range(3):
        assert cosine(second_model, (5,), seed) >= LEAST_COSINE
    assert len(second_model._graphs) == 1


def test_memory_of_graphs_is_given_back(engine: AdapterEngine, tmp_path: Path) -> None:
    backbone = load(engine, tmp_path, "bert")
    for lengths in RAGGED:
        cosine(backbone, lengths, 0)
    give_memory_back(CUDA)
    before = torch.cuda.memory_reserved(CUDA)
    for lengths in RAGGED:
        cosine(backbone, lengths, 0)
    assert len(backbone._graphs) >= 5
    assert drop_graphs()
    give_memory_back(CUDA)
    assert torch.cuda.memory_reserved(CUDA) <= before + (96 << 20)  # workspaces of the capture stream stay


def test_an_unload_gives_back_the_memory_of_graphs(engine: AdapterEngine, tmp_path: Path) -> None:
    held = []
    for _ in range(3):
        backbone = load(engine, tmp_path, "bert")
        for seed in range(3):
            cosine(backbone, (250, 250, 1), seed)
        assert len(backbone._graphs) == 1
        del backbone
        (model,) = [model.model for model in engine.residency.describe()]
        engine.residency.release(model)
        give_memory_back(CUDA)
        held.append(torch.cuda.memory_reserved(CUDA))
    assert held[2] <= held[1]


def test_a_device_has_one_recorder() -> None:
    assert isinstance(cuda_recorder(CUDA), CudaRecorder)
    assert cuda_recorder(CUDA) is cuda_recorder(CUDA)
