"""The packed path on a CUDA device against stock transformers in float32. Run on a machine that has one: `pytest tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from unit.adapter import toys
from unit.adapter.states import LENGTHS, states_one_by_one, states_packed

from sie_adapter.device import Compute, attention_facts, resolve_attention, uses_varlen_kernel
from sie_adapter.engine import Engine
from sie_adapter.families.text_encoder import TextEncoder
from sie_contracts import ipc
from sie_contracts.catalogue import LoadOptions
from sie_contracts.settings import load

CUDA = torch.device("cuda")
LEAST_COSINE = {torch.float32: 0.99999, torch.float16: 0.999, torch.bfloat16: 0.99}


def compute(dtype: torch.dtype, requested: str = "auto") -> Compute:
    facts = attention_facts(CUDA, dtype)
    backend, reason = resolve_attention(requested, facts)
    return Compute(CUDA, dtype, backend, reason, facts)


@pytest.mark.parametrize("dtype", LEAST_COSINE, ids=str)
@pytest.mark.parametrize("kind", toys.CONFIGS)
def test_packed_states_on_cuda_equal_stock_states(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """W3, W4: every architecture and precision, ragged, one pass against one by one."""
    if "gemma" in kind and dtype == torch.float16:
        dtype = torch.bfloat16  # its activations overflow float16
    folder = toys.save(tmp_path / "toy", kind, initializer_range=0.05)
    encoder = TextEncoder(folder, toys.entry(folder), LoadOptions(), compute(dtype))
    assert encoder.attention.endswith("padded") == (kind in toys.PADDED)
    sequences = toys.random_ids(LENGTHS)
    got = torch.cat(states_packed(encoder, sequences)).float().cpu()
    expected = torch.cat(states_one_by_one(folder, sequences))
    cosine = float(F.cosine_similarity(got, expected, dim=1).min())
    print(f"{kind} {dtype}: {encoder.attention}, varlen {uses_varlen_kernel(compute(dtype).facts)}, least cosine {cosine:.6f}")
    assert cosine >= LEAST_COSINE[dtype]


def test_the_documented_default_precision_runs_on_cuda(tmp_path: Path) -> None:
    """float16, one lane, batches equal one by one, memory measured and given back."""
    folder = toys.save(tmp_path / "toy", "bert", initializer_range=0.05)
    engine = Engine(load(environ={"SIE_DEVICE": "cuda"}).settings)
    try:
        resident, _ = engine.residency.ensure("toy", toys.entry(folder), "default", ())
        description = resident.describe(0.0)
        assert (description.precision, len(engine.lanes)) == ("float16", 1)
        sequences = toys.random_ids(LENGTHS)
        with torch.inference_mode():
            together = vectors(engine, sequences)
            alone = np.concatenate([vectors(engine, [ids]) for ids in sequences])
        assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-3
        assert (together * alone).sum(1).min() >= 0.9995
        assert engine.describe().gpu
        assert engine.describe().memory_total_bytes > 1 << 30
        engine.residency.release("toy")
    finally:
        engine.stop(5)


def vectors(engine: Engine, sequences: list[np.ndarray]) -> np.ndarray:
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    group = ipc.Group(0, len(sequences))
    batch = ipc.RunBatch("b", "toy", "encode", lengths.tobytes(), np.concatenate(sequences).tobytes(), (group,), pooling="mean")
    done = engine.execute(batch)
    assert isinstance(done, ipc.BatchDone), done
    return np.frombuffer(done.block, np.float32).reshape(len(sequences), -1)
