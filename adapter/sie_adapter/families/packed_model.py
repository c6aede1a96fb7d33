"""What all families on the packed engine have in common: the attributes of a loaded model, and what it answers unless
its family says otherwise.

items ──► prepare ──► pack ──► forward ──► heads (`heads_for`) ──► answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from sie_adapter.engine import item_results
from sie_adapter.engine.device import Compute
from sie_adapter.engine.item_results import ItemResults
from sie_adapter.heads import Head, Row
from sie_adapter.loading.tokenizer import TokenNeeds, fault, fitted
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.lora import ModelLoras
from sie_adapter.packed.packing import Int64, Items, PackedBatch
from sie_contracts.models import families
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.wire.ipc import Group, Rows, RunBatch
from sie_contracts.wire.messages import Operation, RunOptions

# Short sequences with which the packed path of a model that ranks is tried beside the usual ones: its scores are
# compared by rank as well, which needs many of them.
_RANKED_SAMPLES = 45


class PackedModel:
    """A loaded model. `forward` may run on several threads at once.

    `tokenizer`: tokenizer.json without truncation and padding. `needs`: what the heads need of it. `rows`: how the
    inputs of each operation become ids. `vocabulary`: ids are below it. `width`: of a hidden state, or of the vectors
    of a model that has images. `attention`: the backend in use, with `padded` where the packed path is not equal to
    the model's own. `backbone`: the text model.
    """

    heads: dict[str, Head]
    rows: dict[str, Rows]
    needs = TokenNeeds()
    width: int
    memory_bytes: int
    per_row = False  # as `item_results.side_scores` takes it

    def __init__(self, entry: ModelEntry, compute: Compute) -> None:
        self.max_tokens = entry.max_tokens
        self.precision = compute.precision

    def _run_on(self, backbone: Backbone, model: Any, compute: Compute) -> None:
        """Its text model is `model`, which `backbone` runs."""
        self.backbone = backbone
        self.vocabulary, self.attention, self.engine_choice = backbone.vocabulary, backbone.attention, backbone.engine
        self.loras = self._loras(model, compute)

    def _loras(self, model: Any, compute: Compute) -> ModelLoras:
        """Those that requests may name."""
        return ModelLoras(lambda: model, compute, self.backbone.sampled)

    @staticmethod
    def _check_width(entry: ModelEntry, output: str, width: int) -> None:
        """Raises ModelLoadFailed INCOMPATIBLE unless the entry says so too."""
        if entry.outputs.get(output) != width:
            declared = entry.outputs.get(output)
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: outputs.{output} is {declared}, the model's is {width} wide"
            )

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """The batch as it goes to the device. `queries`: bool [items]."""
        return batch

    def without_pass(self, head: str, ids: Int64, *, is_query: bool) -> Row | None:
        """The row of what needs no forward pass; None for all else."""
        return None

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        """Lay out the chosen items with this architecture's positions."""
        return self.backbone.pack(batch, chosen)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Hidden states of the last layer, [tokens, width], in the precision of the weights, packed order. Under
        inference mode only.
        """
        return self.backbone.forward(packed)

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        """The heads whose rows the answers are made from."""
        if options.muvera is not None:
            return tuple(dict.fromkeys("multivector" if name == "dense" else name for name in options.outputs))
        return options.outputs or tuple(self.heads)[:1]

    def answer(
        self,
        message: RunBatch,
        group: Group,
        query: Mapping[str, Row],
        rows: Mapping[str, Sequence[Row]],
        places: list[int],
    ) -> ItemResults:
        """One answer per input of `group`. `query`: rows of the query that documents are scored against, by head;
        `rows`: those of the inputs; `places`: their numbers in the batch.
        """
        if message.operation == "score":
            return item_results.side_scores(group.options, query, rows, per_row=self.per_row)
        return item_results.vectors(group.options, rows)


def samples_of(family: str, compute: Compute) -> int:
    """As `Backbone` takes them."""
    return 0 if families.row(family).gives_vectors and not compute.int8 else _RANKED_SAMPLES


def fault_of_tokenizer(tokenizer: Tokenizer, table: int) -> str:
    """What a load would refuse of the tokenizer of a model that reads images, whose text model has embeddings for
    `table` ids; empty if nothing.
    """
    return fault(fitted(tokenizer, table)[0], table, TokenNeeds())
