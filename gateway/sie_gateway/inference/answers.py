"""Keys of cached answers, and the rule by which answers are cached. A key has two parts: the name of a space and the
digest of the input. The name is a hash of everything that determines the answer, except the input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from sie_contracts.settings import Settings
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Operation, RunOptions
from sie_gateway.admission.grant import Grant
from sie_gateway.inference.body import RequestItem, input_of

DIGEST_BYTES = 16


class CachePolicy(NamedTuple):
    """Rule by which answers are cached. `is_shared`: all API keys use the same answers. `excluded`: ids of models whose
    answers are not cached.
    """

    is_shared: bool
    excluded: frozenset[str]

    @classmethod
    def from_settings(cls, settings: Settings) -> CachePolicy:
        return cls(settings.cache_shared, frozenset(settings.cache_excluded_models or ()))

    def owner(self, grant: Grant, model: str) -> str | None:
        """Return the owner of the cached answers that a credential may use: the key of the credential, or the empty
        string if all keys share answers. Return None if the credential or the model does not use the cache.
        """
        if not grant.caches or model in self.excluded:
            return None
        return "" if self.is_shared else grant.key


def space_of(owner: str, fingerprint: str, operation: Operation, run: RunOptions) -> str:
    """Return the name of a space: the set of all cached answers that differ only in their inputs.

    `owner`: API key whose requests use the answers; empty if all API keys share the answers. `fingerprint`: fingerprint
    of the answers (`answer_fingerprint`). The hash includes all fields of `run`, so a new option of requests needs no
    change of this function.
    """
    key = msgspec.json.encode([owner, fingerprint, operation, run], order="sorted")
    return hashlib.sha256(key).hexdigest()[:32]


def digests_of(items: Sequence[RequestItem], query: RequestItem | None = None) -> Iterator[bytes]:
    """Yield the digest of each item: a hash of all fields that a worker reads. For a score, it includes `query`."""
    start = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if query is not None:
        start.update(b"query" + hashlib.blake2b(messages.encode(input_of(query))).digest())
    for item in items:
        digest = start.copy()
        digest.update(messages.encode(input_of(item)))
        yield digest.digest()
