"""Access control of the config service, by the scopes in `routes.ROUTES`.

SIE_ADMIN_TOKEN permits all calls, SIE_CONFIG_READ_TOKEN permits reads, and with SIE_AUTH_MODE=token a client's key
permits the calls of its scopes. No route is open without a token. A token that is not configured permits no call.
"""

from __future__ import annotations

from typing import Any

from sie_contracts.errors import MethodNotAllowed, NotFound, NotReady, PermissionDenied, Unauthenticated
from sie_contracts.settings import Settings
from sie_runtime.http.routes import Match, bearer
from sie_runtime.keys import Key, Keys


class ConfigGate:
    """Check of the credentials of a request. The request's token is compared with every configured token, each time in
    constant time, so that the duration of a check reveals nothing about the tokens.
    """

    def __init__(self, settings: Settings) -> None:
        self._admin = settings.admin_token
        self._reader = settings.config_read_token
        self._by_key = settings.auth_mode == "token"
        self._keys: Keys | None = None

    def go_by(self, keys: Keys) -> None:
        """Set the clients' API keys, which the broker stores. `check` then also accepts the tokens of these keys."""
        self._keys = keys

    def check(self, method: str, match: Match[Any], authorization: str) -> str:
        """Check whether a request may use its route. Return the caller's name, which a model's history shows.

        Raises Unauthenticated, PermissionDenied, and NotReady while the keys have not been read. A caller with read
        access gets NotFound for an unknown path, and MethodNotAllowed for a wrong method.
        """
        row = match.route(method)
        token = bearer(authorization)
        is_admin = self._admin is not None and self._admin.matches(token)
        is_reader = self._reader is not None and self._reader.matches(token)
        reads = row is None or row.reader or row.scope == "read"
        scope = "read" if row is None else row.scope
        is_allowed = is_admin or (is_reader and reads)
        key = None if is_allowed or is_reader else self._key_with(token, scope)
        if not (is_allowed or key):
            if is_reader:
                raise PermissionDenied("the read token permits only reads; this call needs SIE_ADMIN_TOKEN")
            if not self._by_key and self._admin is None and (not reads or self._reader is None):
                names = "neither SIE_ADMIN_TOKEN nor SIE_CONFIG_READ_TOKEN is" if reads else "no SIE_ADMIN_TOKEN is"
                raise PermissionDenied(
                    f"{names} configured at the config service, so nobody may do this: start it with such a token"
                )
            needed = "SIE_ADMIN_TOKEN or SIE_CONFIG_READ_TOKEN" if reads else "SIE_ADMIN_TOKEN"
            if self._by_key:
                needed += f", or a key with the scope {scope}"
            reason = "this token is not known" if token else "a token is missing"
            raise Unauthenticated(
                f"{reason}: send `Authorization: Bearer TOKEN`, where TOKEN is the config service's {needed}"
            )
        if not match.methods:
            raise NotFound("no such path; see /docs")
        if row is None:
            raise MethodNotAllowed(f"this path takes {match.allow}", allow=match.allow)
        return f"key {key.name} ({key.id})" if key else "SIE_ADMIN_TOKEN" if is_admin else "SIE_CONFIG_READ_TOKEN"

    def _key_with(self, token: str, scope: str) -> Key | None:
        """Return the key with this token; None for an unknown token, and without SIE_AUTH_MODE=token. Raises
        PermissionDenied for a key without the scope, Unauthenticated for a key that is revoked or has expired, NotReady
        while the keys have not been read.
        """
        if not self._by_key or not token:
            return None
        if self._keys is None or not self._keys.loaded:
            raise NotReady("the keys are not read yet")
        key = self._keys.find(token)
        if key is None:
            return None
        if why := self._keys.ended(key):
            raise Unauthenticated(f"this key {why}: `sie keys create` makes another")
        if scope not in key.scopes:
            raise PermissionDenied(
                f"this call needs a key with the scope {scope}, this one has {', '.join(key.scopes)}"
            )
        return key
