"""The gateways of this installation, by their own announcements: how many share a window, and what all of them put into
the queue.

    each second, every gateway ──► sie.gateway.{id} ──► every gateway, the sender included
                                       └── while it has work in the queue and is not alone: five times a second, with
                                           that work and the turns of the clients that it refused (`listeners`)

A gateway's own figures count as it announced them, so that equal figures stand at every gateway.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from sie_broker import BrokerError, Bus, CoreMessage
from sie_contracts.settings import default_worker_id
from sie_contracts.wire import heartbeats, messages, topology
from sie_contracts.wire.heartbeats import GatewayBeat, LaneTraffic, QueuedWork
from sie_contracts.wire.messages import Priority
from sie_contracts.wire.topology import Lane
from sie_runtime.process import Stop

EVERY_S = 1.0
BUSY_S = 0.2  # while others need to know what is in the queue
SILENT_S = 5.0
HALF_LIFE_S = 60.0  # of the messages that the mean cost is made of
RATE_S = 10.0  # time constant of the tokens a second
QPS_S = 10.0  # over which answers are counted
MAX_BEATS = 50
_MIN_MESSAGES = 0.01  # a lane without traffic is forgotten after some ten half-lives
_logger = logging.getLogger("sie.gateway.peers")


def mean_cost(traffic: list[LaneTraffic]) -> float:
    """Tokens of a message; 0.0 where nobody has sent one lately."""
    count = sum(flow.messages for flow in traffic)
    return sum(flow.tokens for flow in traffic) / count if count else 0.0


class _Flow:
    """Messages and tokens that this gateway put into one lane and priority. `fresh` since the last announcement."""

    __slots__ = ("fresh", "messages", "rate", "tokens")

    def __init__(self) -> None:
        self.messages = self.tokens = self.rate = 0.0
        self.fresh = 0

    def age(self, seconds: float) -> None:
        left = 0.5 ** (seconds / HALF_LIFE_S)
        self.messages *= left
        self.tokens *= left
        self.rate += (self.fresh / seconds - self.rate) * min(1.0, seconds / RATE_S)
        self.fresh = 0


class Peers:
    """Told at each announcement, `waiting`: the tokens that wait in this gateway by lane and priority; `epoch`: of the
    catalogue that it serves by; `queued`: what others need to know of its work in the queue.
    """

    def __init__(
        self,
        bus: Bus,
        waiting: Callable[[], Mapping[tuple[Lane, Priority], int]],
        clock: Callable[[], float] = time.monotonic,
        *,
        epoch: Callable[[], str] = str,
        queued: Callable[[], tuple[QueuedWork, ...]] = tuple,
    ) -> None:
        self.id = f"{default_worker_id()}-{uuid.uuid4().hex[:12]}"
        self._epoch = epoch
        self._queued = queued
        self._bus = bus
        self._waiting = waiting
        self._clock = clock
        self._flows: dict[tuple[Lane, Priority], _Flow] = {}
        self._heard: dict[str, tuple[float, GatewayBeat]] = {}
        self._aged_s = clock()
        self._answered = 0
        self._answers: deque[tuple[int, float]] = deque(maxlen=MAX_BEATS)  # answers, and in how many seconds
        self.listeners: list[Callable[[GatewayBeat], None]] = []  # of what the other gateways announce
        self._is_busy = False  # the last announcement had work in the queue

    async def start(self) -> None:
        await self._bus.subscribe(f"{topology.GATEWAY_SUBJECT}.*", self._on_beat)

    async def run(self, stop: Stop) -> None:
        """Announce until `stop`, then say goodbye."""
        while not await stop.wait_for(self.pause_s()):
            await self._send(self.beat())
        await self._send(GatewayBeat(self.id, leaving=True))

    def pause_s(self) -> float:
        """Until the next announcement."""
        return BUSY_S if self._is_busy else EVERY_S

    async def _send(self, beat: GatewayBeat) -> None:
        try:
            await self._bus.send(topology.gateway_subject(self.id), messages.encode(beat))
        except BrokerError as error:
            _logger.info("not announced: %s", error)  # the broker is away, which others report

    def sent(self, lane: Lane, priority: Priority, count: int, cost: int) -> None:
        """Account for messages put into the queue."""
        flow = self._flows.get((lane, priority))
        if flow is None:
            flow = self._flows[lane, priority] = _Flow()
        flow.messages += count
        flow.tokens += cost
        flow.fresh += cost

    def answered(self) -> None:
        """Account for an inference request that was answered, whatever the answer."""
        self._answered += 1

    def qps(self) -> float:
        """Inference requests that all live gateways answer per second."""
        return sum(beat.qps for beat in self._live())

    def beat(self) -> GatewayBeat:
        """This gateway's next announcement."""
        now_s = self._clock()
        seconds, self._aged_s = max(1e-3, now_s - self._aged_s), now_s
        for flow in self._flows.values():
            flow.age(seconds)
        self._flows = {key: flow for key, flow in self._flows.items() if flow.messages > _MIN_MESSAGES}
        waiting = self._waiting()
        traffic = {
            f"{lane}.{priority}": LaneTraffic(flow.messages, flow.tokens, flow.rate, waiting.get((lane, priority), 0))
            for (lane, priority), flow in self._flows.items()
        }
        for (lane, priority), tokens in waiting.items():
            traffic.setdefault(f"{lane}.{priority}", LaneTraffic(0.0, 0.0, 0.0, tokens))
        self._answers.append((self._answered, seconds))
        self._answered = 0
        while len(self._answers) > 1 and sum(took_s for _, took_s in self._answers) > QPS_S:
            self._answers.popleft()
        qps = sum(count for count, _ in self._answers) / sum(took_s for _, took_s in self._answers)
        queued = self._queued() if self.count() > 1 else ()
        self._is_busy = bool(queued)
        return GatewayBeat(self.id, traffic=traffic, qps=round(qps, 3), config_epoch=self._epoch(), queued=queued)

    async def _on_beat(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_gateway(message.data)
        except msgspec.DecodeError as error:
            _logger.warning("a gateway's announcement could not be read: %s", error)
            return
        self.note(beat)

    def note(self, beat: GatewayBeat) -> None:
        now_s = self._clock()
        self._heard = {name: entry for name, entry in self._heard.items() if now_s - entry[0] < SILENT_S}
        if beat.leaving:
            self._heard.pop(beat.gateway, None)
        else:
            self._heard[beat.gateway] = (now_s, beat)
        if beat.gateway != self.id:
            for listener in self.listeners:
                listener(beat)

    def _live(self) -> list[GatewayBeat]:
        now_s = self._clock()
        return [beat for seen_s, beat in self._heard.values() if now_s - seen_s < SILENT_S]

    def count(self) -> int:
        """Gateways that live, this one included."""
        return max(1, len({self.id, *(beat.gateway for beat in self._live())}))

    def epochs(self) -> dict[str, str]:
        """The epoch of the catalogue that each live gateway serves by; this one's is that of now."""
        return {**{beat.gateway: beat.config_epoch for beat in self._live()}, self.id: self._epoch()}

    def traffic(self, lane: Lane, priority: Priority) -> list[LaneTraffic]:
        """Traffic of a lane and priority, as each live gateway announced it."""
        name = f"{lane}.{priority}"
        return [flow for beat in self._live() if (flow := beat.traffic.get(name)) is not None]
