"""Environment variables of clients, beside the settings of servers: the gateway's address and the key that it wants."""

from __future__ import annotations

from collections.abc import Mapping

BASE_URL, API_KEY = "SIE_BASE_URL", "SIE_API_KEY"
KEY_ALIASES = ("SIE_AUTH_TOKEN",)
LOOPBACK = "http://127.0.0.1:8080"
NAMES = frozenset({BASE_URL, API_KEY})


def base_url(environ: Mapping[str, str]) -> str:
    """The address of the gateway; that of a `sie serve` of this machine where no variable names one."""
    return environ.get(BASE_URL, "").strip() or LOOPBACK


def api_key(environ: Mapping[str, str]) -> str | None:
    """The key of the client, by its name or an alias; None without one."""
    return next((key for name in (API_KEY, *KEY_ALIASES) if (key := environ.get(name, "").strip())), None)
