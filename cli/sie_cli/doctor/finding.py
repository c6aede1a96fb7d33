"""What a check says: findings, each with what mends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from sie_cli.doctor.look import ClusterProbe


class Finding(NamedTuple):
    """One line what is wrong, one line what mends it."""

    wrong: str
    fix: str


CheckResult = tuple[str, list[Finding]]
Check = Callable[[ClusterProbe], Awaitable[CheckResult]]
