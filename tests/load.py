"""Concurrent clients that check every answer against the oracle, earlier answers of the cluster, or the vectors of the
fixed-cost adapter.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np
import oracle
from cluster import MODEL
from fake_adapter import ids_of, vector_of
from numpy.typing import NDArray

from sie_contracts import arrays

TEXTS = oracle.ragged_texts(64, seed=11, longest=60)


@dataclass
class Outcome:
    """One request. `status` 0 means that no response came, and `failure` names the error. `sent_s`: when its last byte
    was handed to the kernel.
    """

    started_s: float
    ended_s: float
    status: int
    code: str = ""
    retryable: bool = False
    right: bool = False
    failure: str = ""
    deliveries: int = 0
    worker: str = ""
    url: str = ""
    sent_s: float = math.inf


def answered(url: str) -> NDArray[np.float32]:
    """Return the vectors of an undisturbed cluster for TEXTS. This takes 8 s less than the imports of the oracle."""
    body = msgspec.msgpack.encode({"items": TEXTS})
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    answer = httpx.post(f"{url}/v1/encode/{MODEL}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    items = arrays.unpack(arrays.decode_msgpack(answer.content))["items"]
    return np.stack([item["dense"]["values"] for item in items])


@dataclass
class Load:
    """Clients that send one text at a time until `stop`."""

    urls: list[str]
    timeout_s: float = 30.0
    model: str = MODEL  # any other model is served by the fixed-cost adapter
    pause_s: float = 0.0  # the pause of a client after an answer
    expected: NDArray[np.float32] | None = None  # a vector for each of TEXTS, as from `answered`; None: by the model
    outcomes: list[Outcome] = field(default_factory=list)
    stopping: bool = False
    in_flight: int = 0

    def __post_init__(self) -> None:
        if self.expected is not None:
            self._expected = self.expected
        elif self.model == MODEL:
            self._expected = oracle.encode(TEXTS)
        else:
            self._expected = np.stack([vector_of(ids_of(text)) for text in TEXTS])

    async def one(self, client: httpx.AsyncClient, url: str, number: int) -> Outcome:
        text, started_s = TEXTS[number % len(TEXTS)], time.monotonic()
        headers = {
            "content-type": "application/msgpack",
            "accept": "application/msgpack",
            "x-sie-explain": "1",
            "x-sie-timeout-ms": str(int(self.timeout_s * 1000)),
        }
        sent_s = math.inf

        async def trace(event: str, info: object) -> None:
            nonlocal sent_s
            if event == "http11.send_request_body.complete":
                sent_s = time.monotonic()
                self.in_flight += 1

        try:
            answer = await client.post(
                f"{url}/v1/encode/{self.model}",
                content=msgspec.msgpack.encode({"items": [text]}),
                headers=headers,
                extensions={"trace": trace},
            )
        except httpx.HTTPError as error:
            outcome = Outcome(started_s, time.monotonic(), 0, failure=type(error).__name__)
        else:
            outcome = Outcome(started_s, time.monotonic(), answer.status_code)
            if answer.status_code == 200:
                body = arrays.unpack(arrays.decode_msgpack(answer.content))
                vector = body["items"][0]["dense"]["values"]
                outcome.right = bool(oracle.cosines(vector, self._expected[number % len(TEXTS)]) > 0.998)
                ran = body["explain"][0]
                outcome.worker, outcome.deliveries = ran["worker"], ran["batch"].get("deliveries", 1)
            else:
                error = answer.json()["error"]
                outcome.code, outcome.retryable = error["code"], error["retryable"]
        finally:
            self.in_flight -= sent_s < math.inf
        outcome.sent_s, outcome.url = sent_s, url
        self.outcomes.append(outcome)
        return outcome

    async def _client(self, url: str, number: int) -> None:
        async with httpx.AsyncClient(timeout=self.timeout_s + 15) as client:
            while not self.stopping:
                outcome = await self.one(client, url, number)
                number += 7
                # after an error, a client pauses before its next request
                await asyncio.sleep(self.pause_s if outcome.status == 200 else 0.05)

    def start(self, clients: int) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._client(self.urls[number % len(self.urls)], number)) for number in range(clients)
        ]

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        self.stopping = True
        await asyncio.gather(*tasks)

    async def successes_after(self, moment_s: float, count: int, timeout_s: float) -> float:
        """Wait until `count` requests that started after `moment_s` have succeeded, and return the time of the last."""
        async with asyncio.timeout(timeout_s):
            while True:
                good = [
                    outcome.ended_s
                    for outcome in self.outcomes
                    if outcome.started_s > moment_s and outcome.status == 200
                ]
                if len(good) >= count:
                    return sorted(good)[count - 1]
                await asyncio.sleep(0.01)

    async def busy(self, count: int, timeout_s: float) -> None:
        """Wait until so many requests are in flight."""
        async with asyncio.timeout(timeout_s):
            while True:
                if self.in_flight >= count:
                    return
                await asyncio.sleep(0.001)

    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == 200 and not outcome.right]

    def longest_s(self) -> float:
        return max(outcome.ended_s - outcome.started_s for outcome in self.outcomes)
