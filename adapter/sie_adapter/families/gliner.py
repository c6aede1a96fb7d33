"""GLiNER: entities of the types that a request names, by the package `gliner`, for spans or tokens, with one encoder or
two.

    text ──► words that have tokens ──► windows of at most max_len words that overlap ──► passes of equal length
         ──► the package's collator, model and decoder ──► spans of words ──► joined over the windows ──► character
         offsets

The package's own `inference` is not called. It cuts long texts, counts a word without tokens as one, which shifts all
offsets after it, finds entities in the padding of a token-level batch, and encodes the labels of a bi-encoder anew for
each batch. Where none of that matters the results are equal.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import (
    ExtractOptions,
    Extractor,
    Result,
    bound_length,
    bytes_of,
    labels_refused,
    padding_of,
    passes,
    tokenizer_fault,
    windows,
)
from sie_adapter.families.gliner_folder import empty_gliner, load_gliner
from sie_adapter.loading.extraction_folders import TOKENS_PER_WORD
from sie_adapter.loading.tokenizer import bare_tokenizer, fault
from sie_contracts.errors import InferenceFailed, SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.wire.ipc import Rows

# padded, labels included: the states of all spans of a pass take some 0.2 MB a word at 512 wide
_TOKENS_PER_PASS = {"cpu": 2048}
_TOKENS_PER_PASS_ELSEWHERE = 8192
_CHARACTERS_PER_TOKEN = 16  # a longer word is cut for the model, which reads its first token
_WORDS_PER_COUNT = 8192
_MIN_ROOM = 8  # labels leave at least this part of a window to the text
# of a window at most, best first: the decoder compares each with all that stay, or all starts with all ends
_CANDIDATES = 2048
_FLAT_CANDIDATES = 8192  # few of those stay
_TOKEN_CANDIDATES = 1024
_LABELS_KEPT = 4096
_LABELS_PER_PASS = 64

Span = tuple[int, int, str, float]  # first and last word, label, score


@dataclass(frozen=True)
class _Words:
    """The words of one text that have tokens. `sizes`: tokens of each; `starts` and `ends`: characters of the text."""

    strings: list[str]
    sizes: list[int]
    starts: list[int]
    ends: list[int]


@dataclass(frozen=True)
class _Window:
    """Words `start` to `stop` of one text."""

    text: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Made:
    """Texts as the device reads them. `passes`: the windows of each, with what the package's collator makes of them, on
    the host.
    """

    labels: list[str]
    words: list[_Words]
    windows: list[_Window]
    passes: list[tuple[list[_Window], Any]]
    padding: int


@dataclass(frozen=True)
class _Request:
    threshold: float
    flat: bool
    multi_label: bool
    merge: bool
    label_vectors: Tensor | None  # [labels, width] of a bi-encoder


class GlinerModel(Extractor[_Made]):
    """A loaded GLiNER. `extract` may run on several threads at once.

    A result is `{"entities": [{text, label, score, start, end}]}` by start; offsets are code points of the text, `end`
    exclusive. A text without words has none. An error instead if its labels cannot be used (InvalidInput) or its scores
    are not finite.

    `tokenizer`: tokenizer.json of the backbone. `max_tokens`: of one window, labels and special tokens included; longer
    texts take several.
    """

    rows: ClassVar[dict[str, Rows]] = {"extract": Rows("raw")}

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """What a load would refuse of class, shapes and tokenizer, empty if nothing. Reads no values of weights and
        runs no code of the folder. Raises ModelLoadFailed for tensors that are not those of the class.
        """
        model = empty_gliner(folder, entry, entry.load)
        layers, processor = model.model.token_rep_layer, model.data_processor
        cause = tokenizer_fault(bare_tokenizer(processor.transformer_tokenizer), layers.bert_layer.model)
        if not cause and hasattr(layers, "labels_encoder"):
            cause = tokenizer_fault(bare_tokenizer(processor.labels_tokenizer), layers.labels_encoder.model)
        return cause

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Load from `folder`, offline. Raises ModelLoadFailed, and ImportError without the package."""
        self._device = compute.device
        self.precision = compute.precision
        self._gliner = load_gliner(folder, entry, load, compute)
        self._processor = self._gliner.data_processor
        self._is_token_level = self._gliner.config.span_mode == "token_level"
        self._collate = self._gliner.data_collator_class(
            self._gliner.config,
            data_processor=self._processor,
            return_tokens=True,
            return_id_to_classes=True,
            prepare_labels=False,
            # a bi-encoder's labels: not used here, but for tokens the package counts them
            prepare_entities=self._is_token_level,
        )
        layers = self._gliner.model.token_rep_layer
        encoder = layers.bert_layer.model
        bare = bare_tokenizer(self._processor.transformer_tokenizer)
        self.tokenizer: bytes = bare.to_str().encode()
        self._counter = bare
        self._max_words: int = self._gliner.config.max_len
        self.max_tokens = bound_length(
            self._processor.transformer_tokenizer, encoder, TOKENS_PER_WORD * self._max_words
        )
        self.vocabulary: int = encoder.get_input_embeddings().num_embeddings
        self.memory_bytes = bytes_of(self._gliner.model)
        self.attention = f"{encoder.config._attn_implementation} padded"
        # a fast tokenizer refuses a second caller while it is set to pad or cut otherwise
        self._tokenizing = threading.Lock()
        self._label_vectors: _LabelVectors | None = None
        if hasattr(layers, "labels_encoder"):
            bound_length(self._processor.labels_tokenizer, layers.labels_encoder.model, 512)
            rows = layers.labels_encoder.model.get_input_embeddings().num_embeddings
            if cause := fault(bare_tokenizer(self._processor.labels_tokenizer), rows):
                raise load_failed("CERTIFICATE", f"{entry.id}, of its labels: {cause}")
            self._label_vectors = _LabelVectors(
                layers, self._processor.labels_tokenizer, self._tokenizing, self._device
            )

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> _Made:
        labels = list(dict.fromkeys(options.labels))
        if not labels:
            raise labels_refused("expected at least one")
        prompt_tokens = self._prompt_tokens(labels)
        words = [self._words(text) for text in texts]
        room = self.max_tokens - prompt_tokens
        windows = [
            _Window(index, *bounds) for index, found in enumerate(words) for bounds in self._windows(found.sizes, room)
        ]
        lengths = [prompt_tokens + sum(words[window.text].sizes[window.start : window.stop]) for window in windows]
        chosen = list(passes(lengths, _TOKENS_PER_PASS.get(self._device.type, _TOKENS_PER_PASS_ELSEWHERE)))
        read = [[windows[index] for index in each] for each in chosen]
        collated = [
            (batch, self._collated([words[at.text].strings[at.start : at.stop] for at in batch], labels))
            for batch in read
        ]
        return _Made(labels, words, windows, collated, padding_of(lengths, chosen))

    def _collated(self, words: list[list[str]], labels: list[str]) -> Any:
        with self._tokenizing:
            return self._collate([{"tokenized_text": row, "ner": None} for row in words], entity_types=labels)

    def _extract(self, texts: Sequence[str], options: ExtractOptions, made: _Made) -> list[Result]:
        request = self._request(options, made.labels)
        spans: dict[_Window, list[Span] | SIEError] = {}
        for batch, collated in made.passes:
            words = [made.words[at.text].strings[at.start : at.stop] for at in batch]
            spans.update(zip(batch, self._spans(words, collated, request), strict=True))
        return [
            self._entities(text, found, [(at, spans[at]) for at in made.windows if at.text == index], request)
            for index, (text, found) in enumerate(zip(texts, made.words, strict=True))
        ]

    def _request(self, options: ExtractOptions, labels: list[str]) -> _Request:
        given = options.parameters
        vectors = self._label_vectors and self._label_vectors.of(labels, keep=given.get("precompute_labels", True))
        return _Request(
            label_vectors=vectors,
            threshold=given.get("threshold", 0.5) if options.threshold is None else options.threshold,
            flat=given.get("flat_ner", True),
            multi_label=given.get("multi_label", False),
            merge=given.get("merge_adjacent_entities", False),
        )

    def _prompt_tokens(self, labels: list[str]) -> int:
        """Tokens of a window that are not of the text."""
        prompt = [] if self._label_vectors else self._processor.prepare_inputs([[]], labels)[0][0]
        encoding = self._counter.encode(prompt, is_pretokenized=True)
        if len({word for word in encoding.word_ids if word is not None}) < len(prompt):
            raise labels_refused("one of them has no token")
        if prompt and encoding.ids.count(self._gliner.config.class_token_index) != len(labels):
            raise labels_refused(f"one of them holds {self._gliner.config.ent_token}, which the model reserves")
        if self.max_tokens - len(encoding.ids) < self.max_tokens // _MIN_ROOM:
            raise labels_refused(f"they take {len(encoding.ids)} of {self.max_tokens} tokens")
        return len(encoding.ids)

    def _words(self, text: str) -> _Words:
        """Words as the package splits them. One without tokens, such as a variation selector, the model
        could not see.
        """
        longest = _CHARACTERS_PER_TOKEN * self.max_tokens
        found = [(word[:longest], start, end) for word, start, end in self._processor.words_splitter(text)]
        sizes: list[int] = []
        for begin in range(0, len(found), _WORDS_PER_COUNT):
            some = [word for word, _, _ in found[begin : begin + _WORDS_PER_COUNT]]
            word_ids = self._counter.encode(some, is_pretokenized=True, add_special_tokens=False).word_ids
            sizes += np.bincount(np.array(word_ids, np.int64), minlength=len(some)).tolist()
        kept = [(word, size, start, end) for (word, start, end), size in zip(found, sizes, strict=True) if size]
        return _Words(
            [row[0] for row in kept], [row[1] for row in kept], [row[2] for row in kept], [row[3] for row in kept]
        )

    def _windows(self, sizes: list[int], room: int) -> Iterator[tuple[int, int]]:
        return windows(sizes, room, self._max_words, 2 * self._gliner.config.max_width)

    def _spans(self, words: list[list[str]], batch: Any, request: _Request) -> list[list[Span] | SIEError]:
        """One pass over what the collator made of the words. Positions in the result are of the given words."""
        inputs = {name: value.to(self._device) for name, value in batch.items() if isinstance(value, Tensor)}
        if request.label_vectors is not None:
            inputs = {name: value for name, value in inputs.items() if not name.startswith("labels_")}
            inputs["labels_embeds"] = request.label_vectors
        logits = self._gliner.model(**inputs, threshold=request.threshold).logits.float().cpu()
        return [
            self._decoded(scores[: len(row)], row, batch["id_to_classes"], request)
            for scores, row in zip(logits, words, strict=True)
        ]

    def _decoded(
        self, logits: Tensor, words: list[str], classes: dict[int, str], request: _Request
    ) -> list[Span] | SIEError:
        """`logits`: [words, widths, labels], or [words, labels, (start, end, inside)] of a token-level model."""
        if not bool(torch.isfinite(logits).all()):
            return InferenceFailed("the model's scores are not finite", reason="non_finite")
        threshold = request.threshold
        candidates = (logits[..., :2] if self._is_token_level else logits).flatten()
        few_stay = request.flat and not request.multi_label
        most = _TOKEN_CANDIDATES if self._is_token_level else _FLAT_CANDIDATES if few_stay else _CANDIDATES
        if len(candidates) > most:
            threshold = max(threshold, float(torch.sigmoid(candidates.topk(most).values[-1])))
        decoded: list[list[Span]] = self._gliner.decoder.decode(
            [words], classes, logits[None], flat_ner=request.flat, threshold=threshold, multi_label=request.multi_label
        )
        return decoded[0]

    def _entities(
        self, text: str, words: _Words, parts: list[tuple[_Window, list[Span] | SIEError]], request: _Request
    ) -> Result:
        found: list[tuple[_Window, list[Span]]] = []
        for window, spans in parts:
            if isinstance(spans, SIEError):
                return spans
            found.append(
                (
                    window,
                    [(first + window.start, last + window.start, label, score) for first, last, label, score in spans],
                )
            )
        entities: list[dict[str, Any]] = [
            {"text": "", "label": label, "score": score, "start": words.starts[first], "end": words.ends[last]}
            for first, last, label, score in self._joined(found, request)
        ]
        if request.merge:
            entities = _merged(entities)
        for entity in entities:
            entity["text"] = text[entity["start"] : entity["end"]]
        return {"entities": entities}

    def _joined(self, found: list[tuple[_Window, list[Span]]], request: _Request) -> list[Span]:
        """Spans of the whole text. Of an overlap each window gives the half that it sees more around; the decoder
        settles what crosses.
        """
        joined: list[Span] = []
        last: list[Span] = []
        begin = 0
        for index, (window, spans) in enumerate(found):
            end = (found[index + 1][0].start + window.stop) // 2 if index + 1 < len(found) else window.stop
            own = [span for span in spans if begin <= span[0] < end]
            if any(span[1] >= begin for span in last):
                settled = self._gliner.decoder.greedy_search(last + own, request.flat, multi_label=request.multi_label)
                last, own = (
                    [span for span in settled if span[0] < begin],
                    [span for span in settled if span[0] >= begin],
                )
            joined += last
            last, begin = own, end
        return joined + last


class _LabelVectors:
    """Vectors of labels by a bi-encoder's label encoder, the most recently used ones kept."""

    def __init__(self, layers: Any, tokenizer: Any, tokenizing: threading.Lock, device: torch.device) -> None:
        self._layers = layers
        self._tokenizer = tokenizer
        self._tokenizing = tokenizing
        self._device = device
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, labels: list[str], *, keep: bool) -> Tensor:
        """[labels, width], before any fusion with the text. With `keep` false all are computed and none is kept."""
        with self._lock:
            known = {label: self._kept[label] for label in labels if label in self._kept} if keep else {}
            missing = [label for label in labels if label not in known]
            for begin in range(0, len(missing), _LABELS_PER_PASS):
                some = missing[begin : begin + _LABELS_PER_PASS]
                known.update(zip(some, self._encode(some), strict=True))
            if keep:
                for label in labels:
                    self._kept[label] = known[label]
                    self._kept.move_to_end(label)
                while len(self._kept) > _LABELS_KEPT:
                    self._kept.popitem(last=False)
        return torch.stack([known[label] for label in labels])

    def _encode(self, labels: list[str]) -> list[Tensor]:
        with self._tokenizing:
            tokens = self._tokenizer(labels, return_tensors="pt", truncation=True, padding="longest")
        vectors: Tensor = self._layers.encode_labels(
            tokens["input_ids"].to(self._device), tokens["attention_mask"].to(self._device)
        )
        return [vector.clone() for vector in vectors]  # they are kept one by one, and none may keep the others alive


def _merged(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbours of one label with at most one character between them; the best score stays. Source: model card of
    NuNER_Zero.
    """
    merged: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    for entity in entities:
        before = last.get(entity["label"])
        if before is not None and 0 <= entity["start"] - before["end"] <= 1:
            before["end"] = entity["end"]
            before["score"] = max(before["score"], entity["score"])
            continue
        merged.append(entity)
        last[entity["label"]] = entity
    return merged
