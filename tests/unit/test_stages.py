"""One vocabulary of stages: in replies, log lines, spans, the command line and the pages."""

from __future__ import annotations

from unittest import mock

import pytest

from sie_contracts.stages import STAGES
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Ok, Stages, WorkResult
from sie_gateway.inference.results import _TIMING_HEADERS, stage_times
from sie_sidecar.in_flight import InFlight, stages_of

AT_WORKER = Stages(
    load_ms=400.0,
    preprocess_ms=2.0,
    batch_wait_ms=3.0,
    device_wait_ms=40.0,
    inference_ms=5.0,
    postprocess_ms=6.0,
    worker_ms=457.0,
    fetch_ms=1.0,
)


def test_stages_of_a_reply_are_contiguous_and_each_wait_has_its_own() -> None:
    result = WorkResult("r", 0, "w", (Ok({}, 3),), b"", stages=AT_WORKER)
    timing = stage_times(total_ms=500.0, wait_ms=477.0, last=result, written_ms=4.0)
    assert [timing[name] for name in STAGES] == [21.0 + 40.0, 400.0, 2.0, 3.0, 5.0, 10.0, 19.0]
    assert timing["device_wait_time"] == 40.0
    assert sum(timing[name] for name in STAGES) == timing["total_time"] == 500.0
    assert timing["queue_ms"] == 61.0 + 400.0 + 3.0
    assert set(STAGES) - set(timing) == set()
    assert len(_TIMING_HEADERS) == len(STAGES) + 1, "all but the rest, the total, and a part of the queue"


@pytest.mark.parametrize(("longest_ms", "queue", "load"), [(0.0, 100.0, 5.0), (65.0, 40.0, 65.0), (900.0, 0.0, 105.0)])
def test_a_chunk_at_the_broker_waits_for_the_load_that_another_chunk_waits_for(
    longest_ms: float, queue: float, load: float
) -> None:
    stages = Stages(load_ms=5.0, inference_ms=15.0, worker_ms=20.0)
    last = WorkResult("r", 1, "w", (Ok({}, 3),), b"", stages=stages)
    timing = stage_times(total_ms=130.0, wait_ms=120.0, last=last, load_ms=longest_ms)
    assert (timing["queue_time"], timing["load_time"], timing["queue_ms"]) == (queue, load, 105.0)
    assert sum(timing[name] for name in STAGES) == 130.0


def test_work_that_did_not_run_has_only_a_queue_and_the_rest() -> None:
    timing = stage_times(total_ms=12.0, wait_ms=10.0, last=None)
    assert {name: timing[name] for name in STAGES if timing[name]} == {"queue_time": 10.0, "unattributed_time": 2.0}


@pytest.mark.parametrize(("tokenised_there_ms", "waited_ms"), [(0.0, 1000.0), (500.0, 3500.0)])
def test_a_batch_that_is_tokenised_in_the_adapter_waits_for_the_device_after_its_start(
    tokenised_there_ms: float, waited_ms: float
) -> None:
    flight = InFlight(
        mock.Mock(), mock.Mock(), 0.0, 60.0, loaded_s=1.0, tokenised_s=2.0, dispatched_s=3.0, started_s=4.0
    )
    done = ipc.BatchDone("b", (), b"", 2000.0, preprocess_ms=tokenised_there_ms)
    assert stages_of(flight, 9.0, done).device_wait_ms == waited_ms
