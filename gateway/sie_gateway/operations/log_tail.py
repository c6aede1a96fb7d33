"""The last lines of a gateway's log that belong to a request, for whoever looks for one by its id.

Lines hold no inputs and no tokens, here as in the log itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from sie_gateway.admission.grant import Grant

MAX_LINES = 5_000
MAX_REQUESTS = 20_000  # whose owners are remembered; of one before them only an administrator sees the lines
MAX_CHARS = 500  # of one


class TailLine(NamedTuple):
    """`at`: seconds since the epoch."""

    request: str
    at: float
    level: str
    logger: str
    message: str


class LogTail(logging.Handler):
    """Keeps the newest lines of loggers below `sie` that carry a request id. All but `emit` belongs to the gateway's
    loop.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[TailLine] = deque(maxlen=MAX_LINES)
        self._owners: dict[str, str] = {}  # by request id, the oldest first

    def admitted(self, request: str, owner: str) -> None:
        """A request of this key was let in."""
        if len(self._owners) >= MAX_REQUESTS:
            del self._owners[next(iter(self._owners))]
        self._owners[request] = owner

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, under the lock of this handler."""
        request = getattr(record, "request_id", None)
        if request:
            message = record.getMessage()[:MAX_CHARS]
            self._lines.append(TailLine(str(request), record.created, record.levelname, record.name, message))

    def lines_of(self, request: str, grant: Grant) -> list[dict[str, Any]]:
        """The lines of a request, the oldest first; none of one that a credential may not see."""
        if "admin" not in grant.scopes and grant.key and self._owners.get(request) != grant.key:
            return []
        with self.lock or contextlib.nullcontext():
            lines = [line for line in self._lines if line.request == request]
        return [
            {"at": round(line.at, 3), "level": line.level, "logger": line.logger, "message": line.message}
            for line in lines
        ]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """While the gateway runs."""
        logger = logging.getLogger("sie")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
