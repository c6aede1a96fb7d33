"""Catalogue in a key-value bucket of the broker. A replica of the config service has no other state, so any number of
replicas may run. If two replicas write the same key, compare-and-set lets one write succeed.

    packaged folder + SIE_MODELS_DIR ──seed──► bucket ──► export, epoch
                     an operator ──── write ──►   └──► for each write of a model, one delta to each bundle concerned

    model.<id>             the present model: compare-and-set uses its revision
    bundle.<id>            a bundle of the folders. A change has no delta: readers notice it by the epoch
    history.<id>.<number>  the model's last REVISIONS_KEPT revisions. One batch writes the model and its history record;
                           the newest record replaces the oldest
    replies.<number>       replies to writes that had an Idempotency-Key. A hash of the key gives the number. If the
                           write changes a model, one batch writes the model and the reply
    aliases                the targets of each alias; an alias itself is stored like a model

To seed is to write the models of the folders to the bucket. Seeding never changes a model that was written or removed
over the API. A removed model remains as a record without an entry, because its later revisions continue its numbers.

If the broker's files are damaged, seeding reads the models of the folders again. A second bucket, the copy, has the
models that were written over the API, under the same keys. Each write goes to the bucket first, then to the copy. So if
the bucket lacks a model of the copy, the bucket has lost the model, and `recover` writes the model again.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from sie_broker import Broker, BrokerError, Bus, Entry, Write
from sie_broker.record import RecordBucket, retry_conflicts
from sie_config_service.aliases import INDEX_KEY, AliasIndex, index_in, index_of
from sie_config_service.mirror import (
    CatalogueSnapshot,
    HeldModel,
    Mirror,
    StoredModel,
    bundle_key,
    bundles_of,
    concerns,
    decoded,
)
from sie_contracts.errors import UNDECODABLE, ModelNotFound, NotReady
from sie_contracts.models.aliases import Alias, is_alias
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry
from sie_contracts.names import NameIndex
from sie_contracts.settings import Settings
from sie_contracts.wire import configs, messages, topology
from sie_contracts.wire.configs import ConfigDelta, ConfigEpoch, ConfigExport, ConfigModel
from sie_runtime.failpoints import failpoint
from sie_runtime.feed import snapshot
from sie_runtime.process import Stop, retry

PRODUCER = "sie-config"
SEED_ATTEMPTS = 5
SEED_BATCH = 200  # models per batch: a model needs two messages, and the broker accepts at most 1,000 in a batch
REVISIONS_KEPT = 100
REPLY_SLOTS = 256
REPLIES_PER_SLOT = 64
REPLY_KEPT_S = 86400.0
# operation that writes an earlier revision of a model again, because its newest revision could not be loaded
RESTORE = "restore"
_logger = logging.getLogger("sie.config")


@dataclass(frozen=True)
class CatalogueChange:
    """Write of a model. `entry`: the new entry, None for a removal. `held`: the stored model before the write."""

    model: str
    held: HeldModel
    entry: dict[str, Any] | None
    source: str
    operation: str
    author: str = ""
    note: str = ""

    def bundles(self, bundles: Mapping[str, BundleEntry]) -> set[str]:
        """Return the bundles that could serve the model before the change or can serve the model now."""
        return concerns(bundles, self.entry, self.held.entry)


class RecordedReply(msgspec.Struct, frozen=True):
    """Stored reply to a write. `key`, `request`: digests of the Idempotency-Key and of the request."""

    key: str
    request: str
    at_s: float
    body: dict[str, Any]


@dataclass(frozen=True)
class ReplySlot:
    """Stored replies under one key of the bucket. `number`: last part of that key. `sequence`: revision of that key."""

    number: int
    replies: tuple[RecordedReply, ...]
    sequence: int

    def find(self, key: str, now_s: float) -> RecordedReply | None:
        """Return the reply to the write whose Idempotency-Key has the digest `key`; None if the slot has no reply for
        this key, or if the reply is REPLY_KEPT_S old.
        """
        return next((reply for reply in self.replies if reply.key == key and now_s - reply.at_s < REPLY_KEPT_S), None)

    def with_reply(self, reply: RecordedReply) -> Write:
        """Return the write that adds a reply to the slot. The slot keeps the newest REPLIES_PER_SLOT replies, without
        those older than REPLY_KEPT_S.
        """
        young = [earlier for earlier in self.replies if reply.at_s - earlier.at_s < REPLY_KEPT_S][
            -REPLIES_PER_SLOT + 1 :
        ]
        return Write(_slot_key(self.number), msgspec.json.encode([*young, reply]), self.sequence)


_stored = msgspec.json.Decoder(StoredModel)
_replies = msgspec.json.Decoder(tuple[RecordedReply, ...])


def model_key(model: str) -> str:
    return f"model.{topology.token(model)}"


def _history_key(model: str, revision: int) -> str:
    return f"history.{topology.token(model)}.{revision % REVISIONS_KEPT}"


def _slot_key(number: int) -> str:
    return f"replies.{number}"


def normalised(entry: ModelEntry | Alias) -> dict[str, Any]:
    """Return an entry as a map, in the form in which it is stored and exported. Equal entries have equal maps."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(entry))
    return document


class CatalogueStore:
    """Reader and writer of the catalogue's bucket. Its memory has only caches of the bucket's content."""

    def __init__(self, broker: Bus, bucket: RecordBucket, copy: RecordBucket) -> None:
        self._broker = broker
        self._bucket = bucket
        self._copy = copy
        self._mirror = Mirror(bucket)
        self._exported: tuple[CatalogueSnapshot | None, bytes] = (None, b"")
        self._parsed: tuple[CatalogueSnapshot | None, Catalogue] = (None, Catalogue())

    async def epoch(self) -> str:
        return (await self.snapshot()).epoch

    async def catalogue_epoch(self) -> ConfigEpoch:
        return (await self.snapshot()).catalogue_epoch

    async def snapshot(self) -> CatalogueSnapshot:
        """Return all models as of the newest write that the broker's leader has. Raises BrokerError, NotReady."""
        return await self._mirror.snapshot()

    @property
    def last_read(self) -> CatalogueSnapshot | None:
        """Return the last snapshot without a request to the broker; None if there is none."""
        return self._mirror.last

    async def reconnected(self) -> None:
        """Discard the snapshot, because after a reconnect the broker may have an older copy of the bucket, or none."""
        await self._mirror.invalidate()

    async def lost(self, stop: Stop) -> bool:
        """Wait until the broker has lost the bucket or some of its writes, and return True. Return False if `stop` is
        set first. Check the bucket only after a reconnect, and after `snapshot` failed to read the epoch or found
        another bucket.
        """
        while not await stop.wait_woken(self._mirror.suspect):
            action = "checking whether the broker still has the catalogue"
            if await retry(self._mirror.check, errors=(BrokerError, NotReady), stop=stop, logger=_logger, task=action):
                return True
        return False

    def written_over_api(self) -> list[str]:
        """Return the ids of entries that were written or removed over the API, as of the last read."""
        held = (self._mirror.last or self._mirror.before).held
        return sorted(
            model for model, state in held.items() if state.stored is not None and state.stored.source == "api"
        )

    async def bundles(self) -> dict[str, BundleEntry]:
        return dict((await self.snapshot()).bundles)

    async def export(self) -> ConfigExport:
        return _export(await self.snapshot())

    async def exported(self) -> bytes:
        """Return the export in JSON, cached per epoch: all gateways and workers request it at the same time."""
        read = await self.snapshot()
        if self._exported[0] is not read:
            self._exported = read, msgspec.json.encode(_export(read))
        return self._exported[1]

    async def catalogue(self) -> Catalogue:
        """Return the parsed catalogue. Raises ValidationFailed for a stored entry that the schema does not permit."""
        read = await self.snapshot()
        if self._parsed[0] is not read:
            self._parsed = read, await snapshot(_export(read))
        return self._parsed[1]

    async def held(self, model: str) -> HeldModel:
        """Return one model as of the newest write that the broker's leader has."""
        entry = await self._bucket.get(model_key(model))
        return (
            HeldModel() if entry is None or entry.value is None else HeldModel(decoded(_stored, entry), entry.revision)
        )

    async def _entries(self, within: str) -> list[Entry]:
        return await self._bucket.use(lambda bucket: bucket.entries(within))

    async def not_found(self, model: str) -> ModelNotFound:
        """Return the error for a missing model, with the revision that removed the model, or with similar names."""
        held = await self.held(model)
        if held.stored is not None:
            fix = "roll back to an earlier revision, which /history lists, or POST the model again"
            return ModelNotFound(
                f"{model} was removed with revision {held.revision}: {fix}", param="id", extras={"suggestions": []}
            )
        like = NameIndex((await self.snapshot()).live).near(model)
        fix = (
            f"did you mean {' or '.join(like)}?"
            if like
            else "GET /v1/configs/models lists all models, and POST there adds one"
        )
        return ModelNotFound(f"no model named {model[:200]!r}; {fix}", param="id", extras={"suggestions": like})

    async def history(self, model: str) -> list[StoredModel]:
        """Return the stored revisions of a model, newest first."""
        entries = await self._entries(f"history.{topology.token(model)}")
        revisions = [decoded(_stored, entry) for entry in entries if entry.value is not None]
        return sorted(revisions, key=lambda revision: -revision.revision)

    async def revisions_at(self, model: str) -> Callable[[str], int | None]:
        """Return a function that maps an epoch to the model's revision at that epoch: 0 before the first revision, None
        if the epoch is older than the stored history or belongs to another bucket.
        """
        created = (await self.snapshot()).created
        entries = await self._entries(f"history.{topology.token(model)}")
        revisions = sorted((entry.revision, decoded(_stored, entry).revision) for entry in entries)

        def revision_at(epoch: str) -> int | None:
            began, _, number = epoch.rpartition(":")
            if began != created or not number.isdecimal():
                return None
            count = bisect_right(revisions, int(number), key=lambda pair: pair[0])
            return revisions[count - 1][1] if count else None if not revisions or revisions[0][1] > 1 else 0

        return revision_at

    async def revision(self, model: str, revision: int) -> StoredModel | None:
        """Return one revision of a model; None if it is no longer stored."""
        entry = await self._bucket.get(_history_key(model, revision))
        stored = None if entry is None or entry.value is None else decoded(_stored, entry)
        return stored if stored is not None and stored.revision == revision else None

    async def backup(self) -> list[StoredModel]:
        """Return all stored revisions of the models whose newest revision was written over the API, because the folders
        lack these revisions.
        """
        models = [
            name for name, held in (await self.snapshot()).held.items() if held.stored and held.stored.source == "api"
        ]
        return [stored for name in sorted(models) for stored in reversed(await self.history(name))]

    async def slot(self, key: str) -> ReplySlot:
        """Read the slot that has the reply to a write with an Idempotency-Key. `key`: digest of the Idempotency-Key,
        which selects one of REPLY_SLOTS slots. If the slot cannot be decoded, return an empty slot: the next reply then
        replaces the stored slot.
        """
        number = int(key[:8], 16) % REPLY_SLOTS
        entry = await self._bucket.get(_slot_key(number))
        if entry is None or entry.value is None:
            return ReplySlot(number, (), 0)
        try:
            return ReplySlot(number, _replies.decode(entry.value), entry.revision)
        except UNDECODABLE as error:
            _logger.warning(
                "bucket %s: key %s cannot be decoded and counts as empty: %s", self._bucket.name, entry.key, error
            )
            return ReplySlot(number, (), entry.revision)

    async def remember(self, reply: Write) -> None:
        """Store the reply to a write that changed no model. Raises WrongRevision."""
        await self._bucket.write([reply])

    async def alias_index(self) -> AliasIndex:
        """Return the index of aliases at the newest write that the broker's leader has. Raises NotReady if the index
        cannot be decoded.
        """
        entry = await self._bucket.get(INDEX_KEY)
        return AliasIndex() if entry is None else AliasIndex.read(entry.value, entry.revision)

    async def write(
        self,
        changes: Sequence[CatalogueChange],
        reply: Write | None = None,
        index: Write | None = None,
        *,
        tell: bool = True,
    ) -> tuple[int, int]:
        """Write the changes, each of a different model, in one atomic batch. With `tell`, broadcast a delta (a message
        about one change) to each bundle that the change concerns. Without `tell`, readers find the changes at their
        next poll. Return the number of deltas sent, and the number that should have been sent.

        Raises WrongRevision if another writer has changed one of the models, the stored replies or the index of
        aliases; the broker then stores none of the changes. Raises BrokerError, NotReady.
        """
        writes: list[Write] = []
        revisions: list[StoredModel] = []
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        for change in changes:
            stored = StoredModel(
                change.entry,
                change.source,
                change.held.revision + 1,
                change.operation,
                now,
                change.model,
                change.author,
                change.note,
            )
            value = msgspec.json.encode(stored)
            writes.append(Write(model_key(change.model), value, change.held.sequence))
            writes.append(Write(_history_key(change.model, stored.revision), value))
            revisions.append(stored)
        writes += [write for write in (index, reply) if write is not None]
        created = (await self.snapshot()).created
        failpoint("config.before_write")
        before, last = await self._mirror.write(writes)
        for stored in revisions:
            if stored.source == "api":
                await self._write_copy(stored)
        return (
            await self._broadcast(changes, revisions, before, created, last - len(writes), index is not None)
            if tell
            else (0, 0)
        )

    async def copy_held(self, held: HeldModel) -> None:
        """Write the newest revision of a model to the copy if the API wrote the revision and the copy lacks it."""
        if held.stored is not None and held.stored.source == "api":
            await self._write_copy(held.stored)

    async def _write_copy(self, stored: StoredModel) -> None:
        """Write a revision to the copy (the second bucket) if the copy has only earlier revisions or none."""
        key = model_key(stored.model)

        async def attempt() -> None:
            entry = await self._copy.get(key)
            present = _copied(entry)
            if present is None or present.revision < stored.revision:
                revision = 0 if entry is None else entry.revision
                await self._copy.write([Write(key, msgspec.json.encode(stored), revision)])

        try:
            await retry_conflicts(attempt)
        except BrokerError as error:
            _logger.warning(
                "bucket %s lacks the newest revision of model %s until its next write, or the next start of the "
                "config service: %s",
                self._copy.name,
                stored.model,
                error,
            )

    async def recover(self, backup: Sequence[StoredModel] = ()) -> list[str]:
        """Write models of the copy or of a backup to the bucket if the bucket lacks their newest revision. Write models
        that came over the API to the copy if the copy lacks their newest revision. Then correct the index of aliases.
        Return the ids of the models written to the bucket.

        `backup`: revisions of models. The bucket's history gets the old revisions that it lacks.
        Raises WrongRevision if another writer changes one of the models or the index at the same time.
        """
        entries = await self._copy.use(lambda bucket: bucket.entries())
        copies = {stored.model: stored for stored in map(_copied, entries) if stored is not None}
        newest = dict(copies)
        for stored in backup:
            if stored.model not in newest or newest[stored.model].revision < stored.revision:
                newest[stored.model] = stored
        present = (await self.snapshot()).held
        for stored in sorted(backup, key=lambda stored: stored.revision):
            if present.get(stored.model, HeldModel()).revision < stored.revision < newest[stored.model].revision:
                write = Write(_history_key(stored.model, stored.revision), msgspec.json.encode(stored))
                await self._bucket.write([write])
        lost = [
            CatalogueChange(
                model,
                HeldModel(
                    msgspec.structs.replace(stored, revision=stored.revision - 1),
                    present.get(model, HeldModel()).sequence,
                ),
                stored.entry,
                stored.source,
                stored.operation,
                stored.author,
                stored.note,
            )
            for model, stored in sorted(newest.items())
            if stored.revision > present.get(model, HeldModel()).revision
        ]
        for start in range(0, len(lost), SEED_BATCH):
            await self.write(lost[start : start + SEED_BATCH], tell=False)
        # Read the index before the snapshot. If another replica adds an alias between these reads, the write below
        # fails with WrongRevision, and does not remove that alias from the index.
        index, read = await self._index_to_correct(), await self.snapshot()
        for model, held in read.held.items():
            if model not in copies or copies[model].revision < held.revision:
                await self.copy_held(held)
        aliases = index_in(read, index)
        if aliases != index.models:
            await self._bucket.write([AliasIndex(aliases, index.sequence).written()])
        return [change.model for change in lost]

    async def _index_to_correct(self) -> AliasIndex:
        try:
            return await self.alias_index()
        except NotReady as error:  # `recover` builds the index from the stored aliases
            _logger.warning("%s", error.message)
            entry = await self._bucket.get(INDEX_KEY)
            return AliasIndex({}, 0 if entry is None else entry.revision)

    async def _broadcast(
        self,
        changes: Sequence[CatalogueChange],
        revisions: Sequence[StoredModel],
        before: CatalogueSnapshot | None,
        created: str,
        first: int,
        with_index: bool,
    ) -> tuple[int, int]:
        """Send a delta for each change and each affected bundle. `before`: the snapshot before the changes; if None,
        the deltas make readers request the whole catalogue. Return the number of deltas sent, and the number that
        should have been sent.
        """
        previous, since = (
            (before.epoch, {bundle: before.since(bundle) for bundle in before.bundles})
            if before is not None
            else ("", {})
        )
        bundles = before.bundles if before is not None else (await self.snapshot()).bundles
        sent = expected = 0
        for number, (change, stored) in enumerate(zip(changes, revisions, strict=True), 1):
            epoch = f"{created}:{first + 2 * number + (with_index and number == len(changes))}"
            for bundle in sorted(change.bundles(bundles)):
                delta = ConfigDelta(
                    PRODUCER, previous, epoch, change.model, stored.revision, stored.entry, since.get(bundle, "")
                )
                since[bundle] = epoch
                failpoint("config.before_broadcast")
                expected += 1
                try:
                    await self._broker.send(topology.config_subject(bundle), messages.encode(delta))
                    sent += 1
                except BrokerError as error:  # readers will find the change when they poll
                    _logger.warning(
                        "a change of bundle %s was not broadcast; its readers find it at their next poll: %s",
                        bundle,
                        error,
                    )
            previous = epoch
        return sent, expected

    async def seed_bundles(self, packaged: Mapping[str, BundleEntry]) -> bool:
        """Replace the bundles in the bucket. Return whether a bundle changed. Raises WrongRevision if each of
        SEED_ATTEMPTS attempts conflicts with another writer.
        """
        values = {bundle_key(name): msgspec.json.encode(bundle) for name, bundle in packaged.items()}

        async def attempt() -> bool:
            present = {entry.key: entry for entry in await self._entries("bundle")}
            writes = [
                Write(key, value, present[key].revision if key in present else 0)
                for key, value in values.items()
                if key not in present or present[key].value != value
            ]
            writes += [Write(key, None, entry.revision) for key, entry in present.items() if key not in values]
            if writes:
                await self._bucket.write(writes)
            return bool(writes)

        return await retry_conflicts(attempt, SEED_ATTEMPTS)

    async def to_seed(self, packaged: Mapping[str, tuple[ModelEntry | Alias, str]]) -> list[CatalogueChange]:
        """Return the changes that make the bucket equal to the folders (`packaged`). Leave out models that were written
        over the API. Also leave out a model that was restored because its file could not be loaded, until the file
        changes.
        """
        present = (await self.snapshot()).held
        changes: list[CatalogueChange] = []
        for model, (entry, source) in packaged.items():
            held, document = present.get(model, HeldModel()), normalised(entry)
            is_changed = held.stored is None or (held.stored.source != "api" and held.entry != document)
            if is_changed and not await self._is_refused(model, held, document):
                changes.append(CatalogueChange(model, held, document, source, "seed"))
        for model, held in present.items():
            stored = held.stored
            if model not in packaged and stored is not None and stored.source != "api" and held.entry is not None:
                changes.append(CatalogueChange(model, held, None, stored.source, "seed"))
        return changes

    async def _is_refused(self, model: str, held: HeldModel, document: dict[str, Any]) -> bool:
        """Return whether the model was restored because the revision with this document could not be loaded."""
        if held.stored is None or held.stored.operation != RESTORE:
            return False
        refused = await self.revision(model, held.revision - 1)
        return refused is not None and refused.entry == document

    async def seed(self, packaged: Mapping[str, tuple[ModelEntry | Alias, str]]) -> list[CatalogueChange]:
        """Write the models of the packaged folder and SIE_MODELS_DIR to the bucket, except models that were written
        over the API. Return the changes.

        Raises WrongRevision if each of SEED_ATTEMPTS attempts conflicts with another writer.
        """
        done: list[CatalogueChange] = []

        async def attempt() -> None:
            changes = await self.to_seed(packaged)
            for start in range(0, len(changes), SEED_BATCH):
                batch = changes[start : start + SEED_BATCH]
                aliases = {
                    change.model: change.entry
                    for change in batch
                    if is_alias(change.entry) or is_alias(change.held.entry)
                }
                index = (await self.alias_index()).written(index_of(aliases)) if aliases else None
                # Broadcast only the deltas of the last batch. A reader that gets such a delta sees that earlier changes
                # are missing, and fetches the whole catalogue. Other readers find the changes at their next poll.
                await self.write(batch, index=index, tell=start + SEED_BATCH >= len(changes))
                done.extend(batch)

        await retry_conflicts(attempt, SEED_ATTEMPTS)
        return done


def _export(read: CatalogueSnapshot) -> ConfigExport:
    listed = tuple(
        ConfigModel(
            model,
            held.entry,
            held.revision,
            bundles_of(read.bundles, held.entry),
            written=held.written,
            raw_yaml=msgspec.json.encode(held.entry).decode(),  # JSON is valid YAML, and encoding JSON is much faster
        )
        for model, held in sorted(read.held.items())
        if held.entry is not None
    )
    bundles = tuple(msgspec.to_builtins(bundle) for bundle in read.bundles.values())
    hashes = {bundle: configs.digest(read.revisions(bundle)) for bundle in read.bundles}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return ConfigExport(read.epoch, listed, bundles, generated_at=now, bundle_config_hashes=hashes)


def _copied(entry: Entry | None) -> StoredModel | None:
    try:
        return None if entry is None or entry.value is None else _stored.decode(entry.value)
    except UNDECODABLE as error:
        _logger.warning(
            "bucket %s: key %s cannot be decoded and is written again: %s",
            topology.CATALOGUE_COPY_BUCKET,
            entry and entry.key,
            error,
        )
        return None


def digest_of(*parts: bytes) -> str:
    """Return the SHA-256 of several parts, in hex. The length of each part is hashed too, so that b"ab", b"c"
    and b"a", b"bc" have different digests.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


async def open_store(broker: Broker, settings: Settings) -> CatalogueStore:
    """Open the catalogue's store, and create its bucket if the bucket does not exist. The bucket with the copy is
    opened at its first use. Raises BrokerError.
    """
    bucket, copy = (
        RecordBucket(broker, name, storage=settings.stream_storage, replicas=settings.stream_replicas)
        for name in (topology.CATALOGUE_BUCKET, topology.CATALOGUE_COPY_BUCKET)
    )
    await bucket.open()
    return CatalogueStore(broker, bucket, copy)
