"""Fixed dimensional encodings in numpy, step by step and one item at a time, as a reference for the batched form."""

from __future__ import annotations

from functools import cache

import numpy as np

from sie_contracts.models.muvera import Muvera


@cache
def planes(seed: int, dim: int, projections: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (dim, projections)).astype(np.float32)


@cache
def sketch(seed: int, inputs: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    stream = np.random.default_rng(seed)
    return stream.integers(0, buckets, size=inputs), stream.choice([-1, 1], size=inputs).astype(np.float32)


@cache
def inner(seed: int, dim: int, width: int) -> np.ndarray:
    columns, signs = sketch(seed, dim, width)
    matrix = np.zeros((dim, width), np.float32)
    matrix[np.arange(dim), columns] = signs
    return matrix


def margin(tokens: np.ndarray, parameters: Muvera) -> float:
    """Return the smallest distance of a token from a plane. If it is near 0, each side of the plane is right."""
    seeds = range(parameters.seed, parameters.seed + parameters.num_repetitions)
    products = [
        np.abs(tokens.astype(np.float64) @ planes(seed, tokens.shape[1], parameters.num_simhash_projections))
        for seed in seeds
    ]
    return float(min((product.min(initial=np.inf) for product in products), default=np.inf))


def encode(tokens: np.ndarray, parameters: Muvera, *, is_query: bool) -> np.ndarray:
    """Encode `tokens`, float32 [tokens, dim], as one float32 vector."""
    dim, partitions = tokens.shape[1], 2**parameters.num_simhash_projections
    cell = parameters.projection_dim or dim
    blocks = np.zeros((parameters.num_repetitions, partitions, cell), np.float32)
    for repetition in range(parameters.num_repetitions if len(tokens) else 0):
        seed = parameters.seed + repetition
        bits = tokens @ planes(seed, dim, parameters.num_simhash_projections) > 0
        index = np.zeros(len(tokens), np.int64)
        for column in bits.T:
            index = 2 * index + (column ^ (index & 1))
        values = tokens @ inner(seed, dim, cell) if parameters.projection_dim else tokens
        for partition in range(partitions):
            members = values[index == partition]
            if len(members):
                blocks[repetition, partition] = members.sum(0) if is_query else members.mean(0)
            elif parameters.fill_empty_partitions and not is_query:
                code = partition ^ (partition >> 1)
                code_bits = [bool(code >> (bits.shape[1] - 1 - place) & 1) for place in range(bits.shape[1])]
                blocks[repetition, partition] = values[np.argmin((bits != code_bits).sum(1))]
    result = blocks.ravel()
    if parameters.final_projection_dim:
        columns, signs = sketch(parameters.seed, len(result), parameters.final_projection_dim)
        projected = np.zeros(parameters.final_projection_dim, np.float32)
        np.add.at(projected, columns, signs * result)
        result = projected
    return result / max(float(np.linalg.norm(result)), 1e-12) if parameters.normalize else result
