"""Who may do what: a scope for each route and method, and tokens that grant scopes. What no route serves needs `read`, to be told so."""

from __future__ import annotations

from sie_contracts.errors import PermissionDenied, Unauthenticated
from sie_contracts.settings import SettingError, Settings
from sie_gateway.assignments import PATH as ASSIGNMENTS

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/livez", "/ping"})
_READ_PATHS = ("/v1/models", "/models", "/health", "/docs", "/openapi.json")
_INFER_PATHS = ("/v1/encode/", "/v1/score/", "/v1/extract/")
_USER_SCOPES = frozenset({"infer", "read", "pools"})
_ALWAYS_GUARDED = frozenset({"config", "admin"})


def scope_of(method: str, path: str) -> str | None:
    """The scope that a call needs, None where it is open. Unknown paths need `read`, and answer 404 behind it."""
    if path in OPEN_PATHS:
        return None
    if method == "POST" and path.startswith(_INFER_PATHS):
        return "infer"
    if method in ("GET", "HEAD") or path == "/" or path.startswith(_INFER_PATHS + _READ_PATHS):
        return "read"
    return "read" if not path.startswith("/v1/configs") else "config"


class Gate:
    """Checks a call's credentials. Every comparison takes the same time, and all tokens are compared, whatever matched."""

    def __init__(self, settings: Settings) -> None:
        if settings.auth_mode == "token":
            raise SettingError("SIE_AUTH_MODE", "this version has no key store; use static, with SIE_AUTH_TOKEN or SIE_AUTH_TOKENS")
        if settings.auth_mode == "static" and not (settings.auth_token or settings.auth_tokens):
            raise SettingError("SIE_AUTH_MODE", "static needs SIE_AUTH_TOKEN or SIE_AUTH_TOKENS")
        self._guarded = settings.auth_mode != "none"
        self._admin = settings.admin_token
        self._reader = settings.config_read_token
        self._users = [*([settings.auth_token] if settings.auth_token else []), *(settings.auth_tokens or ())]

    def check(self, method: str, path: str, authorization: str) -> None:
        """Return if the call may go on. Raises Unauthenticated, PermissionDenied."""
        scope = scope_of(method, path)
        if scope is None or (not self._guarded and scope not in _ALWAYS_GUARDED):
            return
        token = authorization[7:] if authorization[:7].lower() == "bearer " else authorization
        token = token.strip()
        granted: set[str] = set()
        if self._admin is not None and self._admin.matches(token):
            granted |= _USER_SCOPES | _ALWAYS_GUARDED
        if path == ASSIGNMENTS and self._reader is not None and self._reader.matches(token):
            granted.add("read")
        for user in self._users:
            if user.matches(token):
                granted |= _USER_SCOPES
        if scope in granted:
            return
        if granted:
            raise PermissionDenied(f"this token lacks the scope {scope}")
        if scope in _ALWAYS_GUARDED and self._admin is None:
            raise PermissionDenied("no SIE_ADMIN_TOKEN is configured, so nobody may do this")
        raise Unauthenticated("a bearer token is needed" if not token else "this token is not known")
