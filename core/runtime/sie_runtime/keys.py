"""Keys of clients, kept in the broker: what SIE_AUTH_MODE=token accepts beside the static tokens.

    sie keys create ──► a record with its token's digest, in a bucket ──watch──► Keys in every gateway ──► `find`
    sie keys revoke ──► the same record, revoked ──────────┘                     and config service
                    └─► then the same in a second bucket, the copy ──watch──────┘

A file of the broker that is damaged may lose keys, or bring back the record of a revoked key as it was before. So each
record is in two buckets, and the stricter of the two counts. The copy is written after the bucket, and a record is
removed from the copy first: whatever is in the copy alone was lost from the bucket.

A token is 256 random bits, and only its holder has it. It cannot be found from its digest by guessing, so the slow
salted hashes that passwords need would cost milliseconds for each request and add no safety. While the broker cannot be
reached, the last known keys stay valid. Every process judges the expiry of a key by the clock of the broker.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sie_broker import BrokerError, Entry, KeyValue, Store, Write
from sie_broker.record import Record, RecordBucket
from sie_contracts.errors import NotReady
from sie_contracts.wire import topology
from sie_runtime.clock import BrokerClock
from sie_runtime.process import Stop, Trouble

TOKEN_BYTES = 32
CHECK_S = 5.0  # between two checks whether the bucket is still the same one
RETRY_S = 0.5
MAX_NAMED = 10  # keys in one line
_logger = logging.getLogger("sie.keys")


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of one credential, beside the limits for all. 0: no limit of its own."""

    body_bytes: int = 0
    items: int = 0
    tokens_per_minute: int = 0


NO_LIMITS = KeyLimits()


class Key(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A key as the bucket stores it, under its id. Times are seconds since 1970, 0: never. `digest`: see
    `digest_of`.
    """

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    limits: KeyLimits = NO_LIMITS

    def ended(self, now_s: float) -> str:
        """Return why the key is not valid any more, in two words; empty while it is valid."""
        if self.revoked_s:
            return "was revoked"
        return "has expired" if self.expires_s and self.expires_s <= now_s else ""


def create(
    name: str, scopes: tuple[str, ...], *, now_s: float, expires_s: float = 0.0, limits: KeyLimits = NO_LIMITS
) -> tuple[Key, str]:
    """A new key, and its token. The token is stored nowhere, and the key contains no part of it."""
    token = f"sie_{secrets.token_urlsafe(TOKEN_BYTES)}"
    key = Key(
        id=secrets.token_hex(6),
        name=name,
        digest=digest_of(token),
        scopes=scopes,
        created_s=now_s,
        expires_s=expires_s,
        limits=limits,
    )
    return key, token


def digest_of(token: str) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def encode(key: Key) -> bytes:
    return msgspec.json.encode(key)


def decode(entry: Entry) -> Key:
    """The key of an entry that has a value. Raises ValueError for a value that is not a key, or not the key
    of this id.
    """
    if entry.value is None:
        raise ValueError("it was removed")
    key = msgspec.json.decode(entry.value, type=Key)  # DecodeError is a ValueError
    if key.id != entry.key:
        raise ValueError("it holds another id")
    return key


def readable(entries: Iterable[Entry]) -> list[tuple[Key, int]]:
    """The keys among entries, with their revisions. What is none is left out, as gateways leave it out."""
    keys = []
    for entry in entries:
        try:
            keys.append((decode(entry), entry.revision))
        except ValueError as error:
            _logger.warning("record %s cannot be read and is left out: %s", entry.key, error)
    return keys


def stricter(one: Key | None, other: Key | None) -> Key | None:
    """The record that counts, of the two that bucket and copy have: a revocation is never undone."""
    if one is None or other is None:
        return one or other
    return other if other.revoked_s and not one.revoked_s else one


def bucket_of(broker: Store, replicas: int, name: str = topology.KEYS_BUCKET) -> RecordBucket:
    """The bucket of keys, or its copy. It is always stored in files, so that a restart of the broker locks nobody
    out.
    """
    return RecordBucket(broker, name, storage="file", replicas=replicas)


class KeyBuckets:
    """The bucket of keys and its copy, as commands read and write them."""

    def __init__(self, bucket: KeyValue, copy: KeyValue) -> None:
        self.bucket = bucket
        self.copy = copy

    @classmethod
    async def open(cls, broker: Store, replicas: int) -> KeyBuckets:
        """Open both; each is created if it does not exist. Raises BrokerError."""
        bucket = await bucket_of(broker, replicas).open()
        return cls(bucket, await bucket_of(broker, replicas, topology.KEYS_COPY_BUCKET).open())

    async def write(self, key: Key, revision: int) -> None:
        """Write a record over the one at `revision` of the bucket, 0 for none. Raises WrongRevision."""
        await self.bucket.write([Write(key.id, encode(key), revision)])
        await self.copy.write([Write(key.id, encode(key), None)])

    async def read(self) -> list[tuple[Key, int]]:
        """The keys as gateways take them, with their revisions in the bucket; 0 of one that only the copy has."""
        keys = {key.id: (key, 0) for key, _ in readable(await self.copy.entries())}
        for key, revision in readable(await self.bucket.entries()):
            before, _ = keys.get(key.id, (None, 0))
            keys[key.id] = stricter(key, before) or key, revision
        return list(keys.values())

    async def remove(self, key_id: str, revision: int) -> None:
        """Remove a record. Raises WrongRevision."""
        await self.copy.write([Write(key_id, None, None)])
        await self.bucket.write([Write(key_id, None, revision)])


class Keys:
    """All keys, as this process knows them.

    `loaded` is true once all keys were read. Before that an unknown token may be valid. If both buckets are lost, their
    keys are lost too.
    """

    def __init__(self, broker: Store, replicas: int, clock: BrokerClock) -> None:
        self.loaded = False
        self._clock = clock
        self._by_id: dict[str, Key] = {}
        self._by_digest: dict[str, Key] = {}
        self._sides: tuple[dict[str, Key], dict[str, Key]] = ({}, {})  # what the bucket has, and what its copy has
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
        """The key of a token, also one that is not valid any more.

        The duration of the look-up by digest tells an attacker nothing, because nobody can choose the bits of a digest.
        The comparison after it takes constant time.
        """
        digest = digest_of(token)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def of_id(self, key_id: str) -> Key | None:
        """A key by its id, also one that is not valid any more."""
        return self._by_id.get(key_id)

    def ended(self, key: Key) -> str:
        """Return why a key is not valid any more, by the clock of the broker; empty while it is valid. Raises NotReady
        of one that expires while the broker's time is not known.
        """
        if key.expires_s and math.isinf(self._clock.margin_s):
            raise NotReady("the time of the broker has not been read yet, by which keys expire")
        return key.ended(self._clock.now_s())

    def lost(self) -> list[Key]:
        """The keys that the bucket lacks, or has as they were before they were revoked, while the copy has them."""
        return lost_keys(*self._sides)

    async def run(self, stop: Stop) -> None:
        """Follow the buckets until `stop`. Every CHECK_S it is checked whether they are still the same ones."""
        troubles = [Trouble(_logger, f"keys stay as {record.bucket.name} had them") for record in self._records]
        damage = Trouble(_logger, f"{topology.KEYS_BUCKET} is damaged, its copy serves")
        pause_s, before = 0.0, set[str]()
        try:
            while not await stop.wait_for(pause_s):
                for record, trouble in zip(self._records, troubles, strict=True):
                    try:
                        if await record.follow():
                            _logger.info("%s: %d keys", record.bucket.name, len(self._by_id))
                        trouble.passed()
                    except BrokerError as error:
                        trouble.met(error)
                # without its copy the bucket is enough
                self.loaded = self.loaded or not troubles[0].lasting
                lost = self.lost()
                if {key.id for key in lost} & before:  # in two looks: the two watches are not in step
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
    """The keys of the copy that the bucket lacks, or has as they were before they were revoked."""
    lost = [key for key_id, key in copy.items() if stricter(bucket.get(key_id), key) is not bucket.get(key_id)]
    return sorted(lost, key=lambda key: key.created_s)


def damage_of(lost: Sequence[Key]) -> str:
    """One line that names the keys that were lost from the bucket."""
    named = ", ".join(f"{key.id} {key.name}" for key in lost[:MAX_NAMED]) + (", ..." if len(lost) > MAX_NAMED else "")
    return (
        f"it lost {len(lost)} keys, which the copy {topology.KEYS_COPY_BUCKET} has ({named}): run `sie repair "
        f"KV_{topology.KEYS_BUCKET}`"
    )
