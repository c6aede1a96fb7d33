"""Keys of cached answers. A key has two parts: the name of a space and the digest of the input. The name is a hash of
everything that determines the answer, except the input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from sie_contracts.wire import messages
from sie_contracts.wire.messages import Operation, RunOptions
from sie_gateway.inference.body import RequestItem, input_of

DIGEST_BYTES = 16


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
