"""The packed path on a CUDA device against stock transformers and against the engine in float32 on a CPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu.conftest import Record
from oracle import cosines
from parity.checkpoints import ARCHITECTURES, MAX_TOKENS, add_modules, build, modules_of
from parity.engine import ParityEngine, Served
from parity.heads_checkpoints import texts
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from unit.adapter import toys
from unit.adapter.states import LENGTHS, states_one_by_one, states_packed

from sie_adapter.engine.device import Compute
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.packed.attention_backend import attention_facts, resolve_attention
from sie_contracts.models.entries import LoadOptions, Precision
from sie_contracts.settings import Settings

CUDA = torch.device("cuda")
MIN_COSINE = {torch.float32: 0.99999, torch.float16: 0.999, torch.bfloat16: 0.99}
# In any implementation untrained weights lose more in 16 bit than trained ones. So the mean has a tight bound, and the
# worst of 64 texts a loose one.
MIN_VECTOR_COSINE = {"float32": 0.9999, "float16": 0.99, "bfloat16": 0.95}
MIN_MEAN_COSINE = {"float32": 0.9999, "float16": 0.999, "bfloat16": 0.995}
OVERFLOWS = "gemma"  # float16 does not hold its activations
BACKENDS = ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]


class CudaEngine(ParityEngine):
    """The engine of the parity tests on the GPU."""

    def __init__(self, backend: str = "auto") -> None:
        self._engine = AdapterEngine(Settings(device=CUDA.type, attention_backend=backend))


def compute(dtype: torch.dtype, requested: str = "auto") -> Compute:
    facts = attention_facts(CUDA, dtype)
    backend, reason = resolve_attention(requested, facts)
    return Compute(CUDA, dtype, backend, reason, facts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def made(name: str) -> Path:
        architecture = ARCHITECTURES[name]
        return add_modules(build(root / name.replace(" ", "-"), architecture), modules_of(architecture))

    return made


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Iterator[Callable[[str], Served]]:
    """The engine on the CPU in float32, which tests/parity compares with the public libraries."""
    engine = ParityEngine()
    yield functools.cache(
        lambda name: engine.load(
            folder(name), "float32", width=ARCHITECTURES[name].width, max_tokens=ARCHITECTURES[name].max_tokens
        )
    )
    engine.stop()


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[CudaEngine]:
    cuda_engine = CudaEngine(request.param)
    yield cuda_engine
    cuda_engine.stop()


def _skip_unless_known(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")


@pytest.mark.parametrize("dtype", MIN_COSINE, ids=str)
@pytest.mark.parametrize("kind", toys.CONFIGS)
def test_packed_states_on_cuda_equal_stock_states(
    kind: str, dtype: torch.dtype, tmp_path: Path, record: Record
) -> None:
    """One packed pass over ragged sequences has the states of stock passes over one sequence each."""
    _skip_unless_known(kind.split()[0])
    if OVERFLOWS in kind and dtype == torch.float16:
        pytest.skip("its activations overflow float16")
    folder = toys.save(tmp_path / "toy", kind, initializer_range=0.05)
    encoder = TextEncoder(folder, toys.entry(folder), LoadOptions(), compute(dtype))
    assert encoder.attention.endswith("padded") == (kind in toys.PADDED)
    sequences = toys.random_ids(LENGTHS)
    got = torch.cat(states_packed(encoder, sequences)).float().cpu()
    expected = torch.cat(states_one_by_one(folder, sequences))
    cosine = float(F.cosine_similarity(got, expected, dim=1).min())
    record(f"states {kind}", encoder.attention, encoder.precision, cosine)
    assert cosine >= MIN_COSINE[dtype]


@pytest.mark.parametrize("precision", MIN_VECTOR_COSINE)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_on_cuda_equal_those_of_a_cpu(
    name: str,
    precision: str,
    engine: CudaEngine,
    folder: Callable[[str], Path],
    reference: Callable[[str], Served],
    record: Record,
) -> None:
    """The parity checkpoints have windows, bidirectional decoders and rotary tables. The sentences are ragged."""
    if OVERFLOWS in name and precision == "float16":
        pytest.skip("its activations overflow float16")
    architecture = ARCHITECTURES[name]
    _skip_unless_known(architecture.model_type)
    served = engine.load(
        folder(name), cast(Precision, precision), width=architecture.width, max_tokens=architecture.max_tokens
    )
    assert served.attention.endswith("padded") == architecture.attention.endswith("padded")
    sentences = texts()
    for pooling in ARCHITECTURES[name].poolings:
        similarities = cosines(
            served.encode(sentences, pooling=pooling), reference(name).encode(sentences, pooling=pooling)
        )
        record(f"dense {name}", served.attention, precision, float(similarities.min()))
        assert similarities.min() >= MIN_VECTOR_COSINE[precision]
        assert similarities.mean() >= MIN_MEAN_COSINE[precision]


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3 causal"])
def test_two_threads_and_two_streams_do_not_mix_their_texts(
    name: str, precision: str, folder: Callable[[str], Path]
) -> None:
    """The vectors are right with two lanes and with several streams, although the engine uses one stream today."""
    engine = CudaEngine()
    served = engine.load(
        folder(name), cast(Precision, precision), width=ARCHITECTURES[name].width, max_tokens=MAX_TOKENS
    )
    batches = [texts(24, seed=seed) for seed in range(8)]
    alone = [served.encode(batch) for batch in batches]

    def on_a_stream(batch: list[str]) -> np.ndarray:
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            return served.encode(batch)

    for _ in range(3):
        shared = served.encode_at_once(batches, lanes=2)
        with ThreadPoolExecutor(2) as threads:
            streamed = list(threads.map(on_a_stream, batches))
        for expected, shared_vectors, streamed_vectors in zip(alone, shared, streamed, strict=True):
            assert cosines(shared_vectors, expected).min() >= MIN_MEAN_COSINE[precision]
            assert cosines(streamed_vectors, expected).min() >= MIN_MEAN_COSINE[precision]
    engine.stop()


def test_the_documented_default_precision_runs_on_cuda(folder: Callable[[str], Path]) -> None:
    """The default is float16 and one lane. Memory is measured, and a released model gives it back."""
    engine = AdapterEngine(Settings(device=CUDA.type))
    try:
        before = engine.describe().memory_used_bytes
        path = folder("bert")
        entry = toys.entry(path, outputs={"dense": ARCHITECTURES["bert"].width}, max_tokens=MAX_TOKENS)
        resident = engine.residency.ensure("toy", entry)
        description = resident.describe(0.0)
        assert (description.precision, len(engine.device_threads)) == ("float16", 1)
        assert description.certificate["packed"]["dense"] >= 0.999
        assert engine.describe().gpu
        assert engine.describe().memory_total_bytes > 1 << 30
        del resident
        engine.residency.release("toy")
        # the CUDA context and the workspaces of its libraries stay
        assert engine.describe().memory_used_bytes <= before + (256 << 20)
    finally:
        engine.stop(5)
