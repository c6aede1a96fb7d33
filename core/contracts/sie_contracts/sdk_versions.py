"""Dialects of the public SDKs of SIE: their expectations of a server, by the version in their header
`X-SIE-SDK-Version`.

    version ──► dialect_of ──► the first row of DIALECTS that is not newer ──► holds, item errors, statuses, codes

Our own clients send their version in another header, `X-SIE-Client-Version`, and get NATIVE, like all other clients.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from sie_contracts.errors import SIEError

HEADER = "x-sie-sdk-version"
OWN_HEADER = "x-sie-client-version"
CONTRACT_VERSION = (0, 10)
"""The newest minor version of the public contract that this server speaks."""
SERVER_VERSION = ".".join(map(str, CONTRACT_VERSION))
"""The version that other clients are answered by."""
_MINOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Expectations of a range of client versions.

    `holds`: whether a request waits in the gateway for a model that is not loaded. A client that repeats requests
    itself gives its last attempt only the remaining budget, so a request of this client is answered at once.
    `on_item_error`: effect of a failed input if the request does not name one. `statuses`: status of an error, by its
    code. `codes`: code that replaces the code of an error that may be retried; a client does not retry after a code
    that it does not know.
    """

    holds: bool = True
    on_item_error: str = "slot"
    statuses: Mapping[str, int] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)

    def spoken(self, error: SIEError) -> SIEError:
        """Return `error` in the form that these clients read. If its code is replaced and it has no reason, the
        original code becomes the reason.
        """
        code = self.codes.get(error.code, error.code) if error.retryable else error.code
        status = self.statuses.get(error.code)
        if code == error.code and status is None:
            return error
        info = error.info()
        if code != error.code:
            info = msgspec.structs.replace(info, code=code, reason=info.reason or error.code.lower())
        translated = SIEError.from_info(info)
        if status is not None:
            translated.status = status
        return translated


NATIVE = Dialect()
_FAILED = {"MODEL_LOAD_FAILED": 502}
# clients repeat a request with this code only three times: the failure may be permanent
_MIXED = {"ALL_ITEMS_FAILED": "RESOURCE_EXHAUSTED"}


def _busy(code: str, *codes: str) -> dict[str, str]:
    return _MIXED | dict.fromkeys(("NOT_READY", "SHUTTING_DOWN", *codes), code)


DIALECTS: tuple[tuple[tuple[int, int, int], Dialect], ...] = (
    # these clients read 202 as "not yet", and repeat a request after any 503
    ((0, 0, 0), Dialect(False, "fail", _FAILED | {"PROVISIONING": 202}, _MIXED)),
    # these clients repeat a request after a 503 only for certain codes
    ((0, 6, 5), Dialect(False, "fail", _FAILED, _busy("PROVISIONING", "QUEUE_FULL", "QUEUE_UNAVAILABLE"))),
    ((0, 7, 3), Dialect(False, "fail", _FAILED, _busy("QUEUE_FULL", "QUEUE_UNAVAILABLE"))),
    ((0, 9, 0), Dialect(False, "fail", _FAILED, _busy("QUEUE_UNAVAILABLE"))),
)
"""The dialects with the first version of each, the oldest first."""


def _parsed(version: str) -> tuple[int, int, int] | None:
    match = _MINOR.match(version)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def dialect_of(version: str) -> Dialect:
    """Return the dialect of a public SDK of this version. If the version is not known, return the newest dialect."""
    number = _parsed(version)
    if number is None:
        return DIALECTS[-1][1]
    return next(dialect for first, dialect in reversed(DIALECTS) if first <= number)


def server_version(version: str) -> str:
    """Return the contract version for the reply to a public SDK: the version of the SDK, at most ours.

    A public SDK compares it with its own version, and warns if they differ by more than one minor version.
    """
    number = _parsed(version)
    if number is None:
        return SERVER_VERSION
    major, minor = min(number[:2], CONTRACT_VERSION)
    return f"{major}.{minor}"
