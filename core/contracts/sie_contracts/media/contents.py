"""Keys of inputs whose text must stay private: the digest of all that decides what runs for an input. Marks of poison
have it as their key.
"""

from __future__ import annotations

import hashlib

import msgspec

from sie_contracts.wire.messages import WorkItem

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def content_keys(item: WorkItem) -> list[str]:
    """Compute for each input of a work item the digest of all that decides what runs: model, revision, operation,
    input, query, options.
    """
    common = hashlib.sha256(
        _encode((item.model, item.profile, item.revision, item.operation, item.query, item.options))
    )
    keys = []
    for content in item.inputs:
        digest = common.copy()
        digest.update(_encode(content))
        keys.append(digest.hexdigest()[:32])
    return keys
