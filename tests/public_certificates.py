"""Every httpx client, also one that asks once, reads the public certificates for 20 ms, and no test speaks to a public
server: with this module imported they are read once.
"""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import certifi

_FILES = [{"cafile": path} for path in (certifi.where(), os.environ.get("SSL_CERT_FILE")) if path]
_create = ssl.create_default_context
_create_once = functools.cache(_create)


def _context(*args: Any, **options: Any) -> ssl.SSLContext:
    return _create_once(**options) if not args and options in _FILES else _create(*args, **options)


ssl.create_default_context = _context
