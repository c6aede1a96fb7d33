"""A cache of the public certificates. Every httpx client takes 20 ms to read them, although tests speak to no public
server. An import of this module makes a process read them once.
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
