"""Models that run on packed sequences, without padding: encoders and decoders of text, and the heads that compute
outputs from their hidden states. `PackedModel` is also the base of models that read images or sounds.

  items ──► prepare ──► pack ──► forward ──► heads (`heads_for`) ──► answer

  folder + entry ──text_model──► Backbone + Parts ──► TextEncoder: ids ──► hidden states ──► heads ──► answers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from sie_adapter.engine import engines, item_results
from sie_adapter.engine.device import Compute
from sie_adapter.engine.item_results import ItemResults
from sie_adapter.families.text_model import Builder, Finish, class_of, consumed_by
from sie_adapter.families.torch_twin import TorchTwin
from sie_adapter.heads import Head, Row
from sie_adapter.heads.classification import LastTokenHead
from sie_adapter.heads.pooling import DenseHead
from sie_adapter.heads.sparse import TokenTable
from sie_adapter.loading.checkpoint import empty_model
from sie_adapter.loading.modules import Modules, read_modules
from sie_adapter.loading.tokenizer import TokenNeeds, fault, fitted, text_tokenizer
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.lora import ModelLoras
from sie_adapter.packed.packing import Int64, Items, PackedBatch
from sie_contracts.models import families
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.models.options import TOKEN_STATES
from sie_contracts.wire.ipc import Group, Rows, RunBatch
from sie_contracts.wire.messages import Operation, RunOptions

# Number of additional short sequences in the trial at load, which compares the packed path with the unchanged model.
# Outputs of classifiers, rerankers and int8 models are also compared by rank, which needs many sequences.
_RANKED_SAMPLES = 45
_TOKENIZER = "tokenizer"  # name of a derived file


class PackedModel:
    """Loaded model on the packed engine. Several threads may call `forward` at once.

    `tokenizer`: tokenizer.json without truncation and padding. `needs`: the special tokens that the heads need. `rows`:
    how the sidecar turns inputs into ids, for each operation. `vocabulary`: all ids are below this number. `attention`:
    the attention backend, with `padded` appended if the model runs on padded batches. `backbone`: the text model.
    `query_tables`: for some heads, the table with the results of queries, which then need no forward pass.
    """

    heads: dict[str, Head]
    rows: dict[str, Rows]
    query_tables: Mapping[str, TokenTable] = {}
    reads: Mapping[Operation, tuple[str, ...]] = {}  # heads that an operation reads, if not those of its outputs
    finish: Finish | None = None  # computes the answers from the results of heads, if they are not vectors or scores
    needs = TokenNeeds()
    memory_bytes: int
    # whether a score of token vectors is divided by the number of query vectors (`item_results.side_scores`)
    per_row = False

    def __init__(self, entry: ModelEntry, compute: Compute) -> None:
        self.max_tokens = entry.max_tokens
        self.precision = compute.precision

    def _run_on(self, backbone: Backbone, model: Any, compute: Compute) -> None:
        self.backbone = backbone
        self.vocabulary, self.attention, self.engine_choice = backbone.vocabulary, backbone.attention, backbone.engine
        self.loras = self._loras(model, compute)

    def _loras(self, model: Any, compute: Compute) -> ModelLoras:
        return ModelLoras(model, lambda: model, compute, self.backbone.sampled)

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Return the batch in the form for a pass, e.g. with padded queries. `queries` [rows]: True for queries."""
        return batch

    def pack(self, batch: Items, chosen: Int64) -> PackedBatch:
        return self.backbone.pack(batch, chosen)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return hidden states of the last layer, [tokens, width], in the precision of the weights, in packed order.
        Call it under inference mode.
        """
        return self.backbone.forward(packed)

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        """Return the names of the heads (output layers) whose results `answer` needs."""
        if options.muvera is not None:
            return tuple(dict.fromkeys("multivector" if name == "dense" else name for name in options.outputs))
        return self.reads.get(operation) or options.outputs or tuple(self.heads)[:1]

    def answer(
        self, message: RunBatch, group: Group, query: Mapping[str, Row], rows: item_results.Rows, places: list[int]
    ) -> ItemResults:
        """Return one answer per input of the work item `group`. `query`: for each head, the results for the query to
        which documents are compared. `rows`: for each head, the results for the inputs. `places`: the indices of the
        inputs in the batch.
        """
        if self.finish is not None:
            return self.finish(message, group, rows, places)
        if message.operation == "score":
            return item_results.side_scores(group.options, query, rows, per_row=self.per_row)
        return item_results.vectors(group.options, rows)


def samples_of(family: str, compute: Compute) -> int:
    """Return the number of additional short sequences in the trial at load (see `_RANKED_SAMPLES`)."""
    return 0 if families.row(family).gives_vectors and not compute.int8 else _RANKED_SAMPLES


def fault_of_tokenizer(tokenizer: Tokenizer, table: int) -> str:
    """Return why a tokenizer does not fit a model of images or sounds, or an empty string. `table`: the number of ids
    for which the text model has embeddings.
    """
    return fault(fitted(tokenizer, table)[0], table, TokenNeeds())


def _kept_tokenizer(modules: Modules, load: LoadOptions, compute: Compute) -> Tokenizer:
    """Return `text_tokenizer` as an earlier load has checked and stored it, or check and store it now."""
    if (stored := compute.derived.read(_TOKENIZER)) is not None:
        return Tokenizer.from_buffer(stored)
    tokenizer = text_tokenizer(modules, load)
    compute.derived.keep(_TOKENIZER, tokenizer.to_str().encode())
    return tokenizer


class TextEncoder(PackedModel):
    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        modules = read_modules(folder)
        tokenizer = text_tokenizer(modules, entry.load)
        model: Any = empty_model(class_of(entry, folder), modules.folder, entry.load, consumed_by(entry))
        is_decoder = families.row(entry.family).reads_answer or isinstance(model, GenericForSequenceClassification)
        needs = TokenNeeds.for_family(entry.family, entry.run.pooling or modules.pooling, is_decoder=is_decoder)
        table = model.get_input_embeddings().num_embeddings
        return fault(fitted(tokenizer, table)[0], table, needs)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        super().__init__(entry, compute)
        modules = read_modules(folder)
        tokenizer = _kept_tokenizer(modules, load, compute)
        samples = samples_of(entry.family, compute)
        with torch.inference_mode():
            builder = Builder(modules, entry, load, compute, tokenizer)
            self._parts = builder.parts()
            filling = self._parts.filling
            facts = replace(
                compute.model,
                config=builder.config,
                hides_tokens=filling is not None and not filling.attended,
                gives_last_states=self._gives_last_states(),
            )
            on_engine = replace(compute, model=facts, engine=engines.choose(load.engine, facts))
            backbone = Backbone(builder.backbone, on_engine, entry.max_tokens, samples, modules.folder)
            self._twin: TorchTwin | None = None
            if backbone.engine.engine != "torch":

                def again() -> PreTrainedModel:
                    # the tokenizer is read again, because it would keep 6 MB for a vocabulary of 30,000 tokens
                    return Builder(modules, entry, load, compute, _kept_tokenizer(modules, load, compute)).backbone

                on_torch = replace(compute, engine=engines.TORCH)
                self._twin = TorchTwin(again, on_torch, entry.max_tokens, self._add_bytes)
            self._run_on(backbone, builder.backbone, compute)
        self.heads = self._parts.heads
        self.rows = self._parts.rows
        self.per_row = self._parts.per_row
        self.reads, self.finish = self._parts.reads, self._parts.finish
        if self._parts.query_weights is not None:
            self.query_tables = {"sparse": self._parts.query_weights}
        self.tokenizer = builder.tokenizer.to_str().encode()
        is_decoder = any(isinstance(head, LastTokenHead) for head in self.heads.values())
        self.needs = TokenNeeds.for_family(entry.family, entry.run.pooling or modules.pooling, is_decoder=is_decoder)
        self.memory_bytes = self.backbone.memory_bytes + builder.head_bytes
        self._check_limits(entry)

    def _gives_last_states(self) -> bool:
        dense = self._parts.heads.get("dense")
        extra_heads = self._parts.heads.keys() - {"dense", TOKEN_STATES}
        return not extra_heads and isinstance(dense, DenseHead) and dense.is_last_state

    def _check_limits(self, entry: ModelEntry) -> None:
        limit = self.backbone.positions
        if limit and entry.max_tokens > limit:
            raise incompatible(f"{entry.id}: max_tokens is {entry.max_tokens}, the model has {limit} positions")

    def _loras(self, model: Any, compute: Compute) -> ModelLoras:
        if self._twin is None:
            return super()._loras(model, compute)
        return ModelLoras(model, self._twin.model, compute, self._twin.sampled)

    def _add_bytes(self, nbytes: int) -> None:
        self.memory_bytes += nbytes

    def forward(self, packed: PackedBatch) -> Tensor:
        if self._twin is not None and packed.engine == "torch":
            return self._twin.forward(packed)
        return self.backbone.forward(packed)

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Pad the queries of a late-interaction model to their fixed length."""
        filling = self._parts.filling
        return filling.expand(batch, queries) if filling else batch
