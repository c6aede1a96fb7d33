"""What the readers of documents and sounds share: prompts, decoders that write a token a step, and results of what they
wrote.

a file each, a task ──► prompts ──► the loop of `reading`, rows of all batches together ──► what was written ──► results
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sie_adapter.families.extraction import ExtractOptions, Result, by_options
from sie_adapter.packed.images import processor_of
from sie_adapter.packed.packing import Shown
from sie_adapter.readers.greedy import Rules, unknown_rule
from sie_adapter.readers.reading import GeneratedText, GenerationModel, GenerationPrompt
from sie_adapter.readers.slots import DecoderSlots, RowStart, empty, prompted
from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.media.images import Normalisation, Recipe
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.wire.ipc import Rows

P = TypeVar("P", bound=GenerationPrompt)
F_contra = TypeVar("F_contra", contravariant=True)  # a file as the model reads it
IsGone = Callable[[], bool]  # whether nobody waits any more
Read = Callable[[GenerationModel[P], Sequence[P], IsGone], list[GeneratedText]]


class ReaderKind(GenerationModel[P], Protocol[P, F_contra]):
    """What differs between the kinds of readers."""

    def prompt(self, file: F_contra, options: ExtractOptions) -> P:
        """What a row begins with. Raises InvalidInput for what cannot be asked."""

    def result(self, prompt: P, written: GeneratedText) -> dict[str, Any]:
        """What the client gets of what was written, beside why it ended and how long it is."""


class ReaderCall(Generic[P, F_contra]):
    """A reader and who waits for what it writes. `field`: of an input, that has its files."""

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
        """What is in the file of each input, or an error instead of it. Texts are not read."""
        numbers = list(range(len(texts)))
        results: dict[int, Result] = {}
        prompts: dict[int, P] = {}
        for number in numbers:
            try:
                prompts[number] = self._prompt(files[number], options[number])
            except SIEError as error:
                results[number] = error
        readable = list(prompts)
        same = [ExtractOptions(())] * len(readable)  # options are in the prompts: one call, so that all run at once
        outputs = by_options(readable, same, lambda some, _: self._results([prompts[number] for number in some]))
        results.update(zip(readable, outputs, strict=True))
        return [results[number] for number in numbers]

    def _prompt(self, files: Sequence[F_contra], options: ExtractOptions) -> P:
        if len(files) != 1:
            raise _miscounted(self._field, len(files))
        return self._kind.prompt(files[0], options)

    def _results(self, prompts: Sequence[P]) -> list[Result]:
        written = self._read(self._kind, prompts, self._is_gone)
        return [self._result(*pair) for pair in zip(prompts, written, strict=True)]

    def _result(self, prompt: P, written: GeneratedText) -> dict[str, Any]:
        result = self._kind.result(prompt, written)
        data = {"finish_reason": written.finish, "completion_tokens": len(written.ids)}
        return {**result, "data": {**data, **result.get("data", {})}}


def _miscounted(field: str, files: int) -> InvalidInput:
    if not files:
        return InvalidInput(f"{field}: the model reads one", reason="unsupported_modality", param=field)
    return InvalidInput(
        f"{field}: the model reads one, got {files}", reason="invalid_media", param=field, extras={"limit": 1}
    )


@dataclass(frozen=True)
class PagePrompt:
    """A page and what is asked of it. `ids` [tokens] are what the decoder reads first, `task` the name of what it is to
    write; `encoder_ids`: what an encoder reads beside the page; `box`: of the region that is asked about, in pixels of
    the page.
    """

    shown: Shown
    ids: Sequence[int]
    rules: Rules
    task: str = ""
    encoder_ids: Sequence[int] = ()
    box: Sequence[int] | None = None

    def following(self, written: GeneratedText) -> None:
        """A page is read at once."""


def checked_processor(folder: Path, entry: ModelEntry, model: Any, positions: int) -> tuple[Recipe, Normalisation]:
    """How a page becomes numbers for `model`, whose decoder has `positions`. Raises ModelLoadFailed INCOMPATIBLE as
    `check_rules`, and for an image processor that cannot be reproduced.
    """
    check_rules(entry, model, positions)
    return processor_of(folder, entry)


def check_rules(entry: ModelEntry, model: Any, positions: int, refused: Iterable[str] = ()) -> None:
    """Raises ModelLoadFailed INCOMPATIBLE for rules of writing that cannot be reproduced, `refused` among them, and for
    an entry with more tokens than the decoder has `positions`.
    """
    rules = model.generation_config
    if rule := unknown_rule(rules) or next((name for name in refused if getattr(rules, name, None)), ""):
        raise load_failed("INCOMPATIBLE", f"{entry.id}: generation_config.json sets {rule}, which is not kept")
    if entry.max_tokens > positions:
        raise load_failed(
            "INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, its decoder has {positions} positions"
        )


def text_entity(text: str, label: str, bbox: Sequence[int] | None = None) -> dict[str, Any]:
    """What a reader wrote, as an entity: it has no place in a text, and no score of its own."""
    box = None if bbox is None else list(bbox)
    return {"text": text, "label": label, "score": 1.0, "start": None, "end": None, "bbox": box}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The dotted path and the text of each leaf of a tree of maps and lists, in order. Lists add nothing to a path."""
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
    """The task that a request names, or its entry, else `otherwise`. Raises InvalidInput if there is none, or the model
    has no such.
    """
    task = options.parameters.get("task") or otherwise
    if task and is_task(task):
        return str(task)
    expected = f"the model has {', '.join(listed)}"
    cause = "no such task" if task else "expected one"
    raise InvalidInput(f"task: {cause}: {expected}", reason="task", param="task")


def tokens_left(options: ExtractOptions, prompt: int, limit: int, otherwise: int = 0) -> int:
    """How many tokens may be written after a prompt: what the request asks for, else `otherwise` if that is not 0, of
    what the positions of the model leave. Raises InvalidInput if they leave none.
    """
    left = limit - prompt
    if left < 1:
        raise InvalidInput(
            f"instruction: with it the prompt has {prompt} tokens, the model takes {limit} with its answer",
            reason="input_too_long",
            param="instruction",
            extras={"tokens": prompt, "limit": limit},
        )
    return min(int(options.parameters.get("max_new_tokens") or otherwise or left), left)


def reserved(field: str) -> InvalidInput:
    """The error of a text of a client that holds a token of the prompt."""
    return InvalidInput(f"{field}: it holds a token that the model reserves", reason="reserved_token", param=field)


def attended(mask: Tensor, dtype: torch.dtype, *, is_eager: bool) -> Tensor:
    """A mask as the attention of the library takes it: the eager one adds it to the scores."""
    if not is_eager:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


class RowPositions(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The learned positions of a decoder of BART's kind, which numbers all rows alike: here each row has its own.
    `given` [rows, 1] are those of a step; None while a prompt is read.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.given: Tensor | None = None

    def give(self, positions: Tensor | None) -> None:
        """For the passes that follow. Of one thread alone."""
        self.given = positions

    def forward(self, input_ids: Tensor, past: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Vectors to add to those of the tokens."""
        if self.given is None:
            positions: Tensor = self.own(input_ids, past, position_ids=position_ids)
            return positions
        return F.embedding(self.given + self.own.offset, self.own.weight)


Decode = Callable[..., Tensor]  # ids and the arguments of a decoder of the library; scores [rows, tokens, vocabulary]


class BartDecoder:
    """A decoder of BART's kind that looks at the states of an encoder. Of one thread alone."""

    def __init__(self, stack: Any, decode: Decode) -> None:
        """`stack`: the module with the layers, `decode` calls it."""
        self._decode = decode
        self._is_eager = stack.config._attn_implementation == "eager"
        self._width: int = stack.config.d_model
        self._positions = RowPositions(stack.embed_positions)
        stack.set_submodule("embed_positions", self._positions)
        weight = stack.embed_tokens.weight
        self._device, self._dtype = weight.device, weight.dtype

    def begin(self, encoded: Tensor, ids: Sequence[int]) -> RowStart:
        """Read a prompt. `encoded`: states of the encoder, [1, places, width]."""
        cache = empty(has_encoder=True)
        self._positions.give(None)
        scores = self._decode(
            torch.tensor([list(ids)], device=self._device), encoder_hidden_states=encoded, past_key_values=cache
        )
        own, encoder_states = prompted(cache)
        return RowStart(own, scores[0, -1], encoder_states)

    def step(self, ids: Tensor, slots: DecoderSlots) -> Tensor:
        """Scores of the next token of each row, float32 [rows, vocabulary]."""
        self._positions.give(slots.positions)
        scores = self._decode(
            ids,
            attention_mask=attended(slots.mask, self._dtype, is_eager=self._is_eager),
            # the keys and values of the encoder are in the cache: its states only say that there is one
            encoder_hidden_states=torch.zeros(len(ids), 1, self._width, dtype=self._dtype, device=self._device),
            encoder_attention_mask=attended(slots.seen_mask, self._dtype, is_eager=self._is_eager),
            past_key_values=slots.cache(),
        )
        return scores[:, -1].float()
