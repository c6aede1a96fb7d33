"""Environment variables of clients: SIE_BASE_URL, SIE_API_KEY, and SIE_AUTH_TOKEN, which gateways read too."""

from __future__ import annotations

import os

BASE_URL, API_KEY = "SIE_BASE_URL", "SIE_API_KEY"
LOOPBACK = "http://127.0.0.1:8080"
NAMES = frozenset({BASE_URL, API_KEY})


def base_url() -> str | None:
    """Return the address of the gateway in SIE_BASE_URL; None if the variable is unset or empty."""
    return _value(BASE_URL)


def api_key() -> str | None:
    """Return the client's key: SIE_API_KEY, or SIE_AUTH_TOKEN if SIE_API_KEY is empty or unset; None without both."""
    return _value(API_KEY) or _value("SIE_AUTH_TOKEN")


def _value(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None
