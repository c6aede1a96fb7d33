"""Lag of the queue for metrics: the number of waiting messages and the age of the oldest message, by lane (pool,
machine profile and bundle) and priority, and by model.

The counts come from `Backlog`. The ages and the models come from the oldest message of each NATS subject. If the broker
does not answer, the lag is unknown, not zero.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sie_broker import BrokerError, BrokerUnavailable, Queue, StreamMessage
from sie_broker.independent import independently
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import PRIORITIES
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.planner import ModelBacklog
from sie_gateway.streams.backlog import Backlog
from sie_runtime.process import Stop, Trouble

EVERY_S = 5.0
MAX_LANES = 16  # largest number of lanes of a pool in the report: the lanes with the most work
MAX_SUBJECTS = 24  # number of a pool's NATS subjects whose oldest message is read for `models`: the busiest subjects
_ESCAPED = re.compile(r"(?:_[0-9a-f]{2})+")
_logger = logging.getLogger("sie.gateway.lag")
Labels = tuple[str, ...]


class Lag:
    """Waiting work by lane and by model. A lane that had work is reported, with a count of 0, until its pool ends."""

    def __init__(self, queue: Queue, backlog: Backlog, pools: Iterable[str], now_s: Callable[[], float]) -> None:
        """`now_s` returns the broker's time. `pools`: names of the pools, which `refresh` reads at each call."""
        self._queue = queue
        self._backlog = backlog
        self._pools = pools  # the `PoolRecord`: its pools change at run time
        self._now_s = now_s
        self._known: dict[Lane, None] = {}
        # (pool, machine profile, bundle, priority) -> waiting work
        self.lanes: Mapping[Labels, ModelBacklog] = {}
        # (model, pool, machine profile, bundle, priority) -> waiting work
        self.models: Mapping[Labels, ModelBacklog] = {}
        self.is_known = False  # True if the last `refresh` has read the lag of at least one pool

    async def oldest_s(self, lane: Lane) -> float:
        """Return the age of the lane's oldest message in seconds; 0 without a message. Raises BrokerError."""
        (first,) = await self._backlog.oldest(lane.pool, [topology.lane_filter(lane)])
        return 0.0 if first is None else self._age_s(first)

    def _age_s(self, stored: StreamMessage) -> float:
        return max(0.0, self._now_s() - stored.sent_s)

    async def run(self, stop: Stop) -> None:
        trouble = Trouble(_logger, "the lag of the queue cannot be read from the broker")
        while not await stop.wait_for(EVERY_S):
            with trouble.logged(BrokerError):
                await self.refresh()

    async def refresh(self) -> None:
        """Read the lag of all pools from the broker. If the lag of some pools cannot be read, record the lag of the
        other pools, and raise BrokerError.
        """
        pools = sorted(self._pools)
        self._known = {lane: None for lane in self._known if lane.pool in pools}
        answered: list[tuple[dict[Labels, ModelBacklog], dict[Labels, ModelBacklog]]] = []

        async def read(pool: str, counts: Mapping[str, int]) -> None:
            answered.append(await self._read_pool(pool, counts))

        try:
            if not self._queue.connected:
                raise BrokerUnavailable("no connection to the broker")
            await independently(
                functools.partial(read, pool, counts)
                for pool in pools
                if (counts := self._backlog.by_subject(pool)) is not None
            )
        finally:
            self.lanes = {labels: backlog for lanes, _ in answered for labels, backlog in lanes.items()}
            self.models = {labels: backlog for _, models in answered for labels, backlog in models.items()}
            self.is_known = bool(answered)

    async def _read_pool(
        self, pool: str, counts: Mapping[str, int]
    ) -> tuple[dict[Labels, ModelBacklog], dict[Labels, ModelBacklog]]:
        """Return the waiting work of a pool by lane and by model: two maps with the keys and values of `self.lanes` and
        `self.models`. Raises BrokerError.
        """
        lanes: dict[Labels, ModelBacklog] = {}
        models: dict[Labels, ModelBacklog] = {}
        # ignore subjects without a model: any program may publish below `sie.work.`, but no consumer gets such messages
        counts = {subject: count for subject, count in counts.items() if subject.count(".") >= 6}
        busy: Counter[Lane] = Counter()
        for subject, count in counts.items():
            busy[lane_of(subject)] += count
        busiest = [lane for lane, _ in busy.most_common()]
        self._known |= dict.fromkeys(busiest)
        reported = dict.fromkeys([*busiest, *(lane for lane in self._known if lane.pool == pool)])
        # pairs of a subject filter and the labels of its lane and priority; the labels are None if the filter is the
        # subject of one model
        questions: list[tuple[str, Labels | None]] = []
        for lane in list(reported)[:MAX_LANES]:
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
            if first is None:  # all messages of this filter have left the stream since the counts were read
                continue
            oldest_s = self._age_s(first)
            if of_lane is not None:
                lanes[of_lane] = ModelBacklog(lanes[of_lane].count, oldest_s)
            if first.subject not in answered and (model := _model_of(first)) is not None:
                answered.add(first.subject)
                lane = lane_of(first.subject)
                of_model = model, lane.pool, lane.machine_profile, lane.bundle, first.subject.split(".")[5]
                # a model may have messages on two subjects, of its own consumer and of a shared consumer: add the
                # counts
                before = models.get(of_model, ModelBacklog(0))
                models[of_model] = ModelBacklog(
                    before.count + counts.get(first.subject, 1), max(before.oldest_s, oldest_s)
                )
        return lanes, models


def lane_of(subject: str) -> Lane:
    """Return the lane that a NATS subject of work items names. Only names of models are shortened in a subject, so the
    lane can be decoded.
    """
    pool, machine_profile, bundle = subject.split(".")[2:5]
    return Lane(pool, _untoken(machine_profile), _untoken(bundle))


def _untoken(token: str) -> str:
    return _ESCAPED.sub(lambda match: bytes.fromhex(match[0].replace("_", "")).decode(errors="replace"), token)


def _model_of(stored: StreamMessage) -> str | None:
    try:
        return messages.decode_work(stored.data).model
    except UNDECODABLE:
        return None
