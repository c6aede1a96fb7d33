"""How fast the work of one model at one priority leaves the queue, measured while there is work, and the wait that
follows. Pure.

    results of batches ──► time between batches that had work waiting ──► wait = batches ahead x time of a batch

Only measured time counts. The time between two results is a sample if the later work was in the queue before the
earlier result came: then the workers had no pause in between. An idle worker therefore yields no sample, and without a
sample nothing is predicted. The samples are those of this gateway alone, so that several gateways, several workers,
other models and other priorities are all in them.

`AnswerPace`: the same of the gateway itself, for those whom it cannot even hear.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from typing import NamedTuple

from sie_contracts.wire.batch_times import AHEAD_SHARE
from sie_gateway.admission.retry_slots import MAX_RETRY_S

MIN_SAMPLES, MIN_SPAN_S = 4, 1.0  # the time of a batch is the mean of as many of the last samples as reach both
MAX_SAMPLES = 64
EXPIRY_S, EXPIRY_BATCHES = 10.0, 8  # a sample counts for so long and for so many times itself
CHANGED = 2.0  # times as long, or as short, as any fixed and any token part allow beside a batch before
# for each lane, in a row, beyond that: the device has become slower or faster, what came before says nothing any more
CHANGED_SAMPLES = 2
OUTLIER = 4.0  # a sample so many times as long as any other is a stall, which says nothing of the next batch
MAX_EVIDENCE = 64
STALL_S = 0.25  # without a result for so long the queue may stand still
UNKNOWN_STALL_S = 5.0  # the same before any sample
STALL_BATCHES = 3.0
LOOK_S = 0.1
MAX_GROWTH = 4.0  # a batch that is larger than so many measured ones is thought to cost no more than that
FEW_BATCHES = 4  # ahead: then where one ends and the next begins matters
SETTLED = 0.25  # of the time of a batch after its first result: by then all of them are there
RECENT_ANSWERS = 64
RECENT_BATCHES = 16  # to which a late result of the same batch is added
GROWING = 1.25  # times any before it: the last batch while batches grow
# of a budget: batches of at least this are thought to be cut so that several fit into the budget, if they left work
# behind
CAPPED = 0.05
FULL = 0.8  # of a full batch: those that are larger leave nothing behind that fits


class ExpectedWait(NamedTuple):
    """The wait of a request. `min_s` is what it takes if the batches ahead are full and end as usual; `likely_s` has
    one more, the batch that was formed before it came, unless batches are formed as the device is free. `stalled_s`:
    for how long nothing has come, where that is unusual; it may well last as long again. `evidence`: samples that this
    rests on, 0 to MAX_EVIDENCE. `rate`: tokens a second, 0 while not known. `batch_s`: of one batch. `formed_s`: until
    the batch of this request is formed, infinite where that may be long before it runs.
    """

    min_s: float = 0.0
    likely_s: float = 0.0
    stalled_s: float = 0.0
    evidence: int = 0
    rate: float = 0.0
    batch_s: float = 0.0
    formed_s: float = math.inf

    def belief(self, doubt: float) -> float:
        """The part of it that is believed, 0 to 1."""
        samples = self.evidence * self.evidence
        return samples / (samples + doubt)


class _BatchResults:
    """Results that one batch brought to this gateway."""

    __slots__ = (
        "at_s",
        "before_s",
        "device_s",
        "formed_s",
        "is_counted",
        "is_crowded",
        "is_sample",
        "left_work",
        "missing",
        "name",
        "queued_s",
        "tokens",
    )

    def __init__(
        self,
        name: str,
        at_s: float,
        before_s: float,
        queued_s: float,
        is_crowded: bool,
        device_s: float,
        pipeline: int,
        chunks: int,
    ) -> None:
        self.name = name
        self.missing = chunks  # results of it that did not come; those of other gateways never do
        self.at_s = at_s
        self.before_s = before_s
        self.queued_s = queued_s
        self.is_crowded = is_crowded
        self.device_s = device_s
        self.is_sample = device_s < math.inf
        self.formed_s = at_s - pipeline * device_s  # at the latest: a worker may form batches ahead of the device
        self.left_work = False  # work that was in the queue then was not taken
        self.is_counted = False
        self.tokens = 0.0

    def seconds(self, lanes: int) -> float:
        """Since the result before it. If its work was queued later, there was a pause, and the device knows better."""
        if self.queued_s <= self.before_s:
            return self.at_s - self.before_s
        return min(self.at_s - self.queued_s, self.device_s / lanes)


def _is_changed(before: _BatchResults, newest: list[_BatchResults]) -> bool:
    """Whether all of the newest were slower, or all were faster, than a device can be that took so long for the batch
    before.
    """
    odd = [_oddness(before, batch) for batch in newest]
    return min(odd) > CHANGED or max(odd) * CHANGED < 1


def _oddness(before: _BatchResults, batch: _BatchResults) -> float:
    """How many times as long as possible a batch took beside one before it: n times the tokens take between once and n
    times as long.
    """
    if not math.inf > before.device_s > 0 or not math.inf > batch.device_s > 0:
        return 1.0
    size, times = batch.tokens / before.tokens, batch.device_s / before.device_s
    return max(1.0, times / max(1.0, size)) * min(1.0, times / min(1.0, size))


class _BatchSample(NamedTuple):
    tokens: float
    seconds: float
    is_crowded: bool
    left_work: bool


class MeasuredBatch(NamedTuple):
    """A batch as the last samples have it. `is_full`: it is as large as it gets. `left_work`: most of them left work
    behind, and they do not grow as those of a worker that learns what they take. `longest_s`: of one of them.
    """

    tokens: float
    seconds: float
    is_full: bool
    left_work: bool
    longest_s: float


class Throughput:
    """Times are those of one clock, seconds."""

    __slots__ = ("_batches", "_evidence", "_known", "_known_s", "_lanes", "last_s")

    def __init__(self) -> None:
        self._batches: deque[_BatchResults] = deque(maxlen=MAX_SAMPLES)
        self.last_s = -math.inf  # of the last result
        self._lanes = 1
        self._evidence = 0
        self._known: MeasuredBatch | None = None
        self._known_s = -math.inf  # when it was worked out, for as long as no batch came

    def left(
        self,
        now_s: float,
        batch: str,
        tokens: float,
        queued_s: float,
        *,
        is_crowded: bool,
        device_s: float = math.inf,
        lanes: int = 1,
        pipeline: int = 1,
        chunks: int = 1,
    ) -> None:
        """A result came: of `tokens` tokens that were queued at `queued_s` and ran in this batch. `is_crowded`: they
        were queued while more waited than the workers take in, so that no batch is larger. `device_s`: what the batch
        took, of which `lanes` run at a time, each with `pipeline` formed. `chunks`: in it.
        """
        if not batch:  # nothing ran
            return
        entry = next(
            (
                candidate
                for candidate in itertools.islice(reversed(self._batches), RECENT_BATCHES)
                if candidate.name == batch
            ),
            None,
        )
        if entry is None:
            entry = _BatchResults(batch, now_s, self.last_s, queued_s, is_crowded, device_s, pipeline, chunks)
            self._see_left(entry, queued_s)
            self._lanes = lanes
            self._batches.append(entry)
            self.last_s = now_s
        if queued_s < entry.queued_s:
            entry.queued_s = queued_s
            self._see_left(entry, queued_s)
        entry.is_crowded |= is_crowded
        entry.tokens += tokens
        entry.missing -= 1
        entry.is_sample |= entry.queued_s <= entry.before_s
        if entry.is_sample and not entry.is_counted:
            entry.is_counted = True
            self._evidence = min(MAX_EVIDENCE, self._evidence + 1)

    def _see_left(self, later: _BatchResults, queued_s: float) -> None:
        """A queue is first in, first out: what was queued before a batch was formed, and ran in a later one, was left
        by it.
        """
        for batch in itertools.islice(reversed(self._batches), RECENT_BATCHES):
            if batch.formed_s < later.formed_s and queued_s < batch.formed_s:
                batch.left_work = True

    def _samples(self, now_s: float) -> list[_BatchSample]:
        """The last batches that count, the newest first."""
        samples: list[_BatchSample] = []
        newest: list[_BatchResults] = []
        span_s = 0.0
        for batch in reversed(self._batches):
            age_s, seconds = now_s - batch.at_s, batch.seconds(self._lanes)
            if age_s < SETTLED * (batch.device_s if batch.device_s < math.inf else seconds):
                continue
            if age_s > EXPIRY_S + EXPIRY_BATCHES * seconds:
                break
            if len(samples) >= MIN_SAMPLES * self._lanes and span_s >= MIN_SPAN_S:
                break
            if batch.is_sample:
                if len(newest) < CHANGED_SAMPLES * self._lanes:
                    newest.append(batch)
                elif _is_changed(batch, newest):
                    break
                samples.append(_BatchSample(batch.tokens, seconds, batch.is_crowded, batch.left_work))
                span_s += seconds
        return samples

    def batch(self, now_s: float) -> MeasuredBatch | None:
        """None without a sample."""
        if now_s - self._known_s > LOOK_S:
            self._known, self._known_s = self._batch(now_s), now_s
        return self._known

    def _batch(self, now_s: float) -> MeasuredBatch | None:
        samples = self._samples(now_s)
        if not samples:
            if not self._batches or now_s - self._batches[-1].at_s > EXPIRY_S:
                self._evidence = 0
            return None
        newest, before = samples[0].tokens, max((sample.tokens for sample in samples[1:]), default=0.0)
        longest, *shorter = sorted(samples, key=lambda sample: sample.seconds, reverse=True)
        if shorter and longest.seconds > max(OUTLIER * shorter[0].seconds, MIN_SPAN_S / 2):
            samples.remove(longest)
            longest = shorter[0]
        full = [sample for sample in samples if sample.is_crowded]
        # results of several lanes come in turns: the times between some of them say nothing of the others
        counted = full if self._lanes == 1 and full else samples
        tokens = sum(sample.tokens for sample in counted) / len(counted)
        seconds = sum(sample.seconds for sample in counted) / len(counted)
        is_steady = len(samples) >= MIN_SAMPLES - 1 and newest <= GROWING * before
        left_work = is_steady and 2 * sum(sample.left_work for sample in samples) >= len(samples)
        is_full = len(full) == len(counted)
        return MeasuredBatch(max(tokens, 1.0), max(seconds, 1e-6), is_full, left_work, longest.seconds)

    def is_settled(self, now_s: float, within_s: float) -> bool:
        """Whether all results of the last batch are here, or a batch takes so little that one does not matter."""
        if self._batches and self._batches[-1].missing <= 0:
            return True
        measured = self.batch(now_s)
        return measured is None or measured.seconds <= within_s or now_s - self.last_s >= SETTLED * measured.seconds

    def rate(self, now_s: float) -> float:
        """Tokens of this gateway that leave the queue per second, 0 while not known."""
        measured = self.batch(now_s)
        return measured.tokens / measured.seconds if measured is not None else 0.0

    def wait(
        self,
        now_s: float,
        ahead: float,
        cost: float,
        oldest_s: float,
        full_tokens: float,
        fixed_tokens: float,
        share: float = 1.0,
        budget_s: float = math.inf,
        running: float = 0.0,
    ) -> ExpectedWait:
        """The wait of a request of `cost` tokens behind `ahead` tokens, of which the oldest was queued at `oldest_s`.

        A batch that may become larger than those that were measured takes (fixed + tokens) / (fixed + measured tokens)
        of their time; `fixed_tokens` is what the fixed part of a batch is worth, infinite while not known: then a
        larger batch takes no longer. `share`: this gateway's part of what leaves the queue; what is `ahead` is that of
        all gateways. `budget_s`: no worker forms batches that are larger than the budgets of their requests allow, so
        batches that take a good part of it do not become larger; and none is sealed while another one runs if it takes
        more than AHEAD_SHARE of it. Then the `running` tokens of what is ahead are in batches that run, and the others
        fill the next ones from the front, unless batches are smaller than they might be and leave work behind.
        """
        measured = self.batch(now_s)
        silent_s = now_s - max(oldest_s, self.last_s)
        if measured is None:
            return ExpectedWait(stalled_s=silent_s if silent_s > UNKNOWN_STALL_S else 0.0)
        tokens, seconds, is_full, left_work, longest_s = measured
        is_full |= left_work and seconds >= CAPPED * budget_s
        tokens /= share
        size = tokens if is_full else max(tokens, min(ahead + cost, full_tokens))
        if size > tokens and fixed_tokens < math.inf:
            seconds *= (fixed_tokens + min(size, MAX_GROWTH * tokens)) / (fixed_tokens + tokens)
        spent_s = min(max(0.0, silent_s), seconds)
        stalled_s = silent_s if silent_s > max(STALL_S, STALL_BATCHES * longest_s) else 0.0
        formed_s = math.inf
        takes_all = not left_work or tokens >= FULL * full_tokens
        if takes_all and seconds * self._lanes > AHEAD_SHARE * budget_s:
            running = min(running, ahead, size * self._lanes)
            run = min(self._lanes, math.ceil(running / tokens))
            behind = (ahead - running + cost) / size
            least, likely = run + max(1.0, behind), float(run + math.ceil(behind))
            formed_s = max(0.0, (likely - self._lanes) * seconds - spent_s)
        else:
            least = (ahead + cost) / size
            likely = (math.ceil(least) if least < FEW_BATCHES else least) + 1
        min_s = max(0.0, least * seconds - spent_s)
        likely_s = likely * seconds - spent_s
        return ExpectedWait(min_s, likely_s, stalled_s, self._evidence, size / seconds, seconds, formed_s)


class AnswerPace:
    """How fast a gateway answers, for the turns of those whom it could not even hear.

    Requests in progress are summed up over time, in request-seconds: those of the last answers, divided by their
    number, are how long a request takes (Little's law). So time in which nobody asks makes nothing slower.
    """

    __slots__ = ("_ended", "_next_s", "_running", "_since_s", "_sum_s")

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._sum_s = 0.0  # until then
        self._ended: deque[float] = deque(maxlen=RECENT_ANSWERS)  # the sum at the end of each request
        self._next_s = 0.0  # until when turns are given

    def changed(self, now_s: float, running: int) -> None:
        """So many requests are in progress from now on: one more, or one less."""
        self._sum_s += self._running * (now_s - self._since_s)
        self._since_s = now_s
        if running < self._running:
            self._ended.append(self._sum_s)
        self._running = running

    def retry_s(self, now_s: float) -> int:
        """The Retry-After of one more client: when as many of those in progress are over as came before it."""
        if len(self._ended) < 2 or not self._running:
            return 1
        sum_s = self._sum_s + self._running * (now_s - self._since_s)
        took_s = (sum_s - self._ended[0]) / (len(self._ended) - 1)  # grows while nothing ends
        min_s = now_s + took_s / 2  # by then half of what runs is over
        each_s = took_s / self._running
        self._next_s = max(self._next_s, min_s) + each_s
        # no secret: it spreads clients
        wait_s = min(self._next_s - now_s, MAX_RETRY_S * random.uniform(0.8, 1.0))  # noqa: S311
        return max(1, int(wait_s + random.uniform(0, 1)))  # noqa: S311
