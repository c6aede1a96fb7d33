"""Pool from which this worker pulls; gateways assign it. If no gateway has replied for CLOSED_AFTER_S, a worker
whose own pool (SIE_POOL) is `_default` pulls from that pool, and any other worker stops pulling.

    every ASK_S seconds, and when a gateway sends a hint:
    GET {SIE_GATEWAY_URL}/v1/pools/assignments?worker=ID ──► {"worker": ..., "pools": [...]} ──► pull from this pool
"""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import msgspec

from sie_broker import CoreMessage
from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import Secret
from sie_contracts.wire.topology import pool_name
from sie_runtime.failpoints import failpoint
from sie_runtime.process import START_S, Stop, Trouble

ASK_S = 5.0
ANSWER_WITHIN_S = 5.0
CLOSED_AFTER_S = 30.0
_DEFAULT = pool_name("default")
_logger = logging.getLogger("sie.sidecar.admission")


class Assignments(msgspec.Struct, frozen=True):
    """Reply of a gateway: the pools of this worker. `pinned_models` must be loaded even if no request needs them."""

    worker: str
    pools: tuple[str, ...]
    pinned_models: tuple[str, ...] = ()


_answer = msgspec.json.Decoder(Assignments)


def admitted(own: str, answered: tuple[str, ...], silent_s: float) -> str | None:
    """Return the pool to pull from, or None. `own`: the worker's own pool. `answered`: the pools in the last reply;
    before the first reply, only `own`. `silent_s`: seconds since that reply. If several pools are assigned, a worker
    serves its own pool if it is one of them, and otherwise the first.
    """
    if silent_s > CLOSED_AFTER_S:
        return own if own == _DEFAULT else None
    return own if own in answered else next(iter(answered), None)


class PoolMembership:
    """Requests the pool of this worker from gateways, one after the other until a gateway replies. The event `asked` is
    set after the first attempt, even without a reply. The event `changed` is set when the worker must serve another
    pool or load other models.
    """

    def __init__(self, urls: str, token: Secret | None, worker: str, own: str) -> None:
        """Create the membership. `urls`: URLs of gateways, separated by commas. `own`: the worker's own pool."""
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=ANSWER_WITHIN_S, trust_env=False)
        self._urls = [url.strip().rstrip("/") for url in urls.split(",")]
        self._worker = worker
        self._own = own
        self._answered: tuple[str, ...] = (own,)
        self._answered_s = time.monotonic()
        self.pinned: tuple[str, ...] = ()
        self._again = asyncio.Event()
        self.asked = asyncio.Event()
        self.changed = asyncio.Event()

    def pool(self) -> str | None:
        return admitted(self._own, self._answered, time.monotonic() - self._answered_s)

    async def on_hint(self, message: CoreMessage) -> None:
        """Request the pools again: a gateway sends this hint when it has assigned another pool. A message with `reply`
        only checks whether this worker is connected.
        """
        if not message.reply:
            self._again.set()

    async def run(self, stop: Stop) -> None:
        """Request the pools from the gateways now, every ASK_S seconds, and after each hint, until `stop`."""
        trouble, assigned = Trouble(_logger, "no gateway assigns a pool", START_S), (self.pool(), self.pinned)
        try:
            while True:
                if reason := await self._ask_any():
                    trouble.met(reason)
                else:
                    trouble.passed()
                self.asked.set()
                if assigned != (self.pool(), self.pinned):
                    assigned = self.pool(), self.pinned
                    self.changed.set()
                if await stop.wait_woken(self._again, ASK_S):
                    return
        finally:
            await self._client.aclose()

    async def _ask_any(self) -> str:
        """Request this worker's pools from the gateways, one after the other, until a gateway replies. Return an empty
        string, or the errors of all gateways if none replies.
        """
        reasons = []
        for url in list(self._urls):
            trouble = await self._request_pool(url)
            if not trouble:
                return ""
            reasons.append(trouble)
            # move this gateway to the end, so that the gateway that replied last is asked first the next time
            self._urls.append(self._urls.pop(0))
        return "; ".join(dict.fromkeys(reasons))

    async def _request_pool(self, url: str) -> str:
        """Request this worker's pools from one gateway, and store them. Return an empty string, or the error."""
        failpoint("sidecar.before_admission")
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):  # for the whole reply; httpx bounds only each read
                answer = await self._client.get(f"{url}/v1/pools/assignments", params={"worker": self._worker})
        except (httpx.HTTPError, TimeoutError) as error:
            return type(error).__name__
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        try:
            assignments = _answer.decode(answer.content)
        except UNDECODABLE as error:
            return f"the reply is not valid: {error}"
        if assignments.worker != self._worker:
            return "the reply is for another worker"
        self._answered, self.pinned, self._answered_s = assignments.pools, assignments.pinned_models, time.monotonic()
        return ""
