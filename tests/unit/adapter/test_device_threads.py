"""A lane answers every batch, whatever fails in it."""

from __future__ import annotations

import threading

import pytest
import torch
from cluster import until

from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads, is_alone, set_torch_threads
from sie_contracts.wire.ipc import BatchDone, BatchStarted, Refused, Reply, RunBatch
from sie_runtime.failpoints import arm


def batch(name: str) -> RunBatch:
    return RunBatch(name, "toy/one", "encode", b"", b"", ())


def answers(lanes: DeviceThreads, name: str) -> list[Reply]:
    replies: list[Reply] = []
    job = DeviceJob(batch(name), replies.append)
    lanes.submit(job)
    assert job.finished.wait(30.0)
    return replies


@pytest.mark.parametrize("place", ["adapter.batch_started", "adapter.batch_ran"])
def test_a_batch_whose_lane_fails_is_refused_and_the_next_one_runs(place: str) -> None:
    """Without a terminal reply the sidecar would wait for it for ever."""
    lanes = DeviceThreads(1, lambda message: BatchDone(message.batch, (), b"", 0.0))
    arm(f"{place}=error")
    try:
        started, refused = answers(lanes, "b1")
        assert isinstance(started, BatchStarted)
        assert isinstance(refused, Refused)
        assert (refused.batch, refused.error.code) == ("b1", "INTERNAL_ERROR")
        assert [type(reply) for reply in answers(lanes, "b2")] == [BatchStarted, BatchDone]
    finally:
        arm("")
        assert lanes.stop(30.0)


def test_a_lane_is_alone_while_no_other_runs_a_batch() -> None:
    flags: list[bool] = []
    both = threading.Barrier(2, timeout=30.0)

    def execute(message: RunBatch) -> Reply:
        if message.batch != "alone":
            both.wait()
        flags.append(is_alone())
        if message.batch != "alone":
            both.wait()
        return BatchDone(message.batch, (), b"", 0.0, 0.0)

    lanes = DeviceThreads(2, execute)
    assert not is_alone(), "of no lane"
    answers(lanes, "alone")
    jobs = [DeviceJob(batch(name), lambda reply: None) for name in "ab"]
    for job in jobs:
        lanes.submit(job)
    assert all(job.finished.wait(30.0) for job in jobs)
    answers(lanes, "alone")
    assert lanes.stop(30.0)
    assert flags == [True, False, False, True]


def test_a_batch_that_is_alone_has_a_torch_thread_for_each_lane_and_runs_on_the_first() -> None:
    """A second team of threads would make libgomp let all teams sleep at each barrier."""
    runs: dict[str, tuple[str, int]] = {}
    both = threading.Barrier(2, timeout=30.0)

    def execute(message: RunBatch) -> Reply:
        set_torch_threads()
        runs[message.batch] = threading.current_thread().name, torch.get_num_threads()
        if message.batch in {"first", "second"}:
            both.wait()
        return BatchDone(message.batch, (), b"", 0.0, 0.0)

    lanes = DeviceThreads(3, execute)
    for number in range(4):
        until(lambda: lanes._is_first_idle, 30.0, "the first lane is idle")
        answers(lanes, f"alone {number}")
    until(lambda: lanes._is_first_idle, 30.0, "the first lane is idle")
    jobs = [DeviceJob(batch(name), lambda reply: None) for name in ("first", "second")]
    for job in jobs:
        lanes.submit(job)
    assert all(job.finished.wait(30.0) for job in jobs)
    until(lambda: lanes._is_first_idle, 30.0, "the first lane is idle")
    answers(lanes, "again")
    assert lanes.stop(30.0)
    alone = ("device-0", 3)
    assert [runs.pop(f"alone {number}") for number in range(4)] == [alone] * 4
    assert runs.pop("again") == alone
    assert runs["first"][0] == "device-0"
    assert runs["second"] == (runs["second"][0], 1)
    assert runs["second"][0] != "device-0"


@pytest.mark.parametrize("count", [1, 3])
def test_each_job_is_answered_when_they_come_as_lanes_become_idle(count: int) -> None:
    lanes = DeviceThreads(count, lambda message: BatchDone(message.batch, (), b"", 0.0))
    replies: list[list[Reply]] = [[] for _ in range(2000)]
    jobs = [DeviceJob(batch(str(number)), own.append) for number, own in enumerate(replies)]
    submitting = [
        threading.Thread(target=lambda part=part: [lanes.submit(job) for job in part])
        for part in (jobs[::2], jobs[1::2])
    ]
    for thread in submitting:
        thread.start()
    assert all(job.finished.wait(30.0) for job in jobs)
    assert lanes.stop(30.0)
    assert [[(type(reply), reply.batch) for reply in own] for own in replies] == [
        [(BatchStarted, str(number)), (BatchDone, str(number))] for number in range(2000)
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_that_is_submitted_after_the_stop_is_refused(count: int) -> None:
    lanes = DeviceThreads(count, lambda message: BatchDone(message.batch, (), b"", 0.0))
    until(lambda: lanes._is_first_idle, 5.0, "the first lane is idle")
    assert lanes.stop(5.0)
    (refused,) = answers(lanes, "late")
    assert isinstance(refused, Refused)
    assert (refused.batch, refused.error.code) == ("late", "SHUTTING_DOWN")
