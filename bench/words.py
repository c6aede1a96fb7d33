"""Words that are one token each in BERT vocabularies: a text of n words has n tokens plus two special tokens."""

import numpy as np

_TEXT = """
search index query vector model worker stream river mountain engine paper market signal winter garden music history
physics language protein election planet museum bridge contract
"""
WORDS = tuple(_TEXT.split())


def texts_of(kind: str, count: int, seed: int = 3) -> list[str]:
    """Return `count` random texts. `kind`: `mix` for log-normal lengths with a mean of about 87 tokens; `short` for 8
    tokens, including two special tokens.
    """
    rng = np.random.default_rng(seed)
    lengths = np.full(count, 6) if kind == "short" else np.clip(rng.lognormal(4.1, 0.82, count), 2, 254).astype(int)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]
