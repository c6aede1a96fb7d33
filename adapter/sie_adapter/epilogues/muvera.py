"""Fixed dimensional encodings: one vector for each set of token vectors. Their inner products approximate MaxSim.

token rows ──► partition of each token, per repetition ──► sum (query) or mean (document) of each partition ──►
count sketch ──► [items, width]

Source: "MUVERA: Multi-Vector Retrieval via Fixed Dimensional Encodings" (Dhulipala et al. 2024), section 2. Each
repetition divides the space of token vectors into partitions by random planes of its own. Partitions are numbered by
Gray code. Items and repetitions are computed in blocks of limited size, so that the memory of intermediate results does
not grow with the batch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sie_contracts.models.muvera import Muvera

# largest number of bytes of an intermediate result for several items; a result for a single item may be larger
BLOCK_BYTES = 32 << 20
# On a CPU the limit is smaller, so that the result fits the CPU's cache: an encoding took 1.4 times as long with 16 MiB
# as with this limit on an AMD EPYC (bench/muvera.py --block-mib).
CPU_BLOCK_BYTES = 2 << 20
_MATRICES_BYTES, _MATRICES_COUNT = 256 << 20, 64  # limits of the cache of random matrices: bytes, number of entries


def encode(rows: Sequence[Tensor], parameters: Muvera, *, is_query: bool) -> Tensor:
    """Return one encoding per item, float32 [items, parameters.width(dim)], on the device of the rows.

    `rows`: at least one float tensor [tokens, dim], with any number of tokens; the encoding of an item without tokens
    is zeros. The values of an item do not depend on the other items of its batch, except on MPS (see `_partitions_of`).
    On CUDA the order of additions is not fixed, so the last bits may differ. Raises InvalidInput if the result is too
    wide.
    """
    dim, device = rows[0].shape[1], rows[0].device
    width = parameters.width(dim)
    matrices = _MATRICES.get(parameters, dim, device)
    result = torch.zeros(len(rows), width, dtype=torch.float32, device=device)
    budget = CPU_BLOCK_BYTES if device.type == "cpu" else BLOCK_BYTES
    for first, last in _item_blocks([len(item) for item in rows], dim, parameters, budget):
        _encode_block(rows[first:last], parameters, matrices, result[first:last], budget, is_query=is_query)
    return F.normalize(result, dim=1, eps=1e-12, out=result) if parameters.normalize else result


def _item_blocks(lengths: list[int], dim: int, parameters: Muvera, budget: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) of consecutive items. The tokens of a range need at most `budget` bytes. The partitions
    of a range in one repetition also need at most `budget` bytes. An item that alone exceeds one of these limits is a
    range of its own.
    """
    item_bytes = 4 * parameters.partitions * (parameters.projection_dim or dim)
    # bytes per token of the largest intermediate result: a float32 vector, or an int64 index for each repetition
    token_bytes = max(4 * dim, 4 * (parameters.projection_dim or 0), 8 * parameters.num_repetitions, 32)
    first = tokens = 0
    for item, length in enumerate(lengths):
        if item > first and max((tokens + length) * token_bytes, (item + 1 - first) * item_bytes) > budget:
            yield first, item
            first, tokens = item, 0
        tokens += length
    yield first, len(lengths)


def _encode_block(
    rows: Sequence[Tensor], parameters: Muvera, matrices: _Matrices, result: Tensor, budget: int, *, is_query: bool
) -> None:
    """Add the encodings of the items `rows` to `result` [items, width], which the caller has set to zeros."""
    device, items, partitions = result.device, len(rows), parameters.partitions
    lengths = torch.tensor([len(item) for item in rows])
    item_of = torch.repeat_interleave(torch.arange(items), lengths).to(device)  # shape [tokens]
    tokens = (rows[0] if items == 1 else torch.cat(list(rows))).float()  # shape [tokens, dim]
    if not len(tokens):
        return
    part_of = _partitions_of(tokens, parameters, matrices.planes, budget)  # shape [tokens, repetitions]
    inner = matrices.inner
    dim = tokens.shape[1]
    cell = parameters.projection_dim or dim
    step = max(1, budget // max(4 * items * partitions * cell, len(tokens) * (4 * max(dim, cell) if inner else 32)))
    for first in range(0, parameters.num_repetitions, step):
        last = min(first + step, parameters.num_repetitions)
        count = last - first
        bag_of = (item_of[:, None] * count + torch.arange(count, device=device)) * partitions + part_of[:, first:last]
        vectors = tokens
        if inner:
            vectors = inner.projected(tokens, first, last).view(-1, cell)  # shape [tokens * count, cell]
        sums = _aggregate(
            vectors, bag_of.flatten(), items * count * partitions, 1 if inner else count, parameters, is_query=is_query
        )
        values = sums.view(items, -1)
        start, stop = first * partitions * cell, last * partitions * cell
        if matrices.final:
            matrices.final.add(result, values, start, stop)
        else:
            result[:, start:stop] = values


def _partitions_of(tokens: Tensor, parameters: Muvera, planes: Tensor, budget: int) -> Tensor:
    """Return the partition of each token in each repetition, int64 [tokens, repetitions].

    The partition follows from the signs of `tokens` @ `planes`, computed in float64 (float32 on MPS). The rounding of a
    float32 product depends on the shape of the batch, so other items could move a token to another partition.
    """
    repetitions, projections = parameters.num_repetitions, parameters.num_simhash_projections
    encoded = []
    for chunk in tokens.split(max(1, budget // (8 * max(1, *planes.shape)))):
        above = (chunk.to(planes.dtype) @ planes > 0).view(len(chunk), projections, repetitions)
        index = torch.zeros(len(chunk), repetitions, dtype=torch.int64, device=tokens.device)
        for projection in range(projections):
            index = 2 * index + (above[:, projection] ^ (index & 1))
        encoded.append(index)
    return torch.cat(encoded)


def _aggregate(
    vectors: Tensor, bag_of: Tensor, bags: int, repeats: int, parameters: Muvera, *, is_query: bool
) -> Tensor:
    """Return one vector for each bag, [bags, columns of `vectors`]. A bag has the entries of one item in one partition
    of one repetition. An entry is one token in one repetition; entries are ordered by token, then by repetition. For a
    query, the vector of a bag is the sum of its entries' vectors; for a document, it is their mean. If
    `fill_empty_partitions` is set, an empty bag of a document gets the vector of its item's nearest entry.

    `bag_of` [entries]: the bag of each entry. `repeats`: 1 if `vectors` has a row for each entry; the number of
    repetitions if it has a row for each token, which all entries of the token share.
    """
    order = bag_of.sort(stable=True)[1]
    counts = torch.zeros(bags, dtype=torch.int64, device=bag_of.device).index_add_(0, bag_of, torch.ones_like(bag_of))
    bounds = F.pad(counts.cumsum(0), (1, 0))
    mode = "sum" if is_query else "mean"
    sums = F.embedding_bag(order // repeats, vectors, bounds, mode=mode, include_last_offset=True)
    if parameters.fill_empty_partitions and not is_query:
        nearest = _nearest(order, counts, bounds, parameters.num_simhash_projections)
        empty = ((counts == 0) & (nearest >= 0)).nonzero()[:, 0]
        sums[empty] = vectors[nearest[empty] // repeats]
    return sums


def _nearest(order: Tensor, counts: Tensor, bounds: Tensor, projections: int) -> Tensor:
    """Return for each bag (partition of an item in a repetition) the nearest entry (token) of the item, int64 [bags]:
    the first if several are nearest, -1 if the item has no entry. The distance is the Hamming distance between the bits
    of the bag's partition and of the entry's partition. For each bit, the loop compares the best entry of a partition
    with the best entry of the partition that differs only in this bit. This needs fewer steps than a comparison of each
    token with each partition.
    """
    entries = len(order)
    far = (projections + 1) * entries
    gray = torch.arange(1 << projections, device=order.device)
    gray = gray ^ (gray >> 1)  # Gray code: the bits of each partition
    first = order[bounds[:-1].clamp_max(entries - 1)].where(counts > 0, far).view(-1, 1 << projections)
    best = torch.empty_like(first)
    best[:, gray] = first
    for bit in range(projections):
        sides = best.view(-1, 2, 1 << bit)
        # `best` is distance * entries + entry, so a minimum selects the smallest distance, and of equal distances the
        # smallest entry
        best = torch.minimum(sides, sides.flip(1) + entries).view_as(best)
    best = best[:, gray].flatten()
    return (best % entries).where(best < far, -1)


@dataclass(frozen=True, slots=True)
class _Sketch:
    """Count sketch, a random projection: the number at index i of a vector is added to column `columns[i]`, multiplied
    by `signs[i]`. `columns` is int64 [inputs], `signs` float32 [inputs].
    """

    columns: Tensor
    signs: Tensor

    def add(self, result: Tensor, values: Tensor, start: int, stop: int) -> None:
        """Add inputs `start` to `stop` [items, stop - start] to `result` [items, buckets]. `values`: the inputs; they
        are overwritten by the signed values.
        """
        result.index_add_(1, self.columns[start:stop], values.mul_(self.signs[start:stop]))


@dataclass(frozen=True, slots=True)
class _Inner:
    """Count sketches (random projections) for token vectors: one per repetition, with `cell` output dimensions.
    `columns`, `signs`: [repetitions, dim].
    """

    columns: Tensor
    signs: Tensor
    cell: int

    def projected(self, tokens: Tensor, first: int, last: int) -> Tensor:
        """Return `tokens` [tokens, dim] projected by the sketches `first` to `last` - 1: [tokens, (last - first) *
        cell].
        """
        count = last - first
        columns = self.columns[first:last] + self.cell * torch.arange(count, device=tokens.device)[:, None]
        values = tokens[:, None] * self.signs[first:last]
        result = torch.zeros(len(tokens), count * self.cell, dtype=torch.float32, device=tokens.device)
        return result.index_add_(1, columns.flatten(), values.flatten(1))


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Random matrices for one set of parameters and one width of token vectors. `planes`: [dim, projections *
    repetitions]; the index of the repetition changes fastest.
    """

    planes: Tensor
    inner: _Inner | None
    final: _Sketch | None

    @property
    def nbytes(self) -> int:
        sketches = [self.planes] + [
            tensor for part in (self.inner, self.final) if part for tensor in (part.columns, part.signs)
        ]
        return sum(tensor.nbytes for tensor in sketches)


def _draw(parameters: Muvera, dim: int, device: torch.device) -> _Matrices:
    """Draw the random matrices, each from a new random stream. The order of draws must not change, because clients
    build indexes with these matrices.
    """
    seeds = range(parameters.seed, parameters.seed + parameters.num_repetitions)
    shape = (dim, parameters.num_simhash_projections)
    planes = np.stack([np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32) for seed in seeds], axis=2)
    exact = torch.float32 if device.type == "mps" else torch.float64
    inner, final = None, None
    if parameters.projection_dim:
        drawn = [_sketch(seed, dim, parameters.projection_dim) for seed in seeds]
        columns, signs = (torch.from_numpy(np.stack(part)).to(device) for part in zip(*drawn, strict=True))
        inner = _Inner(columns, signs, parameters.projection_dim)
    if parameters.final_projection_dim:
        columns, signs = _sketch(parameters.seed, parameters.cells(dim), parameters.final_projection_dim)
        final = _Sketch(torch.from_numpy(columns).to(device), torch.from_numpy(signs).to(device))
    return _Matrices(torch.from_numpy(planes.reshape(dim, -1 if planes.size else 0)).to(device, exact), inner, final)


def _sketch(seed: int, inputs: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    stream = np.random.default_rng(seed)
    columns = stream.integers(0, buckets, size=inputs)
    return columns, stream.choice(np.array([-1, 1], np.float32), size=inputs)


class _ProjectionCache:
    """Cache of random matrices, by parameters, width and device. The matrices used least recently are dropped first.
    The newest matrices stay even if they alone exceed `limit_bytes`. Thread-safe.
    """

    def __init__(self, limit_bytes: int, limit: int) -> None:
        self._limit_bytes, self._limit = limit_bytes, limit
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[Muvera, int, torch.device], _Matrices] = OrderedDict()

    def get(self, parameters: Muvera, dim: int, device: torch.device) -> _Matrices:
        # normalize and fill_empty_partitions do not change the random numbers, so they are not part of the key
        key = (msgspec.structs.replace(parameters, normalize=False, fill_empty_partitions=False), dim, device)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
        # matrices are drawn without the lock: two threads may draw equal matrices, but no thread waits for another
        drawn = _draw(parameters, dim, device)
        with self._lock:
            self._held[key] = drawn
            while len(self._held) > self._limit or (len(self._held) > 1 and self.nbytes > self._limit_bytes):
                self._held.popitem(last=False)
        return drawn

    @property
    def nbytes(self) -> int:
        return sum(matrices.nbytes for matrices in self._held.values())


_MATRICES = _ProjectionCache(_MATRICES_BYTES, _MATRICES_COUNT)
