"""The sidecar's small parts."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import pytest

from sie_contracts import ipc, messages
from sie_contracts.catalogue import Catalogue, ModelEntry, Weights
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.messages import ArraySlice, Confirmation, Failed, Input, Ok, RunOptions, WorkItem, WorkResult
from sie_sidecar.batch import BatchKey, Job, Waiting
from sie_sidecar.hosting import Hosting
from sie_sidecar.lease import Leases
from sie_sidecar.metrics import Metrics
from sie_sidecar.settlement import Settlement


@dataclass
class Delivered:
    sequence: int
    data: bytes
    delivered: int = 1


def test_work_of_a_new_stream_is_never_taken_for_work_in_hand() -> None:
    """Sequences begin anew when a stream was lost: the same number with other data is other work."""
    leases = Leases(10.0, lambda: True, lambda: 0.0)
    lease = leases.hold(Delivered(5, b"old"))  # type: ignore[arg-type]
    assert leases.adopt(Delivered(5, b"new")) is None  # type: ignore[arg-type]
    assert leases.adopt(Delivered(5, b"old", 2)) is lease  # type: ignore[arg-type]
    newer = leases.hold(Delivered(5, b"new"))  # type: ignore[arg-type]
    leases.drop(lease)
    assert leases.all() == [newer]


def test_work_that_comes_back_takes_its_place_in_the_order_of_arrival() -> None:
    waiting: Waiting[int] = Waiting()
    key = BatchKey("m", "r", "encode", "", "")
    waiting.add(Job(key, 1, 10.0, 10))
    for number in (2, 0, 3, 1):
        waiting.put_back(Job(key, 1, float(number), number))
    assert [job.work for job in waiting] == [0, 1, 2, 3, 10]


class _Refusing:
    """A link whose adapter refuses every load."""

    def __init__(self) -> None:
        self.listeners: list[object] = []
        self.loads = 0

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        self.loads += 1
        raise ModelLoadFailed("no such weights", extras={"error_class": "NOT_FOUND", "permanent": True})


async def test_a_remembered_failure_is_told_anew_each_time() -> None:
    """L6: one load; and no exception that collects the frames of all who met it."""
    link = _Refusing()
    hosting = Hosting(link, lambda: 0.0, lambda: None)  # type: ignore[arg-type]
    entry = ModelEntry(id="m", weights=Weights(path="/nowhere"), family="text-encoder", outputs={"dense": 2}, max_tokens=8)
    hosted = hosting.of(Catalogue.resolve_profile(entry, "default", "m"))
    depths = []
    for _ in range(5):
        with pytest.raises(ModelLoadFailed, match="no such weights") as caught:
            await hosting.ensure(hosted)
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert link.loads == 1
    assert depths[1:] == [depths[1]] * 4


class _Inbox:
    """A broker that takes small messages, with a gateway that confirms each."""

    max_payload = 1000

    def __init__(self) -> None:
        self.taken: list[WorkResult] = []

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        self.taken.append(messages.decode_result(data))
        return messages.encode(Confirmation("taken"))


@dataclass
class _Acked(Delivered):
    acks: int = 0

    async def ack(self) -> None:
        self.acks += 1


async def test_a_result_that_no_message_holds_is_told_with_the_limit() -> None:
    """Not as a failure of ours: the client can ask for less of it."""
    leases, inbox, delivery = Leases(10.0, lambda: True, lambda: 0.0), _Inbox(), _Acked(1, b"")
    item = WorkItem("r", 0, "m", "v", "encode", (Input("a"), Input("b")), RunOptions(), "inbox", 1000)
    vector = Ok({"multivector": ArraySlice("<f4", (125, 2), 0)}, 9)
    settlement = Settlement(inbox, leases, Metrics(), lambda: 0.0)  # type: ignore[arg-type]
    await settlement.answer(leases.hold(delivery), item, WorkResult("r", 0, "w", (vector, vector), bytes(2000)), 10.0)  # type: ignore[arg-type]
    (result,) = inbox.taken
    assert [outcome.error.code for outcome in result.outcomes if isinstance(outcome, Failed)] == ["PAYLOAD_TOO_LARGE"] * 2
    assert all(isinstance(outcome, Failed) and outcome.error.extras == {"limit": 1000} for outcome in result.outcomes)
    assert delivery.acks == 1
