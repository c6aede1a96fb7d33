"""GLiREL, by the package `glirel`: relations between the entities that a request marks in its text.

    text ──► words ──► the words of each entity ──► the package's collator and model ──► scores [pairs, labels] ──► the
    best labels of each pair

A score depends on all labels and their order. The package's own `predict_relations` is not called: its input is words
instead of a text, and it drops the words beyond its limit, accepts entities that are not in the text, and fails without
entities.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, Result, labels_refused, scores_not_finite
from sie_adapter.loading.checkpoint import construction
from sie_adapter.loading.tokenizer import bare_tokenizer, read_tokenizer
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.messages import Mention
from sie_models_extract.extraction import (
    Extractor,
    check_encoder,
    compare,
    describe_backbone,
    fill,
    read_weights,
    tokenizer_fault,
)

_WORDS = re.compile(r"\w+(?:[-_]\w+)*|\S")  # the package splits a text by this pattern
_THRESHOLD, _TOP_K = 0.3, 10  # defaults of the options `threshold` and `top_k`

Span = tuple[int, int]  # range of words of an entity: index of its first word, index of its last word


@dataclass(frozen=True)
class GlirelTexts:
    """Words of each text, and the range of words of each of its entities."""

    labels: list[str]
    read: list[tuple[list[str], list[Span]] | InvalidInput]
    padding: int = 0


class GlirelModel(Extractor[GlirelTexts]):
    """Loaded GLiREL. `extract` may run on several threads at once; the model itself runs for one thread at a time.

    A result is `{"entities": [{text, label, score, start, end}], "relations": [{head, tail, relation, score}]}`. The
    entities are copied from the request, with a score of 1. For each pair (head, tail), the relations are the `top_k`
    best labels with a score above the threshold; all relations are sorted, best first. A text with fewer than two
    entities has no relations. The result is an InvalidInput if labels or entities cannot be used, or if an entity ends
    after the last word that the model reads. It is an InferenceFailed if the scores are not finite.

    `tokenizer`: tokenizer.json of the backbone. `max_tokens`: limit for a text together with labels and special tokens.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model = _built(folder, entry, entry.load, torch.device("cpu"))
        compare(model.state_dict(), read_weights(folder, entry), entry)
        backbone = model.token_rep_layer.bert_layer
        return tokenizer_fault(bare_tokenizer(backbone.tokenizer), backbone.model)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        self._model = _built(folder, entry, load, compute.device)
        fill(self._model, read_weights(folder, entry), entry)
        self._model.eval().requires_grad_(False)
        self._model.float().to(compute.device)
        backbone = self._model.token_rep_layer.bert_layer
        self._describe(self._model, backbone.model, backbone.tokenizer, compute)
        self.precision = "float32"  # always float32, because the package's LSTM and masks are float32
        self._reserved = {*self._counter.get_added_tokens_decoder()} - {backbone.tokenizer.unk_token_id}
        self._around = len(self._counter.encode("").ids)
        self.max_tokens = entry.max_tokens
        self._max_words: int = self._model.base_config.max_len
        # one pass at a time, because a pass calls the model's tokenizer, which is not thread-safe
        self._running = threading.Lock()

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> GlirelTexts:
        labels = list(dict.fromkeys(options.labels))
        prompt = self._prompt_tokens(labels)
        return GlirelTexts(labels, [self._read(text, options.mentions, prompt) for text in texts])

    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: GlirelTexts) -> list[Result]:
        threshold = options.threshold_or(_THRESHOLD)
        most = options.parameters.get("top_k", _TOP_K)
        results: list[Result] = []
        for text, read in zip(texts, prepared.read, strict=True):
            if isinstance(read, InvalidInput):
                results.append(read)
                continue
            scores = self._scores(*read, prepared.labels) if len(read[1]) > 1 else torch.zeros(0, len(prepared.labels))
            if not bool(torch.isfinite(scores).all()):
                results.append(scores_not_finite())
                continue
            relations = _relations(scores, prepared.labels, _named(text, options.mentions), threshold, int(most))
            results.append({"entities": _entities(text, options.mentions), "relations": relations})
        return results

    def _prompt_tokens(self, labels: list[str]) -> int:
        """Return the number of tokens of the labels and special tokens. Raises InvalidInput for unusable labels."""
        if not labels:
            raise labels_refused("expected at least one")
        model = self._model
        prompt = [part for label in labels for part in (model.rel_token, label)] + [model.sep_token]
        encoding = self._counter.encode(prompt, is_pretokenized=True, add_special_tokens=False)
        tokens = len(encoding.ids) + self._around
        if len({word for word in encoding.word_ids if word is not None}) < len(prompt):
            raise labels_refused("a label is empty after tokenisation")
        if sum(number in self._reserved for number in encoding.ids) != len(labels) + 1:
            raise labels_refused("a label contains a token that the model reserves")
        self._check_room(tokens)
        return tokens

    def _read(self, text: str, mentions: Sequence[Mention], prompt: int) -> tuple[list[str], list[Span]] | InvalidInput:
        """Return the words that the model reads, and the first and last word of each entity; an InvalidInput if an
        entity contains no word, or ends after the last word that the model reads.
        """
        split = [(match.group(), match.start(), match.end()) for match in _WORDS.finditer(text)]
        longest = self.max_tokens * 16
        words = [word[:longest] for word, _, _ in split[: self._max_words]]
        encoding = self._counter.encode(words, is_pretokenized=True, add_special_tokens=False)
        read = encoding.word_ids[: self.max_tokens - prompt]
        if len(read) < len(encoding.word_ids):
            words = words[: read[-1] if read else 0]
        starts, ends = [start for _, start, _ in split], [end for _, _, end in split]
        spans: list[Span] = []
        for index, mention in enumerate(mentions):
            first, last = bisect_right(ends, mention.start), bisect_left(starts, mention.end) - 1
            path = f"metadata.entities[{index}]"
            if last < first:
                return InvalidInput.at(path, "its range of the text contains no word")
            if last >= len(words):
                message = f"it ends after word {len(words)}, the last word that the model reads with these labels"
                return InvalidInput.at(path, message, reason="input_too_long", extras={"limit": len(words)})
            spans.append((first, last))
        return words, spans

    def _scores(self, words: list[str], spans: list[Span], labels: list[str]) -> Tensor:
        """Return scores [pairs, labels], float32 on the host, for the ordered pairs of two different entities."""
        entities = [[first, last, "", ""] for first, last in spans]
        with self._running:
            batch = self._model.collate_fn([{"tokenized_text": list(words), "ner": entities}], list(labels))
            scores: Tensor = self._model.compute_score(batch)[0][0]
        if scores.shape != (len(spans) * (len(spans) - 1), len(labels)):
            raise RuntimeError(
                f"expected scores [ordered pairs of entities, labels], got the shape {tuple(scores.shape)}"
            )
        return torch.sigmoid(scores.float()).cpu()


def _named(text: str, mentions: Sequence[Mention]) -> list[str]:
    return [text[mention.start : mention.end] for mention in mentions]


def _entities(text: str, mentions: Sequence[Mention]) -> list[dict[str, Any]]:
    return [
        {"text": name, "label": mention.label, "score": 1.0, "start": mention.start, "end": mention.end}
        for name, mention in zip(_named(text, mentions), mentions, strict=True)
    ]


def _relations(
    scores: Tensor, labels: list[str], names: list[str], threshold: float, most: int
) -> list[dict[str, Any]]:
    """Return the relations, best first; relations with equal scores are sorted by head, tail and label."""
    pairs = [(head, tail) for head in range(len(names)) for tail in range(len(names)) if head != tail]
    relations = []
    for (head, tail), row in zip(pairs, scores.tolist(), strict=True):
        ranked = sorted(range(len(labels)), key=lambda number: -row[number])[:most]
        relations += [(row[number], head, tail, number) for number in ranked if row[number] > threshold]
    return [
        {"head": names[head], "tail": names[tail], "relation": labels[number], "score": score}
        for score, head, tail, number in sorted(relations, key=lambda row: (-row[0], *row[1:]))
    ]


def _built(folder: Path, entry: ModelEntry, load: LoadOptions, device: torch.device) -> Any:
    """Build the package's model with random weights, which are later replaced by the weights of the checkpoint. The
    package's constructor needs a weight file of the backbone, so this function writes an empty weight file.
    """
    from glirel import GLiREL

    raw: dict[str, Any] = json.loads((folder / "glirel_config.json").read_text())
    if raw.get("fixed_relation_types") is not True:
        cause = "fixed_relation_types is not true: the package then orders labels differently in each process"
        raise incompatible(f"{entry.id}: {cause}")
    for name in ("add_entity_markers", "max_entity_pair_distance"):
        if raw.get(name):
            raise incompatible(
                f"{entry.id}: {name} is {raw[name]}, and with this setting the package returns no scores"
            )
    raw = {"max_entity_pair_distance": None, "encoder_config": None, **raw, "device": str(device)}
    describe_backbone(raw, "model_name", "encoder_config", folder, entry)
    encoder = raw.pop("encoder_config")
    check_encoder(encoder, entry, load)
    tokenizer = read_tokenizer(Path(raw["model_name"]))
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        # the package reads the tokenizer again, and another class would drop steps of tokenizer.json
        stated = Path(place) / "tokenizer_config.json"
        stated.write_text(json.dumps({**json.loads(stated.read_text()), "tokenizer_class": "TokenizersBackend"}))
        (Path(place) / "config.json").write_text(json.dumps(encoder))
        save_file({}, Path(place) / "model.safetensors", {"format": "pt"})
        with construction():
            return GLiREL(argparse.Namespace(**{**raw, "model_name": place}))
