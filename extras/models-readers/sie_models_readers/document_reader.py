"""Readers of documents: models that generate the content of a page as text, one token at a time.

page and task of each input ──► prompts ──► the loop of `reading`, for all batches together ──► written text ──► results
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import class_of
from sie_adapter.packed.packing import Shown
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.wire.ipc import Rows
from sie_models_readers.donut import Donut
from sie_models_readers.florence2 import Florence2
from sie_models_readers.transcriber import MODEL_TYPES, Transcriber
from sie_models_readers.written import IsGone, PagePrompt, Read, ReaderCall

_Kind = type[Donut] | type[Florence2] | type[Transcriber]
_KINDS: Mapping[str, _Kind] = {
    "vision-encoder-decoder": Donut,
    "florence2": Florence2,
    **dict.fromkeys(MODEL_TYPES, Transcriber),
}


class DocumentReader:
    """Loaded reader of documents. `reading(..).extract` may run on several threads at once.

    A result has entities or objects, and `data` with `finish_reason` and `completion_tokens`. `finish_reason` is `stop`
    if the model wrote an end token, `length` if the text reached its limit of tokens, `repetition` if the text repeated
    the same tokens. The result is an InvalidInput if an input does not have exactly one image, or if the model does not
    support the task or the instruction. The result is an InferenceFailed if the scores are not finite.

    `max_tokens`: limit of the tokens of prompt and generated text together.
    """

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        return class_of(folder, entry, _KINDS).fault_of_files(folder, entry)

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        with torch.inference_mode():
            self._kind: Donut | Florence2 | Transcriber = class_of(folder, entry, _KINDS)(folder, entry, load, compute)
        self.rows = {"extract": Rows("raw", images=self._kind.recipe, writes=True)}
        self.precision, self.attention = self._kind.precision, self._kind.attention
        self.tokenizer: bytes = self._kind.tokenizer.to_str().encode()
        self.vocabulary, self.max_tokens = self._kind.vocabulary, self._kind.max_tokens
        self.memory_bytes = self._kind.memory_bytes

    def reading(self, read: Read[PagePrompt], is_gone: IsGone) -> ReaderCall[PagePrompt, Shown]:
        """Return the object that computes the results of a batch. `read`: the method `Readings.read` of the device."""
        return ReaderCall(self._kind, self.rows, read, is_gone, "images")
