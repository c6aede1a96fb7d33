"""GLiNER2, run by the package `gliner2`. A model finds entities and relations of the types that a request names. If the
entry has the output `classifications`, the model scores the classes of a request, and finds no entities. A model scores
all spans of words up to a width, or has the boundary architecture (`gliner2_boundary.py`), which supports no relations
and no records here.

    text ──► words that have tokens ──► windows that overlap, each after the prompt with all labels ──► padded
         passes ──► the package's model ──► scores [labels, words, widths] ──► the best spans of each label, over all
         windows ──► character offsets

The package's own `batch_extract` is not called. It runs a text of any length in one pass. It finds entities in the full
stop that it adds to a text. For a word without tokens it uses the token that follows. It keeps the words of texts in
memory. Apart from these differences, the results here are equal to those of the package.

Classes share a prompt that begins with the name of their task (parameter `task`). Only the first window of a text is
classified.

Relations share the prompt of the entities (`gliner2_relations.py`).

A record of a schema becomes a structure of the package: its properties are the labels, and the model predicts how many
objects a window has. Allowed values of a property (choices) are words before the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.engine.device import Compute
from sie_adapter.engine.schema_answers import LEAST
from sie_adapter.families.extraction import ExtractOptions, Result, labels_refused, scores_not_finite
from sie_adapter.loading.checkpoint import construction, for_inference
from sie_adapter.loading.tokenizer import bare_tokenizer, read_tokenizer
from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.models.output_schemas import TextRecord
from sie_models_extract.extraction import (
    Extractor,
    TextWindow,
    absolute_positions,
    check_encoder,
    classified,
    compare,
    fill,
    own_ranges,
    padding_of,
    read_weights,
    tokenizer_fault,
    tokens_of,
    windows,
    words_with_tokens,
)
from sie_models_extract.gliner2_boundary import BoundedSpan, bounded_entities, window_candidates
from sie_models_extract.gliner2_records import FieldCandidates, joined_objects, window_objects, words_of_choices
from sie_models_extract.gliner2_relations import FIELDS, WordPair, relations_of_text, window_relations
from sie_store.folder_files import read_json

_CHARACTERS_PER_TOKEN = 16  # a word is cut after this number of characters times `max_tokens`, before it is tokenised
_CANDIDATES = 16384  # number of candidate entities kept per window, best first; all with the lowest kept score stay
_ENDS = (".", "!", "?")  # if a text ends with none of these characters, the package adds a full stop
_COUNTING = ("count_lstm", "count_lstm_moe", "count_lstm_v2")
T = TypeVar("T")
Output = TypeVar("Output")
# For each task of a window: its logits [objects, labels, words, widths], -inf for spans that end after the last word;
# None if the model predicts no object.
_Logits = Sequence[Tensor | None]
Kind = Literal["entities", "relations", "classifications", "json_structures"]
_SHARED_WORDS = 16  # smallest overlap of two windows, in words, for the boundary architecture: its spans have any width
_TASK = "category"  # name of the classification task if neither the request nor the entry names one


@dataclass(frozen=True)
class _Gliner2Words:
    """Words of one text that have tokens. Word i has the tokens `ids[places[i]:places[i + 1]]` and the characters
    `starts[i]` to `ends[i]`. `closed`: True for a word that ends with a punctuation mark of _ENDS. `is_stopped`: True
    if the package added a full stop after the text as a separate word.
    """

    ids: NDArray[np.int32]
    places: NDArray[np.int64]
    starts: list[int]
    ends: list[int]
    closed: list[bool]
    is_stopped: bool


@dataclass(frozen=True)
class _Gliner2Prompt:
    """Tokens before each text. A prompt has one task, or with relations a task for all entity labels and a task for
    each relation. `kinds`: the package's name of each task. `words`: each task as words, for example ( [P] entities (
    [E] city [E] person ) ). `marks`: for each task the positions of the words [P] and [E], whose states represent the
    task and the labels. `owners`: for each token of the prompt, the indices of its word and its task. `before`: the
    tokens of the words with choices (only for a record), which precede the words of a text. `choices`: for each
    property of the record the positions of its choices among these words.
    """

    kinds: list[Kind]
    ids: list[int]
    marks: list[list[int]]
    words: list[list[str]]
    owners: list[tuple[int, int]]
    before: list[list[int]]
    choices: list[list[int]]

    @property
    def is_classification(self) -> bool:
        return self.kinds[0] == "classifications"

    @property
    def tokens(self) -> int:
        return len(self.ids) + sum(map(len, self.before))


@dataclass(frozen=True)
class _Spans:
    """Spans of words: arrays of their first words, last words, labels and scores, ordered by label and position."""

    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]


class _WindowAnswer(NamedTuple):
    spans: _Spans
    pairs: list[WordPair]


@dataclass(frozen=True)
class Gliner2Texts:
    """Tokenised texts. `passes`: for each forward pass, its windows and the batch of the package, in host memory.
    `errors`: index of a text that cannot run -> its error.
    """

    labels: list[str]
    relations: list[str]
    prompt: _Gliner2Prompt
    words: list[_Gliner2Words]
    errors: dict[int, SIEError]
    passes: list[tuple[list[TextWindow], Any]]
    padding: int


class Gliner2Model(Extractor[Gliner2Texts]):
    """Loaded GLiNER2. `extract` may run on several threads at once.

    A result is `{"entities": [{text, label, score, start, end}]}` in order of start and end. Offsets are code points of
    the text, `end` is exclusive. Entities of two labels may overlap. Entities of one label may overlap only with the
    boundary architecture, by the model's overlap policy. A text without words has no entities. The result is an
    InvalidInput if the labels or the task cannot be used, or if the text contains a token that the model reserves. It
    is an InferenceFailed if a state or score is not finite. With the output `classifications`, a result is that of
    GliclassModel. With the output `relations` and `relation_labels`, a result has `relations` [{head, tail, relation,
    score}], best first; both ends of a relation are in the same window of the text.

    `tokenizer`: tokenizer.json of the backbone. `max_tokens`: limit of one window, with labels; longer texts are read
    in several windows.
    """

    # Largest number of tokens per pass: on a CPU, on other devices. The states of the spans need memory: at a width of
    # 768, about 0.1 MB per word.
    pass_tokens = 512, 16384

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        weights = read_weights(folder, entry)
        with torch.device("meta"):
            model = _built(folder, entry, entry.load, weights, eager=False)
        compare(model.state_dict(), weights, entry)
        return tokenizer_fault(bare_tokenizer(model.processor.tokenizer), model.encoder)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        weights = read_weights(folder, entry)
        self._model = _built(folder, entry, load, weights, eager=compute.backend == "eager")
        fill(self._model, weights, entry)
        for_inference(self._model, compute)
        self._classifies = "classifications" in entry.outputs
        if self._classifies and "entities" in entry.outputs:
            raise incompatible(f"{entry.id}: outputs has entities and classifications, expected one")
        self._is_boundary = self._model.architecture == "boundary"
        if self._is_boundary and "relations" in entry.outputs:
            raise incompatible(f"{entry.id}: relations are not supported for a model of the boundary architecture")
        settings = self._model.boundary_settings if self._is_boundary else None
        self._temperature: float = settings.classification_temperature if settings else 1.0
        self._shared_words = _SHARED_WORDS if settings else 2 * self._model.max_width
        self._processor = self._model.processor
        encoder = self._model.encoder
        self._describe(self._model, encoder, self._processor.tokenizer, compute)
        unknown = self._processor.tokenizer.unk_token_id
        self._reserved = np.array([number for number in self._counter.get_added_tokens_decoder() if number != unknown])
        self._stop = self._ids(_ENDS[:1])[0].tolist()
        self.max_tokens = min(entry.max_tokens, absolute_positions(encoder) or entry.max_tokens)

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> Gliner2Texts:
        labels = list(dict.fromkeys(options.labels))
        relations = [] if options.part else list(dict.fromkeys(options.parameters.get("relation_labels", ())))
        prompt = self._prompt(labels, relations, options)
        words = [self._words(text) for text in texts]
        errors: dict[int, SIEError] = {
            index: InvalidInput("text: it contains a token that the model reserves", reason="reserved_token")
            for index, own in enumerate(words)
            if np.isin(own.ids, self._reserved).any()
        }
        room = self.max_tokens - prompt.tokens - len(self._stop)
        read = [
            TextWindow(index, *bounds)
            for index, own in enumerate(words)
            if index not in errors
            for number, bounds in enumerate(windows(np.diff(own.places).tolist(), room, room, self._shared_words))
            if number == 0 or not prompt.is_classification
        ]
        records = [self._record(prompt, words[at.text], at, room) for at in read]
        lengths = [len(record.input_ids) for record in records]
        chosen = self._passes(lengths, options)
        batches = [
            ([read[index] for index in part], self._processor._pad_batch([records[index] for index in part]))
            for part in chosen
        ]
        return Gliner2Texts(labels, relations, prompt, words, errors, batches, padding_of(lengths, chosen))

    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: Gliner2Texts) -> list[Result]:
        if prepared.prompt.is_classification:
            return self._classes(texts, options, prepared)
        if self._is_boundary:
            return self._bounded_entities(texts, options, prepared)
        if isinstance(options.part, TextRecord):
            return self._records(texts, options, options.part, prepared)
        least, by_label = options.threshold_or(LEAST), options.parameters.get("label_thresholds", {})
        thresholds = [by_label.get(label, least) for label in prepared.labels]
        least_relation = float(options.parameters.get("relation_threshold", least))
        first = 1 if prepared.labels else 0  # index of the first relation among the tasks

        def read(logits: _Logits, at: TextWindow) -> _WindowAnswer | SIEError:
            spans = _above(logits[0] if first else None, at, thresholds)
            pairs = window_relations(zip(prepared.relations, logits[first:], strict=True), at, least_relation)
            if isinstance(spans, SIEError):
                return spans
            return pairs if isinstance(pairs, SIEError) else _WindowAnswer(spans, pairs)

        by_text, errors = self._by_text(prepared, self._logits, read)
        results: list[Result] = []
        for index, (text, words, answers) in enumerate(zip(texts, prepared.words, by_text, strict=True)):
            result: dict[str, Any] = {}
            if first:
                spans = {at: answer.spans for at, answer in answers.items()}
                result["entities"] = _entities(text, words, spans, prepared.labels)
            if prepared.relations:
                pairs = [pair for answer in answers.values() for pair in answer.pairs]
                result["relations"] = relations_of_text(text, words, pairs)
            results.append(errors.get(index, result))
        return results

    def _classes(self, texts: Sequence[str], options: ExtractOptions, prepared: Gliner2Texts) -> list[Result]:
        results: list[Result] = [prepared.errors.get(index, {"classifications": []}) for index in range(len(texts))]
        for read, batch in prepared.passes:
            for at, (_, labels) in zip(read, self._label_states(batch), strict=True):
                logits = self._model.classifier(labels).squeeze(-1) / self._temperature
                results[at.text] = classified(logits.float().cpu(), prepared.labels, options)
        return results

    def _bounded_entities(self, texts: Sequence[str], options: ExtractOptions, prepared: Gliner2Texts) -> list[Result]:
        least, by_label = options.threshold_or(LEAST), options.parameters.get("label_thresholds", {})
        thresholds = [by_label.get(label, least) for label in prepared.labels]

        def candidates(states: tuple[Tensor, Tensor], at: TextWindow) -> list[BoundedSpan] | SIEError:
            return window_candidates(self._model, *states, at, thresholds)

        by_text, errors = self._by_text(prepared, self._label_states, candidates)
        policy = self._model.boundary_settings.overlap_policy
        return [
            errors[index]
            if index in errors
            else {"entities": bounded_entities(text, words, own, prepared.labels, policy)}
            for index, (text, words, own) in enumerate(zip(texts, prepared.words, by_text, strict=True))
        ]

    def _records(
        self, texts: Sequence[str], options: ExtractOptions, record: TextRecord, prepared: Gliner2Texts
    ) -> list[Result]:
        least, by_path = options.threshold_or(LEAST), options.parameters.get("label_thresholds", {})
        thresholds = [by_path.get(".".join((*record.path, text_field.name)), least) for text_field in record.fields]
        choices, before = prepared.prompt.choices, len(prepared.prompt.before)

        def objects(logits: _Logits, at: TextWindow) -> list[FieldCandidates] | SIEError:
            words = prepared.words[at.text]
            return window_objects(logits[0], texts[at.text], record, choices, before, words, at, thresholds)

        by_text, errors = self._by_text(prepared, self._logits, objects)
        return [
            errors[index] if index in errors else {"objects_of_record": joined_objects(record, words, by_window)}
            for index, (words, by_window) in enumerate(zip(prepared.words, by_text, strict=True))
        ]

    def _by_text(
        self,
        prepared: Gliner2Texts,
        run: Callable[[Any], Sequence[Output | SIEError]],
        convert: Callable[[Output, TextWindow], T | SIEError],
    ) -> tuple[list[dict[TextWindow, T]], dict[int, SIEError]]:
        """Run all passes. `run`: function that returns the output of each window of a batch. Return for each text the
        results of `convert` for its windows, and a map: index of a text -> its error.
        """
        errors = dict(prepared.errors)
        by_text: list[dict[TextWindow, T]] = [{} for _ in prepared.words]
        for read, batch in prepared.passes:
            for at, output in zip(read, run(batch), strict=True):
                result = output if isinstance(output, SIEError) else convert(output, at)
                if isinstance(result, SIEError):
                    errors[at.text] = result
                else:
                    by_text[at.text][at] = result
        return by_text, errors

    def _prompt(self, labels: list[str], relations: list[str], options: ExtractOptions) -> _Gliner2Prompt:
        """Return the prompt of a record, or of these labels and relations. Raises InvalidInput for unusable labels or
        relations, and for a record if the model has the boundary architecture.
        """
        processor = self._processor
        if isinstance(options.part, TextRecord):
            if self._is_boundary:
                message = "a GLiNER2 of the boundary architecture supports only enums and booleans"
                raise InvalidInput.at("output_schema", message, reason="unsupported_output")
            return self._record_prompt(options.part)
        if not labels and not relations:
            raise labels_refused("expected at least one")
        if self._classifies or options.part is not None:
            task = str(options.parameters.get("task", _TASK))
            words = processor._transform_schema(task, labels, processor.L_TOKEN, example_mode="none")
            return self._prompt_of_tasks([("classifications", words)])
        tasks: list[tuple[Kind, list[str]]] = []
        if labels:
            words = processor._transform_schema("entities", labels, processor.E_TOKEN, example_mode="none")
            tasks.append(("entities", words))
        tasks += [
            ("relations", processor._transform_schema(label, list(FIELDS), processor.R_TOKEN)) for label in relations
        ]
        return self._prompt_of_tasks(tasks)

    def _record_prompt(self, record: TextRecord) -> _Gliner2Prompt:
        processor = self._processor
        described = {text_field.name: text_field.description for text_field in record.fields if text_field.description}
        names = [text_field.name for text_field in record.fields]
        words = processor._transform_schema(
            record.name, names, processor.C_TOKEN, label_descriptions=described, example_mode="descriptions"
        )
        before, choices = words_of_choices(processor, record)
        return self._prompt_of_tasks([("json_structures", words)], before, choices, descriptions=len(described))

    def _prompt_of_tasks(
        self,
        tasks: Sequence[tuple[Kind, list[str]]],
        before: Sequence[str] = (),
        choices: Sequence[list[int]] = (),
        descriptions: int = 0,
    ) -> _Gliner2Prompt:
        """Return the prompt. `descriptions`: the number of descriptions in the prompt; a special token precedes each.
        Raises InvalidInput for an unusable label or name of a task.
        """
        processor = self._processor
        ends = [processor.SEP_STRUCT] * (len(tasks) - 1) + [processor.SEP_TEXT]
        sizes = [len(words) + 1 for _, words in tasks]
        parts = self._ids([word for (_, words), end in zip(tasks, ends, strict=True) for word in (*words, end)])
        words_before = self._ids(before) if before else []
        places = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).tolist()
        marks: list[list[int]] = []
        for (kind, words), first in zip(tasks, np.cumsum([0, *sizes]).tolist(), strict=False):
            # Words of a task with entities: ( [P] entities ( [E] label .. ) ). In place of [E], a task with classes has
            # [L], a task with properties has [C], and a task with head and tail has [R].
            at = [first + 1, *range(first + 4, first + len(words) - 2, 2)]
            named = [*(parts[place + 1] for place in at[1:]), *words_before]
            self._check_task(kind, parts[first + 2], named, descriptions)
            marks.append([places[place] for place in at])
        self._check_room(places[-1] + sum(map(len, words_before)))
        owners = [(place, task) for place, task in enumerate(np.repeat(np.arange(len(tasks)), sizes).tolist())]
        return _Gliner2Prompt(
            [kind for kind, _ in tasks],
            np.concatenate(parts).tolist(),
            marks,
            [words for _, words in tasks],
            [owner for owner, part in zip(owners, parts, strict=True) for _ in part],
            [ids.tolist() for ids in words_before],
            list(choices),
        )

    def _check_task(
        self, kind: Kind, name: NDArray[np.int32], labels: Sequence[NDArray[np.int32]], descriptions: int
    ) -> None:
        """Raise InvalidInput if the name of a task, or one of the task's labels, cannot be used."""
        if not all(map(len, labels)):
            raise labels_refused("a label is empty after tokenisation")
        if any(np.isin(ids, self._reserved).any() for ids in labels):
            raise labels_refused("a label contains a token that the model reserves")
        mark = self._counter.token_to_id(self._processor.DESC_TOKEN)
        if len(name) and name[np.isin(name, self._reserved)].tolist() == [mark] * descriptions:
            return
        fault = "is empty after tokenisation, or has a token that the model reserves"
        if kind == "relations":
            raise InvalidInput.at("relation_labels", f"one of them {fault}", reason="labels")
        raise InvalidInput.at("task", f"it {fault}")

    def _ids(self, words: Sequence[str]) -> list[NDArray[np.int32]]:
        ids, sizes = tokens_of(self._counter, words)
        return np.split(ids, np.cumsum(sizes)[:-1])

    def _words(self, text: str) -> _Gliner2Words:
        """Split a text into words in the same way as the package, in lower case."""
        longest = _CHARACTERS_PER_TOKEN * self.max_tokens
        split = list(self._processor.word_splitter(self._processor._normalize_text(text), lower=True))
        # The package adds a full stop to the text. A full stop that is a separate word is dropped here. If the full
        # stop belongs to the last word, such as a URL, the end of this word is clipped to the end of the text.
        inside = [(word, start, min(end, len(text))) for word, start, end in split if start < len(text)]
        ids, sizes, words = words_with_tokens(self._counter, inside, longest)
        return _Gliner2Words(
            ids=ids,
            places=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
            starts=[start for _, start, _ in words],
            ends=[end for _, _, end in words],
            closed=[word.endswith(_ENDS) for word, _, _ in words],
            is_stopped=len(split) > len(inside),
        )

    def _record(self, prompt: _Gliner2Prompt, words: _Gliner2Words, at: TextWindow, room: int) -> Any:
        """Return one window as a TransformedRecord of the package. A word that is too long for the model is cut."""
        from gliner2.processor import TransformedRecord

        first = words.places[at.start]
        before = list(itertools.chain.from_iterable(prompt.before))
        places = np.cumsum([0, *map(len, prompt.before)])[:-1].tolist()
        ids = before + words.ids[first : words.places[at.stop]][:room].tolist()
        places += (words.places[at.start : at.stop] - first + len(before)).tolist()
        is_last = at.stop == len(words.starts)
        if words.is_stopped if is_last else not words.closed[at.stop - 1]:
            places.append(len(ids))
            ids += self._stop
        mapped: list[tuple[str, int, int]] = []
        if self._processor.token_pooling in ("mean", "max"):
            sizes = np.diff([*places, len(ids)])
            last = prompt.owners[-1][0]  # index of the prompt's last word
            owners = np.repeat(np.arange(len(places)) + last + 1, sizes).tolist()
            mapped = [("schema" if owner < last else "sep", owner, task) for owner, task in prompt.owners]
            mapped += [("text", owner, len(prompt.kinds)) for owner in owners]
        return TransformedRecord(
            input_ids=prompt.ids + ids,
            mapped_indices=mapped,
            schema_tokens_list=prompt.words,
            text_tokens=[],
            structure_labels=[[1, []] for _ in prompt.kinds],
            task_types=prompt.kinds,
            start_token_idx=[],
            end_token_idx=[],
            text="",
            schema={},
            text_word_first_positions=[len(prompt.ids) + place for place in places],
            schema_special_positions=prompt.marks,
        )

    def _label_states(self, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """Return for each window the states of its words [words, width], and of the labels [labels, width]."""
        batch = batch.to(self._device)
        states = self._model.encode_tokens(batch)
        words, marks = self._processor.extract_embeddings_from_batch(states, batch.input_ids, batch)
        return [(own, torch.stack(list(tasks[0][1:]))) for own, tasks in zip(words, marks, strict=True)]

    def _logits(self, batch: Any) -> list[_Logits | SIEError]:
        """Return the logits of each window, or an error if a state of the window is not finite."""
        model, batch = self._model, batch.to(self._device)
        states = model.encode_tokens(batch)
        words, marks = self._processor.extract_embeddings_from_batch(states, batch.input_ids, batch)
        logits, _ = model._compute_direct_span_logits_batched(batch, words, marks)
        is_finite = (torch.isfinite(states).all(-1) | (batch.attention_mask == 0)).all(1).tolist()
        return [row if finite else scores_not_finite() for row, finite in zip(logits, is_finite, strict=True)]


def _above(logits: Tensor | None, at: TextWindow, thresholds: Sequence[float]) -> _Spans | SIEError:
    """Return the spans whose score reaches the threshold of their label. If more than _CANDIDATES spans reach it,
    return the best _CANDIDATES, and further spans only if their score equals the lowest of these. `logits`: [1, labels,
    words, widths]; `words` may include an added full stop after the words of the window.
    """
    if logits is None:
        none = np.zeros(0, np.int64)
        return _Spans(none, none, none, np.zeros(0))
    scores = torch.sigmoid(logits[0].float())
    if bool((torch.isnan(logits) | torch.isposinf(logits)).any()):
        return scores_not_finite()
    lasts = sum(torch.meshgrid(*(torch.arange(size, device=scores.device) for size in scores.shape[1:]), indexing="ij"))
    scores = torch.where(lasts < at.stop - at.start, scores, -1.0)
    least = torch.tensor(thresholds, device=scores.device).clamp_min(0.0)[:, None, None]
    if (scores >= least).sum() > _CANDIDATES:
        least = least.clamp_min(
            float(torch.where(scores >= least, scores, -1.0).flatten().topk(_CANDIDATES).values[-1])
        )
    places = (scores >= least).nonzero()
    values = scores[tuple(places.T)].double().cpu().numpy()
    labels, firsts, widths = places.cpu().numpy().T
    return _Spans(firsts + at.start, firsts + widths + at.start, labels, values)


def _entities(
    text: str, words: _Gliner2Words, by_window: dict[TextWindow, _Spans], labels: list[str]
) -> list[dict[str, Any]]:
    if not by_window:
        return []
    order = sorted(by_window, key=lambda at: at.start)
    own = []
    for at, (begin, end) in zip(order, own_ranges(order), strict=True):
        spans = by_window[at]
        rows = np.stack([spans.firsts, spans.lasts, spans.labels])
        inside = (spans.firsts >= begin) & (spans.firsts < end)
        own.append((rows[:, inside], spans.scores[inside]))
    firsts, lasts, kinds = np.concatenate([rows for rows, _ in own], axis=1)
    scores = np.concatenate([some for _, some in own])
    chosen: list[tuple[int, int, int, float]] = []
    occupied, kind = bytearray(), -1
    for index in np.lexsort((-scores, kinds)).tolist():
        if kinds[index] != kind:
            occupied, kind = bytearray(len(words.starts)), int(kinds[index])
        first, stop = int(firsts[index]), int(lasts[index]) + 1
        if occupied.find(1, first, stop) < 0:
            occupied[first:stop] = b"\1" * (stop - first)
            chosen.append((words.starts[first], words.ends[stop - 1], kind, float(scores[index])))
    return [
        {"text": text[start:end], "label": labels[kind], "score": score, "start": start, "end": end}
        for start, end, kind, score in sorted(chosen)
    ]


def _built(folder: Path, entry: ModelEntry, load: LoadOptions, weights: dict[str, Tensor], *, eager: bool) -> Any:
    """Build the package's model with random weights, and with as many embeddings as `weights` has. The package itself
    would import code that the encoder's configuration names, and create random embeddings for tokens without weights.
    """
    from gliner2.configuration import ExtractorConfig
    from gliner2.inference.engine import BoundaryExtractor, SpanExtractor
    from gliner2.processor import SchemaTransformer

    raw = read_json(folder / "config.json")
    kinds = {"span": SpanExtractor, "boundary": BoundaryExtractor}
    if (kind := raw.get("architecture") or "span") not in kinds:
        raise incompatible(f"{entry.id} has the architecture {kind}, the family gliner2 needs {' or '.join(kinds)}")
    if (counting := raw.get("counting_layer") or _COUNTING[0]) not in _COUNTING:
        raise incompatible(f"{entry.id}: the package gliner2 has no counting layer {counting}")
    encoder = read_json(folder / "encoder_config" / "config.json")
    if not encoder:
        raise load_failed("NOT_FOUND", f"{entry.id}: its folder has no encoder_config/config.json")
    check_encoder(encoder, entry, load)
    tokenizer = _tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SchemaTransformer.SPECIAL_TOKENS})
    described = CONFIG_MAPPING[encoder.pop("model_type", "deberta-v2")].from_dict(
        {**encoder, "vocab_size": len(tokenizer)}
    )
    config = ExtractorConfig.from_dict(raw)
    # sdpa is set explicitly, because the package would fall back to eager
    config.attn_implementation = "eager" if eager else "sdpa"
    with construction():
        model = kinds[kind](config, encoder_config=described, tokenizer=tokenizer, use_flashdeberta=False)
    table = model.encoder.get_input_embeddings()
    [name] = [name for name, parameter in model.named_parameters() if parameter is table.weight]
    # Give the model's table of embeddings as many rows as the weights have. More rows than tokens are normal; if there
    # are fewer rows than tokens, `fault_of_files` reports this.
    if name in weights and len(weights[name]) != len(table.weight):
        rows = nn.Embedding(len(weights[name]), table.embedding_dim, padding_idx=table.padding_idx)
        model.encoder.set_input_embeddings(rows)
    return model


def _tokenizer(folder: Path) -> Any:
    """Read the tokenizer of `folder`. Older folders have a list as `extra_special_tokens`, where transformers expects a
    map; an empty map replaces this list.
    """
    listed = isinstance(read_json(folder / "tokenizer_config.json").get("extra_special_tokens"), list)
    options: dict[str, Any] = {"extra_special_tokens": {}} if listed else {}
    return read_tokenizer(folder, **options)
