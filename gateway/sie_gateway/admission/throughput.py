"""Speed at which the work of one model at one priority leaves the queue, measured while there is work, and the wait
that follows from it. Pure: no I/O.

    results of batches ──► time between batches that had work waiting ──► wait = batches ahead x time of a batch

Only measured time counts. The time between two results is a sample if the later work was in the queue before the
earlier result came: then the workers had no pause in between. So an idle worker yields no sample, and without a sample
no wait is predicted. The samples are those of this gateway alone, so they include the effects of other gateways,
workers, models and priorities.

`AnswerPace` measures the speed of the gateway itself, for requests that it refuses before it has read them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from typing import NamedTuple

from sie_contracts.wire.batch_times import AHEAD_SHARE
from sie_gateway.admission.retry_slots import MAX_RETRY_S

# the time of a batch is the mean of the last samples: as many as reach this number and this span
MIN_SAMPLES, MIN_SPAN_S = 4, 1.0
MAX_SAMPLES = 64
EXPIRY_S, EXPIRY_BATCHES = 10.0, 8  # a sample counts for EXPIRY_S seconds and EXPIRY_BATCHES times its own time
CHANGED = 2.0  # factor by which a batch is slower or faster than its size explains, so that the device may have changed
# samples in a row for each lane beyond CHANGED: the device has become slower or faster, and older samples do not count
# any more
CHANGED_SAMPLES = 2
OUTLIER = 4.0  # a sample this many times as long as any other is a stall, and does not count for the next batch
MAX_EVIDENCE = 64
STALL_S = 0.25  # seconds without a result after which the queue may stand still
UNKNOWN_STALL_S = 5.0  # the same while there is no sample
STALL_BATCHES = 3.0
LOOK_S = 0.1
MAX_GROWTH = 4.0  # a batch larger than this many measured ones is assumed to take no longer than this many
FEW_BATCHES = 4  # with fewer batches ahead their number is rounded up: it matters where a batch ends
SETTLED = 0.25  # share of a batch's time after its first result: by then all of its results have come
RECENT_ANSWERS = 64
RECENT_BATCHES = 16  # latest batches to which a further result of the same batch may be added
GROWING = 1.25  # the last batch is this many times as large as any before it while batches grow
# share of a budget: a batch that takes longer and left work behind is assumed to be limited, so that several fit into
# the budget
CAPPED = 0.05
FULL = 0.8  # share of a full batch: a larger batch leaves no work behind that would fit into it


class ExpectedWait(NamedTuple):
    """Expected wait of a request. `min_s` is the time if the batches ahead are full and end as usual. `likely_s` adds
    one batch, which was formed before the request came, unless batches are formed only when the device is free.
    `stalled_s` is the time without a result if it is unusually long, else 0; the stall may last as long again.
    `evidence` is the number of samples, 0 to MAX_EVIDENCE. `rate` is in tokens per second, 0 while unknown. `batch_s`
    is the time of one batch. `formed_s` is the time until the batch of this request is formed; it is infinite if that
    may be long before the batch runs.
    """

    min_s: float = 0.0
    likely_s: float = 0.0
    stalled_s: float = 0.0
    evidence: int = 0
    rate: float = 0.0
    batch_s: float = 0.0
    formed_s: float = math.inf

    def belief(self, doubt: float) -> float:
        """Return the part of the wait that is believed, 0 to 1."""
        samples = self.evidence * self.evidence
        return samples / (samples + doubt)


class _BatchResults:
    """Results of one batch that came to this gateway."""

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
        self.missing = chunks  # results that have not come; the results of other gateways never come here
        self.at_s = at_s
        self.before_s = before_s
        self.queued_s = queued_s
        self.is_crowded = is_crowded
        self.device_s = device_s
        self.is_sample = device_s < math.inf
        self.formed_s = at_s - pipeline * device_s  # estimate: a worker may form `pipeline` batches ahead of the device
        self.left_work = False  # true if it left work in the queue when it was formed
        self.is_counted = False
        self.tokens = 0.0

    def seconds(self, lanes: int) -> float:
        """Return the seconds since the result before it. If its work was queued after that result, there was a pause:
        then the time on the device, divided by `lanes`, is the upper limit.
        """
        if self.queued_s <= self.before_s:
            return self.at_s - self.before_s
        return min(self.at_s - self.queued_s, self.device_s / lanes)


def _is_changed(before: _BatchResults, newest: list[_BatchResults]) -> bool:
    """Return True if all of the newest batches were slower, or all were faster, than the device can be, judged by the
    batch before.
    """
    odd = [_oddness(before, batch) for batch in newest]
    return min(odd) > CHANGED or max(odd) * CHANGED < 1


def _oddness(before: _BatchResults, batch: _BatchResults) -> float:
    """Return the factor by which a batch took longer (above 1) or shorter (below 1) than possible, judged by a batch
    before it. A batch of n times the tokens takes between once and n times as long.
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
    """Mean batch of the last samples. `is_full`: the batch is as large as it can be. `left_work`: most of the batches
    left work behind, and they do not grow any more, as batches do while a worker learns their times. `longest_s`: the
    time of the longest of them.
    """

    tokens: float
    seconds: float
    is_full: bool
    left_work: bool
    longest_s: float


class Throughput:
    """Measured throughput of one model at one priority. Times are seconds of one clock."""

    __slots__ = ("_batches", "_evidence", "_known", "_known_s", "_lanes", "last_s")

    def __init__(self) -> None:
        self._batches: deque[_BatchResults] = deque(maxlen=MAX_SAMPLES)
        self.last_s = -math.inf  # time of the last result
        self._lanes = 1
        self._evidence = 0
        self._known: MeasuredBatch | None = None
        self._known_s = -math.inf  # time when `_known` was computed

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
        """Note a result of `tokens` tokens, which were queued at `queued_s` and ran in this batch. `is_crowded`: more
        work waited when they were queued than the workers take in, so no batch is larger. `device_s` is the time of the
        batch on the device. `lanes` batches run at a time, each with `pipeline` batches formed. `chunks` is the number
        of chunks in the batch.
        """
        if not batch:  # a result without a batch: nothing ran
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
        """Mark the batches that left work behind. The queue is first in, first out: work that was queued before a batch
        was formed, but ran in a later batch, was left behind by it.
        """
        for batch in itertools.islice(reversed(self._batches), RECENT_BATCHES):
            if batch.formed_s < later.formed_s and queued_s < batch.formed_s:
                batch.left_work = True

    def _samples(self, now_s: float) -> list[_BatchSample]:
        """Return the latest batches that count, the newest first."""
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
        """Return the mean of the last samples, or None without a sample. It is computed again after LOOK_S seconds."""
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
        # results of several lanes come in turns, so the times between some of them do not stand for the others
        counted = full if self._lanes == 1 and full else samples
        tokens = sum(sample.tokens for sample in counted) / len(counted)
        seconds = sum(sample.seconds for sample in counted) / len(counted)
        is_steady = len(samples) >= MIN_SAMPLES - 1 and newest <= GROWING * before
        left_work = is_steady and 2 * sum(sample.left_work for sample in samples) >= len(samples)
        is_full = len(full) == len(counted)
        return MeasuredBatch(max(tokens, 1.0), max(seconds, 1e-6), is_full, left_work, longest.seconds)

    def is_settled(self, now_s: float, within_s: float) -> bool:
        """Return True if all results of the last batch are probably here, or if a batch takes at most `within_s`
        seconds, so that one batch does not matter.
        """
        if self._batches and self._batches[-1].missing <= 0:
            return True
        measured = self.batch(now_s)
        return measured is None or measured.seconds <= within_s or now_s - self.last_s >= SETTLED * measured.seconds

    def rate(self, now_s: float) -> float:
        """Return the tokens of this gateway that leave the queue per second, 0 while unknown."""
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
        """Return the wait of a request of `cost` tokens behind `ahead` tokens, the oldest of which was queued at
        `oldest_s`.

        A batch that may become larger than the measured ones takes (fixed + tokens) / (fixed + measured tokens) of
        their time. `fixed_tokens` is the fixed time of a batch in tokens. It is infinite while unknown; then a larger
        batch takes no longer. `share` is this gateway's part of the throughput, while `ahead` is the work of all
        gateways.

        A worker forms no batch that is larger than the budgets of its requests allow (`budget_s`). So batches that take
        a good part of the budget do not become larger. No batch is sealed while another one runs if it takes more than
        AHEAD_SHARE of the budget. Then `running` tokens of the work ahead are in running batches, and the rest fills
        the next batches from the front, unless batches are smaller than they might be and leave work behind.
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
    """Speed at which a gateway answers, for the turns of requests that it refuses before it has read them.

    Requests in progress are summed over time, in request-seconds. The request-seconds of the last answers, divided by
    their number, are the time of one request (Little's law). So time without requests does not make the gateway look
    slower.
    """

    __slots__ = ("_ended", "_next_s", "_running", "_since_s", "_sum_s")

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._sum_s = 0.0  # request-seconds until `_since_s`
        self._ended: deque[float] = deque(maxlen=RECENT_ANSWERS)  # `_sum_s` at the end of each of the last requests
        self._next_s = 0.0  # time until which turns are given

    def changed(self, now_s: float, running: int) -> None:
        """Set the number of requests in progress: one more, or one fewer, than before."""
        self._sum_s += self._running * (now_s - self._since_s)
        self._since_s = now_s
        if running < self._running:
            self._ended.append(self._sum_s)
        self._running = running

    def retry_s(self, now_s: float) -> int:
        """Return the Retry-After of one more refused client, in whole seconds. Turns begin when half of the requests in
        progress have ended. They follow each other at the rate at which requests end.
        """
        if len(self._ended) < 2 or not self._running:
            return 1
        sum_s = self._sum_s + self._running * (now_s - self._since_s)
        took_s = (sum_s - self._ended[0]) / (len(self._ended) - 1)  # time of one request; grows while no request ends
        min_s = now_s + took_s / 2  # by this time half of the requests in progress have ended
        each_s = took_s / self._running
        self._next_s = max(self._next_s, min_s) + each_s
        # not secret: it spreads clients in time
        wait_s = min(self._next_s - now_s, MAX_RETRY_S * random.uniform(0.8, 1.0))  # noqa: S311
        return max(1, int(wait_s + random.uniform(0, 1)))  # noqa: S311
