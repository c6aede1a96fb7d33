"""Environment variables of clients: the gateway's address and the client's key. Of these variables, gateways read only
SIE_AUTH_TOKEN.
"""

from __future__ import annotations

import os

BASE_URL, API_KEY = "SIE_BASE_URL", "SIE_API_KEY"
KEY_ALIASES = ("SIE_AUTH_TOKEN",)
LOOPBACK = "http://127.0.0.1:8080"
NAMES = frozenset({BASE_URL, API_KEY})


def base_url() -> str | None:
    """Return the address of the gateway; None if the variable is not set."""
    return _value(BASE_URL)


def api_key() -> str | None:
    """Return the client's key from the first variable that is set: API_KEY, then KEY_ALIASES; None if none is set."""
    return _value(API_KEY) or next(filter(None, map(_value, KEY_ALIASES)), None)


def _value(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None
