"""Keys of clients, stored in the broker. With SIE_AUTH_MODE=token they are accepted, in addition to the static tokens.

    sie keys create ──► a record with its token's digest, in a bucket ──watch──► Keys in every gateway ──► `find`
    sie keys revoke ──► the same record, revoked ──────────┘                     and config service
                    └─► then the same in a second bucket, the copy ──watch──────┘

If a file of the broker is damaged, keys may be lost, or an older record of a revoked key may be read, from before the
revocation. So each record is in two buckets, and the stricter of the two records counts. A write changes the bucket
before the copy. A removal changes the copy before the bucket. So a record that only the copy has was lost from the
bucket.

A token is 256 random bits that only its holder has. Nobody can guess it from its digest. The slow salted hashes that
passwords need would cost milliseconds for each request and add no safety. While the broker cannot be reached, the last
known keys stay valid. Every process judges the expiry of a key by the clock of the broker.
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
CHECK_S = 5.0  # seconds between two checks whether a bucket was deleted or created again
RETRY_S = 0.5
MAX_NAMED = 10  # largest number of keys in one log line
_logger = logging.getLogger("sie.keys")


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of one credential, in addition to the limits of all credentials. 0: no additional limit."""

    body_bytes: int = 0
    items: int = 0
    tokens_per_minute: int = 0


NO_LIMITS = KeyLimits()


class Key(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A key in the bucket, under its id. Times are in seconds since 1970; 0 means never. `digest`: see `digest_of`."""

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    limits: KeyLimits = NO_LIMITS

    def ended(self, now_s: float) -> str:
        """Return the reason why the key is no longer valid, as the end of a sentence; empty while it is valid."""
        if self.revoked_s:
            return "was revoked"
        return "has expired" if self.expires_s and self.expires_s <= now_s else ""


def create(
    name: str, scopes: tuple[str, ...], *, now_s: float, expires_s: float = 0.0, limits: KeyLimits = NO_LIMITS
) -> tuple[Key, str]:
    """Create a key and its token. The token is never stored, and the key contains no part of it."""
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
    """Return the SHA-256 of a token, in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def encode(key: Key) -> bytes:
    return msgspec.json.encode(key)


def decode(entry: Entry) -> Key:
    """Return the key in an entry of the bucket. Raises ValueError for an entry without a value, a value that is not a
    key, or a key whose id differs from the id of the entry.
    """
    if entry.value is None:
        raise ValueError("it was removed")
    key = msgspec.json.decode(entry.value, type=Key)  # DecodeError is a ValueError
    if key.id != entry.key:
        raise ValueError("it holds another id")
    return key


def readable(entries: Iterable[Entry]) -> list[tuple[Key, int]]:
    """Return the keys in `entries`, each with its revision. Entries that are not keys are logged and left out. Gateways
    do the same.
    """
    keys = []
    for entry in entries:
        try:
            keys.append((decode(entry), entry.revision))
        except ValueError as error:
            _logger.warning("record %s cannot be read and is left out: %s", entry.key, error)
    return keys


def stricter(first: Key | None, second: Key | None) -> Key | None:
    """Return the record that counts: the record of the bucket or the record of its copy. A revoked record counts,
    because a revocation is never undone.
    """
    if first is None or second is None:
        return first or second
    return second if second.revoked_s and not first.revoked_s else first


def bucket_of(broker: Store, replicas: int, name: str = topology.KEYS_BUCKET) -> RecordBucket:
    """Return the bucket of keys, or its copy, by name. It is always stored in files, so that all keys stay valid after
    a restart of the broker.
    """
    return RecordBucket(broker, name, storage="file", replicas=replicas)


class KeyBuckets:
    """The bucket of keys and its copy, for commands that read and write both."""

    def __init__(self, bucket: KeyValue, copy: KeyValue) -> None:
        self.bucket = bucket
        self.copy = copy

    @classmethod
    async def open(cls, broker: Store, replicas: int) -> KeyBuckets:
        """Open the bucket and its copy; each is created if it does not exist. Raises BrokerError."""
        bucket = await bucket_of(broker, replicas).open()
        return cls(bucket, await bucket_of(broker, replicas, topology.KEYS_COPY_BUCKET).open())

    async def write(self, key: Key, revision: int) -> None:
        """Write a record, if the bucket has it at `revision` (0: lacks it). Raises WrongRevision."""
        await self.bucket.write([Write(key.id, encode(key), revision)])
        await self.copy.write([Write(key.id, encode(key), None)])

    async def read(self) -> list[tuple[Key, int]]:
        """Read the keys as gateways use them, each with its revision in the bucket. The revision is 0 if only the copy
        has the key.
        """
        keys = {key.id: (key, 0) for key, _ in readable(await self.copy.entries())}
        for key, revision in readable(await self.bucket.entries()):
            before, _ = keys.get(key.id, (None, 0))
            keys[key.id] = stricter(key, before) or key, revision
        return list(keys.values())

    async def remove(self, key_id: str, revision: int) -> None:
        """Remove a record from the copy and the bucket. Raises WrongRevision."""
        await self.copy.write([Write(key_id, None, None)])
        await self.bucket.write([Write(key_id, None, revision)])


class Keys:
    """Keys that this process has read.

    `loaded` is true once the bucket was read; its copy is not needed. Before that, a token without a key may be valid.
    If both buckets are lost, their keys are lost too.
    """

    def __init__(self, broker: Store, replicas: int, clock: BrokerClock) -> None:
        self.loaded = False
        self._clock = clock
        self._by_id: dict[str, Key] = {}
        self._by_digest: dict[str, Key] = {}
        self._sides: tuple[dict[str, Key], dict[str, Key]] = ({}, {})  # records of the bucket, records of its copy
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
        """Return the key of a token, also if the key is no longer valid; None for an unknown token.

        The duration of the look-up by digest reveals no secret to an attacker, because nobody can choose the bits of a
        digest. The comparison after it takes constant time.
        """
        digest = digest_of(token)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    def of_id(self, key_id: str) -> Key | None:
        """Return a key by its id, also if the key is no longer valid."""
        return self._by_id.get(key_id)

    def ended(self, key: Key) -> str:
        """Return the reason why a key is no longer valid, by the clock of the broker; empty while it is valid. Raises
        NotReady for a key with an expiry while the broker's time is unknown.
        """
        if key.expires_s and math.isinf(self._clock.margin_s):
            raise NotReady("the time of the broker has not been read yet, by which keys expire")
        return key.ended(self._clock.now_s())

    def lost(self) -> list[Key]:
        """Return the keys of the copy that the bucket lacks, or has without their revocation."""
        return lost_keys(*self._sides)

    async def run(self, stop: Stop) -> None:
        """Follow the buckets until `stop`. Every CHECK_S seconds, it checks whether a bucket was deleted or created
        again.
        """
        troubles = [Trouble(_logger, f"keys of {record.bucket.name} stay as they were") for record in self._records]
        damage = Trouble(_logger, f"{topology.KEYS_BUCKET} is damaged, its copy is used")
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
                # the bucket alone is enough, its copy is not needed
                self.loaded = self.loaded or not troubles[0].lasting
                lost = self.lost()
                # a key counts as lost only after two checks in a row: one watch may be behind the other
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
    """Return the keys of the copy that the bucket lacks, or has without their revocation, oldest first."""
    lost = [key for key_id, key in copy.items() if stricter(bucket.get(key_id), key) is not bucket.get(key_id)]
    return sorted(lost, key=lambda key: key.created_s)


def damage_of(lost: Sequence[Key]) -> str:
    """Return a one-line description of the keys that the bucket has lost."""
    named = ", ".join(f"{key.id} {key.name}" for key in lost[:MAX_NAMED]) + (", ..." if len(lost) > MAX_NAMED else "")
    return (
        f"it lost {len(lost)} keys, which the copy {topology.KEYS_COPY_BUCKET} has ({named}): run `sie repair "
        f"KV_{topology.KEYS_BUCKET}`"
    )
