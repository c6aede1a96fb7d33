"""Base of the families on the packed engine: the attributes of a loaded model, and default answers.

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

# Short sequences that the trial of the packed path has in addition, for a model that ranks or has int8 weights: its
# scores are also compared by rank, which needs many sequences.
_RANKED_SAMPLES = 45


class PackedModel:
    """Loaded model on the packed engine. `forward` may run on several threads at once.

    `tokenizer`: tokenizer.json without truncation and padding. `needs`: the special tokens that the heads need. `rows`:
    how the inputs of each operation become ids. `vocabulary`: all ids are below this number. `width`: the width of a
    hidden state, or of the vectors of a model that has images. `attention`: the backend in use; `padded` follows its
    name if the model runs on padded batches. `backbone`: the text model.
    """

    heads: dict[str, Head]
    rows: dict[str, Rows]
    needs = TokenNeeds()
    width: int
    memory_bytes: int
    per_row = False  # argument of `item_results.side_scores`

    def __init__(self, entry: ModelEntry, compute: Compute) -> None:
        self.max_tokens = entry.max_tokens
        self.precision = compute.precision

    def _run_on(self, backbone: Backbone, model: Any, compute: Compute) -> None:
        """Use `backbone`, which runs the text model `model`."""
        self.backbone = backbone
        self.vocabulary, self.attention, self.engine_choice = backbone.vocabulary, backbone.attention, backbone.engine
        self.loras = self._loras(model, compute)

    def _loras(self, model: Any, compute: Compute) -> ModelLoras:
        """Return the LoRAs that requests may name."""
        return ModelLoras(lambda: model, compute, self.backbone.sampled)

    @staticmethod
    def _check_width(entry: ModelEntry, output: str, width: int) -> None:
        """Raise ModelLoadFailed INCOMPATIBLE unless the entry declares `width` for `output`."""
        if entry.outputs.get(output) != width:
            declared = entry.outputs.get(output)
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: outputs.{output} is {declared}, the model's is {width} wide"
            )

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Return the batch in the form that goes to the device. `queries`: bool [items]."""
        return batch

    def without_pass(self, head: str, ids: Int64, *, is_query: bool) -> Row | None:
        """Return the row of an input that needs no forward pass; None for all other inputs."""
        return None

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        """Lay out the chosen items with this architecture's positions."""
        return self.backbone.pack(batch, chosen)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return hidden states of the last layer, [tokens, width], in the precision of the weights, in packed order. To
        be called under inference mode.
        """
        return self.backbone.forward(packed)

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        """Return the names of the heads whose rows make up the answers."""
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
        """Return one answer per input of `group`. `query`: the rows of the query to which documents are compared, by
        head. `rows`: the rows of the inputs, by head. `places`: the numbers of these rows in the batch.
        """
        if message.operation == "score":
            return item_results.side_scores(group.options, query, rows, per_row=self.per_row)
        return item_results.vectors(group.options, rows)


def samples_of(family: str, compute: Compute) -> int:
    """Return the number of additional sequences in the trial of `Backbone`, its `more_samples`."""
    return 0 if families.row(family).gives_vectors and not compute.int8 else _RANKED_SAMPLES


def fault_of_tokenizer(tokenizer: Tokenizer, table: int) -> str:
    """Return the fault of the tokenizer of a model that reads images or sounds, whose text model has embeddings for
    `table` ids; an empty string if there is none.
    """
    return fault(fitted(tokenizer, table)[0], table, TokenNeeds())
