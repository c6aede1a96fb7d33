"""Which pools this worker may pull from, as the gateway assigns them. Without an answer `_default` stays open, any other pool closes.

    every ASK_S: GET {SIE_GATEWAY_URL}/v1/pools/assignments?worker=ID ──► {"worker", "pools"} ──► exactly these
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
import msgspec

from sie_contracts.runtime.failpoints import failpoint
from sie_contracts.runtime.process import Stop
from sie_contracts.settings import Secret
from sie_contracts.topology import pool_name

ASK_S = 5.0
ANSWER_WITHIN_S = 5.0
CLOSED_AFTER_S = 30.0
_DEFAULT = pool_name("default")
_logger = logging.getLogger("sie.sidecar.admission")


class Assignments(msgspec.Struct, frozen=True):
    """The gateway's answer."""

    worker: str
    pools: tuple[str, ...]


_answer = msgspec.json.Decoder(Assignments)


def admitted(own: str, answered: frozenset[str], silent_s: float) -> frozenset[str]:
    """The pools that may be pulled from. `answered`: the last answer, `own` alone before the first. `silent_s`: seconds since it, or since
    the start."""
    if silent_s <= CLOSED_AFTER_S:
        return answered
    return frozenset({own}) if own == _DEFAULT else frozenset()


class Admission:
    """Asks until `stop`. `admits` tells whether the worker's own pool is among the assigned ones."""

    def __init__(self, url: str, token: Secret | None, worker: str, pool: str, clock: Callable[[], float]) -> None:
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False)
        self._worker = worker
        self._pool = pool
        self._clock = clock
        self._answered = frozenset({pool})
        self._answered_s = clock()
        self.on_change: Callable[[], None] = lambda: None

    def admits(self) -> bool:
        return self._pool in admitted(self._pool, self._answered, self._clock() - self._answered_s)

    async def run(self, stop: Stop) -> None:
        """Ask now and every ASK_S until `stop`."""
        said = ""
        admits = self.admits()
        try:
            while True:
                trouble = await self._ask()
                if trouble and trouble != said:
                    _logger.warning("the gateway assigns no pools: %s", trouble)
                said = trouble
                if admits != self.admits():
                    admits = not admits
                    _logger.info("pool %s is %s this worker", self._pool, "open to" if admits else "closed to")
                    self.on_change()
                if await stop.wait_for(ASK_S):
                    return
        finally:
            await self._client.aclose()

    async def _ask(self) -> str:
        """Take the gateway's answer; returns why there was none, or nothing."""
        failpoint("sidecar.before_admission")
        try:
            answer = await self._client.get("/v1/pools/assignments", params={"worker": self._worker})
        except httpx.HTTPError as error:
            return type(error).__name__
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        try:
            found = _answer.decode(answer.content)
        except msgspec.DecodeError as error:
            return f"not the expected answer: {error}"
        if found.worker != self._worker:
            return "it answered for another worker"
        self._answered, self._answered_s = frozenset(found.pools), self._clock()
        return ""
