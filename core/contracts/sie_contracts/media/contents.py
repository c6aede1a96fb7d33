"""Keys of inputs. If an input has crashed adapter processes, the sidecar refuses later inputs with the same key. A key
is a digest of all data on which the result of an input depends, so the key does not reveal the text.
"""

from __future__ import annotations

import hashlib

import msgspec

from sie_contracts.wire.messages import WorkItem

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def content_keys(item: WorkItem) -> list[str]:
    """Return one key for each input: a digest of model, profile, revision, operation, input, query and options."""
    common = hashlib.sha256(
        _encode((item.model, item.profile, item.revision, item.operation, item.query, item.options))
    )
    keys = []
    for content in item.inputs:
        digest = common.copy()
        digest.update(_encode(content))
        keys.append(digest.hexdigest()[:32])
    return keys
