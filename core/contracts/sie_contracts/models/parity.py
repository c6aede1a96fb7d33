"""Lowest cosine at which vectors of two computations of a model count as equal, by the bits of its precision."""

from __future__ import annotations

COSINE_32 = 0.9999
COSINE_16 = 0.999
COSINE_8 = 0.99
