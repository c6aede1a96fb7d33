"""A folder with heads through the sidecar's rows and the adapter's engine: texts in, outputs of every kind out.

texts + options ──► layouts.make ──► RunBatch ──► Engine.execute ──► {"dense", "sparse", "multivector"} of each text, or
scores
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from parity.device import new_engine
from parity.engine import force_padded
from parity.table import Agreement, ParityTable, path_of

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.families.text_encoder import TextEncoder
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire.ipc import BatchDone, Group, RunBatch
from sie_contracts.wire.messages import Input, Ok, Operation, RunOptions
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import ModelTokenizer, WorkItemInput

Array = NDArray[Any]
MIN_COSINE = 0.9999  # float32
MAX_DIFFERENCE = 1e-5  # float32, of a component, in units of the vector's norm
# bfloat16: a multiple of the mean distance of the public library's own bfloat16. With untrained weights every
# implementation is far from float32.
MAX_MEAN_OF_STOCK = 1.5
MAX_MEAN_DISTANCE = 1e-3


@dataclass(frozen=True)
class HeadsModel:
    """A resident model. Outputs come back in the order of the texts."""

    engine: AdapterEngine
    name: str
    encoder: TextEncoder
    tokenizer: ModelTokenizer

    @property
    def path(self) -> str:
        """Return `packed` or `padded`."""
        return path_of(self.encoder.attention)

    def encode(self, texts: Sequence[str], *outputs: str, **options: Any) -> list[dict[str, Array]]:
        """Return the arrays of each text by name, from one batch of one work item. Sparse vectors are `sparse.indices`
        and `sparse.values`.
        """
        return self.encode_items([(texts, RunOptions(outputs=outputs, **options))])[0]

    def encode_at_once(
        self, batches: Sequence[Sequence[str]], *outputs: str, **options: Any
    ) -> list[list[dict[str, Array]]]:
        """Encode each batch as `encode` does, on two threads."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda texts: self.encode(texts, *outputs, **options), batches))

    def encode_items(self, items: Sequence[tuple[Sequence[str], RunOptions]]) -> list[list[dict[str, Array]]]:
        """Encode one batch of several work items, each with its own options."""
        reply = self._run(
            "encode", [WorkItemInput([Input(text) for text in texts], None, options) for texts, options in items]
        )
        outcomes = iter(reply.outcomes)
        return [[_arrays(reply, next(outcomes)) for _ in texts] for texts, _ in items]

    def encode_inputs(self, inputs: Sequence[Input], *outputs: str, **options: Any) -> list[dict[str, Array]]:
        """Encode inputs of any form, as `encode` does for texts."""
        reply = self._run("encode", [WorkItemInput(inputs, None, RunOptions(outputs=outputs, **options))])
        return [_arrays(reply, outcome) for outcome in reply.outcomes]

    def score(self, query: str, texts: Sequence[str], *outputs: str, **options: Any) -> Array:
        """The score of each text against the query, one batch: float64 [texts]."""
        options = {"outputs": outputs, **options}
        reply = self._run(
            "score", [WorkItemInput([Input(text) for text in texts], Input(query), RunOptions(**options))]
        )
        scores = []
        for outcome in reply.outcomes:
            assert isinstance(outcome, Ok), outcome
            scores.append(outcome.score)
        return np.array(scores)

    def _run(self, operation: Operation, works: list[WorkItemInput]) -> BatchDone:
        prepared_works = layouts.make(self.tokenizer, self.encoder.rows[operation], works)
        groups, stop = [], 0
        for work, prepared_work in zip(works, prepared_works, strict=True):
            inputs = len(work.inputs) if prepared_work.chunked else -1
            groups.append(
                Group(stop, stop + len(prepared_work.rows), work.options, inputs, chunked=prepared_work.chunked)
            )
            stop += len(prepared_work.rows)
        ids = [row.ids for work_rows in prepared_works for row in work_rows.rows]
        lengths = np.array([len(row) for row in ids], "<i4")
        message = RunBatch(
            "heads", self.name, operation, lengths.tobytes(), np.concatenate(ids).astype("<i4").tobytes(), tuple(groups)
        )
        with torch.inference_mode():
            reply = self.engine.execute(message)
        assert isinstance(reply, BatchDone), reply
        return reply


class HeadsEngine:
    """An engine. Its creator calls `stop`."""

    def __init__(self) -> None:
        self._engine = new_engine()

    def load(
        self,
        folder: Path,
        outputs: dict[str, int],
        *,
        max_tokens: int,
        precision: str = "float32",
        padded: bool = False,
        engine: str = "torch",
        **entry: Any,
    ) -> HeadsModel:
        """Load a folder. `entry`: more fields of its entry. `padded` forces the padded path. Raises ModelLoadFailed."""
        name = f"heads/{folder.name}-{precision}-{engine}-{len(self._engine.residency.describe())}"
        parsed = parse_entry(
            {
                "id": name,
                "weights": {"path": str(folder)},
                "family": "text-encoder",
                "outputs": outputs,
                "max_tokens": max_tokens,
                "load": {"precision": precision, "engine": engine},
                **entry,
            }
        )
        resident = self._engine.residency.ensure(name, parsed)
        assert isinstance(resident.weights, TextEncoder)
        if padded:
            force_padded(resident)
        return HeadsModel(self._engine, name, resident.weights, ModelTokenizer(resident.weights.tokenizer, max_tokens))

    def stop(self) -> None:
        """End the lanes."""
        assert self._engine.stop(10)


def check(
    table: ParityTable, name: str, model: HeadsModel, got: Array, expected: Array, stock: Array | None = None
) -> None:
    """Compare vectors [.., width] with those of the float32 oracle, and record the agreement. `stock`: vectors of the
    oracle in the model's precision.
    """
    agreement, precision = Agreement.of(got, expected), model.encoder.precision
    table.record(name, model.path, precision, agreement)
    if stock is None:
        assert agreement.cosine >= MIN_COSINE
        assert agreement.difference <= MAX_DIFFERENCE
        return
    theirs = Agreement.of(stock, expected)
    table.record(name, "stock", precision, theirs)
    assert agreement.mean_distance <= max(MAX_MEAN_DISTANCE, MAX_MEAN_OF_STOCK * theirs.mean_distance)


def _arrays(reply: BatchDone, outcome: object) -> dict[str, Array]:
    assert isinstance(outcome, Ok), outcome
    return {
        name: np.frombuffer(reply.block, part.dtype, int(np.prod(part.shape)), part.offset).reshape(part.shape)
        for name, part in outcome.outputs.items()
    }
