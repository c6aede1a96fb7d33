"""Keys of clients, kept in the broker: what SIE_AUTH_MODE=token accepts beside the static tokens.

    sie keys create ──► a record with its token's digest, in a bucket ──watch──► Keys in every gateway ──► `find`
    sie keys revoke ──► the same record, revoked ──────────┘                     and config service

A token is 256 random bits, and only its holder has it. It cannot be found from its digest by guessing, so the slow
salted hashes that passwords need would cost milliseconds for each request and add no safety. While the broker cannot be
reached, the last known keys stay valid.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets

import msgspec

from sie_broker import BrokerError, Entry, KeyValue, Store
from sie_broker.record import Bucket, Record
from sie_contracts import topology
from sie_runtime.process import Stop, Trouble

TOKEN_BYTES = 32
CHECK_S = 5.0  # between two checks whether the bucket is still the same one
RETRY_S = 0.5
_logger = logging.getLogger("sie.keys")


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits of one credential, beside the limits for all. 0: no limit of its own."""

    body_bytes: int = 0
    items: int = 0
    tokens_per_minute: int = 0


NO_LIMITS = Limits()


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
    limits: Limits = NO_LIMITS

    def ended(self, now_s: float) -> str:
        """Why the key is not valid any more, in two words; empty while it is valid."""
        if self.revoked_s:
            return "was revoked"
        return "has expired" if self.expires_s and self.expires_s <= now_s else ""


def create(
    name: str, scopes: tuple[str, ...], *, now_s: float, expires_s: float = 0.0, limits: Limits = NO_LIMITS
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


def bucket_of(broker: Store, replicas: int) -> Bucket:
    """The bucket of keys. It is always stored in files, so that a restart of the broker locks nobody out."""
    return Bucket(broker, topology.KEYS_BUCKET, storage="file", replicas=replicas)


async def open_bucket(broker: Store, replicas: int) -> KeyValue:
    """The bucket of keys, open; created if it does not exist. Raises BrokerError."""
    return await bucket_of(broker, replicas).open()


class Keys:
    """All keys, as this process knows them.

    `loaded` is true once all keys were read. Before that an unknown token may be valid. If the bucket is lost, its keys
    are lost too.
    """

    def __init__(self, broker: Store, replicas: int) -> None:
        self.loaded = False
        self._by_id: dict[str, Key] = {}
        self._by_digest: dict[str, Key] = {}
        self._record = Record(
            bucket_of(broker, replicas), decode, self._on_key, on_lost=self._on_lost, drops_unreadable=True
        )

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

    async def run(self, stop: Stop) -> None:
        """Follow the bucket until `stop`. Every CHECK_S it is checked whether the bucket is still the same one."""
        trouble = Trouble(_logger, "keys stay as they are for now")
        pause_s = 0.0
        try:
            while not await stop.wait_for(pause_s):
                try:
                    if await self._record.follow():
                        self.loaded = True
                        _logger.info("%d keys", len(self._by_id))
                    trouble.passed()
                except BrokerError as error:
                    trouble.met(error)
                pause_s = RETRY_S if self._record.is_stale else CHECK_S
        finally:
            await self._record.close()

    def _on_lost(self) -> None:
        self._by_id, self._by_digest = {}, {}

    def _on_key(self, key_id: str, key: Key | None, revision: int) -> None:
        before = self._by_id.pop(key_id, None)
        if before is not None:
            self._by_digest.pop(before.digest, None)
        if key is not None:
            self._by_id[key_id] = self._by_digest[key.digest] = key
