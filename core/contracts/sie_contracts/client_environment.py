"""Environment variables of clients, beside the settings of servers: the gateway's address and the key that it wants."""

from __future__ import annotations

import os

BASE_URL, API_KEY = "SIE_BASE_URL", "SIE_API_KEY"
KEY_ALIASES = ("SIE_AUTH_TOKEN",)
LOOPBACK = "http://127.0.0.1:8080"
NAMES = frozenset({BASE_URL, API_KEY})


def base_url() -> str | None:
    """The address of the gateway; None without one."""
    return _value(BASE_URL)


def api_key() -> str | None:
    """The key of the client, by its name or an alias; None without one."""
    return _value(API_KEY) or next(filter(None, map(_value, KEY_ALIASES)), None)


def _value(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None
