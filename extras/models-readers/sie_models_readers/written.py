"""Base of the readers of documents and sounds: prompts, decoders that write one token per step, and results.

file and task of each input ──► prompts ──► the loop of `reading`, for all batches together ──► written text ──► results
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sie_adapter.families.extraction import ExtractOptions, Result, by_options, miscounted
from sie_adapter.generation.greedy import Rules, unknown_rule
from sie_adapter.generation.reading import GeneratedText, GenerationModel, GenerationPrompt
from sie_adapter.generation.slots import DecoderSlots, RowStart, empty, prompted
from sie_adapter.packed.images import processor_of
from sie_adapter.packed.packing import Shown
from sie_contracts.errors import InferenceFailed, InvalidInput, SIEError
from sie_contracts.media.images import Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows

P = TypeVar("P", bound=GenerationPrompt)
F_contra = TypeVar("F_contra", contravariant=True)  # a file in the form that the model reads
IsGone = Callable[[], bool]  # returns True once no client waits for the response
Read = Callable[[GenerationModel[P], Sequence[P], IsGone], list[GeneratedText | InferenceFailed]]


class ReaderKind(GenerationModel[P], Protocol[P, F_contra]):
    """Model class of a reader: it builds prompts, and converts generated texts to results."""

    def prompt(self, file: F_contra, options: ExtractOptions) -> P:
        """Return the prompt for a file. Raises InvalidInput for options that the model does not support."""

    def result(self, prompt: P, written: GeneratedText) -> dict[str, Any]:
        """Return the result for the client from the generated text. `ReaderCall` adds `finish_reason` and
        `completion_tokens` of this text if `data` of the result lacks these fields.
        """


class ReaderCall(Generic[P, F_contra]):
    """Computation of the results of one batch of a reader. `field`: the name of the input field that has the files."""

    def __init__(
        self, kind: ReaderKind[P, F_contra], rows: Mapping[str, Rows], read: Read[P], is_gone: IsGone, field: str
    ) -> None:
        self._kind = kind
        self._read = read
        self._is_gone = is_gone
        self._field = field
        self.rows = rows

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], files: Sequence[Sequence[F_contra]]
    ) -> list[Result]:
        """Return a result for the file of each input, or the input's error. The contents of `texts` are not read."""
        numbers = list(range(len(texts)))
        results: dict[int, Result] = {}
        prompts: dict[int, P] = {}
        for number in numbers:
            try:
                prompts[number] = self._prompt(files[number], options[number])
            except SIEError as error:
                results[number] = error
        readable = list(prompts)
        # `by_options` makes one call for each set of equal options. The prompts already contain the options. So the
        # rows get equal placeholders as options, and run in one call.
        same = [ExtractOptions(())] * len(readable)
        outputs = by_options(readable, same, lambda some, _: self._results([prompts[number] for number in some]))
        results.update(zip(readable, outputs, strict=True))
        return [results[number] for number in numbers]

    def _prompt(self, files: Sequence[F_contra], options: ExtractOptions) -> P:
        if error := miscounted(self._field, len(files)):
            raise error
        return self._kind.prompt(files[0], options)

    def _results(self, prompts: Sequence[P]) -> list[Result]:
        written = self._read(self._kind, prompts, self._is_gone)
        return [self._result(*pair) for pair in zip(prompts, written, strict=True)]

    def _result(self, prompt: P, written: GeneratedText | InferenceFailed) -> Result:
        if isinstance(written, InferenceFailed):
            return written
        result = self._kind.result(prompt, written)
        data = {"finish_reason": written.finish, "completion_tokens": len(written.ids)}
        return {**result, "data": {**data, **result.get("data", {})}}


@dataclass(frozen=True)
class PagePrompt:
    """Prompt for a page. `ids` [tokens]: the first tokens of the decoder. `task`: the name of the task. `encoder_ids`:
    tokens that an encoder reads besides the page. `box`: the region of the page that the task is about, in pixels.
    """

    shown: Shown
    ids: Sequence[int]
    rules: Rules
    task: str = ""
    encoder_ids: Sequence[int] = ()
    box: Sequence[int] | None = None

    def following(self, written: GeneratedText) -> None:
        """Return None: a page has a single prompt."""


def checked_processor(
    folder: Path, entry: ModelEntry, load: LoadOptions, model: Any, positions: int
) -> tuple[Recipe, Normalisation]:
    """Return the recipe that turns pages into pixels, and the normalisation of the pixels. `positions`: the number of
    positions of the model's decoder. Raises the errors of `processor_of` and `check_rules`.
    """
    check_rules(entry, model, positions)
    return processor_of(folder, entry, load)


def check_rules(entry: ModelEntry, model: Any, positions: int, refused: Iterable[str] = ()) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE for unsupported generation rules, for options in `refused`, and for an entry
    whose `max_tokens` is above `positions`.
    """
    rules = model.generation_config
    if rule := unknown_rule(rules) or next((name for name in refused if getattr(rules, name, None)), ""):
        raise incompatible(f"{entry.id}: generation_config.json sets {rule}, which is not supported")
    if entry.max_tokens > positions:
        raise incompatible(f"{entry.id}: max_tokens is {entry.max_tokens}, the model has {positions} positions")


def text_entity(text: str, label: str, bbox: Sequence[int] | None = None) -> dict[str, Any]:
    """Return a generated text as an entity, with a score of 1 and without offsets."""
    box = None if bbox is None else list(bbox)
    return {"text": text, "label": label, "score": 1.0, "start": None, "end": None, "bbox": box}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and text of each leaf of a tree of maps and lists. Lists add nothing to a path."""
    if isinstance(tree, dict):
        for name, below in tree.items():
            yield from leaves(below, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, list):
        for below in tree:
            yield from leaves(below, path)
    elif str(tree).strip():
        yield path, str(tree)


def task_of(
    options: ExtractOptions, is_task: Callable[[str], bool], listed: Sequence[str], *, otherwise: str = ""
) -> str:
    """Return the task that the request or the entry names, else `otherwise`. Raises InvalidInput if this task is empty,
    or if the model does not have this task.
    """
    task = options.parameters.get("task") or otherwise
    if task and is_task(task):
        return str(task)
    expected = f"the model has {', '.join(listed)}"
    cause = "no such task" if task else "none is named"
    raise InvalidInput(f"task: {cause}: {expected}", reason="task", param="task")


def tokens_left(options: ExtractOptions, prompt: int, limit: int, otherwise: int = 0) -> int:
    """Return the largest number of tokens after a prompt of `prompt` tokens: `max_new_tokens` of the request or entry
    (default: `otherwise`, if it is not 0), but at most `limit` minus `prompt`. Raises InvalidInput if no token is left.
    """
    left = limit - prompt
    if left < 1:
        raise InvalidInput(
            f"instruction: the prompt has {prompt} tokens; prompt and answer together may have at most {limit} tokens",
            reason="input_too_long",
            param="instruction",
            extras={"tokens": prompt, "limit": limit},
        )
    return min(int(options.parameters.get("max_new_tokens") or otherwise or left), left)


def reserved(field: str) -> InvalidInput:
    """Return the error for a client's text that contains a special token of the model's prompts."""
    return InvalidInput(f"{field}: it contains a token that the model reserves", reason="reserved_token", param=field)


def attended(mask: Tensor, dtype: torch.dtype, *, is_eager: bool) -> Tensor:
    """Return a boolean mask as transformers' attention expects it. Eager attention adds the mask to the scores: its
    mask is 0 at visible positions, and the lowest float at all others.
    """
    if not is_eager:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


class RowPositions(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Learned positions of a decoder like BART's, separate for each row. The decoder's own module would give all rows
    of a step the same position. `given` [rows, 1]: the positions in a step; None while a prompt is read.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.given: Tensor | None = None

    def give(self, positions: Tensor | None) -> None:
        """Set the positions of the rows for the next passes. Only one thread may call this method."""
        self.given = positions

    def forward(self, input_ids: Tensor, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        if self.given is None:
            positions: Tensor = self.own(input_ids, past, position_ids=position_ids)
            return positions
        return F.embedding(self.given + self.own.offset, self.own.weight)


# arguments: ids, and the arguments of a transformers decoder; result: scores [rows, tokens, vocabulary]
Decode = Callable[..., Tensor]


class BartDecoder:
    """Decoder like BART's, which attends to the states of an encoder. Not thread-safe."""

    def __init__(self, stack: Any, decode: Decode) -> None:
        """`stack`: the module with the decoder's layers, which `decode` calls."""
        self._decode = decode
        self._is_eager = stack.config._attn_implementation == "eager"
        self._width: int = stack.config.d_model
        self._positions = RowPositions(stack.embed_positions)
        stack.set_submodule("embed_positions", self._positions)
        weight = stack.embed_tokens.weight
        self._device, self._dtype = weight.device, weight.dtype

    def begin(self, encoded: Tensor, ids: Sequence[int]) -> RowStart:
        """Run the decoder over a prompt; return the new row. `encoded`: the encoder's states, [1, positions, width]."""
        cache = empty(has_encoder=True)
        self._positions.give(None)
        scores = self._decode(
            torch.tensor([list(ids)], device=self._device), encoder_hidden_states=encoded, past_key_values=cache
        )
        own, encoder_states = prompted(cache)
        return RowStart(own, scores[0, -1], encoder_states)

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        self._positions.give(slots.positions)
        scores = self._decode(
            ids,
            attention_mask=attended(slots.mask, self._dtype, is_eager=self._is_eager),
            # the decoder reads no value of this argument, but would ignore the cached encoder states if it were None
            encoder_hidden_states=torch.zeros(len(ids), 1, self._width, dtype=self._dtype, device=self._device),
            encoder_attention_mask=attended(slots.seen_mask, self._dtype, is_eager=self._is_eager),
            past_key_values=slots.cache(),
        )
        return scores[:, -1].float()
