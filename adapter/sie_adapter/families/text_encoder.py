"""Everything that runs on the packed engine: encoders and decoders of text with their heads.

    folder + entry ──► the transformers class that the outputs need ──► Backbone + heads ──► answers

family                  transformers class            heads
text-encoder            bare model, or masked LM      dense (and tokens), sparse, multivector
cross-encoder           sequence classification       score
decoder-reranker        causal LM                     answer
zero-shot-classifier    sequence classification       label
text-classifier         sequence classification       class
token-classifier        token classification          token
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from sie_adapter import answers, checkpoint
from sie_adapter.answers import Answers
from sie_adapter.backbone import Backbone
from sie_adapter.checkpoint import Modules, empty_model, read_json, read_modules
from sie_adapter.device import Compute
from sie_adapter.entities import entities
from sie_adapter.heads import Head, Row
from sie_adapter.heads.classification import LastTokenHead, SequenceHead, TokenHead
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.heads.pooling import POOLINGS, DenseHead, Pooling
from sie_adapter.heads.sparse import MaskedLanguageHead, TokenTable, TokenWeightHead
from sie_adapter.heads.tokens import TokenStatesHead
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.late_interaction import late_interaction
from sie_adapter.lora import Loras
from sie_adapter.packing import Int64, Items, Packed, expanded
from sie_adapter.tokenizer import Needs, fault, fitted, load_tokenizer, special_ids
from sie_contracts import families
from sie_contracts.entries import LoadOptions, ModelEntry
from sie_contracts.ipc import Group, Rows, RunBatch, Side
from sie_contracts.load_errors import load_failed
from sie_contracts.messages import Operation, RunOptions
from sie_contracts.options import TOKEN_STATES

_logger = logging.getLogger("sie.adapter")
_RANKED = 45
_LORA_SAMPLE = (8, 24)


class Filling(NamedTuple):
    """What fills queries of late interaction up: to `length` tokens with the id `filler`, which the others attend to or
    not.
    """

    length: int
    filler: int
    attended: bool

    def of(self, batch: Items, queries: np.ndarray) -> Items:
        """`batch` with those that `queries` (bool [items]) marks filled up."""
        return (
            expanded(batch, np.where(queries, self.length, 0), self.filler, attended=self.attended)
            if queries.any()
            else batch
        )


class TextEncoder:
    """A loaded model. `forward` may run on several threads at once.

    `tokenizer`: tokenizer.json without truncation and padding. `needs`: what the heads need of it. `rows`: how the
    inputs of each operation become ids. `vocabulary`: ids are below it. `width`: of a hidden state. `attention`: the
    backend in force, with `padded` where the packed path does not hold.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """What a load would refuse of class, shapes and tokenizer, empty if nothing. Reads no values of weights and
        runs no code of the folder. Raises ModelLoadFailed for tensors that are not those of the class.
        """
        modules = read_modules(folder)
        tokenizer = load_tokenizer(modules.folder, entry.load)
        model: Any = empty_model(class_of(entry, folder), modules.folder, entry.load, consumed_by(entry))
        is_decoder = families.row(entry.family).reads_answer or isinstance(model, GenericForSequenceClassification)
        needs = Needs.of(entry.family, entry.run.pooling or modules.pooling, is_decoder=is_decoder)
        table = model.get_input_embeddings().num_embeddings
        return fault(fitted(tokenizer, table)[0], table, needs)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Load from `folder`. Raises ModelLoadFailed INCOMPATIBLE for weights, limits or files that do not fit the
        entry.
        """
        self.max_tokens = entry.max_tokens
        self.precision = compute.precision
        self.heads: dict[str, Head] = {}
        self.rows: dict[str, Rows] = {}
        self.filling: Filling | None = None
        self.query_weights: TokenTable | None = None
        self._entry = entry
        self._compute = compute
        modules = read_modules(folder)
        tokenizer = load_tokenizer(modules.folder, load)
        with torch.inference_mode():
            builder = _Builder(modules, entry, load, compute, tokenizer)
            # what is ranked is compared by rank as well, which takes more than a few
            self.backbone = Backbone(
                builder.backbone, compute, entry.max_tokens, 0 if families.row(entry.family).gives_vectors else _RANKED
            )
            builder.build(self)
        self.tokenizer = builder.tokenizer.to_str().encode()
        is_decoder = any(isinstance(head, LastTokenHead) for head in self.heads.values())
        self.needs = Needs.of(entry.family, entry.run.pooling or modules.pooling, is_decoder=is_decoder)
        self.vocabulary = self.backbone.vocabulary
        self.width = self.backbone.width
        self.attention = self.backbone.attention
        self.memory_bytes = self.backbone.memory_bytes + builder.head_bytes
        self._check_limits(entry)
        self.loras = Loras(builder.backbone, compute, lambda: self.forward(self.backbone.sample(_LORA_SAMPLE)))

    def _check_limits(self, entry: ModelEntry) -> None:
        limit = self.backbone.positions
        if limit and entry.max_tokens > limit:
            raise load_failed(
                "INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, the model has {limit} positions"
            )

    def prepare(self, batch: Items, queries: np.ndarray) -> Items:
        """Queries of late interaction are filled up with mask tokens."""
        return self.filling.of(batch, queries) if self.filling else batch

    def without_pass(self, head: str, ids: Int64, *, is_query: bool) -> Row | None:
        """Inference-free queries."""
        return self.query_weights.row(ids) if self.query_weights and is_query and head == "sparse" else None

    def pack(self, batch: Items, chosen: Int64) -> Packed:
        """Lay out the chosen items with this architecture's positions."""
        return self.backbone.pack(batch, chosen)

    def forward(self, packed: Packed) -> Tensor:
        """Hidden states of the last layer, [tokens, width], in the precision of the weights, packed order. Under
        inference mode only.
        """
        return self.backbone.forward(packed)

    def heads_for(self, operation: Operation, options: RunOptions) -> tuple[str, ...]:
        """The heads whose rows the answers are made from."""
        if options.muvera is not None:
            return tuple(dict.fromkeys("multivector" if name == "dense" else name for name in options.outputs))
        return options.outputs or (self._only,)

    def answer(
        self,
        message: RunBatch,
        group: Group,
        query: Mapping[str, Row],
        rows: Mapping[str, Sequence[Row]],
        places: list[int],
    ) -> Answers:
        """One answer per input."""
        return self._answer(message, group, query, rows, places)

    _answer: Callable[..., Answers]
    _only = ""


def class_of(entry: ModelEntry, folder: Path) -> Any:
    """The transformers class that is made from the files of `folder`."""
    # a masked LM is loaded whole only where its head is what the sparse output is made from
    family = families.row(entry.family)
    if family.gives_vectors and "sparse" in entry.outputs and not (folder / "sparse_linear.pt").is_file():
        return AutoModelForMaskedLM
    return getattr(transformers, family.transformers_class)


def consumed_by(entry: ModelEntry) -> tuple[str, ...]:
    """Tensors beside those of the class, which a head reads."""
    return ("linear.weight",) if "multivector" in entry.outputs else ()


class _Builder:
    """Loads the parts of one model and puts them together."""

    def __init__(
        self, modules: Modules, entry: ModelEntry, load: LoadOptions, compute: Compute, tokenizer: Tokenizer
    ) -> None:
        self.modules, self.entry, self.load, self.compute = modules, entry, load, compute
        self.folder = folder = modules.root
        self.head_bytes = 0
        auto_class = class_of(entry, folder)
        self.is_masked = auto_class is AutoModelForMaskedLM
        self.linear = checkpoint.tensor(modules.folder, "linear.weight") if "multivector" in entry.outputs else None
        float32_head = auto_class not in (AutoModel, AutoModelForMaskedLM)
        model = checkpoint.load_model(
            auto_class, modules.folder, load, compute, consumed_by(entry), float32_head=float32_head
        )
        self.config = model.config
        self.tokenizer, beyond = fitted(tokenizer, model.get_input_embeddings().num_embeddings)
        if beyond:
            _logger.info(
                "%s: text like any other, since its weights have no embedding for it: %s", entry.id, ", ".join(beyond)
            )
        if families.row(entry.family).reads_answer:
            self._keep_answers(model)
        self.head: TransformersHead | None = None
        if model.base_model is model:
            self.backbone: PreTrainedModel = model
        else:
            self.head = TransformersHead(model, in_float32=not self.is_masked)
            self.backbone = self.head.backbone
            if self.is_masked and compute.device.type == "cpu":
                self.head.block()
            self.head_bytes = self.head.memory_bytes

    def build(self, encoder: TextEncoder) -> None:
        {
            "text-encoder": self._text_encoder,
            "cross-encoder": self._cross_encoder,
            "decoder-reranker": self._decoder_reranker,
            "zero-shot-classifier": self._zero_shot,
            "text-classifier": self._text_classifier,
            "token-classifier": self._token_classifier,
        }[self.entry.family](encoder)

    # text-encoder

    def _text_encoder(self, encoder: TextEncoder) -> None:
        outputs = self.entry.outputs
        query = document = Side()
        if "dense" in outputs:
            encoder.heads["dense"] = self._dense()
            encoder.heads[TOKEN_STATES] = TokenStatesHead()
        if "sparse" in outputs:
            encoder.heads["sparse"] = self._sparse()
            query = self._idf(encoder) or query
        if "multivector" in outputs:
            head, query, document = self._multivector(encoder)
            encoder.heads["multivector"] = head
        per_row = "score" in outputs
        width = outputs.get("multivector", 0)
        encoder.rows["encode"] = Rows("text", query, document, tokens=True, vectors=width)
        if "score" in self.entry.tasks:
            encoder.rows["score"] = Rows("sides", query, document, vectors=width)

        def answer(message: RunBatch, group: Group, query: Any, rows: Any, places: list[int]) -> Answers:
            if message.operation == "score":
                return answers.side_scores(group.options, query, rows, per_row=per_row)
            return answers.vectors(group.options, rows)

        encoder._answer = answer

    def _dense(self) -> DenseHead:
        pooling = self.entry.run.pooling or self.modules.pooling or "mean"
        if pooling not in POOLINGS:
            raise load_failed(
                "INCOMPATIBLE", f"{self.entry.id}: pooling is {pooling}, expected one of {', '.join(POOLINGS)}"
            )
        # without a pooling before them they are those of late interaction
        layers = (
            self.modules.layers if "multivector" not in self.entry.outputs or "Pooling" in self.modules.kinds else ()
        )
        width = layers[-1].out_features if layers else self.config.hidden_size
        self._expect_width("dense", width)
        return DenseHead(cast(Pooling, pooling), nn.Sequential(*layers) if layers else None, self.compute.device)

    def _expect_width(self, output: str, width: int) -> None:
        if self.entry.outputs[output] != width:
            said = self.entry.outputs[output]
            raise load_failed(
                "INCOMPATIBLE", f"{self.entry.id}: outputs.{output} is {said}, the model's is {width} wide"
            )

    def _sparse(self) -> Head:
        options = self.entry.head
        vocabulary = self.backbone.get_input_embeddings().num_embeddings
        self._expect_width("sparse", vocabulary)
        if not self.is_masked:
            layer = _saved_layer(self.folder / "sparse_linear.pt").to(self.compute.device)
            unused = special_ids(self.modules.folder, self.load, ("cls", "eos", "pad", "unk"))  # as FlagEmbedding
            return TokenWeightHead(layer, vocabulary, unused)
        assert self.head is not None
        activation = options.sparse_activation or ""
        pooling = self.modules.settings.get("SpladePooling", {})
        twice = activation == "log1p_log1p_relu" if activation else pooling.get("activation_function") == "log1p_relu"
        if pooling.get("pooling_strategy", "max") != "max":
            raise load_failed(
                "INCOMPATIBLE", f"{self.entry.id}: SpladePooling by {pooling['pooling_strategy']}, expected max"
            )
        dropped = special_ids(self.modules.folder, self.load) if options.sparse_special_tokens is False else frozenset()
        return MaskedLanguageHead(self.head, vocabulary, self.compute.device, twice=twice, dropped=dropped)

    def _idf(self, encoder: TextEncoder) -> Side | None:
        """Queries without a pass, where the entry asks for them or the model's files route queries to a table."""
        stored = self.modules.query_weights
        asked = self.entry.head.query_encoder
        if asked == "model" or (asked is None and stored is None):
            return None
        table = torch.zeros(self.backbone.get_input_embeddings().num_embeddings)
        if stored is not None:
            if stored.ndim != 1 or len(stored) > len(table):
                raise load_failed(
                    "INCOMPATIBLE", f"{self.entry.id}: {len(stored)} weights of queries, a vocabulary of {len(table)}"
                )
            table[: len(stored)] = stored
        else:
            weights = read_json(self.folder / "idf.json")
            if not weights:
                raise load_failed(
                    "INCOMPATIBLE", f"{self.entry.id}: query_encoder is idf and the model has no idf.json"
                )
            for token, weight in weights.items():
                if (number := self.tokenizer.token_to_id(token)) is not None:
                    table[number] = float(weight)
        encoder.query_weights = TokenTable(table)
        return Side(special=False)

    def _multivector(self, encoder: TextEncoder) -> tuple[MultivectorHead, Side, Side]:
        is_stanford = self.linear is not None and not self.modules.kinds
        options = late_interaction(self.modules, self.entry.head, is_stanford=is_stanford)
        layers: list[nn.Module] = [checkpoint.linear(self.linear)] if is_stanford else list(self.modules.layers)
        is_m3 = (self.folder / "colbert_linear.pt").is_file()
        if is_m3:
            layers = [_saved_layer(self.folder / "colbert_linear.pt")]
        width = layers[-1].out_features if layers else self.config.hidden_size
        self._expect_width("multivector", width)
        skipped = self._known_ids(options.skipped)
        head = MultivectorHead(
            nn.Sequential(*layers) if layers else None, self.compute.device, skipped=skipped, drop_first=is_m3
        )
        length = options.expanded
        if length:
            if length > self.entry.max_tokens:
                raise load_failed(
                    "INCOMPATIBLE", f"{self.entry.id}: queries are filled up to {length} tokens, max_tokens is less"
                )
            own = (
                options.filler
                or _special(self.modules.folder, "mask_token")
                or _special(self.modules.folder, "eos_token")
            )
            filler = self._one_id("token that fills queries", own)
            encoder.filling = Filling(length, filler, options.attends)
        return (
            head,
            Side(self._marker(options.query_marker), options.query_length, length),
            Side(self._marker(options.document_marker), options.document_length),
        )

    def _marker(self, token: str) -> int:
        """The id of a marker, which PyLate writes with the space behind it; -1 for none."""
        if not token:
            return -1
        known = (name for name in (token, *token.split()[:1]) if self.tokenizer.token_to_id(name) is not None)
        return self._one_id("marker", next(known, token))

    def _one_id(self, what: str, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise load_failed(
                "INCOMPATIBLE", f"{self.entry.id}: the {what} {token!r} is not one token of its vocabulary"
            )
        return int(number)

    def _known_ids(self, words: Iterable[str]) -> frozenset[int]:
        """The ids of the words that are one token; the unknown token only if it is named."""
        unknown = _special(self.modules.folder, "unk_token")
        known = {word: self.tokenizer.token_to_id(word) for word in words}
        outside = None if unknown in known else self.tokenizer.token_to_id(unknown)
        return frozenset(number for number in known.values() if number is not None and number != outside)

    # heads over a whole sequence, or over its tokens

    def _cross_encoder(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        if prompt := read_json(self.folder / "config_sentence_transformers.json").get("default_prompt_name"):
            raise load_failed(
                "INCOMPATIBLE",
                f"{self.entry.id}: its pairs are given the prompt {prompt}, which this adapter does not do",
            )
        encoder.heads["score"] = self._sequence_head(self.head)
        encoder.rows["score"] = Rows("pair")
        activation = self.entry.head.activation or _stored_activation(self.folder, self.config)
        labels = self.config.num_labels
        if labels != (2 if activation == "softmax" else 1):
            raise load_failed(
                "INCOMPATIBLE",
                f"{self.entry.id} has {labels} labels, a score needs 1, or 2 with head.activation softmax",
            )
        encoder._only = "score"
        encoder._answer = lambda message, group, query, rows, places: answers.class_scores(
            group.options, rows["score"], activation
        )

    def _sequence_head(self, head: TransformersHead) -> Head:
        return (
            LastTokenHead(head, head.pad)
            if head.is_decoder
            else SequenceHead(head, self.config.hidden_size, self.compute.device)
        )

    def _keep_answers(self, model: PreTrainedModel) -> None:
        """Cut the output layer down to the rows no and yes; what the model does to its logits stays."""
        options = self.entry.head
        if not (self.entry.pair and options.yes_token and options.no_token):
            raise load_failed(
                "INCOMPATIBLE", f"{self.entry.id}: a decoder-reranker needs pair, head.yes_token and head.no_token"
            )
        ids = [self._one_id("answer", token) for token in (options.no_token, options.yes_token)]
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        # float32 and a copy: the layer may be the input embedding, which keeps its precision
        model.set_output_embeddings(checkpoint.linear(layer.weight[ids], None if bias is None else bias[ids]))

    def _decoder_reranker(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        encoder.heads["answer"] = LastTokenHead(self.head)
        encoder.rows["score"] = Rows("pieces")
        difference = self.entry.head.score == "difference"
        encoder._only = "answer"
        encoder._answer = lambda message, group, query, rows, places: answers.answer_scores(
            group.options, rows["answer"], difference=difference
        )

    def _zero_shot(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        names = {str(name).lower(): int(number) for number, name in self.config.id2label.items()}
        entailment = next((number for name, number in names.items() if name.startswith("entail")), None)
        against = next((number for name, number in names.items() if name.startswith(("contra", "not_entail"))), None)
        if entailment is None or against is None:
            raise load_failed(
                "INCOMPATIBLE",
                f"{self.entry.id}: its labels are {', '.join(names)}, expected entailment and its opposite",
            )
        encoder.heads["label"] = self._sequence_head(self.head)
        encoder.rows["extract"] = Rows("hypotheses")
        encoder._only = "label"
        encoder._answer = lambda message, group, query, rows, places: answers.zero_shot(
            group.options, rows["label"], entailment, against
        )

    def _text_classifier(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        names = [self.config.id2label[number] for number in range(self.config.num_labels)]
        activation = self.entry.head.activation or _own_activation(self.config)
        encoder.heads["class"] = self._sequence_head(self.head)
        encoder.rows["extract"] = Rows("text", pairs={0, 1} <= set(self.tokenizer.encode("x", "x").sequence_ids))
        encoder._only = "class"
        encoder._answer = lambda message, group, query, rows, places: answers.classes(
            group.options, rows["class"], names, activation
        )

    def _token_classifier(self, encoder: TextEncoder) -> None:
        assert self.head is not None
        names = [self.config.id2label[number] for number in range(self.config.num_labels)]
        encoder.heads["token"] = TokenHead(self.head, self.config.hidden_size, self.compute.device)
        encoder.rows["extract"] = Rows("spans")
        encoder._only = "token"
        encoder._answer = lambda message, group, query, rows, places: entities(
            message, group, rows["token"], places, names
        )


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


def _own_activation(config: Any) -> str:
    """As the text-classification pipeline of transformers decides."""
    if config.problem_type == "regression":
        return "identity"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _stored_activation(folder: Path, config: Any) -> str:
    """As sentence-transformers decides: what the repository's configuration names, its own file first, else sigmoid."""
    named = read_json(folder / "config_sentence_transformers.json").get("activation_fn")
    named = named or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise load_failed("INCOMPATIBLE", f"the activation of the scores is {kind}, expected Sigmoid or Identity")
    return kind.lower()
