"""Keys of inputs whose text must stay private. A key is a digest of all data that the result of an input depends on.
Poison marks are stored under these keys.
"""

from __future__ import annotations

import hashlib

import msgspec

from sie_contracts.wire.messages import WorkItem

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def content_keys(item: WorkItem) -> list[str]:
    """Return a digest for each input of a work item, over model, profile, revision, operation, input, query and
    options.
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
