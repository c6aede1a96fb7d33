"""Access control: each row of `routes.ROUTES` has a scope, and credentials have scopes.

    method, path ──► row of ROUTES ──► its scope ──► does the credential have it? ──► Grant
                       └ no row: NotFound, or 405 with `Allow`, for a caller with scope `read`

A path that is not in ROUTES is not served, so every route has a scope. Tests call each row of the table with each
credential (`tests/unit/test_auth.py`).
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from sie_contracts.errors import MethodNotAllowed, NotFound, NotReady, PermissionDenied, SIEError, Unauthenticated
from sie_contracts.loopback import is_loopback
from sie_contracts.settings import Secret, SettingError, Settings
from sie_gateway.admission.admission import key_of
from sie_gateway.admission.grant import ANYBODY, WORKERS_NAME, Grant
from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.http.routes import PLUGINS, TABLE
from sie_runtime.http import config_routes
from sie_runtime.http.asgi import Send
from sie_runtime.http.routes import ANY, OPEN, SCOPES, Match, bearer
from sie_runtime.keys import Key, Keys

USER_SCOPES = frozenset({"infer", "read", "pools"})
POLICY_VIOLATION = 1008  # close code of a websocket (RFC 6455)
# scopes that require a token even in auth mode `none`. Exception: routes with `local` require no token while the
# gateway listens only on loopback.
GUARDED = frozenset({"config", "admin"})


def require_tokens(settings: Settings) -> None:
    """Raise SettingError if the auth mode is `static` and no user token is set: no user could call the gateway."""
    if settings.auth_mode == "static" and not (settings.auth_token or settings.auth_tokens):
        raise SettingError("SIE_AUTH_MODE", "the mode `static` needs SIE_AUTH_TOKEN or SIE_AUTH_TOKENS")


# pairs (pattern of paths, error message): paths that clients often try, but that no gateway serves
_ELSEWHERE = (
    (
        re.compile(r"/v1/(chat/completions|completions|responses|generate|estimate|recommend)(/|$)"),
        "this server does not generate text: use /v1/encode, /v1/score or /v1/extract here, and a server of language"
        " models for generation",
    ),
    (
        re.compile(r"(/v1)?/(embed|embeddings)/."),
        "no such path; did you mean /v1/encode/{model}? /v1/embeddings takes the model in the body",
    ),
    (
        re.compile(r"(/v1)?/rerank/."),
        "no such path; did you mean /v1/score/{model}? /v1/rerank takes the model in the body",
    ),
    *(row for plugin in PLUGINS.loaded.values() for row in plugin.unserved),
)


class Gate:
    """Check of the credentials of a call. The comparison with static tokens takes constant time: it continues after a
    match.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None, host: str = "") -> None:
        """Auth mode `token` requires `keys`; in every other mode, `keys` must be None. `host`: the address on which the
        gateway listens. Raises SettingError.
        """
        require_tokens(settings)
        if (settings.auth_mode == "token") != (keys is not None):
            raise SettingError(
                "SIE_AUTH_MODE", "the mode `token` requires the keys of a broker; no other mode may use them"
            )
        self._guarded = settings.auth_mode != "none"
        self._is_private = not self._guarded and is_loopback(host)
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

    def check(self, method: str, path: str, authorization: str, match: Match[GatewayRoute] | None = None) -> Grant:
        """Return the grant of a call that is allowed. The handshake of a websocket counts as a GET. `match`: routes of
        the path, if the caller has looked them up.

        Raises Unauthenticated, PermissionDenied, and NotReady if the keys are not read yet. For a key with an expiry
        time, NotReady also means that the broker's time is not read yet. An unknown path or method requires the scope
        `read`. A caller with this scope gets NotFound for an unknown path, and MethodNotAllowed for a method that this
        gateway does not serve.
        """
        if match is None:
            match = TABLE.match(path)
        row = match.methods.get("GET" if method == "HEAD" else method)
        grant = ANYBODY
        if row is None or row.scope != OPEN:
            scope = "read" if row is None else self._pools if row.scope == "pools" else row.scope
            is_open = row is not None and row.local and self._is_private
            if self._guarded or (scope in GUARDED and not is_open):
                grant = self._granted(scope, authorization, reads_config=row is not None and row.reader)
            # auth mode `none` requires no token, but an admin token allows more on routes with scope `pools` or ANY
            elif scope in ("pools", ANY) and authorization:
                # in auth mode `none`, all callers have the same owner key, so every caller may use the jobs, files and
                # pools of every other caller
                grant = replace(self._static_grant(bearer(authorization)) or ANYBODY, key=ANYBODY.key)
            if scope == ANY:
                grant = replace(grant, scopes=self._usable(grant.scopes))
        if row is None or not row.served:
            if not match.methods:
                for pattern, message in _ELSEWHERE:
                    if pattern.match(path):
                        raise NotFound(message)
                for name, remedy in PLUGINS.missing.items():
                    if name in path.split("/"):
                        raise NotFound(f"{name} is not installed at this gateway: {remedy}", reason="not_installed")
                near, is_double = TABLE.near(path), path.startswith("/v1/v1/")
                fault = "no such path: it begins with /v1 twice" if is_double else "no such path"
                base = ", and a base URL without /v1" if is_double else ""
                raise NotFound(f"{fault}; did you mean {near}{base}?" if near else f"{fault}; see /docs")
            elsewhere = (
                "; the config service (config_url in /health) takes the other methods"
                if path.startswith(config_routes.PREFIX)
                else ""
            )
            raise MethodNotAllowed(f"this path takes {match.allow} here{elsewhere}", allow=match.allow)
        return grant

    def of_key(self, key: str) -> Grant | None:
        """Return the current grant of the credential with this key; None if the credential is not valid any more. Used
        for work that continues after its call has ended, such as a job. Raises NotReady if the keys are not read yet.
        For a key with an expiry time, NotReady also means that the broker's time is not read yet.
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
        """Wrap `send` of a websocket so that the credential is checked before each frame. If the credential is not
        valid any more, the websocket is closed with code 1008 in place of the frame.
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
            raise PermissionDenied(
                "this route needs SIE_ADMIN_TOKEN, which is not set: set it and start the gateway again"
            )
        raise Unauthenticated(
            "a token is needed: send it as Authorization: Bearer TOKEN" if not token else "this token is not known"
        )

    def _usable(self, scopes: frozenset[str]) -> frozenset[str]:
        """Return the scopes of all routes that a credential with `scopes` may call. In auth mode `none`, every
        credential has all scopes except GUARDED.
        """
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
    return Grant(key.id, frozenset(key.scopes), key.limits, key.id, key.caches)


def _static(token: Secret, scopes: frozenset[str], name: str) -> Grant:
    return Grant(key_of(token.reveal()), scopes, name=name)
