"""Access control: each row of `routes.ROUTES` has a scope, and credentials have scopes.

    method, path ──► row of ROUTES ──► its scope ──► does the credential have it? ──► Grant
                       └ none: NotFound, or 405 with `Allow`, to whoever may read

What is not in ROUTES is not served, so no route is without a scope. Tests make the matrix of all rows and credentials
from the same table (`tests/unit/test_auth.py`).
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException

from sie_contracts.errors import NotFound, NotReady, PermissionDenied, SIEError, Unauthenticated
from sie_contracts.settings import Secret, SettingError, Settings
from sie_gateway.admission.admission import key_of
from sie_gateway.admission.grant import ANYBODY, WORKERS_NAME, Grant
from sie_gateway.http.routes import TABLE
from sie_runtime.http.routes import ANY, OPEN, SCOPES, bearer
from sie_runtime.http.server import Send
from sie_runtime.keys import Key, Keys

USER_SCOPES = frozenset({"infer", "read", "pools"})
POLICY_VIOLATION = 1008  # RFC 6455
GUARDED = frozenset({"config", "admin"})  # in mode none too


def require_tokens(settings: Settings) -> None:
    """Raises SettingError for the mode static without a token: nobody could call."""
    if settings.auth_mode == "static" and not (settings.auth_token or settings.auth_tokens):
        raise SettingError("SIE_AUTH_MODE", "static needs SIE_AUTH_TOKEN or SIE_AUTH_TOKENS")


# routes of servers of language models, for which clients have methods
# routes of other servers that this one has no counterpart of, with what to use
_ELSEWHERE = (
    (
        re.compile(r"/v1/(chat/completions|completions|responses|generate|estimate|recommend)(/|$)"),
        "this server does not generate text: use /v1/encode, /v1/score or /v1/extract here, and a server of language"
        " models for generation",
    ),
    (
        re.compile(r"/v1/audio/(transcriptions|translations)$"),
        "this server writes what is spoken at /v1/extract, with a model that reads sounds",
    ),
)


class Gate:
    """Checks a call's credentials. Every comparison takes the same time, and all static tokens are compared, whatever
    matched.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None) -> None:
        """`keys` in mode token, and there alone. Raises SettingError."""
        require_tokens(settings)
        if (settings.auth_mode == "token") != (keys is not None):
            raise SettingError("SIE_AUTH_MODE", "token, and no other mode, needs the keys of a broker")
        self._guarded = settings.auth_mode != "none"
        self._pools = "admin" if settings.pool_write_role == "admin" else "pools"
        self._keys = keys
        self._reader = settings.config_read_token
        users = [*([settings.auth_token] if settings.auth_token else []), *(settings.auth_tokens or ())]
        self._static = [
            (token, _static(token, USER_SCOPES, f"static-{number}")) for number, token in enumerate(users, 1)
        ]
        self._has_admin = settings.admin_token is not None
        if settings.admin_token is not None:
            self._static.append((settings.admin_token, _static(settings.admin_token, frozenset(SCOPES), "admin")))

    def check(self, method: str, path: str, authorization: str) -> Grant:
        """Let the call in or not. The handshake of a websocket is a GET.

        Raises Unauthenticated, PermissionDenied, NotReady while the keys are not known; then, to those who may know,
        NotFound for a path that no row has, and HTTPException 405 with `Allow` for another method.
        """
        match = TABLE.match(path)
        row = match.route(method)
        grant = ANYBODY
        if row is None or row.scope != OPEN:
            scope = "read" if row is None else self._pools if row.scope == "pools" else row.scope
            if self._guarded or scope in GUARDED:
                grant = self._granted(scope, authorization, reads_config=row is not None and row.reader)
            elif scope in ("pools", ANY) and authorization:  # needs none, but an administrator may do more
                # whoever calls, what is made has one owner
                grant = replace(self._static_grant(bearer(authorization)) or ANYBODY, key=ANYBODY.key)
            if scope == ANY:
                grant = replace(grant, scopes=self._usable(grant.scopes))
        if row is None or not row.served:
            if not match.methods:
                for pattern, message in _ELSEWHERE:
                    if pattern.match(path):
                        raise NotFound(message)
                raise NotFound(
                    f"no such path; did you mean {near}?"
                    if (near := TABLE.near(path))
                    else "no such path; /docs lists all"
                )
            allowed = [name for name, route in match.methods.items() if route.served]
            raise HTTPException(405, headers={"Allow": ", ".join(allowed)})
        return grant

    def of_key(self, key: str) -> Grant | None:
        """The grant of the credential that this is the key of, as it is now: for work that outlives the call that asked
        for it. None where it is not valid any more. Raises NotReady while the keys are not known.
        """
        if not key and not self._guarded:
            return replace(ANYBODY, scopes=self._usable(frozenset()))
        for _, grant in self._static:
            if grant.key == key:
                return grant
        if self._keys is None or not key:
            return None
        if not self._keys.loaded:
            raise NotReady("the keys have not been read from the broker yet")
        key_record = self._keys.of_id(key)
        return None if key_record is None or self._keys.ended(key_record) else _grant_of(key_record)

    def watched(self, path: str, authorization: str, send: Send) -> Send:
        """`send` of a websocket that was let in, for as long as it would be let in again: then the next frame is a
        close (1008).
        """

        async def checked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "websocket.send":
                try:
                    self.check("GET", path, authorization)
                except SIEError as error:
                    message = {"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.code}
            await send(message)

        return checked

    def _granted(self, scope: str, authorization: str, *, reads_config: bool) -> Grant:
        token = bearer(authorization)
        grant = self._static_grant(token)
        if reads_config and self._reader is not None and self._reader.matches(token):
            return _static(self._reader, frozenset({scope}), WORKERS_NAME)
        if grant is None and token and self._keys is not None:
            grant = self._of_key(self._keys, token)
        if grant is not None and (scope == ANY or scope in grant.scopes):
            return grant
        if grant is not None:
            raise PermissionDenied(f"this token lacks the scope {scope}")
        if scope in GUARDED and not self._has_admin and self._keys is None:
            raise PermissionDenied("no SIE_ADMIN_TOKEN is configured, so nobody may do this")
        raise Unauthenticated(
            "a token is needed: send it as Authorization: Bearer TOKEN" if not token else "this token is not known"
        )

    def _usable(self, scopes: frozenset[str]) -> frozenset[str]:
        """The scopes whose routes let a credential with `scopes` in: in mode none all that are not guarded."""
        lets = (scopes & frozenset(SCOPES)) | (frozenset() if self._guarded else frozenset(SCOPES) - GUARDED)
        return lets | {"pools"} if self._pools in lets else lets - {"pools"}

    def _static_grant(self, token: str) -> Grant | None:
        grant = None
        for static_token, its_grant in self._static:
            if static_token.matches(token):
                grant = its_grant
        return grant

    def _of_key(self, keys: Keys, token: str) -> Grant | None:
        key = keys.find(token)
        if key is None:
            if not keys.loaded:
                raise NotReady("the keys have not been read from the broker yet")
            return None
        ended = keys.ended(key)
        if ended:
            raise Unauthenticated(f"this key {ended}")
        return _grant_of(key)


def _grant_of(key: Key) -> Grant:
    return Grant(key.id, frozenset(key.scopes), key.limits, key.id)


def _static(token: Secret, scopes: frozenset[str], name: str) -> Grant:
    return Grant(key_of(token.reveal()), scopes, name=name)
