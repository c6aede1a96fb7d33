"""Clients that retry as the SDK does and check every answer.

    Request ─► sie_client.core.call ─► attempt at one of the gateways ─► Received or TransportFailed ─► ... ─► Outcome

After a refused connection a client tries the other gateway at once, as a load balancer would. That is no new attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from client import Connection, connect, request
from fake_adapter import ids_of, vector_of
from numpy.typing import NDArray

from sie_client.core import Received, Send, Session, TransportFailed, call
from sie_client.errors import SIEError
from sie_contracts import arrays

COSINE = 0.998
# an attempt counts as unanswered so long after its budget, because a frozen gateway answers when it runs again
GRACE_S = 10.0


@dataclass(frozen=True)
class Attempt:
    """One attempt of a request. `status` 0 means no answer, and `failure` the reason. Times are of `time.monotonic`."""

    started_s: float
    ended_s: float
    gateway: int
    status: int
    failure: str = ""


@dataclass
class Outcome:
    """One request of a user. `verdict`: right, wrong, or failed when the SDK gave up."""

    model: str
    started_s: float
    ended_s: float = 0.0
    verdict: str = "failed"
    detail: str = ""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def at_once(self) -> bool:
        """Return True if the first attempt got a right answer."""
        return self.verdict == "right" and len(self.attempts) == 1


class Expected:
    """Texts of a model and their vectors."""

    def __init__(self, model: str, texts: Sequence[str], vectors: Sequence[NDArray[np.float32]]) -> None:
        self.model = model
        self.texts = texts
        self.vectors = vectors

    @staticmethod
    def toy(model: str, count: int = 256) -> Expected:
        texts = [f"text {number}: " + "toy " * (number % 9) for number in range(count)]
        return Expected(model, texts, [vector_of(ids_of(text)) for text in texts])

    def fault(self, body: bytes, ids: Sequence[str], picked: Sequence[int]) -> str:
        """Return the fault of an answer to these inputs; empty if it is right."""
        try:
            answer: dict[str, Any] = arrays.unpack(arrays.decode_msgpack(body))
        except msgspec.DecodeError as error:
            return f"{error}: {body[:300]!r}"
        slots = answer["items"]
        if [slot.get("id") for slot in slots] != list(ids):
            return f"{len(slots)} slots with other ids"
        for slot, index in zip(slots, picked, strict=True):
            if "error" in slot:
                return f"slot error {slot['error']['code']}"
            values, expected = np.asarray(slot["dense"]["values"], np.float64), self.vectors[index]
            if values.shape != expected.shape:
                return f"{values.shape} values"
            cosine = float(values @ expected / (np.linalg.norm(values) * np.linalg.norm(expected)))
            if not cosine > COSINE:
                return f"a vector of another text, cosine {cosine:.3f}"
        return ""


class Crowd:
    """Clients of one model, each with its own pace. `outcomes` are in the order in which requests end."""

    def __init__(
        self,
        urls: Sequence[str],
        expected: Expected,
        *,
        clients: int,
        pace_s: float,
        items: int,
        budget_s: float,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.unasked = 0
        self._addresses = [(str(pieces.hostname), int(pieces.port or 0)) for pieces in map(urlsplit, urls)]
        self._expected = expected
        self._pace_s, self._items, self._budget_s = pace_s, items, budget_s
        self._numbers = itertools.count()
        self._stopping = asyncio.Event()
        self._idle: list[list[Connection]] = [[] for _ in urls]
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def stop(self) -> None:
        """Send no new requests, and wait until the running ones have ended within their budgets."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        for connection in itertools.chain(*self._idle):
            self.unasked += connection.unasked
            connection.close()

    async def _client(self, client: int) -> None:
        await asyncio.sleep(self._pace_s * client / len(self._tasks))
        due_s = time.monotonic()
        while not self._stopping.is_set():
            self.outcomes.append(await self._request(next(self._numbers)))
            due_s = max(due_s + self._pace_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())

    async def _request(self, number: int) -> Outcome:
        expected = self._expected
        count = 1 + number % self._items
        picked = [(number * 7 + offset) % len(expected.texts) for offset in range(count)]
        ids = [f"{expected.model}-{number}-{offset}" for offset in range(count)]
        items = [{"id": item_id, "text": expected.texts[index]} for item_id, index in zip(ids, picked, strict=True)]
        body = msgspec.msgpack.encode({"items": items})
        outcome = Outcome(expected.model, time.monotonic())
        budget_s = 4 * self._budget_s
        session = Session(connection_budget_s=budget_s, capacity_budget_s=budget_s)
        plan = call(Send("POST", f"/v1/encode/{expected.model}", {}, body), session)
        step: Received | TransportFailed | None = None
        try:
            while True:
                action = plan.send(step)
                if isinstance(action, Send):
                    step = await self._attempt(action, outcome, number)
                else:
                    step = None
                    await asyncio.sleep(action.seconds)
        except StopIteration as done:
            outcome.detail = expected.fault(done.value.body, ids, picked)
            outcome.verdict = "wrong" if outcome.detail else "right"
        except SIEError as error:
            outcome.detail = str(error)[:200]
        outcome.ended_s = time.monotonic()
        return outcome

    async def _attempt(self, send: Send, outcome: Outcome, number: int) -> Received | TransportFailed:
        first = number + len(outcome.attempts)
        started_s = time.monotonic()
        failure: OSError = ConnectionRefusedError("no gateway listens")
        for turn in range(len(self._addresses)):
            gateway = (first + turn) % len(self._addresses)
            try:
                connection = await self._connection(gateway)
            except OSError as error:
                failure = error
                continue
            timeout_ms = str(round(self._budget_s * 1000))
            message = request(
                send.path,
                send.body,
                x_sie_timeout_ms=timeout_ms,
                x_sie_client_version="0.1.0",
            )
            return await self._exchange(connection, message, gateway, outcome, started_s)
        ended_s = time.monotonic()
        outcome.attempts.append(Attempt(started_s, ended_s, first % len(self._addresses), 0, "refused"))
        return TransportFailed(failure, ended_s - started_s)

    async def _connection(self, gateway: int) -> Connection:
        """Return an open connection. Raise OSError if the gateway does not accept one."""
        idle = self._idle[gateway]
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
            self.unasked += connection.unasked
        return await connect(*self._addresses[gateway])

    async def _exchange(
        self, connection: Connection, message: bytes, gateway: int, outcome: Outcome, started_s: float
    ) -> Received | TransportFailed:
        try:
            async with asyncio.timeout(self._budget_s + GRACE_S):
                status, body = await connection.send(message)
        except (ConnectionError, TimeoutError) as error:
            connection.close()
            ended_s = time.monotonic()
            outcome.attempts.append(
                Attempt(started_s, ended_s, gateway, 0, "closed" if isinstance(error, ConnectionError) else "silent")
            )
            return TransportFailed(error, ended_s - started_s)
        ended_s = time.monotonic()
        code = "" if status == 200 else _code(status, body)
        outcome.attempts.append(Attempt(started_s, ended_s, gateway, status, code))
        self._idle[gateway].append(connection)
        return Received(status, connection.headers(), body, ended_s - started_s)


def _code(status: int, body: bytes) -> str:
    """Return the code of a refusal; empty for a 202, which reports how a cold lane starts."""
    answer = msgspec.json.decode(body)
    return str(answer["status"] if status == 202 else answer["code"])
