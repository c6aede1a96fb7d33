"""Readers of documents: what is on a page, written a token at a time.

a page each, a task ──► prompts ──► the loop of `reading`, rows of all batches together ──► what was written ──► results
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from sie_adapter.checkpoint import read_json
from sie_adapter.device import Compute
from sie_adapter.families.donut import Donut
from sie_adapter.families.extraction import ExtractOptions, Result, by_options
from sie_adapter.families.florence2 import Florence2
from sie_adapter.families.transcriber import MODEL_TYPES, Transcriber
from sie_adapter.families.written import PagePrompt
from sie_adapter.packing import Shown
from sie_adapter.reading import Writer, Written
from sie_contracts.entries import LoadOptions, ModelEntry
from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.images import Recipe
from sie_contracts.ipc import Rows
from sie_contracts.load_errors import load_failed

Read = Callable[[Writer[PagePrompt], Sequence[PagePrompt]], list[Written]]


class Reader(Writer[PagePrompt], Protocol):
    """What differs between the kinds of readers.

    `max_tokens`: of a prompt and what is written after it. `recipe`: how images become the pixels that it reads.
    """

    precision: str
    attention: str
    memory_bytes: int
    tokenizer: Tokenizer
    vocabulary: int
    max_tokens: int
    recipe: Recipe

    def prompt(self, image: Shown, options: ExtractOptions) -> PagePrompt:
        """What a row begins with. Raises InvalidInput for what cannot be asked."""

    def result(self, prompt: PagePrompt, written: Written) -> dict[str, Any]:
        """What the client gets of what was written."""


_Kind = type[Donut] | type[Florence2] | type[Transcriber]
_KINDS: Mapping[str, _Kind] = {
    "vision-encoder-decoder": Donut,
    "florence2": Florence2,
    **dict.fromkeys(MODEL_TYPES, Transcriber),
}


class DocumentReader:
    """A loaded reader. `reading(..).extract` may run on several threads at once.

    A result has entities, objects or both, and `data` with `finish_reason` and `completion_tokens`: `stop` if the model
    ended by itself, `length` if it was cut at its limit, `repetition` if it wrote the same again and again. An error
    instead if the input has no image or several, or if the task cannot be done (InvalidInput), or if scores are not
    finite.

    `max_tokens`: of the prompt and what is written after it.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """What a load would refuse of class, shapes and tokenizer; empty if nothing. Reads no values of weights and
        runs no code of the folder. Raises ModelLoadFailed for tensors that are not those of the class.
        """
        return _kind(folder, entry).fault_of_files(folder, entry)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        """Load from `folder`, offline. Raises ModelLoadFailed."""
        with torch.inference_mode():
            self._kind: Reader = _kind(folder, entry)(folder, entry, load, compute)
        self.rows = {"extract": Rows("raw", images=self._kind.recipe, writes=True)}
        self.precision, self.attention = self._kind.precision, self._kind.attention
        self.tokenizer: bytes = self._kind.tokenizer.to_str().encode()
        self.vocabulary, self.max_tokens = self._kind.vocabulary, self._kind.max_tokens
        self.memory_bytes = self._kind.memory_bytes

    def reading(self, read: Read) -> Reading:
        """What answers one batch. `read` has the rows written."""
        return Reading(self._kind, self.rows, read)


class Reading:
    """A reader and who waits for what it writes."""

    def __init__(self, kind: Reader, rows: Mapping[str, Rows], read: Read) -> None:
        self._kind = kind
        self._read = read
        self.rows = rows

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], images: Sequence[Sequence[Shown]]
    ) -> list[Result]:
        """What is in the image of each input, or an error instead of it. Texts are not read."""
        numbers = list(range(len(texts)))
        results: dict[int, Result] = {}
        prompts: dict[int, PagePrompt] = {}
        for number in numbers:
            made = self._prompt(images[number], options[number])
            if isinstance(made, SIEError):
                results[number] = made
            else:
                prompts[number] = made
        readable = list(prompts)
        same = [ExtractOptions(())] * len(
            readable
        )  # options are in the prompts: one call, so that all rows run at once
        found = by_options(readable, same, lambda some, _: self._results([prompts[number] for number in some]))
        results.update(zip(readable, found, strict=True))
        return [results[number] for number in numbers]

    def _prompt(self, images: Sequence[Shown], options: ExtractOptions) -> PagePrompt | SIEError:
        try:
            if len(images) != 1:
                raise _miscounted(len(images))
            return self._kind.prompt(images[0], options)
        except SIEError as error:
            return error

    def _results(self, prompts: Sequence[PagePrompt]) -> list[Result]:
        written = self._read(self._kind, prompts)
        return [self._result(*each) for each in zip(prompts, written, strict=True)]

    def _result(self, prompt: PagePrompt, written: Written) -> dict[str, Any]:
        found = self._kind.result(prompt, written)
        told = {"finish_reason": written.finish, "completion_tokens": len(written.ids)}
        return {**found, "data": {**found.get("data", {}), **told}}


def _miscounted(images: int) -> InvalidInput:
    if not images:
        return InvalidInput("images: the model reads one", reason="unsupported_modality", param="images")
    return InvalidInput(
        f"images: the model reads one, got {images}", reason="invalid_media", param="images", extras={"limit": 1}
    )


def _kind(folder: Path, entry: ModelEntry) -> _Kind:
    found = str(read_json(folder / "config.json").get("model_type"))
    if found not in _KINDS:
        raise load_failed(
            "INCOMPATIBLE", f"{entry.id}: model_type is {found}, a document reader is {' or '.join(_KINDS)}"
        )
    return _KINDS[found]
