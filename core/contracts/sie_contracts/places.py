"""Remove paths of this machine from messages to clients. Only the last part of each path stays."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sie_contracts.errors import ErrorInfo

# An absolute path, or a path that begins with ~. It does not match a part of a name (org/model), of a URL
# (s3://bucket/key) or of a phrase (and/or). After a colon, only `/` without a second `/` begins a path.
_PATH = re.compile(r"(?<![\w.~/…-])(?:(?<!:)(?:file://|~)?/|(?<=:)~?/(?!/))[^\s:;,'\"()\[\]{}<>|]+")


def without_paths(text: str) -> str:
    return _PATH.sub(lambda match: f"…/{match[0].rstrip('/').rpartition('/')[2]}", text)


def public(error: ErrorInfo) -> ErrorInfo:
    """Return the error without absolute paths in its message and in the text values of its extras."""
    extras: dict[str, Any] = {
        key: without_paths(value) if isinstance(value, str) else value for key, value in error.extras.items()
    }
    return msgspec.structs.replace(error, message=without_paths(error.message), extras=extras)
