"""Model classes of Qwen3-VL for `vision_language`, one for embeddings and one for scores. Images are part of the
prompt.

Both classes use the state of the last token of a conversation, which ends where the model's answer would begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, processors
from torch import Tensor

from sie_adapter.engine.device import Compute
from sie_adapter.heads import Head
from sie_adapter.heads.classification import LastTokenHead
from sie_adapter.heads.pooling import DenseHead
from sie_adapter.loading import checkpoint
from sie_adapter.loading.tokenizer import load_tokenizer
from sie_contracts.media.images import ImageTokens, Normalisation, Recipe
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_contracts.wire.ipc import Rows
from sie_models_vision.qwen_vl import LANGUAGE_HEAD, QwenVL

_IMAGE = ("<|vision_start|>", "<|vision_end|>")
# end of the user's turn and begin of the answer; `Qwen3Encoder` adds both after every text, even after a truncated text
_TURN = "<|im_end|>\n<|im_start|>assistant\n"
_NOTHING = "NULL"  # text for an input with neither text nor image, as in the training of the model


class _Qwen3(QwenVL):
    def tokens(self, tokenizer: Tokenizer, recipe: Recipe) -> ImageTokens:
        before, after = (tuple(tokenizer.encode(token, add_special_tokens=False).ids) for token in _IMAGE)
        return ImageTokens(self._token, before=before, after=after, beside_text=True)


class Qwen3Encoder(_Qwen3):
    """Model class of Qwen3-VL-Embedding: the vector is the state of the last token. Source: the vendor's code."""

    output = "dense"

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        super().__init__(folder, entry, load, compute, normalisation)
        self.width: int = self.language.config.hidden_size
        self.heads: dict[str, Head] = {"dense": DenseHead("last", None, compute.device)}

    def framed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer, changed so that it adds `_TURN` after every text, even after a truncated text."""
        ids = tokenizer.encode(_TURN, add_special_tokens=False).ids
        tokens = [tokenizer.id_to_token(number) for number in ids]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <turn>", pair="$A $B <turn>", special_tokens=[{"id": "<turn>", "ids": ids, "tokens": tokens}]
        )
        return tokenizer

    def rows(self, images: Recipe, tokens: ImageTokens) -> dict[str, Rows]:
        return {"encode": Rows("text", images=images, image_tokens=tokens, empty=_NOTHING)}


class Qwen3Reranker(_Qwen3):
    """Model class of Qwen3-VL-Reranker: the score is P(yes) for the next token. Source: the vendor's code."""

    output = "score"
    width = 0

    def __init__(
        self, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute, normalisation: Normalisation
    ) -> None:
        super().__init__(folder, entry, load, compute, normalisation)
        if not (entry.pair and entry.head.yes_token and entry.head.no_token):
            raise incompatible(f"{entry.id}: {entry.family} needs `pair`, `head.yes_token` and `head.no_token`")
        tokenizer = load_tokenizer(folder, load)
        ids = [self._answer(tokenizer, token) for token in (entry.head.no_token, entry.head.yes_token)]
        layer = checkpoint.linear(self._output_rows(folder, ids)).to(compute.device)
        self.heads: dict[str, Head] = {"answer": LastTokenHead(lambda states: layer(states.float()))}

    def _answer(self, tokenizer: Tokenizer, token: str) -> int:
        ids = tokenizer.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise incompatible(f"{self._id}: {token!r} in yes_token or no_token is not one token of its vocabulary")
        return int(ids[0])

    def _output_rows(self, folder: Path, ids: list[int]) -> Tensor:
        """Return the output layer's rows for these ids, float32. For a model with tied weights, which has no output
        layer, return rows of its input embeddings.
        """
        if stored := _stored_rows(folder, LANGUAGE_HEAD, ids):
            return torch.stack(stored)
        config: Any = self.model.config
        if not (config.tie_word_embeddings or config.text_config.tie_word_embeddings):
            raise incompatible(f"{self._id}: the weights have no {LANGUAGE_HEAD}")
        rows: Tensor = self.model.get_input_embeddings().weight[ids].float()
        return rows

    def rows(self, images: Recipe, tokens: ImageTokens) -> dict[str, Rows]:
        return {"score": Rows("pieces", images=images, image_tokens=tokens, empty=_NOTHING)}


def _stored_rows(folder: Path, name: str, ids: list[int]) -> list[Tensor]:
    """Read only the rows `ids` of a matrix. Return the rows, float32; an empty list if no file has the matrix."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118  not a mapping
                matrix = file.get_slice(name)
                return [matrix[number].float() for number in ids]
    return []
