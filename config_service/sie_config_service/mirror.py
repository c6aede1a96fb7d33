"""A replica's copy of the bucket: read whole once, then only later writes, so that ten thousand models cost no more
than one.

    bucket ── all models, at first ──► Mirror ◄── what was written since, in order ── bucket
                                         └─► Snapshot: all models at one epoch, and what each bundle has heard of

It is no `sie_broker.record.Record`, which watches a bucket and may be behind it for a moment: a reply of the config
service after a write must hold that write. So each read asks the leader of the bucket for its last revision and then
for the writes up to that revision, and applies all of them or none.

The epoch is when the bucket was made and the number of the last write of the catalogue in it: a kept reply moves no
epoch.

A mirror belongs to one bucket. A broker that loses the bucket (memory storage, or somebody deletes it) gives another
one, made later and empty at first: the mirror then refuses to read it and stays `is_lost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from sie_broker import BrokerError, BrokerUnavailable, Entry, Write
from sie_broker.record import RecordBucket
from sie_contracts.errors import NotReady
from sie_contracts.models.aliases import is_alias
from sie_contracts.models.bundles import DEFAULT, BundleEntry, serving
from sie_contracts.wire import configs, topology
from sie_contracts.wire.configs import ConfigEpoch

REPLIES = "replies"  # first part of the keys that are not of the catalogue
BEHIND_S = 2.0  # for which a replica of the broker may not have seen what its leader has
_PAUSE_S = 0.02
_logger = logging.getLogger("sie.config")
_Record = TypeVar("_Record")


class StoredModel(msgspec.Struct, frozen=True):
    """One revision of a model. `entry` is None once it is removed. `source`: packaged, overlay or api; seeding touches
    the first two.
    """

    entry: dict[str, Any] | None
    source: str
    revision: int = 0
    operation: str = ""
    created_at: str = ""
    model: str = ""
    author: str = ""  # whose token wrote it, by name; empty for what was seeded, and of versions that did not keep it
    note: str = ""  # why, where no person decided it


@dataclass(frozen=True, slots=True)
class HeldModel:
    """A model as it is in the bucket, and the bucket's revision for compare-and-set. `stored` is None for one that
    never was.
    """

    stored: StoredModel | None = None
    sequence: int = 0

    @property
    def entry(self) -> dict[str, Any] | None:
        return None if self.stored is None else self.stored.entry

    @property
    def revision(self) -> int:
        """The model's own count of its revisions: 1, 2, 3."""
        return 0 if self.stored is None else self.stored.revision

    @property
    def written(self) -> int:
        """The number of its write in epochs: its place in the history follows it in the bucket."""
        return self.sequence + 1


_stored = msgspec.json.Decoder(StoredModel)
_bundle = msgspec.json.Decoder(BundleEntry)


@dataclass(frozen=True)
class CatalogueSnapshot:
    """All models at one epoch, removed ones included. `concerned`: the number of the last write that each bundle was
    told of, as far as it is known; what came up to `unknown` may have concerned any.
    """

    epoch: str = ""
    held: Mapping[str, HeldModel] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)
    concerned: Mapping[str, int] = field(default_factory=dict)
    unknown: int = 0

    @cached_property
    def live(self) -> dict[str, StoredModel]:
        """Without removed ones."""
        return {
            model: held.stored
            for model, held in self.held.items()
            if held.stored is not None and held.stored.entry is not None
        }

    @property
    def created(self) -> str:
        return self.epoch.rpartition(":")[0]

    def since(self, bundle: str) -> str:
        """The epoch of the last write that concerned a bundle."""
        return f"{self.created}:{max(self.unknown, self.concerned.get(bundle, 0))}"

    def revisions(self, bundle: str) -> dict[str, int]:
        """The revisions of the models that a bundle can serve."""
        return self._revisions.get(bundle, {})

    @cached_property
    def _revisions(self) -> dict[str, dict[str, int]]:
        revisions: dict[str, dict[str, int]] = {bundle: {} for bundle in self.bundles}
        for model, stored in self.live.items():
            for bundle in bundles_of(self.bundles, stored.entry or {}):
                revisions.setdefault(bundle, {})[model] = stored.revision
        return revisions

    @cached_property
    def catalogue_epoch(self) -> ConfigEpoch:
        """The epoch and hashes that followers compare with their own."""
        hashes = {bundle: configs.bundle_hash(revisions) for bundle, revisions in self._revisions.items()}
        return ConfigEpoch(
            self.epoch,
            {bundle: self.since(bundle) for bundle in self.bundles},
            configs.digest(self.bundles),
            configs.digest(hashes),
        )


def bundle_key(bundle: str) -> str:
    return f"bundle.{topology.token(bundle)}"


def bundles_of(bundles: Mapping[str, BundleEntry], entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The bundles that can serve a stored entry, the preferred one first; an alias has none."""
    return () if is_alias(entry) else serving(bundles, str(entry.get("family", "")), str(entry.get("bundle", "")))


def concerns(bundles: Mapping[str, BundleEntry], *entries: dict[str, Any] | None) -> set[str]:
    """The bundles that hear of a change: those that had or get the model. Gateways listen to all of them, so there is
    always one.
    """
    return {bundle for entry in entries if entry is not None for bundle in bundles_of(bundles, entry)} or {DEFAULT}


def decoded(decoder: msgspec.json.Decoder[_Record], entry: Entry) -> _Record:
    """A record of the bucket. Raises NotReady for one that is none: an unreadable catalogue is not an empty one."""
    try:
        return decoder.decode(entry.value or b"")
    except msgspec.DecodeError as error:
        raise NotReady(
            f"the catalogue's record {entry.key} cannot be read ({error}): run `sie repair "
            f"KV_{topology.CATALOGUE_BUCKET}`; nothing is served until then, and gateways and workers keep the "
            "catalogue that they have"
        ) from error


class Mirror:
    """Follows the bucket whenever somebody asks. What it cannot read changes nothing of what it has."""

    def __init__(self, bucket: RecordBucket) -> None:
        self._bucket = bucket
        self._lock = asyncio.Lock()
        self._now = CatalogueSnapshot()
        self._read = 0  # the bucket's revision up to which it was read
        self._created = ""  # when the bucket was made; empty until it was read
        self.is_lost = False  # the broker has another bucket now
        self.suspect = asyncio.Event()  # the bucket may be lost: `check` tells
        self.before = CatalogueSnapshot()  # what was read before `forget`

    @property
    def last(self) -> CatalogueSnapshot | None:
        """The last snapshot, without asking the broker; None before the first read and while a whole read is due."""
        return self._now if self._now.epoch else None

    async def snapshot(self) -> CatalogueSnapshot:
        """All as the broker's leader has it now. Raises BrokerError; NotReady also once the bucket is lost."""
        async with self._lock:
            try:
                created, _, last = (await self._bucket.use(lambda bucket: bucket.epoch())).rpartition(":")
            except BrokerError:
                self.suspect.set()
                raise
            if self._created not in ("", created):
                self.is_lost = True
                self.suspect.set()
                raise NotReady("the broker lost the catalogue, which is seeded again now; try again in a few seconds")
            if self._now.created != created or self._read > int(last):
                await self._begin(created, int(last))
            if self._read < int(last):
                self._apply(await self._since(int(last)))
                self._read = int(last)
            return self._now

    async def invalidate(self) -> None:
        """Read all of it again next time: the broker was away, and what it has now may be an older copy."""
        async with self._lock:
            if self._now.epoch:
                self.before = self._now
            self._now, self._read = CatalogueSnapshot(), 0
        self.suspect.set()

    async def check(self) -> bool:
        """Open the bucket again and read it. Returns whether it is lost, or lacks writes that were read before. Raises
        BrokerError, NotReady.
        """
        await self._bucket.open()
        try:
            held = (await self.snapshot()).held
        except NotReady:
            if not self.is_lost:
                raise
            return True
        return any(
            before.revision > held.get(model, HeldModel()).revision for model, before in self.before.held.items()
        )

    async def write(self, writes: Sequence[Write]) -> tuple[CatalogueSnapshot | None, int]:
        """Do a batch. Returns all as it was just before, None where that cannot be told, and the bucket's last
        revision.

        Raises WrongRevision, BrokerError; then nothing, or nothing that is known, was stored.
        """
        async with self._lock:
            last = await self._bucket.write(list(writes))
            first = last - len(writes) + 1
            try:
                entries = await self._since(last)
                self._apply(entry for entry in entries if entry.revision < first)
                before = self._now
                self._apply(entry for entry in entries if entry.revision >= first)
            except (BrokerUnavailable, NotReady):
                return None, last
            return before if before.epoch else None, last

    async def _begin(self, created: str, last: int) -> None:
        """Read all models, and all bundles. What any write up to `last` concerned is not known."""
        models = await self._bucket.use(lambda bucket: bucket.entries("model"))
        entries = await self._bucket.use(lambda bucket: bucket.entries("bundle"))
        bundles = [decoded(_bundle, entry) for entry in entries]
        held = {}
        for entry in models:
            stored = decoded(_stored, entry)
            held[stored.model or str((stored.entry or {})["id"])] = HeldModel(stored, entry.revision)
        self._read = max((entry.revision for entry in models), default=0)
        self._created = created
        self._now = CatalogueSnapshot(
            f"{created}:{self._read}", held, {bundle.id: bundle for bundle in bundles}, {}, last
        )

    async def _since(self, last: int) -> list[Entry]:
        """Read the writes since the last read, up to revision `last` at least, or those that the bucket still has.
        Raises BrokerUnavailable.
        """
        entries: list[Entry] = []
        for _ in range(int(BEHIND_S / _PAUSE_S)):
            entries = await self._bucket.use(lambda bucket: bucket.since(self._read))
            if entries and entries[-1].revision >= last:
                return entries
            await asyncio.sleep(_PAUSE_S)  # until another replica of the broker answers, or this one has caught up
        if await self._bucket.use(lambda bucket: bucket.reaches(last)):
            raise BrokerUnavailable(f"the catalogue's bucket does not show its write {last}")
        _logger.warning(
            "%s is damaged: its write %d, the last one, is gone; what the folders and its copy have is written again",
            self._bucket.name,
            last,
        )
        return entries

    def _apply(self, entries: Iterable[Entry]) -> None:
        """All or nothing. Raises NotReady."""
        held, bundles, concerned = dict(self._now.held), dict(self._now.bundles), dict(self._now.concerned)
        number, unknown, read = int(self._now.epoch.rpartition(":")[2]), self._now.unknown, self._read
        for entry in entries:
            read = entry.revision
            kind = entry.key.partition(".")[0]
            if kind == REPLIES:
                continue
            number = read
            if kind == "history" and entry.value is not None:
                stored = decoded(_stored, entry)
                before = held.get(stored.model, HeldModel())
                if stored.revision <= before.revision:
                    continue  # an earlier one, restored from a backup
                if stored.revision > before.revision + 1:
                    unknown = read  # what came between is not there any more
                for bundle in concerns(bundles, stored.entry, before.entry):
                    concerned[bundle] = read
                held[stored.model] = HeldModel(stored, read - 1)
            elif kind == "bundle":
                unknown = read
                bundles = {name: bundle for name, bundle in bundles.items() if bundle_key(name) != entry.key}
                if entry.value is not None:
                    bundle_now = decoded(_bundle, entry)
                    bundles[bundle_now.id] = bundle_now
        self._read = read
        epoch = f"{self._now.created}:{number}"
        if epoch != self._now.epoch:  # else it is the same, with what was derived from it
            self._now = CatalogueSnapshot(epoch, held, bundles, concerned, unknown)
