"""Stores placement tables in a bucket. A lane (pool, machine profile and bundle) has one table: the workers on which
each model is placed. A small table is one message. A large table is stored in parts, by a hash of the model.

    key of the lane          Placement: at_s, and either all rows or the stamps of the parts
    key of the lane .p{n}    PlacementPart: its stamp, and the rows of models with crc32(model) % parts == n

A stamp identifies the content of a part. A write stores all changed parts and the lane's key in one batch, by
compare-and-set on the lane's key. A reader keeps its former table until it has a part for each stamp in the lane's key.
Then it joins the parts.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from sie_broker import Entry, KeyValue, PayloadTooBig, Write
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.records import Placement, PlacementPart

# A table of at most WHOLE_BYTES is stored as one message. A larger table is split into parts of about PART_BYTES. Under
# load, a table changes every 5 s, and each worker of the lane reads the change. With parts, workers read only the
# changed parts.
WHOLE_BYTES = 64 << 10
PART_BYTES = 32 << 10
MAX_PARTS = 512
SPARE_BYTES = 4 << 10  # bytes of `max_payload` that are reserved for the headers of a message


@dataclass(frozen=True)
class TableChange:
    """Writes that store a lane's table of placements, and the content of a `StoredTable` after these writes. `table`:
    the whole table. `head`: the value of the lane's key. It is the table, or for a large table the stamps of `parts`.
    """

    writes: list[Write]
    table: Placement
    head: Placement
    parts: dict[int, PlacementPart]


def decode(entry: Entry) -> Placement | PlacementPart:
    """Decode the value of an entry: a table or a part of a table. Raises an error of UNDECODABLE for another value."""
    value = entry.value or b""
    is_part = topology.lane_key_of(entry.key) != entry.key
    return records.decode_placement_part(value) if is_part else records.decode_placement(value)


async def read_lane(bucket: KeyValue, lane_key: str) -> tuple[list[Entry], int]:
    """Read the table of one lane (pool, machine profile and bundle). Return (entries, revision). The last entry is that
    of the lane's key. A watch that starts after the revision delivers each entry that is newer than the returned
    entries. Raises BrokerError.
    """
    head = await bucket.get(lane_key)
    if head is None:
        return [], 0
    try:
        has_parts = head.value is not None and bool(records.decode_placement(head.value).parts)
    except UNDECODABLE:
        has_parts = False
    if not has_parts:
        return [head], head.revision
    # The parts may come from a replica that lacks the latest writes. So the watch must start at the lower one of two
    # revisions: that of the lane's entry, and the newest revision of a part.
    parts = await bucket.entries(lane_key)
    return [*parts, head], min(head.revision, max((part.revision for part in parts), default=0))


class StoredTable:
    """Table of one lane (pool, machine profile and bundle), as the bucket stores it. `table` is None before a complete
    table was read.
    """

    def __init__(self, lane_key: str) -> None:
        self.key = lane_key
        self.clear()

    def clear(self) -> None:
        """Discard the table. Called when the contents of the bucket are unknown."""
        self.table: Placement | None = None
        self._revisions: dict[str, int] = {}  # revision of each key in the bucket
        self._head: Placement | None = None
        self._parts: dict[int, PlacementPart] = {}
        self._sizes: dict[int, int] = {}  # stamp -> number of bytes of the encoded part

    def has(self, key: str) -> bool:
        return key == self.key or topology.part_number(self.key, key) is not None

    def put(self, key: str, value: Placement | PlacementPart | None, revision: int) -> bool:
        """Set the value of a key; None for a removed or unreadable key. Ignore keys of other lanes, and a revision that
        is not newer than the key's present revision. Return whether the table changed.
        """
        if not self.has(key) or revision <= self._revisions.get(key, 0):
            return False
        self._revisions[key] = revision
        number = topology.part_number(self.key, key)
        if number is None:
            self._head = value if isinstance(value, Placement) else None
        elif not isinstance(value, PlacementPart):
            self._parts.pop(number, None)
            return False
        else:
            if number in self._parts and self._parts[number].stamp == value.stamp:
                return False
            self._parts[number] = value
            if self._head is None or not self._head.parts:
                return False
        return self._join()

    def _join(self) -> bool:
        head, before = self._head, self.table
        if head is None or not head.parts:
            self.table = head
            return self.table is not before
        parts = [
            part
            for number, stamp in enumerate(head.parts)
            if (part := self._parts.get(number)) is not None and part.stamp == stamp
        ]
        if len(parts) < len(head.parts):
            # a part has not arrived yet, or a part is newer than the lane's key that arrived last
            return False
        hosts: dict[str, tuple[str, ...]] = {}
        raised_s: dict[str, float] = {}
        for part in parts:
            hosts.update(part.hosts)
            raised_s.update(part.raised_s)
        self.table = Placement(head.at_s, hosts, raised_s)
        return True

    @property
    def revision(self) -> int:
        """Return the revision of the last write or removal of the lane's key that this process has seen; else 0."""
        return self._revisions.get(self.key, 0)

    def change(self, table: Placement, max_payload: int) -> TableChange:
        """Return the writes that store `table`. They fail if the lane's key no longer has the revision that the
        property `revision` returns.

        `max_payload`: the broker's limit for a message, in bytes. Raises PayloadTooBig if a value of the change has
        more than `max_payload` - SPARE_BYTES bytes.
        """
        change = self._change(table, max_payload)
        size, key = max((len(write.value or b""), write.key) for write in change.writes)
        if size > max_payload - SPARE_BYTES:
            raise PayloadTooBig(
                f"the placement table of {self.key} needs a message of {size} bytes for the key {key}, but "
                f"max_payload is {max_payload}"
            )
        return change

    def _change(self, table: Placement, max_payload: int) -> TableChange:
        limit = max_payload - SPARE_BYTES
        if sum(map(self._size, self._parts.values())) <= WHOLE_BYTES // 2:
            whole = messages.encode(table)
            if len(whole) <= min(WHOLE_BYTES, limit):
                removals = [Write(topology.part_key(self.key, number), None) for number in sorted(self._parts)]
                return TableChange([*removals, Write(self.key, whole, self.revision)], table, table, {})
        parts = self._split(table, min(PART_BYTES, limit))
        head = Placement(table.at_s, parts=tuple(parts[number].stamp for number in range(len(parts))))
        writes = [
            Write(topology.part_key(self.key, number), messages.encode(part))
            for number, part in parts.items()
            if part is not self._parts.get(number)  # `_renewed` returns the same object for an unchanged part
        ]
        writes += [
            Write(topology.part_key(self.key, number), None) for number in sorted(self._parts.keys() - parts.keys())
        ]
        return TableChange([*writes, Write(self.key, messages.encode(head), self.revision)], table, head, parts)

    def written(self, change: TableChange, revision: int) -> None:
        """Set the table and the parts to those of `change`, which the broker has stored with `revision`."""
        self.table, self._head, self._parts = change.table, change.head, change.parts
        self._sizes = {part.stamp: self._size(part) for part in self._parts.values()}
        # `put` ignores these entries when the watch delivers them. The last revision of the batch is correct for each
        # key, because no other write has a revision between those of the batch.
        self._revisions.update(dict.fromkeys((write.key for write in change.writes), revision))

    def _size(self, part: PlacementPart) -> int:
        size = self._sizes.get(part.stamp)
        if size is None:
            size = self._sizes[part.stamp] = len(messages.encode(part))
        return size

    def _split(self, table: Placement, limit: int) -> dict[int, PlacementPart]:
        before = self._head
        if before is not None and before.parts and self.table is not None and len(self._parts) == len(before.parts):
            parts = self._renewed(table, self.table)
            sizes = [self._size(part) for part in parts.values()]
            if max(sizes) <= limit and sum(sizes) >= len(parts) * limit // 8:
                return parts
        count = 2
        size = len(messages.encode(table))
        while count < MAX_PARTS and count * limit < 2 * size:
            count *= 2
        rows: list[list[str]] = [[] for _ in range(count)]
        for model in table.hosts:
            rows[_part_of(model, count)].append(model)
        return {number: _part(table, models) for number, models in enumerate(rows)}

    def _renewed(self, table: Placement, before: Placement) -> dict[int, PlacementPart]:
        changed = {model for model, hosts in table.hosts.items() if before.hosts.get(model) != hosts}
        changed |= before.hosts.keys() - table.hosts.keys()
        changed |= {model for model, _ in table.raised_s.items() ^ before.raised_s.items()}
        rows: dict[int, set[str]] = {}
        for model in changed:
            rows.setdefault(_part_of(model, len(self._parts)), set()).add(model)
        return self._parts | {
            number: _part(table, sorted(models | self._parts[number].hosts.keys())) for number, models in rows.items()
        }


def _part_of(model: str, count: int) -> int:
    return zlib.crc32(model.encode()) % count


def _part(table: Placement, models: Sequence[str]) -> PlacementPart:
    hosts = {model: table.hosts[model] for model in models if model in table.hosts}
    rows = PlacementPart(0, hosts, {model: table.raised_s[model] for model in models if model in table.raised_s})
    stamp = int.from_bytes(hashlib.blake2b(messages.encode(rows), digest_size=8).digest(), "big")
    return PlacementPart(stamp, rows.hosts, rows.raised_s)
