"""Laya: typed decisions about a text. A question has options. The model reads a mask token before each option, and the
state of this token is scored. The encoder runs packed; no code of the package `laya` runs.

    question, options, text ──► ids ──► packed passes ──► layers of the head, together for texts of one length
    ──► a logit for each option ──► temperature ──► probabilities

Three types of question: `choice` among labels, `score` among the levels of a scale, and `noul`, whether a statement is
true. With `multi_label` each label is a statement. Long texts, options and questions are cut at the places where the
package cuts them. A statement is never cut, because its label is at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.engine import engines
from sie_adapter.engine.device import Compute
from sie_adapter.families.extraction import ExtractOptions, Result, labels_refused
from sie_adapter.loading.checkpoint import construction, for_inference
from sie_adapter.loading.tokenizer import bare_tokenizer, read_tokenizer
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import Items
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.models.output_schemas import Decision, SchemaPart
from sie_contracts.wire.ipc import Rows
from sie_models_extract.extraction import (
    Extractor,
    check_encoder,
    classified,
    compare,
    fill,
    read_weights,
    tokenizer_fault,
)
from sie_models_extract.folders import LAYA
from sie_store.folder_files import read_json

TOKENIZER, ENCODER = "tokenizer", "encoder"  # folders below the model's folder

Question = Literal["choice", "score", "noul"]
_QUESTIONS: tuple[Question, ...] = ("choice", "score", "noul")
# question about the labels, if the request has no instruction
_OF_LABELS: dict[Question, str] = {"choice": "Which of these describes the text?", "score": "How much?", "noul": ""}
# the two options of a statement, in the order in which the package lists them
_TRUTH = ("false: no, the statement does not hold", "true: yes, the statement holds")
_OPTION_TOKENS = 48  # largest number of tokens of an option; further tokens are cut off
_QUESTION_TOKENS, _LEAST_QUESTION_TOKENS, _LEAST_OPTION_TOKENS = 16, 8, 4
_AROUND_TOKENS = 32  # approximate number of tokens around a statement: its type, its two options and the special tokens
_HEAD_TOKENS = 192  # limit for the tokens of question and options, if the configuration has no limit
_TEMPERATURES = (0.5, 5.0)  # smallest and largest temperature that the package applies
_UNREAD = ("act_head.", "temperature")  # prefixes of tensors that do not affect the probabilities


@dataclass(frozen=True)
class _QuestionIds:
    """Question as ids. `head`: the ids before a text. `marks`: the positions of the mask tokens in `head`."""

    head: list[int]
    marks: list[int]


@dataclass(frozen=True)
class LayaTexts:
    """Tokenised texts. `texts`: the indices of the texts that are not blank. `rows`: the ids for each of these texts
    with each question. `passes`: for each pass the indices of its rows.
    """

    kind: Question
    questions: list[_QuestionIds]
    texts: list[int]
    rows: list[list[int]]
    passes: list[list[int]]
    padding: int = 0


class _DecisionModel(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Encoder and the layers after it. Attributes have the names that the weights file uses."""

    def __init__(self, encoder: PreTrainedModel, layers: int) -> None:
        super().__init__()
        self.encoder = encoder
        width = encoder.config.hidden_size
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True, norm_first=True)
        self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers else None
        self.type_emb = nn.Embedding(len(_QUESTIONS), width)
        self.scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, states: Tensor, kind: int, marks: Tensor) -> Tensor:
        """Return the logits of the options, [sequences, options]. `states`: the encoder's states, [sequences, tokens,
        width], without padding. `marks` [sequences, options]: the positions of the mask tokens.
        """
        states = states + self.type_emb.weight[kind]
        if self.head is not None:
            states = self.head(states)
        rows = torch.arange(len(states), device=states.device)[:, None]
        logits: Tensor = self.scorer(states[rows, marks]).squeeze(-1).float()
        return logits


class LayaModel(Extractor[LayaTexts]):
    """Loaded Laya. `extract` may run on several threads at once.

    A result is `{"classifications": [{label, score}]}`, best first: the labels whose probability reaches the threshold
    (default 0). A repeated label counts once. A text of white space has no classifications. The result is an
    InvalidInput if there are no labels, if all labels together or a statement have too many tokens, or if two labels
    are equal after they were cut. It is an InferenceFailed if the logits are not finite.

    `tokenizer`: tokenizer.json of the encoder. `max_tokens`: limit for question and text; longer texts are cut.
    """

    pass_tokens = 2048, 32768
    rows: ClassVar[dict[str, Rows]] = {"extract": Rows("raw", questions=_AROUND_TOKENS)}

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        weights = _weights(folder, entry)
        with torch.device("meta"):
            model = _built(folder, entry, entry.load)
        compare(model.state_dict(), weights, entry)
        return tokenizer_fault(bare_tokenizer(_tokenizer(folder)), model.encoder)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        self._config = _configuration(folder, entry)
        model = _built(folder, entry, load)
        fill(model, _weights(folder, entry), entry)
        for_inference(model, compute)
        self._model = model
        tokenizer = _tokenizer(folder)
        self._describe(model, model.encoder, tokenizer, compute)
        special = (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
        if None in special:
            raise incompatible(f"{entry.id}: its tokenizer lacks one of the tokens CLS, SEP and MASK")
        self._first, self._end, self._mark = special
        self._mask = str(tokenizer.mask_token)
        self._head_tokens = int(self._config.get("head_max_len", _HEAD_TOKENS))
        positions = getattr(model.encoder.config, "max_position_embeddings", None) or entry.max_tokens
        self.max_tokens = min(entry.max_tokens, positions)
        self._backbone = Backbone(model.encoder, replace(compute, engine=engines.TORCH), self.max_tokens)
        self.attention = self._backbone.attention

    def _make(self, texts: Sequence[str], options: ExtractOptions) -> LayaTexts:
        kind, questions = self._questions(options)
        places = [index for index, text in enumerate(texts) if text.strip()]
        rows = [
            [*question.head, *ids[: max(0, self.max_tokens - len(question.head) - 1)], self._end]
            for ids in (self._ids(texts[index]) for index in places)
            for question in questions
        ]
        return LayaTexts(kind, questions, places, rows, self._passes([len(row) for row in rows], options))

    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: LayaTexts) -> list[Result]:
        results: list[Result] = [{"classifications": []} for _ in texts]
        logits: dict[int, Tensor] = {}
        for chosen in prepared.passes:
            logits.update(self._logits(prepared, chosen))
        count = len(prepared.questions)
        for number, index in enumerate(prepared.texts):
            own = [logits[row] for row in range(number * count, (number + 1) * count)]
            # the probability of `true` among two options is the sigmoid of the difference of their logits
            scores = torch.stack([row[1] - row[0] for row in own]) if prepared.kind == "noul" else own[0]
            scores = scores / self._temperature(prepared.kind, len(own[0]))
            is_many = {"multi_label": prepared.kind == "noul"}
            labelled = replace(options, parameters={**options.parameters, **is_many})
            results[index] = classified(scores, _labels(options), labelled)
        return results

    def _logits(self, prepared: LayaTexts, chosen: Sequence[int]) -> dict[int, Tensor]:
        """Run one packed pass. Return the logits of each of its rows, float32 [options], on the host."""
        rows = [prepared.rows[index] for index in chosen]
        lengths = np.array([len(row) for row in rows], np.int64)
        items = Items(lengths, np.concatenate([np.array(row, np.int32) for row in rows]))
        packed = self._backbone.pack(items, np.arange(len(rows)))
        states = self._backbone.forward(packed)
        kind, count = _QUESTIONS.index(prepared.kind), len(prepared.questions)
        results: dict[int, Tensor] = {}
        for first, sequences, length, _ in packed.groups.tolist():
            begin = int(np.searchsorted(packed.bounds, first))
            numbers = [chosen[place] for place in packed.order[begin : begin + sequences].tolist()]
            marks = torch.tensor([prepared.questions[number % count].marks for number in numbers], device=self._device)
            own = states[first : first + sequences * length].unflatten(0, (sequences, length))
            results.update(zip(numbers, self._model(own, kind, marks).cpu(), strict=True))
        return results

    def _questions(self, options: ExtractOptions) -> tuple[Question, list[_QuestionIds]]:
        """Return the type of the questions, and the questions: one, or with `multi_label` one for each label."""
        if not options.labels:
            raise labels_refused("expected at least one")
        kind, text, labels = _kind(options), _text(options), _labels(options)
        if kind == "noul":
            statements = [""] if _is_unnamed(options.part) else labels
            return kind, [self._statement_ids(text, label) for label in statements]
        shown = [f"level {number}: {label}" for number, label in enumerate(labels)] if kind == "score" else labels
        words, marked, room = self._parts(kind, text, shown)
        return kind, [self._question_ids(words[:room], marked)]

    def _statement_ids(self, text: str, label: str) -> _QuestionIds:
        """Return the ids of the question that asks if `label` applies. `text`: instruction and description before the
        label. Raises InvalidInput if the question is too long, because the package would cut off the label.
        """
        words, marked, room = self._parts("noul", f"{text} {label}".strip(), _TRUTH)
        if len(words) > room:
            alone, _, _ = self._parts("noul", label, _TRUTH)
            if len(alone) >= room:
                most = room - len(self._parts("noul", "", _TRUTH)[0])
                raise labels_refused(f"the model reads each label as a statement of at most {most} tokens")
            message = f"at most {room - len(alone)} tokens are allowed, the description of a schema property included"
            raise InvalidInput.at("instruction", message, reason="labels")
        return self._question_ids(words, marked)

    def _parts(self, kind: Question, text: str, options: Sequence[str]) -> tuple[list[int], list[list[int]], int]:
        """Return the ids of a question, the ids of its options, and the largest number of ids for the question. Each
        option follows a mask token. Long options are cut at the same length as in the package `laya`. Raises
        InvalidInput for options that are equal after the cut.
        """
        size = 1 + _OPTION_TOKENS
        marked = [[self._mark, *self._ids(f" {option}")][:size] for option in options]
        room = self._head_tokens - sum(map(len, marked))
        if room < _QUESTION_TOKENS:
            size = max(_LEAST_OPTION_TOKENS, (self._head_tokens - _QUESTION_TOKENS) // len(marked))
            marked = [ids[:size] for ids in marked]
            room = self._head_tokens - sum(map(len, marked))
        if len(set(map(tuple, marked))) < len(marked):
            raise labels_refused(f"the model reads at most {size - 1} tokens of a label, and two labels begin alike")
        return self._ids(f"{kind} question: {text}"), marked, max(_LEAST_QUESTION_TOKENS, room)

    def _question_ids(self, words: Sequence[int], marked: Sequence[Sequence[int]]) -> _QuestionIds:
        """Return a question as the package writes it: [CLS] question [SEP] [MASK] option [MASK] option [SEP]. Raises
        InvalidInput if the question leaves too few tokens for the text.
        """
        ids = [self._first, *words, self._end]
        marks = np.cumsum([len(ids), *map(len, marked)])[:-1].tolist()
        head = [*ids, *(number for own in marked for number in own), self._end]
        self._check_room(len(head) + 1)
        return _QuestionIds(head, marks)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._counter.encode(text.replace(self._mask, " "), add_special_tokens=False).ids
        return ids

    def _temperature(self, kind: Question, options: int) -> float:
        size = "2" if options <= 2 else "3-5" if options <= 5 else "6-10" if options <= 10 else "11+"
        own = self._config.get("temperature_by_options", {}).get(f"{kind}:{size}")
        return _bounded(self._config.get("temperature", [1.0] * 3)[_QUESTIONS.index(kind)] if own is None else own)


def _labels(options: ExtractOptions) -> list[str]:
    return list(dict.fromkeys(options.labels))


def _kind(options: ExtractOptions) -> Question:
    if options.parameters.get("multi_label"):
        return "noul"
    is_scale = (
        options.part.is_scale if isinstance(options.part, Decision) else options.parameters.get("task") == "score"
    )
    return "score" if is_scale else "choice"


def _text(options: ExtractOptions) -> str:
    """Return the text of the question. A schema property without a description gets the wording of the package."""
    part, texts = options.part, [options.instruction.strip()]
    if isinstance(part, Decision) and not part.question:
        name = part.path[-1]
        if part.is_many:
            texts.append(f"{name}:")
        elif part.is_scale:
            texts.append(f"Score `{name}` from {part.labels[0]} to {part.labels[-1]}")
        elif not part.is_boolean:
            texts.append(f"What is `{name}`?")
        elif _is_unnamed(part):
            texts.append(f"Is `{name}` true?")
    return " ".join(filter(None, texts)) or _OF_LABELS[_kind(options)]


def _is_unnamed(part: SchemaPart | None) -> bool:
    """Return True if a part is a boolean and its statement is only the name of its property."""
    return isinstance(part, Decision) and part.is_boolean and part.labels[0] == part.path[-1].replace("_", " ")


def _bounded(temperature: Any) -> float:
    """Return a temperature within _TEMPERATURES; 1 for a value that is no number."""
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not np.isfinite(temperature):
        return 1.0
    return float(min(_TEMPERATURES[1], max(_TEMPERATURES[0], temperature)))


def _configuration(folder: Path, entry: ModelEntry) -> Mapping[str, Any]:
    config: dict[str, Any] = json.loads((folder / LAYA).read_text("utf-8"))
    if (layout := config.get("option_layout", "sequential")) != "sequential":
        raise incompatible(f"{entry.id}: option_layout is {layout}, the family laya needs sequential")
    if len(config.get("temperature", [1.0] * 3)) != len(_QUESTIONS):
        raise incompatible(f"{entry.id}: {LAYA} needs a temperature for each of {', '.join(_QUESTIONS)}")
    return config


def _built(folder: Path, entry: ModelEntry, load: LoadOptions) -> Any:
    """Build the model with random weights. Code that the encoder's configuration names is not run."""
    config = _configuration(folder, entry)
    encoder = read_json(folder / ENCODER / "config.json")
    if not encoder:
        raise load_failed("NOT_FOUND", f"{entry.id}: its folder has no {ENCODER}/config.json")
    check_encoder(encoder, entry, load)
    described = CONFIG_MAPPING[encoder.pop("model_type")].from_dict(encoder)
    with construction():
        model = AutoModel.from_config(described, attn_implementation="sdpa")
    return _DecisionModel(model, int(config.get("head_layers", 2)))


def _weights(folder: Path, entry: ModelEntry) -> dict[str, Tensor]:
    return {name: weight for name, weight in read_weights(folder, entry).items() if not name.startswith(_UNREAD)}


def _tokenizer(folder: Path) -> Any:
    return read_tokenizer(folder / TOKENIZER)
