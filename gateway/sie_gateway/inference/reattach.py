"""Clients that disconnect and try again. A run continues for `window_s` seconds after the disconnect of its client. If
the same request arrives again in this time, its reply is the result of the run.

    client disconnects ──► the run continues for `window_s` seconds
        the same request arrives in this time ──► it waits for the run, and gets the reply of the run
        otherwise ──► the run is cancelled, its work withdrawn from the queue, its permits released

Requests are the same if their bodies, paths, and headers (`_HEADERS`, `x-sie-*`) are equal. Requests without an API
key must also come from the same address.

Only a run whose client has disconnected can be joined. Two clients with the same request at the same time are two
requests, each with its own work in the queue. A client that joins a run gets the bytes and headers of the run's reply.
`Inference` watches a client only after its run has taken WATCH_AFTER_S, so short runs never reach this module.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sie_contracts.errors import SHUTTING_DOWN, GatewayTimeout, ShuttingDown
from sie_gateway.inference.call import Call, ClientGone, EncodedReply
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks

REATTACH_WINDOW_S = 10.0  # seconds for which a run (request in progress) continues without a client
# Limits of the runs that continue without a client: their number, and the bytes of all their bodies. At a limit, a run
# is cancelled when its client disconnects.
MAX_AWAY = 256
MAX_AWAY_BYTES = 256 << 20
# headers that distinguish requests, in addition to the path, the body, and all x-sie-* headers except _ID_HEADER
_HEADERS = ("authorization", "content-type", "accept")
_ID_HEADER = "x-sie-request-id"  # not compared, because a client sends another id with each attempt
Identity = tuple[str, str, int, tuple[tuple[str, str], ...]]
_logger = logging.getLogger("sie.gateway.attach")


class Attachments:
    """Runs whose client has disconnected. Above MAX_AWAY runs or MAX_AWAY_BYTES, the disconnect cancels the run."""

    def __init__(self, *, window_s: float = REATTACH_WINDOW_S) -> None:
        self.window_s = window_s
        self.joined = 0  # number of clients that joined their run again, since the start of the gateway
        self.abandoned = 0  # number of runs that were cancelled because their clients had disconnected
        self.count = 0  # number of runs that can be joined
        self.tasks = Tasks(_logger, lambda: None)
        self._watched: dict[asyncio.Task[Any], Run] = {}  # task of a run -> run
        self._away: dict[Identity, list[Run]] = {}
        self._bytes = 0
        self._closed = False

    def count_joined(self) -> None:
        self.joined += 1

    def count_abandoned(self) -> None:
        self.abandoned += 1

    def watch(self, task: asyncio.Task[Any], call: Call) -> None:
        """Start to watch the client of a run. `call.receive` reports that the client has disconnected."""
        self._watched[task] = Run(self, task, call)

    def ended(self, task: asyncio.Task[Any], error: BaseException | None, answer: EncodedReply | None = None) -> bool:
        """Record the end of a run, watched or not. Return True if the client that started the run has disconnected.
        Raises ClientGone if the run was cancelled because no client joined it.
        """
        run = self._watched.pop(task, None)
        return run is not None and run.end(error, answer)

    def find(self, call: Call) -> Run | None:
        """Return the oldest run of the same request whose client has disconnected, or None."""
        return next((run for run in self._away.get(_identity(call), ()) if run.call.body == call.body), None)

    def keep(self, run: Run) -> bool:
        """Store a run without a client, so that `find` can return it. Return False if the run would exceed MAX_AWAY or
        MAX_AWAY_BYTES, or after `close`.
        """
        if self._closed or self.count >= MAX_AWAY or self._bytes + len(run.call.body) > MAX_AWAY_BYTES:
            return False
        self._away.setdefault(_identity(run.call), []).append(run)
        self.count += 1
        self._bytes += len(run.call.body)
        return True

    def remove(self, run: Run) -> None:
        identity = _identity(run.call)
        runs = self._away[identity]
        runs.remove(run)
        if not runs:
            del self._away[identity]
        self.count -= 1
        self._bytes -= len(run.call.body)

    def close(self) -> None:
        """Cancel the runs whose clients have disconnected. From now on, a disconnect cancels a run at once, because its
        client tries again at another gateway.
        """
        self._closed = True
        for run in [run for runs in self._away.values() for run in runs]:
            run.give_up()


def _identity(call: Call) -> Identity:
    headers = sorted(
        (name, value)
        for name, value in call.headers.items()
        if name in _HEADERS or (name.startswith("x-sie-") and name != _ID_HEADER)
    )
    # without an API key, the client's address is part of the result: it decides which target of an alias a client gets
    return call.path, "" if call.grant.key else call.client, len(call.body), tuple(headers)


class Run:
    """Request in progress whose client is watched. `task` runs the request."""

    def __init__(self, table: Attachments, task: asyncio.Task[Any], call: Call) -> None:
        self.call = call
        self._table = table
        self._task = task
        self._is_given_up = False
        self._window: asyncio.TimerHandle | None = None  # timer that cancels the run; None while the run has a client
        self._outcome: asyncio.Future[EncodedReply] | None = (
            None  # created when the client that started the run disconnects
        )
        self._watcher: asyncio.Task[None] | None = table.tasks.start(self._until_left(), "presence of a client")

    def end(self, error: BaseException | None, answer: EncodedReply | None) -> bool:
        """Record the end of the run. Return True if the client that started the run has disconnected. Raises ClientGone
        if the run was cancelled because no client joined it.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        self._unkeep()
        is_left = self._outcome is not None
        if self._outcome is not None:
            self._settle(self._outcome, error, answer)
        # `_watcher` and `_outcome` refer to an exception whose traceback refers back to this run. Without this line,
        # this cycle would stay in memory, with the body of the request, until a garbage collection.
        self._watcher = self._outcome = None
        if self._is_given_up and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise ClientGone from error
        return is_left

    @staticmethod
    def _settle(
        outcome: asyncio.Future[EncodedReply], error: BaseException | None, answer: EncodedReply | None
    ) -> None:
        if error is None:
            assert answer is not None
            outcome.set_result(answer)
            return
        ended = error if isinstance(error, Exception) else ShuttingDown(SHUTTING_DOWN)
        outcome.set_exception(ended)
        outcome.exception()  # marks the exception as retrieved, in case no client joins the run

    async def _until_left(self) -> None:
        await _disconnected(self.call)
        self._leave()

    def _leave(self) -> None:
        """Record that the client has disconnected. Cancel the run if no client joins it in `window_s` seconds."""
        failpoint("reattach.left")
        loop = asyncio.get_running_loop()
        if self._outcome is None:
            self._outcome = loop.create_future()
        if self._table.keep(self):
            self._window = loop.call_later(self._table.window_s, self.give_up)
        else:
            self.give_up()

    def _unkeep(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None
            self._table.remove(self)

    def give_up(self) -> None:
        """Cancel the run because no client joined it."""
        self._unkeep()
        self._is_given_up = True
        self._table.count_abandoned()
        self._task.cancel()

    async def join(self, call: Call, timeout_s: float) -> EncodedReply:
        """Wait for the result of the run on behalf of `call`, which repeats the request. Raises the exceptions of the
        run, GatewayTimeout, and ClientGone if the client of `call` disconnects too.
        """
        outcome = self._outcome
        assert outcome is not None
        self._unkeep()
        self._table.count_joined()
        leaving = self._table.tasks.start(_disconnected(call), "presence of a client")
        waited: set[asyncio.Future[Any]] = {outcome, leaving}
        try:
            await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not outcome.done():
                self._leave()
        call.follow(self.call)
        try:
            if outcome.done():
                return outcome.result()
            if leaving.done():
                raise ClientGone
            raise GatewayTimeout("no result within the remaining time of the request")
        finally:  # the traceback of an exception keeps this frame in memory, so delete its large values
            del outcome, waited, leaving


async def _disconnected(call: Call) -> None:
    """Wait until the client has disconnected. The caller must have read the whole body before."""
    assert call.receive is not None
    while (await call.receive())["type"] != "http.disconnect":
        pass
