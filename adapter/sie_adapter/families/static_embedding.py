"""Static embeddings: the vector of a text is the mean of the stored vectors of its tokens, without a forward pass.

files                                               package that computes equal vectors
modules.json: StaticEmbedding, then Dense, ...      sentence-transformers
config.json of model2vec, without modules.json      the package model2vec
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import tensor
from sie_adapter.loading.modules import read_modules
from sie_contracts.errors import InvalidInput
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import RunOptions
from sie_store.folder_files import read_json

MAX_TOKENS = 1 << 20  # limit for the tokens of a text if the model has no limit
_CUT = 512  # limit for the tokens of a text in model2vec if config.json has no max_length
_FILE = "tokenizer.json"


class StaticEmbedding:
    """Table with a vector for each token. `encode` may run on several threads. A text without a token gets an error."""

    rows: ClassVar = {"encode": Rows("raw")}
    precision, attention = "float32", "none"

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        """Return why the files do not fit the entry, or an empty string. Raises ModelLoadFailed for damaged files."""
        modules = read_modules(folder)
        table = read_table(modules.folder)
        words = _words(modules.folder)
        if (largest := max(words.get_vocab().values(), default=-1)) >= len(table):
            return f"the largest id of its tokenizer is {largest}, its table has {len(table)} rows"
        if (width := modules.width(table.shape[1])) != entry.outputs.get("dense"):
            return f"outputs.dense is {entry.outputs.get('dense')}, the vectors of the model are {width} wide"
        return ""

    def __init__(self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute) -> None:
        if fault := self.fault_of_files(folder, entry):
            raise incompatible(f"{entry.id}: {fault}")
        modules = read_modules(folder)
        self._device = compute.device
        self._table = read_table(modules.folder).to(compute.device)
        self._layers = nn.Sequential(*modules.layers).to(compute.device)
        self._words = _words(modules.folder)
        self.tokenizer = self._words.to_str().encode()
        self.max_tokens = entry.max_tokens
        self.memory_bytes = self._table.nbytes
        self._unknown: int | None = None
        self._characters = 0
        if not modules.kinds:
            self._read_as_model2vec(folder)

    def _read_as_model2vec(self, folder: Path) -> None:
        """Make `encode` truncate texts like model2vec: `encode` first cuts a text to a number of characters, then drops
        unknown tokens, then cuts the remaining ids to a number of tokens.
        """
        length = read_json(folder / "config.json").get("max_length", _CUT)
        if length is not None:
            self.max_tokens = min(self.max_tokens, length)
            self._characters = length * int(np.median([len(token) for token in self._words.get_vocab()]))
        model = json.loads(self._words.to_str())["model"]
        self._unknown = self._words.token_to_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")

    def encode(self, texts: Sequence[str], options: RunOptions) -> list[Any]:
        cut = [text[: self._characters] for text in texts] if self._characters else list(texts)
        read = [encoding.ids for encoding in self._words.encode_batch_fast(cut, add_special_tokens=False)]
        if self._unknown is not None:
            read = [[number for number in ids if number != self._unknown] for ids in read]
        answers: list[Any] = [InvalidInput("text: expected at least 1 token, got 0", reason="no_tokens")] * len(read)
        places = [place for place, ids in enumerate(read) if ids]
        if not places:
            return answers
        ids = torch.tensor([number for place in places for number in read[place][: self.max_tokens]])
        starts = np.cumsum([0, *(min(len(read[place]), self.max_tokens) for place in places[:-1])])
        with torch.inference_mode():
            vectors = functional.embedding_bag(
                ids.to(self._device), self._table, torch.from_numpy(starts).to(self._device), mode="mean"
            )
            rows = self._layers(vectors).cpu().numpy()
        for place, row in zip(places, rows, strict=True):
            answers[place] = {"dense": row}
        return answers


def read_table(folder: Path) -> Tensor:
    """Return the vectors of the tokens, float32 [tokens, width]. model2vec may store fewer vectors than tokens: the
    tensor `mapping` then has the row of each token. If the tensor `weights` is stored, it has a factor for each token.
    Raises ModelLoadFailed INCOMPATIBLE for tensors that are missing or do not form such a table.
    """
    table = tensor(folder, "embedding.weight")
    if table is None:
        table, mapping, weights = (tensor(folder, name) for name in ("embeddings", "mapping", "weights"))
        if table is not None and mapping is not None:
            rows = mapping.long()
            if table.ndim != 2 or mapping.ndim != 1 or int(rows.min()) < 0 or int(rows.max()) >= len(table):
                raise incompatible(f"{folder}: its mapping names rows that its embeddings lack")
            table = table[rows]
        if table is not None and weights is not None:
            if weights.shape != (len(table),):
                raise incompatible(
                    f"{folder}: its weights have the shape {tuple(weights.shape)}, expected ({len(table)},)"
                )
            table = table * weights[:, None]
    if table is None or table.ndim != 2 or not len(table):
        raise incompatible(f"{folder}: its safetensors have neither a tensor embedding.weight nor embeddings")
    return table.contiguous()


def _words(folder: Path) -> Tokenizer:
    if not (folder / _FILE).is_file():
        raise load_failed("NOT_FOUND", f"{folder} has no {_FILE}")
    words = Tokenizer.from_file(str(folder / _FILE))
    words.no_padding()
    return words
