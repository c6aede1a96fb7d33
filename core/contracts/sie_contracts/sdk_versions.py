"""Dialects: the codes and statuses that each version of the open-source SIE project's SDKs expects of a server. These
SDKs also work with this server. They send their version in the header `X-SIE-SDK-Version`.

    SDK's version ──► dialect_of ──► the last row of DIALECTS whose version is not newer than the SDK's ──► Dialect

The clients of this project send their version in another header, `X-SIE-Client-Version`. A client without the header
`X-SIE-SDK-Version` gets the dialect NATIVE.
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
"""The newest version (major, minor) of the open-source project's API that this server supports."""
SERVER_VERSION = ".".join(map(str, CONTRACT_VERSION))
"""The version that the server reports to a client whose `X-SIE-SDK-Version` is missing or cannot be parsed."""
_MINOR = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Expectations that the clients in a range of versions have of a server.

    `holds`: whether a request waits in the gateway while its model is loaded. The open-source SDKs repeat requests
    themselves, so `holds` is false for them: the gateway answers at once. `on_item_error`: default of the request
    parameter `on_item_error`. `statuses`: HTTP status by error code, where the status differs from that of NATIVE.
    `codes`: retryable error code -> code that is sent instead. Most of the replaced codes are unknown to these clients,
    and they do not retry after an unknown code.
    """

    holds: bool = True
    on_item_error: str = "slot"
    statuses: Mapping[str, int] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)

    def spoken(self, error: SIEError) -> SIEError:
        """Return `error` with the code and the status that clients of this dialect expect. If the code is replaced and
        `error` has no reason, the former code becomes the reason.
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
# ALL_ITEMS_FAILED becomes RESOURCE_EXHAUSTED, after which the open-source SDKs repeat a request only three times. More
# repetitions are useless if all inputs of the request fail each time.
_MIXED = {"ALL_ITEMS_FAILED": "RESOURCE_EXHAUSTED"}


def _busy(code: str, *codes: str) -> dict[str, str]:
    return _MIXED | dict.fromkeys(("NOT_READY", "SHUTTING_DOWN", *codes), code)


DIALECTS: tuple[tuple[tuple[int, int, int], Dialect], ...] = (
    # up to 0.6.4, clients read status 202 as "not yet", and repeat a request after any 503
    ((0, 0, 0), Dialect(False, "fail", _FAILED | {"PROVISIONING": 202}, _MIXED)),
    # from 0.6.5 on, clients repeat a request after a 503 only for certain codes
    ((0, 6, 5), Dialect(False, "fail", _FAILED, _busy("PROVISIONING", "QUEUE_FULL", "QUEUE_UNAVAILABLE"))),
    ((0, 7, 3), Dialect(False, "fail", _FAILED, _busy("QUEUE_FULL", "QUEUE_UNAVAILABLE"))),
    ((0, 9, 0), Dialect(False, "fail", _FAILED, _busy("QUEUE_UNAVAILABLE"))),
)
"""Pairs (first SDK version that uses the dialect, dialect), the oldest version first."""


def _parsed(version: str) -> tuple[int, int, int] | None:
    match = _MINOR.match(version)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def dialect_of(version: str) -> Dialect:
    """Return the dialect of this version of the SDKs; the newest dialect if the version cannot be parsed."""
    number = _parsed(version)
    if number is None:
        return DIALECTS[-1][1]
    return next(dialect for first, dialect in reversed(DIALECTS) if first <= number)


def server_version(version: str) -> str:
    """Return the version to send to an open-source SDK of version `version`: the SDK's own version, but at most
    SERVER_VERSION; SERVER_VERSION if `version` cannot be parsed. The SDK warns if the received version differs from its
    own version by more than one minor version.
    """
    number = _parsed(version)
    if number is None:
        return SERVER_VERSION
    major, minor = min(number[:2], CONTRACT_VERSION)
    return f"{major}.{minor}"
