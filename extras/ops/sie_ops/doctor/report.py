"""Report of `sie doctor`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct


class DoctorFinding(Struct, frozen=True):
    """A fault that a check of `sie doctor` has detected, and its fix."""

    wrong: str
    fix: str


class DoctorCheck(Struct, frozen=True):
    """Result of one check. `absent`: there is nothing to check. `blind`: the check could not run; `says` has the
    reason.
    """

    check: str
    state: Literal["fine", "wrong", "absent", "blind"]
    says: str
    findings: list[DoctorFinding]


class DoctorReport(Struct, kw_only=True):
    """Result of `sie doctor` on the machine of this gateway, with the gateway's settings."""

    EXAMPLE: ClassVar[Any] = {
        "status": "fine",
        "checks": [{"check": "broker", "state": "fine", "says": "3 streams", "findings": []}],
    }

    status: Literal["fine", "wrong", "blind"]
    checks: list[DoctorCheck]
