"""What the readers of documents share: prompts, decoders that write a token a step, and results of what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sie_adapter.families.extraction import ExtractOptions
from sie_adapter.greedy import Rules, unknown_rule
from sie_adapter.images import processor_of
from sie_adapter.packing import Shown
from sie_adapter.slots import Begun, Slots, empty, prompted
from sie_contracts.entries import ModelEntry
from sie_contracts.errors import InvalidInput
from sie_contracts.images import Normalisation, Recipe
from sie_contracts.load_errors import load_failed


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


def checked_processor(folder: Path, entry: ModelEntry, model: Any, positions: int) -> tuple[Recipe, Normalisation]:
    """How a page becomes numbers for `model`, whose decoder has `positions`. Raises ModelLoadFailed INCOMPATIBLE for
    rules of writing or an image processor that cannot be reproduced, and for an entry with more tokens than positions.
    """
    if rule := unknown_rule(model.generation_config):
        raise load_failed("INCOMPATIBLE", f"{entry.id}: generation_config.json sets {rule}, which is not kept")
    if entry.max_tokens > positions:
        raise load_failed(
            "INCOMPATIBLE", f"{entry.id}: max_tokens is {entry.max_tokens}, its decoder has {positions} positions"
        )
    return processor_of(folder, entry)


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
    options: ExtractOptions, known: Callable[[str], bool], listed: Sequence[str], *, otherwise: str = ""
) -> str:
    """The task that a request names, or its entry, else `otherwise`. Raises InvalidInput if there is none, or the model
    has no such.
    """
    task = options.parameters.get("task") or otherwise
    if task and known(task):
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


def reserved(what: str) -> InvalidInput:
    """The error of a text of a client that holds a token of the prompt."""
    return InvalidInput(f"{what}: it holds a token that the model reserves", reason="reserved_token", param=what)


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
            found: Tensor = self.own(input_ids, past, position_ids=position_ids)
            return found
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

    def begin(self, encoded: Tensor, ids: Sequence[int]) -> Begun:
        """Read a prompt. `encoded`: states of the encoder, [1, places, width]."""
        cache = empty(has_encoder=True)
        self._positions.give(None)
        scores = self._decode(
            torch.tensor([list(ids)], device=self._device), encoder_hidden_states=encoded, past_key_values=cache
        )
        own, seen = prompted(cache)
        return Begun(own, scores[0, -1], seen)

    def step(self, ids: Tensor, slots: Slots) -> Tensor:
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
