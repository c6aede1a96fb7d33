"""Stand-ins for the timers with which a server measures the rate of a body. A test ends each of them."""

from __future__ import annotations

from typing import Any

import pytest

from sie_runtime.http import protocol

TIME_S = 0.25


class BodyTime:
    def __init__(self, connection: protocol.Protocol) -> None:
        self._connection = connection
        self._before_bytes = connection._body_bytes
        self.is_cancelled = False

    @property
    def read_bytes(self) -> int:
        """Return how many bytes the server has read since this time began."""
        return self._connection._body_bytes - self._before_bytes

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self) -> None:
        assert not self.is_cancelled
        self._connection._body_late(self._before_bytes)


def body_times(monkeypatch: pytest.MonkeyPatch) -> list[BodyTime]:
    """Return a list that gets each time that begins from now on, as if it took TIME_S."""
    begun: list[BodyTime] = []

    def watch(connection: Any) -> None:
        begun.append(BodyTime(connection))
        connection._body_timer = begun[-1]

    monkeypatch.setattr(protocol, "RATE_S", TIME_S)
    monkeypatch.setattr(protocol.Protocol, "_watch_body", watch)
    return begun
