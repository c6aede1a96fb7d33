"""Loader of text models. From the files of a folder, it creates the backbone (the model without its head), the
tokenizer, the heads, and the functions that turn the results of the heads into results of inputs.

    folder + entry ──► the transformers class that the outputs need ──► Builder ──► Parts

  family                  transformers class            heads
  text-encoder            bare model, or masked LM      dense (and tokens), sparse, multivector
  cross-encoder           sequence classification       score
  decoder-reranker        causal LM                     answer
  zero-shot-classifier    sequence classification       label
  text-classifier         sequence classification       class
  token-classifier        token classification          token
  pruner                  sequence classification       score, keep
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from sie_adapter.engine import item_results
from sie_adapter.engine.device import Compute
from sie_adapter.engine.item_results import ItemResults
from sie_adapter.families.entities import entities
from sie_adapter.heads import Head
from sie_adapter.heads.classification import LastTokenHead, SequenceHead, TokenHead
from sie_adapter.heads.keep import KeepHead
from sie_adapter.heads.multivector import MultivectorHead
from sie_adapter.heads.pooling import DenseHead
from sie_adapter.heads.sparse import MaskedLanguageHead, TokenTable, TokenWeightHead
from sie_adapter.heads.token_pooling import MAX_ROWS
from sie_adapter.heads.transformers_head import TransformersHead
from sie_adapter.loading import checkpoint
from sie_adapter.loading.late_interaction import Filling, late_interaction
from sie_adapter.loading.modules import Modules, output_width, pooled_width, states_width
from sie_adapter.loading.tokenizer import fitted, special_ids, tokenizer_limit
from sie_adapter.packed.pruning import pruned
from sie_contracts.models import families
from sie_contracts.models.entries import POOLINGS, LoadOptions, ModelEntry, poolings
from sie_contracts.models.load_errors import incompatible
from sie_contracts.models.options import TOKEN_STATES
from sie_contracts.wire.ipc import Group, Rows, RunBatch, Side
from sie_contracts.wire.messages import Operation
from sie_store.entry_faults import MODEL_FILE
from sie_store.folder_files import read_json

_logger = logging.getLogger("sie.adapter")
# Returns the answers to the inputs of one work item. Arguments: the batch, the group of the work item, the output rows
# of the model's heads by name of the head, and the indices of these rows in the batch.
Finish = Callable[[RunBatch, Group, item_results.Rows, list[int]], ItemResults]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Heads (output layers) of one model, and the rules that turn the results of heads into results of inputs. `rows`:
    for each operation, the rule by which the sidecar turns an input into rows of ids.

    A model whose outputs are vectors has a head for each output; `per_row` is the argument of
    `item_results.side_scores`. Other models have `finish`, which computes answers from the results of heads. `reads`:
    for each operation, the heads that `finish` reads; only the first head if the operation has no entry.
    """

    heads: dict[str, Head]
    rows: dict[str, Rows]
    finish: Finish | None = None
    reads: Mapping[Operation, tuple[str, ...]] = field(default_factory=dict)
    per_row: bool = False
    filling: Filling | None = None
    query_weights: TokenTable | None = None


def class_of(entry: ModelEntry, folder: Path) -> Any:
    # the class with a masked-LM head is loaded only if that head computes the sparse output
    family = families.row(entry.family)
    if family.gives_vectors and "sparse" in entry.outputs and not (folder / "sparse_linear.pt").is_file():
        return AutoModelForMaskedLM
    name = family.transformers_class
    if name == "AutoModel" and (folder / "config.json").is_file():
        name = checkpoint.ENCODERS.get(str(read_json(folder / "config.json").get("model_type")), name)
    return getattr(transformers, name)


def consumed_by(entry: ModelEntry) -> tuple[str, ...]:
    """Return the names of tensors that a head reads from the files, because the transformers class skips them."""
    return ("linear.weight",) if "multivector" in entry.outputs else ()


class Builder:
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
                "%s: special tokens without an embedding are read as plain text: %s", entry.id, ", ".join(beyond)
            )
        if families.row(entry.family).reads_answer:
            self._keep_answers(model)
        self.head: TransformersHead | None = None
        if model.base_model is model:
            self.backbone: PreTrainedModel = model
        else:
            self.head = TransformersHead(model, in_float32=not self.is_masked)
            self.backbone = self.head.backbone
            self.head_bytes = self.head.memory_bytes

    def parts(self) -> Parts:
        """Create the heads of the family. Raises ModelLoadFailed for files that are missing or do not fit the entry."""
        return {
            "text-encoder": self._text_encoder,
            "cross-encoder": self._cross_encoder,
            "decoder-reranker": self._decoder_reranker,
            "zero-shot-classifier": self._zero_shot,
            "text-classifier": self._text_classifier,
            "token-classifier": self._token_classifier,
            "pruner": self._pruner,
        }[self.entry.family]()

    def _text_encoder(self) -> Parts:
        outputs = self.entry.outputs
        heads: dict[str, Head] = {}
        query = document = Side()
        query_weights: TokenTable | None = None
        filling: Filling | None = None
        if "dense" in outputs:
            heads["dense"] = self._dense()
            heads[TOKEN_STATES] = MultivectorHead(None, self.compute.device)  # without layers: returns the states
        if "sparse" in outputs:
            heads["sparse"] = self._sparse()
            query_weights = self._query_weights()
            if query_weights:
                own = self.modules.query_folder
                query = Side(special=False, limit=(own and tokenizer_limit(own)) or 0)
        if "multivector" in outputs:
            heads["multivector"], query, document, filling = self._multivector()
        width = outputs.get("multivector", 0)
        dense = heads.get("dense")
        pooling = dense.pooling if isinstance(dense, DenseHead) else ""
        rows = {"encode": Rows("text", query, document, tokens=True, vectors=width, chunks=True, pooling=pooling)}
        if "score" in self.entry.tasks:
            rows["score"] = Rows("sides", query, document, vectors=width)
        return Parts(heads=heads, rows=rows, per_row="score" in outputs, filling=filling, query_weights=query_weights)

    def _dense(self) -> DenseHead:
        pooling = self.entry.run.pooling or self.modules.pooling or "mean"
        if poolings(pooling) is None:
            raise incompatible(f"{self.entry.id}: pooling is {pooling}, expected one of {', '.join(POOLINGS)}")
        # if modules.json has no pooling layer, its dense layers compute the output multivector
        is_late = "multivector" in self.entry.outputs and "Pooling" not in self.modules.kinds
        layers = () if is_late else self.modules.layers
        width = pooled_width(self.modules.token_layers, pooling, layers, states_width(self.config))
        check_width(self.entry, "dense", width)
        return DenseHead(pooling, _sequence(layers), self.compute.device, _sequence(self.modules.token_layers))

    def _sparse(self) -> Head:
        options = self.entry.head
        vocabulary = self.backbone.get_input_embeddings().num_embeddings
        check_width(self.entry, "sparse", vocabulary)
        if not self.is_masked:
            layer = _saved_layer(self.folder / "sparse_linear.pt").to(self.compute.device)
            if (weights := output_width([layer], states_width(self.config))) != 1:
                raise incompatible(f"sparse_linear.pt computes {weights} numbers for a token, expected 1")
            # these special tokens get no weight, because FlagEmbedding gives them none
            unused = special_ids(self.modules.folder, self.load, ("cls", "eos", "pad", "unk"))
            return TokenWeightHead(layer, vocabulary, unused)
        assert self.head is not None
        activation = options.sparse_activation or ""
        pooling = self.modules.settings.get("SpladePooling", {})
        twice = activation == "log1p_log1p_relu" if activation else pooling.get("activation_function") == "log1p_relu"
        dropped = special_ids(self.modules.folder, self.load) if options.sparse_special_tokens is False else frozenset()
        return MaskedLanguageHead(
            self.head,
            vocabulary,
            self.compute.device,
            twice=twice,
            dropped=dropped,
            max_entries=self.modules.max_entries,
            sums=pooling.get("pooling_strategy") == "sum",
        )

    def _query_weights(self) -> TokenTable | None:
        """Return the table of token weights that encodes queries without a forward pass. Return None if `query_encoder`
        is `model`, or if it is not set and the folder has no Router with a table of weights.
        """
        stored = self.modules.query_weights
        requested = self.entry.head.query_encoder
        if requested == "model" or (requested is None and stored is None):
            return None
        table = torch.zeros(self.backbone.get_input_embeddings().num_embeddings)
        if stored is not None:
            if stored.ndim != 1 or len(stored) > len(table):
                raise incompatible(f"{self.entry.id}: {len(stored)} query weights do not fit {len(table)} token ids")
            table[: len(stored)] = stored
        else:
            weights = read_json(self.folder / "idf.json")
            if not weights:
                raise incompatible(f"{self.entry.id}: query_encoder is idf and the model has no idf.json")
            for token, weight in weights.items():
                if (number := self.tokenizer.token_to_id(token)) is not None:
                    table[number] = float(weight)
        return TokenTable(table, self.modules.max_entries)

    def _multivector(self) -> tuple[MultivectorHead, Side, Side, Filling | None]:
        is_stanford = self.linear is not None and not self.modules.kinds
        options = late_interaction(self.modules, self.entry.head, is_stanford=is_stanford)
        layers: list[nn.Module] = [checkpoint.linear(self.linear)] if is_stanford else list(self.modules.layers)
        is_m3 = (self.folder / "colbert_linear.pt").is_file()
        if is_m3:
            layers = [_saved_layer(self.folder / "colbert_linear.pt")]
        check_width(self.entry, "multivector", output_width(layers, states_width(self.config)))
        skipped = self._known_ids(options.skipped)
        pooling = self.modules.token_pooling
        if pooling is not None and self.entry.max_tokens > MAX_ROWS:
            raise incompatible(f"{self.entry.id}: max_tokens is more than {MAX_ROWS}, the limit of token pooling")
        head = MultivectorHead(
            _sequence(layers), self.compute.device, skipped=skipped, drop_first=is_m3, pooling=pooling
        )
        length, filling = options.expanded, None
        if length:
            if length > self.entry.max_tokens:
                raise incompatible(f"{self.entry.id}: queries are padded to {length} tokens, more than max_tokens")
            folder = self.modules.folder
            own = options.filler or _special(folder, "mask_token") or _special(folder, "eos_token")
            filler = self._one_id("token that fills queries", own)
            filling = Filling(length, filler, options.attends)
        return (
            head,
            Side(self._marker(options.query_marker), options.query_length, length),
            Side(self._marker(options.document_marker), options.document_length),
            filling,
        )

    def _marker(self, token: str) -> int:
        """Return the id of a marker; -1 for an empty marker. A marker of PyLate ends with a space; the marker's token
        may lack this space.
        """
        if not token:
            return -1
        candidates = (name for name in (token, *token.split()[:1]) if self.tokenizer.token_to_id(name) is not None)
        return self._one_id("marker", next(candidates, token))

    def _one_id(self, role: str, token: str) -> int:
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise incompatible(f"{self.entry.id}: the {role} {token!r} is not one token of its vocabulary")
        return int(number)

    def _known_ids(self, words: Iterable[str]) -> frozenset[int]:
        """Return the ids of the words that are tokens of the vocabulary. For any other word, the tokenizer may return
        the id of the unknown token: drop this id if `words` does not contain the unknown token.
        """
        unknown = _special(self.modules.folder, "unk_token")
        ids = {word: self.tokenizer.token_to_id(word) for word in words}
        outside = None if unknown in ids else self.tokenizer.token_to_id(unknown)
        return frozenset(number for number in ids.values() if number is not None and number != outside)

    def _cross_encoder(self) -> Parts:
        assert self.head is not None
        if not self.entry.pair:
            check_pair_prompt(self.folder)
        activation = self.entry.head.activation or stored_activation(self.folder, self.config)
        labels = self.config.num_labels
        if labels != (2 if activation == "softmax" else 1):
            raise incompatible(
                f"{self.entry.id} has {labels} labels, a score needs 1, or 2 with head.activation softmax"
            )
        return Parts(
            heads={"score": self._sequence_head(self.head)},
            rows={"score": Rows("pieces" if self.entry.pair else "pair")},
            finish=lambda message, group, rows, places: item_results.class_scores(
                group.options, rows["score"], activation
            ),
        )

    def _sequence_head(self, head: TransformersHead) -> Head:
        if head.is_decoder:
            return LastTokenHead(head, head.pad)
        return SequenceHead(head, states_width(self.config), self.compute.device)

    def _keep_answers(self, model: PreTrainedModel) -> None:
        """Reduce the output layer to the rows of the answers "no" and "yes", or to the row of "yes" if the score needs
        only this logit. Operations of the model after this layer, such as a scaling, do not change.
        """
        options = self.entry.head
        is_single = options.score in ("logit", "sigmoid")
        if not (self.entry.pair and options.yes_token and bool(options.no_token) != is_single):
            needs = f"no head.no_token with score {options.score}" if is_single else "head.no_token"
            raise incompatible(f"{self.entry.id}: a decoder-reranker needs pair, head.yes_token and {needs}")
        ids = [self._one_id("answer", token) for token in (options.no_token, options.yes_token) if token]
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        # the rows are copied in float32, because the layer may be tied to the input embedding, which keeps its dtype
        model.set_output_embeddings(checkpoint.linear(layer.weight[ids], None if bias is None else bias[ids]))

    def _decoder_reranker(self) -> Parts:
        assert self.head is not None
        difference = self.entry.head.score in ("difference", "logit")
        return Parts(
            heads={"answer": LastTokenHead(self.head)},
            rows={"score": Rows("pieces")},
            finish=lambda message, group, rows, places: item_results.answer_scores(
                group.options, rows["answer"], difference=difference
            ),
        )

    def _zero_shot(self) -> Parts:
        assert self.head is not None
        names = {str(name).lower(): int(number) for number, name in self.config.id2label.items()}
        entailment = next((number for name, number in names.items() if name.startswith("entail")), None)
        against = next((number for name, number in names.items() if name.startswith(("contra", "not_entail"))), None)
        if entailment is None or against is None:
            raise incompatible(
                f"{self.entry.id}: its labels are {', '.join(names)}, "
                "expected entailment, and contradiction or not_entailment",
            )
        return Parts(
            heads={"label": self._sequence_head(self.head)},
            rows={"extract": Rows("hypotheses")},
            finish=lambda message, group, rows, places: item_results.zero_shot(
                group.options, rows["label"], entailment, against
            ),
        )

    def _text_classifier(self) -> Parts:
        assert self.head is not None
        names = [self.config.id2label[number] for number in range(self.config.num_labels)]
        activation = self.entry.head.activation or _own_activation(self.config)
        takes_pairs = {0, 1} <= set(self.tokenizer.encode("x", "x").sequence_ids)
        return Parts(
            heads={"class": self._sequence_head(self.head)},
            rows={"extract": Rows("text", pairs=takes_pairs)},
            finish=lambda message, group, rows, places: item_results.classes(
                group.options, rows["class"], names, activation
            ),
        )

    def _token_classifier(self) -> Parts:
        assert self.head is not None
        names = [self.config.id2label[number] for number in range(self.config.num_labels)]
        keeps_order = self.config.model_type == "openai_privacy_filter"
        return Parts(
            heads={"token": TokenHead(self.head, self.config.hidden_size, self.compute.device)},
            rows={"extract": Rows("spans")},
            finish=lambda message, group, rows, places: entities(
                message, group, rows["token"], places, names, keeps_order=keeps_order
            ),
        )

    def _pruner(self) -> Parts:
        """Return the heads of a cross-encoder, and a head that scores for each token whether it should be kept."""
        scores = self._cross_encoder()
        keep = KeepHead.load(self.folder / "best.pt", self.config.hidden_size, self.compute.device, self.entry.id)
        self.head_bytes += keep.memory_bytes
        activation = self.entry.head.activation or stored_activation(self.folder, self.config)

        def finish(message: RunBatch, group: Group, rows: item_results.Rows, places: list[int]) -> ItemResults:
            if message.operation == "score":
                return item_results.class_scores(group.options, rows["score"], activation)
            return pruned(message, group, rows, places, activation)

        return Parts(
            heads={**scores.heads, "keep": keep},
            rows={**scores.rows, "extract": Rows("passages")},
            reads={"extract": ("score", "keep")},
            finish=finish,
        )


def check_width(entry: ModelEntry, output: str, width: int) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE if the entry declares another width than `width` for `output`."""
    if (declared := entry.outputs.get(output)) != width:
        raise incompatible(f"{entry.id}: outputs.{output} is {declared}, the vectors of the model are {width} wide")


def _sequence(layers: Sequence[nn.Module]) -> nn.Module | None:
    return nn.Sequential(*layers) if layers else None


def _saved_layer(path: Path) -> nn.Linear:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if set(state) - {"bias"} != {"weight"}:
        raise incompatible(f"{path.name} contains {', '.join(sorted(state))}, expected weight and bias")
    return checkpoint.linear(state["weight"], state.get("bias"))


def _special(folder: Path, name: str) -> str:
    """Return the token `name` of tokenizer_config.json, or of special_tokens_map.json; empty if neither file has it."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(folder / file).get(name)
        if token:
            return token["content"] if isinstance(token, dict) else str(token)
    return ""


def _own_activation(config: Any) -> str:
    """Return the activation by the rules of transformers' text-classification pipeline."""
    if config.problem_type == "regression":
        return "identity"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def check_pair_prompt(folder: Path) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE for a prompt that sentence-transformers puts before each pair."""
    model = read_json(folder / MODEL_FILE)
    name = model.get("default_prompt_name")
    if name and (model.get("prompts") or {}).get(name, "-"):
        raise incompatible(f"{MODEL_FILE} puts the prompt {name!r} before pairs, which this adapter does not support")


def stored_activation(folder: Path, config: Any) -> str:
    """Return the activation in config_sentence_transformers.json, else in config.json, else sigmoid, as
    sentence-transformers does. Raises ModelLoadFailed INCOMPATIBLE for another activation than sigmoid or identity.
    """
    named = read_json(folder / "config_sentence_transformers.json").get("activation_fn")
    named = named or (getattr(config, "sentence_transformers", None) or {}).get("activation_fn")
    named = named or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise incompatible(f"the activation of the scores is {kind}, expected Sigmoid or Identity")
    return kind.lower()
