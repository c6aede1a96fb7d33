"""How much work the broker holds and how long the oldest of it waits, by lane and priority and by model: what metrics
tell of the queue.

Counts come from the shared backlog, ages from the oldest messages themselves, which also name their models. What cannot
be asked is unknown, never zero.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from sie_broker import BrokerError, BrokerUnavailable, Queue, StreamMessage
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import PRIORITIES
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.planner import ModelBacklog
from sie_gateway.streams.backlog import Backlog
from sie_runtime.process import Stop, Trouble

EVERY_S = 5.0
MAX_LANES = 16  # that are told of, those with the most work first
MAX_SUBJECTS = 24  # of models, the same
_ESCAPED = re.compile(r"(?:_[0-9a-f]{2})+")
_logger = logging.getLogger("sie.gateway.lag")
Labels = tuple[str, ...]


class Lag:
    """One task runs `run`. A lane that had work once is told of as long as its pool is there, so that its zero is."""

    def __init__(self, queue: Queue, backlog: Backlog, pools: Iterable[str], now_s: Callable[[], float]) -> None:
        """`now_s` is the broker's time."""
        self._queue = queue
        self._backlog = backlog
        self._pools = pools  # come and go
        self._now_s = now_s
        self._known: dict[Lane, None] = {}
        self._lanes: dict[Labels, ModelBacklog] = {}
        self._models: dict[Labels, ModelBacklog] = {}
        self.is_known = False  # else there is nothing to tell, which is not the same as no work

    def lanes(self) -> Mapping[Labels, ModelBacklog]:
        """By pool, machine profile, bundle and priority."""
        return self._lanes

    def models(self) -> Mapping[Labels, ModelBacklog]:
        """By model, pool, machine profile, bundle and priority."""
        return self._models

    async def oldest_s(self, lane: Lane) -> float:
        """How long the oldest message of a lane waits, seconds; 0 where there is none. Raises BrokerError."""
        (first,) = await self._backlog.oldest(lane.pool, [topology.lane_filter(lane)])
        return 0.0 if first is None else self._age_s(first)

    def _age_s(self, stored: StreamMessage) -> float:
        return max(0.0, self._now_s() - stored.sent_s)

    async def run(self, stop: Stop) -> None:
        """Look each EVERY_S until `stop`."""
        trouble = Trouble(_logger, "the age of the queue is not known")
        while not await stop.wait_for(EVERY_S):
            try:
                await self.refresh()
                trouble.passed()
            except BrokerError as error:
                self._lanes, self._models, self.is_known = {}, {}, False
                trouble.met(error)

    async def refresh(self) -> None:
        """Raises BrokerError."""
        if not self._queue.connected:
            raise BrokerUnavailable("no connection to the broker")
        lanes: dict[Labels, ModelBacklog] = {}
        models: dict[Labels, ModelBacklog] = {}
        pools = sorted(self._pools)
        self._known = {lane: None for lane in self._known if lane.pool in pools}
        counted = {pool: counts for pool in pools if (counts := self._backlog.by_subject(pool)) is not None}
        for pool, counts in counted.items():
            await self._refresh_pool(pool, counts, lanes, models)
        self._lanes, self._models, self.is_known = lanes, models, bool(counted)

    async def _refresh_pool(
        self,
        pool: str,
        counts: Mapping[str, int],
        lanes: dict[Labels, ModelBacklog],
        models: dict[Labels, ModelBacklog],
    ) -> None:
        busy: dict[Lane, int] = {}
        for subject, count in counts.items():
            lane = lane_of(subject)
            busy[lane] = busy.get(lane, 0) + count
        self._known |= dict.fromkeys(sorted(busy, key=busy.__getitem__, reverse=True))
        reported = [
            lane for lane in (*sorted(busy, key=busy.__getitem__, reverse=True), *self._known) if lane.pool == pool
        ]
        questions: list[
            tuple[str, Labels | None]
        ] = []  # a filter, with the labels of a lane and priority, None of a subject
        for lane in list(dict.fromkeys(reported))[:MAX_LANES]:
            for priority in PRIORITIES:
                labels = lane.pool, lane.machine_profile, lane.bundle, priority
                count = self._backlog.messages(lane, priority) or 0
                lanes[labels] = ModelBacklog(count)
                if count:
                    questions.append((topology.lane_filter(lane, priority), labels))
        questions += [
            (subject, None) for subject in sorted(counts, key=counts.__getitem__, reverse=True)[:MAX_SUBJECTS]
        ]
        answers = await self._backlog.oldest(pool, [question for question, _ in questions])
        answered: set[str] = set()
        for (_, of_lane), first in zip(questions, answers, strict=True):
            if first is None:  # it was answered meanwhile
                continue
            oldest_s = self._age_s(first)
            if of_lane is not None:
                lanes[of_lane] = ModelBacklog(lanes[of_lane].count, oldest_s)
            if first.subject not in answered and (model := _model_of(first)) is not None:
                answered.add(first.subject)
                lane = lane_of(first.subject)
                of_model = model, lane.pool, lane.machine_profile, lane.bundle, first.subject.split(".")[5]
                before = models.get(of_model, ModelBacklog(0))  # by the other way that it may take
                models[of_model] = ModelBacklog(
                    before.count + counts.get(first.subject, 1), max(before.oldest_s, oldest_s)
                )


def lane_of(subject: str) -> Lane:
    """The lane of a subject of work. The tokens of a machine profile and a bundle are never cut, so they say what they
    are made of.
    """
    pool, machine_profile, bundle = subject.split(".")[2:5]
    return Lane(pool, _untoken(machine_profile), _untoken(bundle))


def _untoken(token: str) -> str:
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[0].replace("_", "")).decode(errors="replace"), token)


def _model_of(stored: StreamMessage) -> str | None:
    """Model of a message, None if it cannot be read."""
    try:
        return messages.decode_work(stored.data).model
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
