"""Oracle: sentence-transformers on the same folder, one text at a time, so that no padding enters its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from parity.checkpoints import Pooling
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule

Vectors = NDArray[np.float32]

_MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken", "weighted": "weightedmean"}


class Reference:
    """The folder, loaded by sentence-transformers in `precision` with attention written out (eager), which every
    architecture supports.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        options = {"dtype": precision, "attn_implementation": "eager"}
        self.stored = SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs=options)
        self._pooled: dict[tuple[str, ...], dict[Pooling, Vectors]] = {}

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, cut to the limit of the folder."""
        return [self.stored.tokenize([text])["input_ids"][0].tolist() for text in texts]

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return [texts, width], computed by all modules of the folder."""
        return self._encode(self.stored, texts)

    def pooled(self, texts: Sequence[str], poolings: Sequence[Pooling]) -> dict[Pooling, Vectors]:
        """Return [texts, width] for each pooling, computed by the modules of the folder but Normalize. The cache has no
        key for `poolings`: they are the same in all calls.
        """
        if (cached_vectors := self._pooled.get(tuple(texts))) is not None:
            return cached_vectors
        behind = [module for module in list(self.stored)[2:] if not isinstance(module, Normalize)]
        pooled_vectors: dict[Pooling, Vectors] = {}
        # One pass gives several poolings side by side, unless modules follow the pooling.
        for together in [[pooling] for pooling in poolings] if behind else [poolings]:
            pooling = PoolingModule(self.stored[0].get_embedding_dimension(), tuple(_MODES[mode] for mode in together))
            vectors = self._encode(SentenceTransformer(modules=[self.stored[0], pooling, *behind], device="cpu"), texts)
            pooled_vectors |= zip(together, np.split(vectors, len(together), axis=1), strict=True)
        self._pooled[tuple(texts)] = pooled_vectors
        return pooled_vectors

    def _encode(self, model: SentenceTransformer, texts: Sequence[str]) -> Vectors:
        vectors = model.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=False)
        return np.asarray(vectors.float().numpy(), np.float32)
