"""API keys of clients, stored in the broker. With SIE_AUTH_MODE=token they are accepted in addition to the static
tokens.

    sie keys create ──► a record with its token's digest, in a bucket ──watch──► Keys in every gateway ──► `find`
    sie keys revoke ──► the same record, revoked ──────────┘                     and config service
                    └─► then the same in a second bucket, the copy ──watch──────┘

If a file of the broker is damaged, keys may be lost, or a revoked key may return with a record from before its
revocation. So each record is in two buckets, and the stricter of the two records counts. A write changes the bucket
first and the copy second; a removal deletes from the copy first. So if only the copy has a record, the bucket lost it.

A token has 256 random bits, so it cannot be guessed from its digest. A slow salted hash, which passwords need, would
cost milliseconds per request and would not make tokens safer. While the broker cannot be reached, the last keys that
were read stay valid. Every process uses the broker's clock to check whether a key has expired.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sie_broker import BrokerError, Entry, KeyValue, Store, Write
from sie_broker.record import Record, RecordBucket
from sie_contracts.errors import UNDECODABLE, NotReady
from sie_contracts.wire import topology
from sie_runtime.clock import BrokerClock
from sie_runtime.process import Stop, Trouble

TOKEN_BYTES = 32
CHECK_S = 5.0  # seconds between two checks whether a bucket was deleted or recreated
RETRY_S = 0.5  # seconds between two checks while the keys of a bucket cannot be read
MAX_NAMED = 10  # largest number of keys that one log line names
_logger = logging.getLogger("sie.keys")


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of one key, which apply in addition to the limits for all keys. 0 means that the key has no such limit."""

    body_bytes: int = 0
    items: int = 0
    tokens_per_minute: int = 0


NO_LIMITS = KeyLimits()


class Key(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Record of a key, stored under `id`. Times are seconds since 1970; 0: never. `digest`: see `digest_of`. `caches`:
    answers to requests with this key may be cached.
    """

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    limits: KeyLimits = NO_LIMITS
    caches: bool = True

    def ended(self, now_s: float) -> str:
        """Return why the key is not valid any more ("was revoked" or "has expired"); empty while it is valid."""
        if self.revoked_s:
            return "was revoked"
        return "has expired" if self.expires_s and self.expires_s <= now_s else ""


def create(
    name: str,
    scopes: tuple[str, ...],
    *,
    now_s: float,
    expires_s: float = 0.0,
    limits: KeyLimits = NO_LIMITS,
    caches: bool = True,
) -> tuple[Key, str]:
    """Return a new key and its token. The token is not stored anywhere, and the key contains no part of it."""
    token = f"sie_{secrets.token_urlsafe(TOKEN_BYTES)}"
    key = Key(
        id=secrets.token_hex(6),
        name=name,
        digest=digest_of(token),
        scopes=scopes,
        created_s=now_s,
        expires_s=expires_s,
        limits=limits,
        caches=caches,
    )
    return key, token


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def encode(key: Key) -> bytes:
    return msgspec.json.encode(key)


def decode(entry: Entry) -> Key:
    """Return the key in an entry. Raises ValueError if the entry was removed, is no key, or has another key's id."""
    if entry.value is None:
        raise ValueError("the key was removed")
    key = msgspec.json.decode(entry.value, type=Key)
    if key.id != entry.key:
        raise ValueError("the value has the id of another key")
    return key


def is_foreign(entry: Entry) -> bool:
    """Return whether an entry is no record of a key, of whatever version. NATS does not check the subject of a reply,
    so a user that may not write keys can have the broker store an acknowledgement or an answer of its API in the
    bucket.
    """
    try:
        record = msgspec.json.decode(entry.value or b"", type=dict[str, Any])
    except UNDECODABLE:
        return True
    return record.get("id") != entry.key or "digest" not in record


async def remove_foreign(broker: Store, remover: Store, replicas: int) -> int:
    """Remove the entries that are no keys from the bucket of keys and from its copy, and return their number. `broker`
    reads the buckets; `remover` is connected as a user that may purge them. Raises BrokerError.
    """
    removed = 0
    for name in (topology.KEYS_BUCKET, topology.KEYS_COPY_BUCKET):
        bucket = await bucket_of(broker, replicas, name).open()
        foreign = [entry for entry in await bucket.entries() if is_foreign(entry)]
        if foreign:
            purged = await bucket_of(remover, replicas, name).open()
            for entry in foreign:
                await purged.erase(entry)
                removed += 1
    return removed


def readable(entries: Iterable[Entry]) -> list[tuple[Key, int]]:
    """Return (key, revision) for each entry. Entries that cannot be decoded are logged and omitted: gateways do not
    accept them either.
    """
    keys = []
    for entry in entries:
        try:
            keys.append((decode(entry), entry.revision))
        except UNDECODABLE as error:
            _logger.warning("API key %s cannot be read and is left out: %s", entry.key, error)
    return keys


def stricter(first: Key | None, second: Key | None) -> Key | None:
    """Return the stricter of two records of a key: `second` if only `second` is revoked, otherwise `first`. If a record
    is missing (None), return the other record.
    """
    if first is None or second is None:
        return first or second
    return second if second.revoked_s and not first.revoked_s else first


def bucket_of(broker: Store, replicas: int, name: str = topology.KEYS_BUCKET) -> RecordBucket:
    """Return the bucket of API keys, or its copy (KEYS_COPY_BUCKET). Both are stored in files, to survive a restart."""
    return RecordBucket(broker, name, storage="file", replicas=replicas)


class KeyBuckets:
    """Bucket of keys and its copy, for commands such as `sie keys revoke`, which change both buckets."""

    def __init__(self, bucket: KeyValue, copy: KeyValue) -> None:
        self.bucket = bucket
        self.copy = copy

    @classmethod
    async def open(cls, broker: Store, replicas: int) -> KeyBuckets:
        """Open the bucket and its copy. They are created if they do not exist. Raises BrokerError."""
        bucket = await bucket_of(broker, replicas).open()
        return cls(bucket, await bucket_of(broker, replicas, topology.KEYS_COPY_BUCKET).open())

    async def write(self, key: Key, revision: int) -> None:
        """Write to both buckets. Raises BrokerError, and WrongRevision if the record in `bucket` does not have this
        `revision`; revision 0 means that `bucket` must not have the key yet.
        """
        await self.bucket.write([Write(key.id, encode(key), revision)])
        await self.copy.write([Write(key.id, encode(key), None)])

    async def read(self) -> list[tuple[Key, int]]:
        """Return (key, revision of its record in the bucket) for all keys. The revision is 0 if only the copy has the
        key. If bucket and copy have different records of a key, the record that `stricter` chooses is returned;
        gateways use the same record. The revision is right even if the record in the bucket cannot be decoded, so that
        `write` can replace it.
        """
        keys = {key.id: key for key, _ in readable(await self.copy.entries())}
        entries = await self.bucket.entries()
        for key, _ in readable(entries):
            keys[key.id] = stricter(key, keys.get(key.id)) or key
        revisions = {entry.key: entry.revision for entry in entries}
        return [(key, revisions.get(key.id, 0)) for key in keys.values()]

    async def remove(self, key: Key, revision: int) -> None:
        """Remove a revoked key from both buckets. Raises BrokerError; WrongRevision if the record in `bucket` does not
        have this `revision` (then nothing is removed), or if another writer changes the record during the removal.
        """
        # the broker checks the revision at this write, before the copy loses its record
        revision = await self.bucket.write([Write(key.id, encode(key), revision)])
        await self.copy.write([Write(key.id, None, None)])
        await self.bucket.write([Write(key.id, None, revision)])


class Keys:
    """Keys that this process has read from the broker.

    `loaded` is true when the bucket has been read, even if its copy has not. While `loaded` is false, a token that
    `find` does not know may be valid. If both buckets are deleted, no key is valid any more.
    """

    def __init__(self, broker: Store, replicas: int, clock: BrokerClock) -> None:
        self.loaded = False
        self._clock = clock
        self._by_id: dict[str, Key] = {}
        self._by_digest: dict[str, Key] = {}
        # (keys in the bucket by id, keys in its copy by id)
        self._sides: tuple[dict[str, Key], dict[str, Key]] = ({}, {})
        names = (topology.KEYS_BUCKET, topology.KEYS_COPY_BUCKET)
        self._records = [
            Record(
                bucket_of(broker, replicas, name),
                decode,
                functools.partial(self._on_key, side),
                on_lost=functools.partial(self._on_lost, side),
                drops_unreadable=True,
            )
            for name, side in zip(names, self._sides, strict=True)
        ]

    def find(self, token: str) -> Key | None:
        """Return the key that belongs to a token, even if it is not valid any more; None if the token is unknown.

        How long the look-up in the dict takes reveals nothing useful, because an attacker cannot choose the bits of a
        digest. The comparison that follows takes constant time.
        """
        digest = digest_of(token)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def of_id(self, key_id: str) -> Key | None:
        return self._by_id.get(key_id)

    def ended(self, key: Key) -> str:
        """Return why a key is not valid; empty for a valid key. Raises NotReady if the key has an expiry time and the
        broker's time has not been read.
        """
        if key.expires_s and math.isinf(self._clock.margin_s):
            raise NotReady("this key may have expired: the broker's time has not been read yet")
        return key.ended(self._clock.now_s())

    def lost(self) -> list[Key]:
        return lost_keys(*self._sides)

    async def run(self, stop: Stop) -> None:
        """Watch both buckets until `stop` is requested. Every CHECK_S seconds, check whether a bucket was deleted or
        recreated.
        """
        troubles = [
            Trouble(_logger, f"{record.bucket.name} cannot be read; keys that were read before stay in use")
            for record in self._records
        ]
        damage = Trouble(_logger, f"{topology.KEYS_BUCKET} is damaged, its copy is used")
        pause_s, before = 0.0, set[str]()
        try:
            while not await stop.wait_for(pause_s):
                for record, trouble in zip(self._records, troubles, strict=True):
                    with trouble.logged(BrokerError):
                        if await record.follow():
                            _logger.info("bucket %s was read; %d keys are known", record.bucket.name, len(self._by_id))
                # `loaded` depends on the bucket alone, not on its copy
                self.loaded = self.loaded or not troubles[0].lasting
                if not self._records[0].is_stale:  # until the bucket is read after a reconnect, keys may look lost
                    lost = self.lost()
                    # a key counts as lost only after two checks in a row, because the watches of the two buckets may
                    # deliver a change at different times
                    if {key.id for key in lost} & before:
                        damage.met(damage_of(lost))
                    elif not lost:
                        damage.passed()
                    before = {key.id for key in lost}
                pause_s = RETRY_S if any(record.is_stale for record in self._records) else CHECK_S
        finally:
            for record in self._records:
                await record.close()

    def _on_lost(self, side: dict[str, Key]) -> None:
        for key_id in list(side):
            self._on_key(side, key_id, None, 0)

    def _on_key(self, side: dict[str, Key], key_id: str, key: Key | None, revision: int) -> None:
        if key is None:
            side.pop(key_id, None)
        else:
            side[key_id] = key
        before = self._by_id.pop(key_id, None)
        if before is not None:
            self._by_digest.pop(before.digest, None)
        counts = stricter(self._sides[0].get(key_id), self._sides[1].get(key_id))
        if counts is not None:
            self._by_id[key_id] = self._by_digest[counts.digest] = counts


def lost_keys(bucket: Mapping[str, Key], copy: Mapping[str, Key]) -> list[Key]:
    """Return the keys that the bucket has lost, oldest first: keys that only the copy has, and keys that are revoked
    only in the copy.
    """
    lost = [key for key_id, key in copy.items() if stricter(bucket.get(key_id), key) is not bucket.get(key_id)]
    return sorted(lost, key=lambda key: key.created_s)


def damage_of(lost: Sequence[Key]) -> str:
    """Return a log text about the keys that the bucket has lost, with the command that repairs the bucket."""
    named = ", ".join(f"{key.id} {key.name}" for key in lost[:MAX_NAMED]) + (", ..." if len(lost) > MAX_NAMED else "")
    return (
        f"it lost {len(lost)} keys, which the copy {topology.KEYS_COPY_BUCKET} has ({named}): run `sie repair "
        f"KV_{topology.KEYS_BUCKET}`"
    )
