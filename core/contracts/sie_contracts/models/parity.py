"""Bounds within which two computations of one model count as equal, by the precision of the model."""

from __future__ import annotations

COSINE_32 = 0.9999
COSINE_16 = 0.999
COSINE_8 = 0.99
