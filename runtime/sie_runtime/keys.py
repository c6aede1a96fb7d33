"""Keys of clients, kept in the broker: what SIE_AUTH_MODE=token accepts beside the static tokens.

    sie keys create ──► a record with its token's digest, in a bucket ──watch──► a table in every gateway and config
    service ──► `find` sie keys revoke ──► the same record, revoked ──────────────────────────────────┘

A token is 256 random bits and stands nowhere but with its holder: of the digest nobody finds it by guessing, so the
slow, salted hashes that passwords need would add milliseconds to every request and no safety. While the broker is away
the last known table stays.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets

import msgspec

from sie_broker import Broker, BrokerError, Entry, KeyValue, Subscription
from sie_contracts import topology
from sie_runtime.process import Stop, Trouble

TOKEN_BYTES = 32
CHECK_S = 5.0  # between two looks whether the bucket is still the same one
RETRY_S = 0.5
_logger = logging.getLogger("sie.keys")


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one credential may use, beside the limits for all. 0: no limit of its own."""

    body_bytes: int = 0
    items: int = 0
    tokens_per_minute: int = 0


NO_LIMITS = Limits()


class Key(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A key as the bucket holds it, under its id. Times are seconds since 1970, 0: never. `digest`: see `digest_of`."""

    id: str
    name: str
    digest: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    limits: Limits = NO_LIMITS

    def ended(self, now_s: float) -> str:
        """Why it is good for nothing any more, in two words; empty while it is."""
        if self.revoked_s:
            return "was revoked"
        return "has expired" if self.expires_s and self.expires_s <= now_s else ""


def create(
    name: str, scopes: tuple[str, ...], *, now_s: float, expires_s: float = 0.0, limits: Limits = NO_LIMITS
) -> tuple[Key, str]:
    """A new key and its token, which is stored nowhere. No part of the token is in the key."""
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
    """The key of an entry that has a value. Raises ValueError for what is no key, or one under another
    id than its own.
    """
    if entry.value is None:
        raise ValueError("it was removed")
    key = msgspec.json.decode(entry.value, type=Key)  # DecodeError is a ValueError
    if key.id != entry.key:
        raise ValueError("it holds another id")
    return key


async def open_bucket(broker: Broker, replicas: int) -> KeyValue:
    """The bucket of keys, made if it is not there: in files always, so that a broker's restart locks nobody out. Raises
    BrokerError.
    """
    return await broker.key_value(topology.KEYS_BUCKET, storage="file", replicas=replicas)


class Keys:
    """What a process knows of all keys. `loaded` from the first complete look on: before it, an unknown token may be a
    good one.
    """

    def __init__(self, broker: Broker, replicas: int) -> None:
        self.loaded = False
        self._broker = broker
        self._replicas = replicas
        self._by_id: dict[str, Key] = {}
        self._by_digest: dict[str, Key] = {}
        self._watch: Subscription | None = None
        self._made = ""  # which bucket it is that is watched

    def find(self, token: str) -> Key | None:
        """The key of a token, also one that has ended.

        What a guesser could time is a look-up by digest, whose bits nobody chooses; the comparison behind it takes the
        same time always.
        """
        digest = digest_of(token)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    async def run(self, stop: Stop) -> None:
        """Follow the bucket until `stop`."""
        trouble = Trouble(_logger, "keys stay as they are for now")
        pause_s = 0.0
        try:
            while not await stop.wait_for(pause_s):
                try:
                    await self._follow()
                    trouble.passed()
                except BrokerError as error:
                    trouble.met(error)
                pause_s = CHECK_S if self._watch is not None else RETRY_S
        finally:
            await self._unfollow()

    async def _follow(self) -> None:
        """Read all and watch from there on, unless it is so already. A bucket that was lost took its keys with it.
        Raises BrokerError.
        """
        bucket = await open_bucket(self._broker, self._replicas)
        made, _, revision = (await bucket.epoch()).rpartition(":")
        if self._watch is not None and made == self._made:
            return
        await self._unfollow()
        entries = await bucket.entries()
        self._by_id, self._by_digest = {}, {}
        for entry in entries:
            self._take(entry)
        # the revision is the leader's, and the entries may come from a replica that is behind it: what that lacked
        # comes by the watch
        read = min(int(revision), max((entry.revision for entry in entries), default=0))
        self._watch, self._made = await bucket.watch(self._changed, read), made
        self.loaded = True
        _logger.info("%d keys", len(self._by_id))

    async def _unfollow(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await watch.stop()

    async def _changed(self, entry: Entry) -> None:
        self._take(entry)

    def _take(self, entry: Entry) -> None:
        before = self._by_id.pop(entry.key, None)
        if before is not None:
            self._by_digest.pop(before.digest, None)
        if entry.value is None:
            return
        try:
            key = decode(entry)
        except ValueError as error:
            _logger.error("key %s cannot be read, so nobody has it: %s", entry.key, error)
            return
        self._by_id[key.id] = self._by_digest[key.digest] = key
