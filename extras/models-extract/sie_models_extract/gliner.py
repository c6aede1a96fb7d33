"""GLiNER, by the package `gliner`: entities of the types in a request. Models score spans or tokens, with one or two
encoders.

    text ──► words that have tokens ──► windows of at most max_len words that overlap ──► padded passes
         ──► the package's collator, model and decoder ──► spans of words ──► joined over the windows ──► character
         offsets

The package's own `inference` is not called. It cuts long texts. It counts a word without tokens as a word, which shifts
all offsets after it. It finds entities in the padding of a token-level batch. It encodes the labels of a bi-encoder
again for each batch. Apart from these differences, the results here are equal to those of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, LabelVectors, Result, labels_refused, scores_not_finite
from sie_adapter.loading.tokenizer import bare_tokenizer, fault
from sie_contracts.errors import SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_models_extract.extraction import (
    Extractor,
    TextWindow,
    bound_length,
    own_ranges,
    padding_of,
    tokenizer_fault,
    windows,
    words_with_tokens,
)
from sie_models_extract.folders import TOKENS_PER_WORD
from sie_models_extract.gliner2_relations import WordPair
from sie_models_extract.gliner_folder import empty_gliner, load_gliner

# A word is cut after this number of characters times `max_tokens`. The cut changes no result, because the model reads
# only the first token of a word.
_CHARACTERS_PER_TOKEN = 16
# Largest number of candidate entities per window of a text; the decoder gets only the best ones. The decoder's time
# grows with the square of this number, because the decoder compares each candidate with all selected candidates. For a
# token-level model, the decoder also compares all starts with all ends.
_CANDIDATES = 2048
# limit in place of _CANDIDATES for requests whose entities have one label and must not overlap: the decoder then
# selects few candidates and makes few comparisons
_FLAT_CANDIDATES = 8192
_TOKEN_CANDIDATES = 1024  # limit in place of _CANDIDATES for a token-level model

Span = tuple[int, int, str, float]  # entity in a text: first word, last word, label, score


@dataclass(frozen=True)
class GlinerWords:
    """Words of a text that have tokens. `sizes`: tokens of each word. `starts`, `ends`: offsets of each word."""

    strings: list[str]
    sizes: list[int]
    starts: list[int]
    ends: list[int]

    def range(self, first: int, last: int) -> tuple[int, int]:
        return self.starts[first], self.ends[last]


@dataclass(frozen=True)
class GlinerTexts:
    """Tokenised texts. `passes`: for each pass its windows, and the result of the package's collator, on the host."""

    labels: list[str]
    words: list[GlinerWords]
    windows: list[TextWindow]
    passes: list[tuple[list[TextWindow], Any]]
    padding: int


@dataclass(frozen=True)
class GlinerRequest:
    """Options of a request. `label_vectors`: [labels, width]; None for a model without a separate label encoder."""

    threshold: float
    flat: bool
    multi_label: bool
    merge: bool
    label_vectors: Tensor | None = None
    relation_labels: tuple[str, ...] = ()
    relation_threshold: float = 0.0


@dataclass(frozen=True)
class WindowResult:
    """Entities of one window, and the relations between them. Positions are word indices in the window."""

    spans: list[Span]
    relations: list[WordPair] = field(default_factory=list)

    def moved(self, words: int) -> WindowResult:
        """Return a copy of this result with `words` added to each position."""
        return WindowResult(
            [(first + words, last + words, label, score) for first, last, label, score in self.spans],
            [
                WordPair((head[0] + words, head[1] + words), (tail[0] + words, tail[1] + words), label, score)
                for head, tail, label, score in self.relations
            ],
        )


class GlinerModel(Extractor[GlinerTexts]):
    """Loaded GLiNER. `extract` may run on several threads at once.

    A result is `{"entities": [{text, label, score, start, end}]}` in order of start. Offsets are code points of the
    text, `end` is exclusive. A text without words has no entities. The result is an InvalidInput if the labels cannot
    be used, and an InferenceFailed if the scores are not finite.

    `tokenizer`: tokenizer.json of the backbone. `max_tokens`: limit of one window, with labels and special tokens; a
    longer text is read in several windows.
    """

    # tokens per pass, on a CPU and elsewhere; at a width of 512, the states of the spans need about 0.2 MB per word
    pass_tokens = 512, 8192

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        model = empty_gliner(folder, entry, entry.load)
        layers, processor = model.model.token_rep_layer, model.data_processor
        cause = tokenizer_fault(bare_tokenizer(processor.transformer_tokenizer), layers.bert_layer.model)
        if not cause and hasattr(layers, "labels_encoder"):
            cause = tokenizer_fault(bare_tokenizer(processor.labels_tokenizer), layers.labels_encoder.model)
        return cause

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        self._gliner = load_gliner(folder, entry, load, compute)
        self._processor = self._gliner.data_processor
        self._decoder = self._gliner.decoder
        self._is_token_level = self._gliner.config.span_mode == "token_level"
        # the package's processor for token-level bi-encoders counts the labels, so it needs prepare_entities
        counted = {"prepare_entities": True} if self._is_token_level else {}
        self._collate = self._gliner.data_collator_class(
            self._gliner.config,
            data_processor=self._processor,
            return_tokens=True,
            return_id_to_classes=True,
            prepare_labels=False,
            **counted,
        )
        layers = self._gliner.model.token_rep_layer
        encoder = layers.bert_layer.model
        self._describe(self._gliner.model, encoder, self._processor.transformer_tokenizer, compute)
        self._max_words: int = self._gliner.config.max_len
        self.max_tokens = bound_length(
            self._processor.transformer_tokenizer, encoder, TOKENS_PER_WORD * self._max_words
        )
        # a fast tokenizer raises if a thread calls it while another thread changes its padding or truncation
        self._tokenizing = threading.Lock()
        self._label_vectors: LabelVectors | None = None
        if hasattr(layers, "labels_encoder"):
            bound_length(self._processor.labels_tokenizer, layers.labels_encoder.model, 512)
            rows = layers.labels_encoder.model.get_input_embeddings().num_embeddings
            if cause := fault(bare_tokenizer(self._processor.labels_tokenizer), rows):
                raise load_failed("CERTIFICATE", f"{entry.id}, encoder of labels: {cause}")
            self._label_vectors = LabelVectors(self._encode_labels)

    def _encode_labels(self, labels: Sequence[str]) -> Tensor:
        """Return the vectors of labels, [labels, width], before the model combines them with a text."""
        with self._tokenizing:
            tokens = self._processor.labels_tokenizer(
                list(labels), return_tensors="pt", truncation=True, padding="longest"
            )
        vectors: Tensor = self._gliner.model.token_rep_layer.encode_labels(
            tokens["input_ids"].to(self._device), tokens["attention_mask"].to(self._device)
        )
        return vectors

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> GlinerTexts:
        labels = list(dict.fromkeys(options.labels))
        if not labels:
            raise labels_refused("expected at least one")
        prompt_tokens = self._prompt_tokens(options)
        words = [self._words(text) for text in texts]
        room = self.max_tokens - prompt_tokens
        windows = [
            TextWindow(index, *bounds) for index, own in enumerate(words) for bounds in self._windows(own.sizes, room)
        ]
        lengths = [prompt_tokens + sum(words[window.text].sizes[window.start : window.stop]) for window in windows]
        chosen = self._passes(lengths, options)
        read = [[windows[index] for index in part] for part in chosen]
        collated = [
            (batch, self._collated([words[at.text].strings[at.start : at.stop] for at in batch], options))
            for batch in read
        ]
        return GlinerTexts(labels, words, windows, collated, padding_of(lengths, chosen))

    def _kinds(self, options: ExtractOptions) -> dict[str, list[str]]:
        """Return the labels, as keyword arguments of the package's collator."""
        return {"entity_types": list(dict.fromkeys(options.labels))}

    def _collated(self, words: list[list[str]], options: ExtractOptions) -> Any:
        with self._tokenizing:
            return self._collate([{"tokenized_text": row, "ner": None} for row in words], **self._kinds(options))

    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: GlinerTexts) -> list[Result]:
        request = self._request(options, prepared.labels)
        by_window: dict[TextWindow, WindowResult | SIEError] = {}
        for batch, collated in prepared.passes:
            words = [prepared.words[at.text].strings[at.start : at.stop] for at in batch]
            by_window.update(zip(batch, self._read(words, collated, request), strict=True))
        return [
            self._result(text, words, [(at, by_window[at]) for at in prepared.windows if at.text == index], request)
            for index, (text, words) in enumerate(zip(texts, prepared.words, strict=True))
        ]

    def _request(self, options: ExtractOptions, labels: list[str]) -> GlinerRequest:
        parameters = options.parameters
        vectors = self._label_vectors and self._label_vectors.encode(
            labels, keep=parameters.get("precompute_labels", True)
        )
        return GlinerRequest(
            label_vectors=vectors,
            threshold=options.threshold_or(0.5),
            flat=parameters.get("flat_ner", True),
            multi_label=parameters.get("multi_label", False),
            merge=parameters.get("merge_adjacent_entities", False),
        )

    def _prompt(self, options: ExtractOptions) -> tuple[list[str], dict[int, int]]:
        """Return the words before a text, and a map: special token id -> its number of occurrences in the words."""
        labels = self._kinds(options)["entity_types"]
        words = [] if self._label_vectors else self._processor.prepare_inputs([[]], labels)[0][0]
        return words, {self._gliner.config.class_token_index: len(labels)} if words else {}

    def _prompt_tokens(self, options: ExtractOptions) -> int:
        """Return the number of tokens that a window has besides its text. Raises InvalidInput for unusable labels."""
        prompt, marks = self._prompt(options)
        encoding = self._counter.encode(prompt, is_pretokenized=True)
        if len({word for word in encoding.word_ids if word is not None}) < len(prompt):
            raise labels_refused("a label is empty after tokenisation")
        for mark, count in marks.items():
            if encoding.ids.count(mark) != count:
                token = self._counter.id_to_token(mark)
                raise labels_refused(f"a label contains {token}, which the model reserves")
        self._check_room(len(encoding.ids))
        return len(encoding.ids)

    def _words(self, text: str) -> GlinerWords:
        longest = _CHARACTERS_PER_TOKEN * self.max_tokens
        _, sizes, words = words_with_tokens(self._counter, list(self._processor.words_splitter(text)), longest)
        return GlinerWords(
            [word[:longest] for word, _, _ in words],
            sizes.tolist(),
            [start for _, start, _ in words],
            [end for _, _, end in words],
        )

    def _windows(self, sizes: list[int], room: int) -> Iterator[tuple[int, int]]:
        return windows(sizes, room, self._max_words, 2 * self._gliner.config.max_width)

    def _read(self, words: list[list[str]], batch: Any, request: GlinerRequest) -> list[WindowResult | SIEError]:
        """Run one pass over the collator's batch. Return the result of each row. Positions in a result are indices of
        the row's words.
        """
        inputs = self._inputs(batch)
        if request.label_vectors is not None:
            inputs = {name: value for name, value in inputs.items() if not name.startswith("labels_")}
            inputs["labels_embeds"] = request.label_vectors
        logits = self._gliner.model(**inputs, threshold=request.threshold).logits
        return self._window_results(logits, words, batch, request)

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        return {name: value.to(self._device) for name, value in batch.items() if isinstance(value, Tensor)}

    def _window_results(
        self, logits: Tensor, words: list[list[str]], batch: Any, request: GlinerRequest
    ) -> list[WindowResult | SIEError]:
        return [
            self._decoded(scores[: len(row)], row, batch["id_to_classes"], request)
            for scores, row in zip(logits.float().cpu(), words, strict=True)
        ]

    def _decoded(
        self, logits: Tensor, words: list[str], classes: dict[int, str], request: GlinerRequest
    ) -> WindowResult | SIEError:
        """Decode a window's logits [words, widths, labels], or token-level [words, labels, (start, end, inside)]."""
        if not bool(torch.isfinite(logits).all()):
            return scores_not_finite()
        threshold = request.threshold
        candidates = (logits[..., :2] if self._is_token_level else logits).flatten()
        few_stay = request.flat and not request.multi_label
        most = _TOKEN_CANDIDATES if self._is_token_level else _FLAT_CANDIDATES if few_stay else _CANDIDATES
        if len(candidates) > most:
            threshold = max(threshold, float(torch.sigmoid(candidates.topk(most).values[-1])))
        decoded: list[list[Span]] = self._decoder.decode(
            [words], classes, logits[None], flat_ner=request.flat, threshold=threshold, multi_label=request.multi_label
        )
        return WindowResult(decoded[0])

    def _result(
        self,
        text: str,
        words: GlinerWords,
        parts: list[tuple[TextWindow, WindowResult | SIEError]],
        request: GlinerRequest,
    ) -> Result:
        by_window: list[tuple[TextWindow, WindowResult]] = []
        for window, part in parts:
            if isinstance(part, SIEError):
                return part
            by_window.append((window, part.moved(window.start)))
        spans = self._joined([(window, part.spans) for window, part in by_window], request)
        entities: list[dict[str, Any]] = [
            {"text": "", "label": label, "score": score, "start": words.starts[first], "end": words.ends[last]}
            for first, last, label, score in spans
        ]
        if request.merge:
            entities = _merged(entities)
        for entity in entities:
            entity["text"] = text[entity["start"] : entity["end"]]
        return {"entities": entities}

    def _joined(self, by_window: list[tuple[TextWindow, list[Span]]], request: GlinerRequest) -> list[Span]:
        """Join the entities of a text's windows. If entities of two windows overlap, the package's decoder selects."""
        joined: list[Span] = []
        last: list[Span] = []
        ranges = own_ranges([window for window, _ in by_window])
        for (_, spans), (begin, end) in zip(by_window, ranges, strict=True):
            own = [span for span in spans if begin <= span[0] < end]
            if any(span[1] >= begin for span in last):
                settled = self._decoder.greedy_search(last + own, request.flat, multi_label=request.multi_label)
                last = [span for span in settled if span[0] < begin]
                own = [span for span in settled if span[0] >= begin]
            joined += last
            last = own
        return joined + last


def _merged(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring entities of one label with at most one character between them. A joined entity has the higher
    of both scores. Source: model card of NuNER_Zero.
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
