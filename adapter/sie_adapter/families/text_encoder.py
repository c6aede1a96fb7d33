"""Everything that runs on the packed engine: encoders and decoders of text with their heads.

    folder + entry ──► the transformers class that the outputs need ──► Backbone + heads ──► answers

family                  transformers class            heads
text-encoder            bare model, or masked LM      dense, sparse, multivector
cross-encoder           sequence classification       score
decoder-reranker        causal LM                     answer
zero-shot-classifier    sequence classification       label
token-classifier        token classification          token
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from sie_adapter import answers, checkpoint
from sie_adapter.answers import Answers
from sie_adapter.backbone import Backbone
from sie_adapter.checkpoint import Modules, read_json, read_modules
from sie_adapter.device import Compute
from sie_adapter.entities import entities
from sie_adapter.failure import load_failed
from sie_adapter.heads import Head, Row
from sie_adapter.heads.classification import SequenceHead, TokenHead, YesNoHead
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.heads.pooling import POOLINGS, DenseHead, Pooling
from sie_adapter.heads.sparse import MaskedLanguageHead, TokenTable, TokenWeightHead
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.packing import Int64, Items, Packed, expanded
from sie_contracts.catalogue import HeadOptions, LoadOptions, ModelEntry
from sie_contracts.ipc import Group, Rows, RunBatch, Side
from sie_contracts.messages import Operation, RunOptions

_CLASSES = {
    "cross-encoder": AutoModelForSequenceClassification,
    "zero-shot-classifier": AutoModelForSequenceClassification,
    "decoder-reranker": AutoModelForCausalLM,
    "token-classifier": AutoModelForTokenClassification,
}
FAMILIES = ("text-encoder", *_CLASSES)


class TextEncoder:
    """A loaded model. `forward` may run on several threads at once.

    `tokenizer`: tokenizer.json without truncation and padding. `rows`: how the inputs of each operation become ids. `vocabulary`: ids are
    below it. `width`: of a hidden state. `attention`: the backend in force, with `padded` where the packed path does not hold.
    """

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Load from `folder`. Raises ModelLoadFailed INCOMPATIBLE for weights, limits or files that do not fit the entry."""
        self.max_tokens = entry.max_tokens
        self.precision = compute.precision
        self.heads: dict[str, Head] = {}
        self.rows: dict[str, Rows] = {}
        self._entry = entry
        self._compute = compute
        tokenizer = checkpoint.load_tokenizer(folder, load)
        self.tokenizer = tokenizer.to_str().encode()
        with torch.inference_mode():
            builder = _Builder(folder, entry, load, compute, tokenizer)
            self.backbone = Backbone(builder.backbone, compute, entry.max_tokens)
            builder.build(self)
        self.vocabulary = self.backbone.vocabulary
        self.width = self.backbone.width
        self.attention = self.backbone.attention
        self.memory_bytes = self.backbone.memory_bytes + builder.head_bytes
        self._check_limits(entry)

    def _check_limits(self, entry: ModelEntry) -> None:
        limit = self.backbone.positions
        if limit and entry.max_tokens > limit:
            raise load_failed("INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, the model has {limit} positions")

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Queries of late interaction are filled up with mask tokens."""
        return batch

    def without_pass(self, head: str, ids: Int64, *, is_query: bool) -> Row | None:
        """Inference-free queries."""
        return None

    def pack(self, batch: Items, chosen: Int64) -> Packed:
        """Lay out the chosen items with this architecture's positions."""
        return self.backbone.pack(batch, chosen)

    def forward(self, packed: Packed) -> Tensor:
        """Hidden states of the last layer, [tokens, width], in the precision of the weights, packed order. Under inference mode only."""
        return self.backbone.forward(packed)

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        """The heads whose rows the answers are made from."""
        if options.muvera is not None:
            return tuple(dict.fromkeys("multivector" if name == "dense" else name for name in options.outputs))
        return options.outputs or (self._only,)

    def answer(
        self, message: RunBatch, group: Group, query: Mapping[str, Row], rows: Mapping[str, Sequence[Row]], places: list[int]
    ) -> Answers:
        """One answer per input."""
        return self._answer(message, group, query, rows, places)

    _answer: Callable[..., Answers]
    _only = ""


class _Builder:
    """Loads the parts of one model and puts them together."""

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, tokenizer: Tokenizer) -> None:
        self.folder, self.entry, self.load, self.compute, self.tokenizer = folder, entry, load, compute, tokenizer
        self.modules = read_modules(folder)
        self.head_bytes = 0
        auto_class = _CLASSES.get(entry.family, AutoModel)
        # a masked LM is loaded whole only where its head is what the sparse output is made from
        self.is_masked = entry.family == "text-encoder" and "sparse" in entry.outputs and not (folder / "sparse_linear.pt").is_file()
        self.linear = checkpoint.tensor(folder, "linear.weight") if "multivector" in entry.outputs else None
        consumed = ("linear.weight",) if self.linear is not None else ()
        model = checkpoint.load_model(AutoModelForMaskedLM if self.is_masked else auto_class, folder, load, compute, consumed)
        self.config = model.config
        if entry.family == "decoder-reranker":
            self._keep_answers(model)
        self.head: TransformersHead | None = None
        if model.base_model is model:
            self.backbone: PreTrainedModel = model
        else:
            self.head = TransformersHead(model, in_float32=not self.is_masked)
            self.backbone = self.head.backbone
            self.head_bytes = self.head.memory_bytes

    def build(self, encoder: TextEncoder) -> None:
        {
            "text-encoder": self._text_encoder, "cross-encoder": self._cross_encoder, "decoder-reranker": self._decoder_reranker,
            "zero-shot-classifier": self._zero_shot, "token-classifier": self._token_classifier,
        }[self.entry.family](encoder)  # fmt: skip

    # text-encoder

    def _text_encoder(self, encoder: TextEncoder) -> None:
        outputs = self.entry.outputs
        query = document = Side()
        if "dense" in outputs:
            encoder.heads["dense"] = self._dense()
        if "sparse" in outputs:
            encoder.heads["sparse"] = self._sparse()
            query = self._idf(encoder) or query
        if "multivector" in outputs:
            head, query, document = self._multivector(encoder)
            encoder.heads["multivector"] = head
        per_row = "score" in outputs
        encoder.rows["encode"] = Rows("text", query, document)
        if "score" in self.entry.tasks:
            encoder.rows["score"] = Rows("sides", query, document)

        def answer(message: RunBatch, group: Group, query: Any, rows: Any, places: list[int]) -> Answers:
            if message.operation == "score":
                return answers.side_scores(group.options, query, rows, per_row=per_row)
            return answers.vectors(group.options, rows)

        encoder._answer = answer

    def _dense(self) -> DenseHead:
        pooling = self.entry.run.pooling or self.modules.pooling or "mean"
        if pooling not in POOLINGS:
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: pooling is {pooling}, expected one of {', '.join(POOLINGS)}")
        layers = self.modules.layers if "multivector" not in self.entry.outputs else ()
        width = layers[-1].out_features if layers else self.config.hidden_size
        self._expect_width("dense", width)
        return DenseHead(cast(Pooling, pooling), nn.Sequential(*layers) if layers else None, self.compute.device)

    def _expect_width(self, output: str, width: int) -> None:
        if self.entry.outputs[output] != width:
            said = self.entry.outputs[output]
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: outputs.{output} is {said}, the model's is {width} wide")

    def _sparse(self) -> Head:
        options = self.entry.head
        vocabulary = self.backbone.get_input_embeddings().num_embeddings
        self._expect_width("sparse", vocabulary)
        special = checkpoint.special_ids(self.folder, self.load)
        if not self.is_masked:
            layer = _saved_layer(self.folder / "sparse_linear.pt").to(self.compute.device)
            return TokenWeightHead(layer, vocabulary, special)
        assert self.head is not None
        activation = options.sparse_activation or ""
        pooling = self.modules.settings.get("SpladePooling", {})
        twice = activation == "log1p_log1p_relu" if activation else pooling.get("activation_function") == "log1p_relu"
        if pooling.get("pooling_strategy", "max") != "max":
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: SpladePooling by {pooling['pooling_strategy']}, expected max")
        dropped = special if options.sparse_special_tokens is False else frozenset()
        return MaskedLanguageHead(self.head, vocabulary, twice=twice, dropped=dropped)

    def _idf(self, encoder: TextEncoder) -> Side | None:
        if self.entry.head.query_encoder != "idf":
            return None
        weights = read_json(self.folder / "idf.json")
        if not weights:
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: query_encoder is idf and the model has no idf.json")
        table = torch.zeros(self.backbone.get_input_embeddings().num_embeddings, device=self.compute.device)
        for token, weight in weights.items():
            if (number := self.tokenizer.token_to_id(token)) is not None:
                table[number] = float(weight)
        lookup = TokenTable(table)
        encoder.without_pass = lambda head, ids, *, is_query: lookup.row(ids) if is_query and head == "sparse" else None  # type: ignore[method-assign]
        return Side(special=False)

    def _multivector(self, encoder: TextEncoder) -> tuple[MultivectorHead, Side, Side]:
        options = _late_options(self.folder, self.entry.head, self.modules)
        layers: list[nn.Module] = [checkpoint.linear(self.linear)] if self.linear is not None else list(self.modules.layers)
        is_m3 = (self.folder / "colbert_linear.pt").is_file()
        if is_m3:
            layers = [_saved_layer(self.folder / "colbert_linear.pt")]
        width = layers[-1].out_features if layers else self.config.hidden_size
        self._expect_width("multivector", width)
        skipped = self._punctuation() if options.skip_punctuation else frozenset()
        head = MultivectorHead(nn.Sequential(*layers) if layers else None, self.compute.device, skipped=skipped, drop_first=is_m3)
        length = options.query_length or 0
        expands = bool(options.query_expansion and length)
        if expands:
            filler = self._one_id("mask token", str(_special(self.folder, "mask_token")))
            attended = bool(options.attend_expansion)
            limit = length

            def prepare(batch: Items, queries: np.ndarray) -> Items:
                return expanded(batch, np.where(queries, limit, 0), filler, attended=attended) if queries.any() else batch

            encoder.prepare = prepare  # type: ignore[method-assign]
        return (
            head,
            Side(self._marker(options.query_marker), length, length if expands else 0),
            Side(self._marker(options.document_marker), options.document_length or 0),
        )

    def _marker(self, token: str | None) -> int:
        return self._one_id("marker", token) if token else -1

    def _one_id(self, what: str, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: the {what} {token!r} is not one token of its vocabulary")
        return int(number)

    def _punctuation(self) -> frozenset[int]:
        unknown = self.tokenizer.token_to_id(str(_special(self.folder, "unk_token")))
        found = {self.tokenizer.token_to_id(mark) for mark in string.punctuation}
        return frozenset(number for number in found if number is not None and number != unknown)

    # heads over a whole sequence, or over its tokens

    def _cross_encoder(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        encoder.heads["score"] = SequenceHead(self.head)
        encoder.rows["score"] = Rows("pair")
        activation = self.entry.head.activation or _stored_activation(self.folder, self.config)
        if self.config.num_labels > 1 and activation == "sigmoid":
            labels = self.config.num_labels
            raise load_failed("INCOMPATIBLE", f"{self.entry.id} has {labels} labels, a score needs 1, or head.activation softmax")
        encoder._only = "score"
        encoder._answer = lambda message, group, query, rows, places: answers.class_scores(rows["score"], activation)

    def _keep_answers(self, model: PreTrainedModel) -> None:
        """Cut the output layer down to the rows no and yes; what the model does to its logits stays."""
        options = self.entry.head
        if not (self.entry.pair and options.yes_token and options.no_token):
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: a decoder-reranker needs pair, head.yes_token and head.no_token")
        ids = [self._one_id("answer", token) for token in (options.no_token, options.yes_token)]
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        # float32 and a copy: the layer may be the input embedding, which keeps its precision
        model.set_output_embeddings(checkpoint.linear(layer.weight[ids], None if bias is None else bias[ids]))

    def _decoder_reranker(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        encoder.heads["answer"] = YesNoHead(self.head)
        encoder.rows["score"] = Rows("pieces")
        difference = self.entry.head.score == "difference"
        encoder._only = "answer"
        encoder._answer = lambda message, group, query, rows, places: answers.answer_scores(rows["answer"], difference=difference)

    def _zero_shot(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        names = {str(name).lower(): int(number) for number, name in self.config.id2label.items()}
        entailment = next((number for name, number in names.items() if name.startswith("entail")), None)
        against = next((number for name, number in names.items() if name.startswith(("contra", "not_entail"))), None)
        if entailment is None or against is None:
            raise load_failed("INCOMPATIBLE", f"{self.entry.id}: its labels are {', '.join(names)}, expected entailment and its opposite")
        encoder.heads["label"] = SequenceHead(self.head)
        encoder.rows["extract"] = Rows("hypotheses")
        encoder._only = "label"
        encoder._answer = lambda message, group, query, rows, places: answers.zero_shot(group.options, rows["label"], entailment, against)

    def _token_classifier(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        names = [self.config.id2label[number] for number in range(self.config.num_labels)]
        encoder.heads["token"] = TokenHead(self.head)
        encoder.rows["extract"] = Rows("spans")
        encoder._only = "token"
        encoder._answer = lambda message, group, query, rows, places: entities(message, group, rows["token"], places, names)


def _saved_layer(path: Path) -> nn.Linear:
    """A linear layer that was saved by torch.save: tensors only, nothing of it is executed."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if set(state) - {"bias"} != {"weight"}:
        raise load_failed("INCOMPATIBLE", f"{path.name} holds {', '.join(sorted(state))}, expected weight and bias")
    return checkpoint.linear(state["weight"], state.get("bias"))


def _special(folder: Path, name: str) -> str:
    """A special token by its role, as tokenizer_config.json or special_tokens_map.json names it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        found = read_json(folder / file).get(name)
        if found:
            return found["content"] if isinstance(found, dict) else str(found)
    return ""


def _late_options(folder: Path, given: HeadOptions, modules: Modules) -> HeadOptions:
    """The options of late interaction: the entry's, else those of the model's own files (Stanford's metadata, PyLate's configuration)."""
    stanford = read_json(folder / "artifact.metadata")
    pylate = read_json(folder / "config_sentence_transformers.json")
    own: dict[str, Any] = {
        "query_marker": stanford.get("query_token_id") or pylate.get("query_prefix"),
        "document_marker": stanford.get("doc_token_id") or pylate.get("document_prefix"),
        "query_length": stanford.get("query_maxlen") or pylate.get("query_length"),
        "document_length": stanford.get("doc_maxlen") or pylate.get("document_length"),
        "query_expansion": pylate.get("do_query_expansion", True if stanford else None),
        "attend_expansion": stanford.get("attend_to_mask_tokens", pylate.get("attend_to_expansion_tokens")),
        "skip_punctuation": stanford.get("mask_punctuation", bool(pylate["skiplist_words"]) if "skiplist_words" in pylate else None),
    }
    names = [name for name in own if getattr(given, name) is not None]
    return HeadOptions(**{**own, **{name: getattr(given, name) for name in names}})


def _stored_activation(folder: Path, config: Any) -> str:
    """As sentence-transformers decides: what the repository's configuration names, else sigmoid for one label."""
    stored = getattr(config, "sentence_transformers", None) or {}
    named = stored.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    named = named or read_json(folder / "config_sentence_transformers.json").get("activation_fn")
    if not named:
        return "sigmoid" if config.num_labels == 1 else "identity"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise load_failed("INCOMPATIBLE", f"the activation of the scores is {kind}, expected Sigmoid or Identity")
    return kind.lower()
