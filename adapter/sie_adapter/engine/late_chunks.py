"""Vectors of the chunks of texts ("late chunking"). A text runs in one or more windows, each a row of the batch. A
chunk is pooled from the states of its own tokens. The tokens of a chunk in one window are a segment.

    states of a pass ──► states of each segment, side by side ──► heads ──► a part for each segment
    parts of all passes ──► joined by chunk ──► a row for each chunk ──► results, as for any row

Heads compute values for segments, not for windows. The rows of chunks are numbered after all rows of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sie_adapter.engine.device import to_device
from sie_adapter.engine.item_results import ItemResult, ItemResults
from sie_adapter.heads import Head, JoiningHead, Row, States
from sie_adapter.packed.packing import Int64, Items, MalformedBatch, Positions, pack
from sie_contracts.errors import InternalFailure, SIEError
from sie_contracts.wire.ipc import ChunkedRows, Group


class LateChunks:
    """Values of the segments of one batch. A head computes a value for each segment; the values of a chunk's segments
    are joined to the vector of the chunk.

    `lengths`: the number of tokens of each row. Raises MalformedBatch if a group has other numbers of rows or inputs
    than it declares, if a chunk has no segment, or if segments are not in order or are outside of their rows.
    """

    def __init__(self, groups: Sequence[Group], lengths: Int64) -> None:
        self._count = len(lengths)
        tables: list[Int64] = []
        # first row of a chunked input -> number of the first chunk of this input
        self._firsts: dict[int, int] = {}
        chunks = 0
        for group in groups:
            row = group.start
            for described in group.chunked:
                if described.segments:
                    table = np.frombuffer(described.segments, "<i4").reshape(-1, 4).astype(np.int64)
                    self._firsts[row] = chunks
                    table = _checked(table, described, lengths[row : row + described.rows])
                    tables.append(table + np.array([chunks, row, 0, 0]))
                    chunks += _chunk_count(described)
                row += described.rows
            if group.chunked and (row != group.stop or len(group.chunked) != group.due):
                raise MalformedBatch("the chunked inputs of a group do not match the group's rows and inputs")
        self._segments = np.concatenate(tables) if tables else np.zeros((0, 4), np.int64)
        self._parts: dict[str, list[Row | None]] = {}
        self.windows = np.zeros(self._count, bool)  # bool [rows]: True for rows with segments of chunks
        self.windows[self._segments[:, 1]] = True
        self.chunks = chunks

    def reduce(self, name: str, head: Head, states: States, rows: Int64) -> set[int]:
        """Compute the values of the segments in these rows. Return the rows with NaN or infinite values."""
        if not isinstance(head, JoiningHead):
            raise InternalFailure(f"the head {name} cannot join the segments of a chunk", reason="malformed_batch")
        sequences = np.full(self._count, -1, np.int64)
        sequences[states.packed.order] = np.arange(len(states.packed.order))
        numbers = np.flatnonzero(np.isin(self._segments[:, 1], rows))
        owners, begins, ends = self._segments[numbers, 1:].T
        lengths = ends - begins
        starts = states.packed.bounds[sequences[owners]] + begins
        source = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        items = Items(lengths, states.packed.ids[source].astype(np.int32))
        packed = pack(items, np.arange(len(numbers)), Positions())
        within = np.arange(len(source)) - np.repeat(packed.bounds[:-1], packed.lengths)
        source = source[np.repeat(items.starts[packed.order], packed.lengths) + within]
        hidden = states.hidden[to_device(source, states.hidden.device)]
        none = np.zeros(len(numbers), bool)  # no row is a query, because only documents have chunks
        segments = States(hidden, packed, none, states.pooling, begins[packed.order] > 0)
        reduced = head.parts(segments, np.arange(len(numbers)))
        parts = self._parts.setdefault(name, [None] * len(self._segments))
        for number, part in zip(numbers[packed.order].tolist(), reduced.rows, strict=True):
            parts[number] = part
        bad = packed.order[~reduced.usable.cpu().numpy()]
        return set(owners[bad].tolist())

    def joined(self, heads: Mapping[str, Head], pooling: str) -> dict[str, list[Row | None]]:
        """Return the results of all chunks, by head (output layer); None for a chunk if one of its segments has no
        value. `pooling`: the pooling that the batch requests.
        """
        bounds = np.searchsorted(self._segments[:, 0], np.arange(self.chunks + 1))
        lengths = self._segments[:, 3] - self._segments[:, 2]
        rows: dict[str, list[Row | None]] = {}
        for name, parts in self._parts.items():
            head: Any = heads[name]
            chunks = [slice(int(first), int(stop)) for first, stop in itertools.pairwise(bounds)]
            whole = [number for number, own in enumerate(chunks) if all(part is not None for part in parts[own])]
            rows[name] = [None] * self.chunks
            if not whole:
                continue
            joined = head.join([parts[chunks[n]] for n in whole], [lengths[chunks[n]] for n in whole], pooling)
            for number, row in zip(whole, joined, strict=True):
                rows[name][number] = row
        return rows

    def units(self, group: Group) -> list[tuple[list[int], list[int]]]:
        """Return (rows of the text, rows of the results) for each input of a work item. An input with chunks has a
        result row for each chunk. For an input without chunks, the two lists are equal.
        """
        units = []
        row = group.start
        for described in group.chunked:
            own = list(range(row, row + described.rows))
            if row in self._firsts:
                first = self._count + self._firsts[row]
                units.append((own, list(range(first, first + _chunk_count(described)))))
            else:
                units.append((own, own))
            row += described.rows
        return units


def _chunk_count(described: ChunkedRows) -> int:
    return len(described.spans) // 12


def _checked(table: Int64, described: ChunkedRows, lengths: Int64) -> Int64:
    chunk, row, first, end = table.T
    if (
        not np.array_equal(np.unique(chunk), np.arange(_chunk_count(described)))
        or (np.diff(chunk) < 0).any()
        or row.min() < 0
        or row.max() >= len(lengths)
        or first.min() < 0
        or (first >= end).any()
        or (end > lengths[row]).any()
    ):
        raise MalformedBatch("the segments of chunks are not in order, or outside of their rows")
    return table


def result_of(described: ChunkedRows, results: Sequence[ItemResult | SIEError]) -> ItemResult | SIEError:
    """Return the result of one input: the joined arrays of its chunks, and a table with the range of each chunk
    (`messages.Ok`). If a chunk failed, return the first error. For an input without chunks, return its only result.
    """
    if not described.spans:
        (result,) = results
        return result
    good: list[ItemResult] = []
    for result in results:
        if isinstance(result, SIEError):
            return result
        good.append(result)
    table = np.zeros((len(good), 5), np.int32)
    table[:, :3] = np.frombuffer(described.spans, "<i4").reshape(-1, 3)
    arrays = {}
    for name in good[0].arrays:
        parts = [result.arrays[name] for result in good]
        arrays[name] = np.stack(parts) if name == "dense" else np.concatenate(parts)
        if name in ("multivector", "sparse.indices"):
            table[:, 3 if name == "multivector" else 4] = [len(part) for part in parts]
    return ItemResult({"chunks": table, **arrays})


def results_of(group: Group, results: ItemResults) -> ItemResults:
    """Return one result for each input of a work item, from the results of the chunks of all inputs, in order."""
    joined: ItemResults = []
    at = 0
    for described in group.chunked:
        count = _chunk_count(described) if described.spans else 1
        joined.append(result_of(described, results[at : at + count]))
        at += count
    return joined
