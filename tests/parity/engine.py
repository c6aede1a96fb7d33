"""A model folder through the adapter's own engine, from texts to vectors. All messages to the engine are made here.

folder ──► ParityEngine.load ──► Served ──► tokens (the sidecar's tokenizer) ──► RunBatch ──► Engine.execute ──► vectors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from parity.device import new_engine
from text_rows import text_rows

from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.text_encoder import TextEncoder
from sie_adapter.memory.residency import Resident
from sie_contracts.models.entries import Precision, parse_entry
from sie_contracts.wire.ipc import BatchDone, Group, Reply, RunBatch
from sie_contracts.wire.messages import Ok, RunOptions
from sie_sidecar.prepare.rows import ModelTokenizer

Vectors = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Served:
    """A resident model. Vectors come back in the order of the texts. They are normalised on request only."""

    engine: AdapterEngine
    resident: Resident
    tokenizer: ModelTokenizer

    @property
    def attention(self) -> str:
        """The backend in force, with `padded` where the model does not run packed."""
        return self.resident.weights.attention

    @property
    def precision(self) -> str:
        return self.resident.weights.precision

    def tokens(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, special tokens included, cut to the model's limit."""
        return [row.ids for row in text_rows(self.tokenizer, texts)]

    def encode(self, texts: Sequence[str], *, pooling: str = "", normalize: bool = False) -> Vectors:
        """Return float32 [texts, width], from one batch. An empty `pooling` means that of the folder. Fails unless
        every item succeeds.
        """
        return self.encode_ids(self.tokens(texts), pooling=pooling, normalize=normalize)

    def encode_ids(self, sequences: Sequence[Ids], *, pooling: str = "", normalize: bool = False) -> Vectors:
        """`encode` for token ids."""
        with torch.inference_mode():
            return _vectors(self.engine.execute(self._message(sequences, pooling, normalize=normalize)))

    def encode_at_once(self, batches: Sequence[Sequence[str]], *, lanes: int, pooling: str = "") -> list[Vectors]:
        """Encode each batch as `encode` does, on `lanes` threads. All batches are queued before the first ends."""
        messages = [self._message(self.tokens(texts), pooling, normalize=False) for texts in batches]
        replies: list[list[Reply]] = [[] for _ in messages]
        jobs = [DeviceJob(message, answers.append) for message, answers in zip(messages, replies, strict=True)]
        threads = DeviceThreads(lanes, self.engine.execute)
        for job in jobs:
            threads.submit(job)
        for job in jobs:
            assert job.finished.wait(60)
        assert threads.stop(60)
        return [_vectors(answers[-1]) for answers in replies]

    def _message(self, sequences: Sequence[Ids], pooling: str, *, normalize: bool) -> RunBatch:
        lengths = np.array([len(ids) for ids in sequences], "<i4")
        group = Group(0, len(sequences), RunOptions(normalize=normalize))
        ids = np.concatenate(sequences).astype("<i4")
        return RunBatch(
            "parity", self.resident.model, "encode", lengths.tobytes(), ids.tobytes(), (group,), pooling=pooling
        )


class ParityEngine:
    """An engine with the models of a test session. Its creator calls `stop`."""

    def __init__(self) -> None:
        self._engine = new_engine()

    def load(
        self,
        folder: Path,
        precision: Precision,
        *,
        width: int,
        max_tokens: int,
        padded: bool = False,
        causal: bool | None = None,
        engine: str = "torch",
    ) -> Served:
        """Load a folder. `padded` forces the path of models that cannot run packed; `causal` overrides its
        configuration.

        Raises ModelLoadFailed.
        """
        forced = ("-padded" if padded else "") + ("" if causal is None else f"-causal-{causal}") + f"-{engine}"
        model = f"parity/{folder.name}-{max_tokens}-{precision}{forced}"
        entry = parse_entry(
            {
                "id": model,
                "weights": {"path": str(folder)},
                "family": "text-encoder",
                "outputs": {"dense": width},
                "max_tokens": max_tokens,
                "load": {"precision": precision, "causal": causal, "engine": engine},
            }
        )
        resident = self._engine.residency.ensure(model, entry)
        if padded:
            force_padded(resident)
        return Served(self._engine, resident, ModelTokenizer(resident.weights.tokenizer, max_tokens))

    def stop(self) -> None:
        """End the lanes."""
        assert self._engine.stop(10)


def force_padded(resident: Resident) -> None:
    """Force the padded path, which a load chooses for a model whose packed states are wrong; no setting requests it."""
    encoder = resident.weights
    assert isinstance(encoder, TextEncoder)
    encoder.backbone.run_padded()
    encoder.attention = encoder.backbone.attention


def _vectors(reply: Reply) -> Vectors:
    assert isinstance(reply, BatchDone), reply
    rows = []
    for outcome in reply.outcomes:
        assert isinstance(outcome, Ok), outcome
        array = outcome.outputs["dense"]
        rows.append(np.frombuffer(reply.block, array.dtype, array.shape[0], array.offset))
    return np.stack(rows)
