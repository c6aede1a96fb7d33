"""Lowest cosine at which the vectors of two computations count as equal, by the bits of the model's precision."""

from __future__ import annotations

COSINE_32 = 0.9999
COSINE_16 = 0.999
COSINE_8 = 0.99
