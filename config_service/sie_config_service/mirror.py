"""Copy of the catalogue's bucket in the memory of a replica. The first read gets all models and bundles; each later
read gets only new writes, so its size does not grow with the number of models.

    bucket ── all models, at first ──► Mirror ◄── later writes, in order ── bucket
                                         └─► CatalogueSnapshot: all models at one epoch, and for each bundle (set of
                                             families of one worker image) the last write that concerned it

A read of the config service must contain all earlier writes. This module therefore does not use
`sie_broker.record.Record`, which may be behind its bucket for a moment. Each read first gets the number of the last
write from the leader of the bucket (a server of the broker). Then it gets the writes up to this number from any server,
and applies all of them or none.

The epoch has two parts: the time when the bucket was created, and the number of the catalogue's last write.
The bucket also stores replies for requests with an Idempotency-Key; their writes do not change the epoch.

A mirror belongs to one bucket. If the broker loses the bucket (it was in memory, or a user deleted it), the service
creates a new, empty bucket. The mirror refuses to read the new bucket; `is_lost` stays True.
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
from sie_contracts.errors import UNDECODABLE, NotReady
from sie_contracts.models.aliases import is_alias
from sie_contracts.models.bundles import DEFAULT, BundleEntry, serving
from sie_contracts.wire import configs, topology
from sie_contracts.wire.configs import ConfigEpoch

REPLIES = "replies"  # first part of the keys of stored replies, which are not models
# seconds for which `Mirror._since` reads again if the reply of the broker lacks the newest writes of the bucket
BEHIND_S = 2.0
_PAUSE_S = 0.02
_logger = logging.getLogger("sie.config")
_Record = TypeVar("_Record")


class StoredModel(msgspec.Struct, frozen=True):
    """Revision of a model. `entry` is None for a removal. `source`: "packaged" or "overlay" (from a folder), or "api"
    (from a request). Seeding, which copies the folders to the bucket, never changes a model with the source "api".
    """

    entry: dict[str, Any] | None
    source: str
    revision: int = 0
    operation: str = ""
    created_at: str = ""
    model: str = ""
    # name of the writer's API token; `sie-config` for a restored revision; empty for a seeded revision
    author: str = ""
    note: str = ""  # reason for a revision that the config service restored; empty for all other revisions


@dataclass(frozen=True, slots=True)
class HeldModel:
    """Model in the bucket. `sequence`: revision of its key, for compare-and-set. `stored`: None if never written."""

    stored: StoredModel | None = None
    sequence: int = 0

    @property
    def entry(self) -> dict[str, Any] | None:
        return None if self.stored is None else self.stored.entry

    @property
    def revision(self) -> int:
        """Return the number of the model's newest revision, counted from 1; 0 if the model never existed."""
        return 0 if self.stored is None else self.stored.revision

    @property
    def written(self) -> int:
        """Return the number of the write that stored the history record of the newest revision. One batch writes the
        model and then this record. The catalogue at the epoch TIME:NUMBER contains this revision if NUMBER is at least
        the returned number.
        """
        return self.sequence + 1


_stored = msgspec.json.Decoder(StoredModel)
_bundle = msgspec.json.Decoder(BundleEntry)


@dataclass(frozen=True)
class CatalogueSnapshot:
    """Models of the catalogue at one epoch, including removed models. `concerned`: bundle -> number of the last write
    that is known to affect this bundle. `unknown`: every write up to this number may have affected any bundle.
    """

    epoch: str = ""
    held: Mapping[str, HeldModel] = field(default_factory=dict)
    bundles: Mapping[str, BundleEntry] = field(default_factory=dict)
    concerned: Mapping[str, int] = field(default_factory=dict)
    unknown: int = 0

    @cached_property
    def live(self) -> dict[str, StoredModel]:
        """Return the models that exist, without the removed ones."""
        return {
            model: held.stored
            for model, held in self.held.items()
            if held.stored is not None and held.stored.entry is not None
        }

    @property
    def created(self) -> str:
        return self.epoch.rpartition(":")[0]

    def since(self, bundle: str) -> str:
        """Return the epoch of the last write that may have changed the models of a bundle."""
        return f"{self.created}:{max(self.unknown, self.concerned.get(bundle, 0))}"

    def revisions(self, bundle: str) -> dict[str, int]:
        """Return the revisions of the models that a bundle can serve, by id."""
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
        """Return the epochs and hashes that gateways and workers compare with their own."""
        hashes = {bundle: configs.digest(revisions) for bundle, revisions in self._revisions.items()}
        return ConfigEpoch(
            self.epoch,
            {bundle: self.since(bundle) for bundle in self.bundles},
            configs.digest(self.bundles),
            configs.digest(hashes),
        )


def bundle_key(bundle: str) -> str:
    return f"bundle.{topology.token(bundle)}"


def bundles_of(bundles: Mapping[str, BundleEntry], entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the bundles that can serve a stored entry, the preferred bundle first; an alias has none."""
    return () if is_alias(entry) else serving(bundles, str(entry.get("family", "")), str(entry.get("bundle", "")))


def concerns(bundles: Mapping[str, BundleEntry], *entries: dict[str, Any] | None) -> set[str]:
    """Return the bundles that could serve a model before its change or can serve the model now. If there is none,
    return the default bundle, because gateways must get a message about each change.
    """
    return {bundle for entry in entries if entry is not None for bundle in bundles_of(bundles, entry)} or {DEFAULT}


def decoded(decoder: msgspec.json.Decoder[_Record], entry: Entry) -> _Record:
    """Decode a record of the bucket. Raises NotReady for an unreadable record, so that no model seems removed."""
    try:
        return decoder.decode(entry.value or b"")
    except UNDECODABLE as error:
        raise NotReady(
            f"the catalogue's record {entry.key} cannot be read ({error}): run `sie repair "
            f"KV_{topology.CATALOGUE_BUCKET}`; nothing is served until then, and gateways and workers keep the "
            "catalogue that they have"
        ) from error


class Mirror:
    """Copy of the bucket. Each call of `snapshot` first reads the new writes from the broker."""

    def __init__(self, bucket: RecordBucket) -> None:
        self._bucket = bucket
        self._lock = asyncio.Lock()
        self._now = CatalogueSnapshot()
        self._read = 0  # number of the last write in the bucket that was applied
        self._created = ""  # time when the bucket was created; empty before the first read
        self.is_lost = False  # True after the broker lost this bucket; another bucket may have its name now
        self.suspect = asyncio.Event()  # set if the bucket may be lost; `CatalogueStore.lost` then calls `check`
        self.before = CatalogueSnapshot()  # last snapshot that `invalidate` discarded

    @property
    def last(self) -> CatalogueSnapshot | None:
        """Return the last snapshot without a new read. Return None before the first read, and after `invalidate` until
        the next read.
        """
        return self._now if self._now.epoch else None

    async def snapshot(self) -> CatalogueSnapshot:
        """Read new writes, and return all models as of the newest write that the bucket's leader has. Raises
        BrokerError; NotReady for an unreadable record or a lost bucket.
        """
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
        """Discard the snapshot after a reconnect, because the broker may have an older copy of the bucket."""
        async with self._lock:
            if self._now.epoch:
                self.before = self._now
            self._now, self._read = CatalogueSnapshot(), 0
        self.suspect.set()

    async def check(self) -> bool:
        """Open the bucket again and read it. Return True if the bucket is lost, or lacks writes that were in the
        snapshot `before`. Raises BrokerError, NotReady.
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
        """Write a batch. Return the snapshot of the catalogue directly before the batch (None if this state is
        unknown), and the number of the batch's last write.

        Raises WrongRevision if nothing was stored, and BrokerError if it is unknown whether the batch was stored.
        """
        async with self._lock:
            last = await self._bucket.write(list(writes))
            if not self._now.epoch:  # a reconnect discarded the snapshot; the next read gets this batch
                return None, last
            first = last - len(writes) + 1
            try:
                entries = await self._since(last)
                self._apply(entry for entry in entries if entry.revision < first)
                before = self._now
                self._apply(entry for entry in entries if entry.revision >= first)
            except (BrokerError, NotReady):
                return None, last
            return before, last

    async def _begin(self, created: str, last: int) -> None:
        """Read all models and bundles, at least up to write number `last`. The snapshot says that every write up to
        this number may have changed any bundle, because the records do not say which bundles a write changed.
        """
        models = await self._bucket.use(lambda bucket: bucket.entries("model"))
        entries = await self._bucket.use(lambda bucket: bucket.entries("bundle"))
        bundles = [decoded(_bundle, entry) for entry in entries]
        held = {}
        for entry in models:
            stored = decoded(_stored, entry)
            held[stored.model or str((stored.entry or {})["id"])] = HeldModel(stored, entry.revision)
        self._read = max((entry.revision for entry in models), default=0)
        # After each write of a model follows a history record, from which `_apply` learns the changed bundles. But
        # `_apply` skips the history record of a revision that this read has returned. So if a model was written during
        # this read, the snapshot says that the history record may have changed any bundle.
        if self._read > last:
            last = self._read + 1
        self._created = created
        self._now = CatalogueSnapshot(
            f"{created}:{self._read}", held, {bundle.id: bundle for bundle in bundles}, {}, last
        )

    async def _since(self, last: int) -> list[Entry]:
        """Return the writes after write number `self._read`. They end with write `last` or a later one, unless the
        bucket has lost write `last`. Raises BrokerUnavailable if the broker has write `last` but does not return it.
        """
        entries: list[Entry] = []
        for _ in range(int(BEHIND_S / _PAUSE_S)):
            entries = await self._bucket.use(lambda bucket: bucket.since(self._read))
            if entries and entries[-1].revision >= last:
                return entries
            # the reply came from a server of the broker that lacks the newest writes: read again after a pause
            await asyncio.sleep(_PAUSE_S)
        if await self._bucket.use(lambda bucket: bucket.reaches(last)):
            raise BrokerUnavailable(f"the broker has write {last} of the catalogue's bucket, but does not return it")
        _logger.warning(
            "bucket %s is damaged: its last write, %d, is missing; at the next seeding, the models are written again "
            "from the model folders, and from the bucket with copies of the models that came over the API",
            self._bucket.name,
            last,
        )
        return entries

    def _apply(self, entries: Iterable[Entry]) -> None:
        """Apply writes to the snapshot, all or none of them. Raises NotReady for an unreadable record."""
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
                    continue  # an old revision, restored from a backup to the history only
                if stored.revision > before.revision + 1:
                    # The bucket has lost the revisions between `before` and `stored`, which may have changed any
                    # bundle.
                    unknown = read
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
        if epoch != self._now.epoch:  # an unchanged snapshot keeps its cached properties
            self._now = CatalogueSnapshot(epoch, held, bundles, concerned, unknown)
