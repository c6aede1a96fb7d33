"""Every failpoint of the product with its action and scenario, and the cluster of these tests.

    a process starts with --failpoints ──► a scenario reaches the failpoint ──► the process dies, fails or stands still
    there ──► it is started again

The supervisor of these tests is `Field.supervise`. It starts dead processes again, unarmed, as `sie serve` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import psutil
from cluster import until
from fake_adapter import TOKENIZER, vector_of
from stack import Device, Part, Plan, Role, Stack
from tokenizers import Tokenizer

from sie_broker import Broker
from sie_broker.nats import connect
from sie_contracts.errors import SIEError
from sie_contracts.wire import ipc, topology
from sie_contracts.wire.topology import Lane
from sie_runtime.failpoints import CRASHED

T = TypeVar("T")
Action = Literal["crash", "error", "stop"]
LANE = Lane("_default", "cpu", "default")
POOL = LANE.pool
WARM = "toy/warm"
COLD = [f"toy/cold-{number}" for number in range(8)]
DEADLY = "the end of it"
ACK_WAIT_S = 3
BUDGET_S = 30.0
SHORT_S = 2.4  # the budget of a request whose gateway dies: its results are offered for that long
GRACE_S = 20.0  # an answer may be late by so much on a busy machine
BACK_S = 60.0  # for a process to be ready again on a busy machine, with its imports of torch
INLINE_BYTES = 128 << 10
BIG_ITEMS = 14_500  # the results of so many items, 76 bytes each, are larger than a message of 1 MiB
MAX_TOKENS = 512
COSINE = 0.998
_tokenizer = Tokenizer.from_buffer(TOKENIZER)


@dataclass(frozen=True)
class Place:
    """A failpoint of the process `role`, reached by `scenario`.

    `runs`: how often the device may run the input of a single request. `long`: only the long lane runs it.
    """

    role: Role
    scenario: str
    action: Action = "crash"
    runs: int | None = None
    long: bool = False


# in the order of their processes, because neighbours then need the same processes
PLACES: dict[str, Place] = {
    # the request is not in the queue yet: it runs once, when its client sends it again
    "gateway.before_publish": Place("gateway", "one_request", "error", runs=1, long=True),
    "publish.before_publish": Place("gateway", "one_request", runs=1, long=True),
    # the request is in the queue, and its client has to send it again
    "publish.published": Place("gateway", "one_request", runs=2, long=True),
    "gateway.published": Place("gateway", "one_request", runs=2),
    "gateway.consumer_ensured": Place("gateway", "one_request", runs=2, long=True),
    "results.before_confirm": Place("gateway", "one_request", "stop", runs=1),
    "results.assembled": Place("gateway", "big_result", "error", long=True),
    "gateway.before_withdraw": Place("gateway", "given_up"),
    "publish.before_cancel": Place("gateway", "given_up", long=True),
    "reattach.left": Place("gateway", "client_leaves", "error"),
    "gateway.before_demand": Place("gateway", "cold_model", long=True),
    "gateway.before_placement": Place("gateway", "cold_model", long=True),
    "gateway.placement_written": Place("gateway", "cold_model", long=True),
    "gateway.leader_lease_held": Place("gateway", "leader"),
    "gateway.consumer_deleted": Place("gateway", "consumer_at_rest", long=True),
    "gateway.before_pool_write": Place("gateway", "reservation", long=True),
    "gateway.pool_recorded": Place("gateway", "reservation", long=True),
    "gateway.before_pool_removal": Place("gateway", "reservation_ends", long=True),
    "payloads.before_put": Place("gateway", "large_input", long=True),
    "payloads.after_put": Place("gateway", "large_input", long=True),
    "payloads.before_removal": Place("gateway", "old_payload", long=True),
    "payloads.before_get": Place("sidecar", "large_input", "error"),
    "settle.before_result": Place("sidecar", "one_request", runs=2),
    "settle.before_ack": Place("sidecar", "one_request", runs=2),
    "settle.between_parts": Place("sidecar", "big_result", long=True),
    "settle.before_release": Place("sidecar", "work_left_over", long=True),
    "sidecar.before_admission": Place("sidecar", "admission", long=True),
    "settle.before_cancelled_ack": Place("sidecar", "cancelled"),
    "dead_letters.before_publish": Place("sidecar", "unreadable_work", long=True),
    "dead_letters.published": Place("sidecar", "unreadable_work", long=True),
    "poison.before_mark": Place("sidecar", "poison"),
    "isolate.suspects_marked": Place("sidecar", "poison", long=True),
    "isolate.before_run": Place("sidecar", "poison", long=True),
    "worker.before_hand_back": Place("sidecar", "drain_in_vain", long=True),
    "config.before_write": Place("config", "new_model", long=True),
    "config.before_broadcast": Place("config", "new_model"),
    "adapter.before_load": Place("adapter", "real_adapter", long=True),
    "adapter.loaded": Place("adapter", "real_adapter", long=True),
    "adapter.batch_started": Place("adapter", "real_adapter", "error", long=True),
    "adapter.batch_ran": Place("adapter", "real_adapter", long=True),
}


@dataclass(frozen=True)
class Answer:
    """An answer to a client. `status` 0: no answer came, because the gateway died or the client left."""

    status: int
    body: dict[str, Any]
    taken_s: float

    @property
    def error(self) -> tuple[str, str]:
        """Return the code and the reason of an error."""
        error = self.body["error"]
        return error["code"], error.get("reason", "")


def vector(text: str) -> np.ndarray:
    """Return the vector that the fixed-cost adapter answers for a text, cut as its sidecar cuts it."""
    ids = _tokenizer.encode(text).ids
    return vector_of([*ids[: MAX_TOKENS - 1], ids[-1]] if len(ids) > MAX_TOKENS else ids)


def codes() -> set[str]:
    """Return the documented error codes."""
    error_codes, classes = set(), [SIEError]
    while classes:
        error_class = classes.pop()
        classes += error_class.__subclasses__()
        error_codes.add(error_class.code)
    return error_codes


class Field:
    """A broker, a config service, a gateway and a worker with the fixed-cost adapter, of which one at a time is
    armed.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.worker = stack.workers[0]
        self.parts: dict[Role, Part] = {
            "gateway": stack.gateways[0],
            "sidecar": self.worker.sidecar,
            "adapter": self.worker.adapter,
            "config": stack.config,
        }
        self.payloads = stack.folder / "payloads"
        self._clients = ThreadPoolExecutor(16)
        self._expected: dict[str, np.ndarray] = {}
        self._armed: set[Role] = set()

    @staticmethod
    @contextlib.contextmanager
    def running(folder: Path, device: Device | None = Device(deadly=DEADLY)) -> Iterator[Field]:  # noqa: B008  frozen
        environ = {
            "SIE_PAYLOAD_STORE_URL": str(folder / "payloads"),
            "SIE_INLINE_PAYLOAD_BYTES": str(INLINE_BYTES),
            "SIE_CHUNK_COST": "1000000",
            "SIE_MAX_ITEMS_PER_REQUEST": str(BIG_ITEMS),
            "SIE_ACK_WAIT_S": str(ACK_WAIT_S),
            "SIE_KEY_WINDOW_TOKENS": "4000000",
        }
        if device is not None:
            environ["SIE_PRELOAD_MODELS"] = WARM
        with Stack(folder, Plan([WARM, *COLD], workers=(device,), environ=environ, preload=device is None)) as stack:
            field = Field(stack)
            try:
                yield field
            finally:
                field.close()

    def close(self) -> None:
        self._clients.shutdown(wait=False, cancel_futures=True)

    # processes

    def arm(self, name: str, action: Action, role: Role, *arguments: str) -> Part:
        """Restart a process with an armed failpoint. Do not wait until it is ready, because it may die before."""
        part = self.parts[role]
        part.stop()
        self._armed.add(role)
        part.start("--failpoints", f"{name}={action}", *arguments)
        return part

    def restore(self) -> None:
        """Restore all processes, ready and unarmed, also after a failed test."""
        for role, part in self.parts.items():
            if part.paused and part.alive:
                part.resume()
            if role in self._armed:
                part.stop()
        self._armed.clear()
        self.back()

    def reached(self, name: str, action: Action, part: Part) -> None:
        """Wait until the process reached its failpoint, and start it again if it died there."""
        if action == "error":
            self._within(
                lambda: any(f"FailpointError: {name}" in line for line in part.log), f"{part.name} fails at {name}"
            )
        elif action == "stop":
            self._within(
                lambda: psutil.Process(part.pid).status() == psutil.STATUS_STOPPED,
                f"{part.name} stands still at {name}",
            )
            os.kill(part.pid, signal.SIGCONT)
        else:
            self._within(lambda: not part.alive, f"{part.name} dies at {name}")
            assert part.status == CRASHED, f"status {part.status}\n{self.stack.log()}"
            if self.worker.adapter.paused:
                self.worker.adapter.resume()
            self.back()
        self._armed.discard(part.role)

    def _within(self, condition: Callable[[], object], goal: str, timeout_s: float = BACK_S) -> None:
        try:
            until(condition, timeout_s, goal)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.stack.log()}") from None

    def supervise(self, until_true: Callable[[], object], timeout_s: float, goal: str) -> None:
        """Start dead processes again until a condition is true."""

        def look() -> object:
            for part in self.parts.values():
                if not part.alive:
                    part.start()
            return until_true()

        self._within(look, goal, timeout_s)

    def back(self) -> None:
        """Start dead processes and wait until all are ready."""
        for part in self.parts.values():
            if not part.alive:
                part.start()
        for part in self.parts.values():
            part.wait_ready(BACK_S)

    # requests

    def ask(
        self, *texts: str, model: str = WARM, budget_s: float = BUDGET_S, leave_s: float | None = None
    ) -> Future[Answer]:
        """Send a request from a client of its own, which leaves after `leave_s`. A result must be right, and an error
        must have a documented code.
        """

        def run() -> Answer:
            started_s = time.monotonic()
            url, headers = f"{self.stack.urls[0]}/v1/encode/{model}", {"X-SIE-Timeout-Ms": str(int(budget_s * 1000))}
            try:
                got = httpx.post(
                    url, json={"items": texts}, headers=headers, timeout=leave_s or budget_s + 20, trust_env=False
                )
            except httpx.TransportError:
                return Answer(0, {}, time.monotonic() - started_s)
            answer = Answer(got.status_code, got.json(), time.monotonic() - started_s)
            assert answer.taken_s <= budget_s + GRACE_S, f"an answer of budget {budget_s} s took {answer.taken_s:.2f} s"
            if answer.status != 200:
                assert answer.error[0] in codes(), answer.body
            else:
                self.check(model, texts, answer)
            return answer

        return self._clients.submit(run)

    def check(self, model: str, texts: Sequence[str], answer: Answer) -> None:
        vectors = np.array([slot["dense"]["values"] for slot in answer.body["items"]])
        if model.startswith("toy/"):
            np.testing.assert_allclose(vectors, [vector(text) for text in texts], atol=1e-5)
        else:  # in bfloat16 the last digits change with the batch
            expected = np.array([self._expected[text] for text in texts])
            assert (np.sum(vectors * expected, axis=1) > COSINE).all()

    def learn(self, model: str, text: str) -> None:
        """Record the answer of the unarmed adapter as the right one."""
        answer = httpx.post(
            f"{self.stack.urls[0]}/v1/encode/{model}", json={"items": [text]}, timeout=60, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        self._expected[text] = np.array(answer.json()["items"][0]["dense"]["values"])

    def right(self, *texts: str, model: str = WARM) -> Answer:
        """Send a request as a client that retries, which must get its result."""
        answer = self.ask(*texts, model=model).result()
        assert answer.status == 200, answer.body
        return answer

    # checks of the state after a failpoint

    def batches(self) -> int:
        """Return how many batches the adapter's process has taken."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.stack.folder / "w0.sock"))
            connection.sendall(ipc.frame(ipc.Ping()))
            pong = ipc.reply(bytes(ipc.receive_frame(connection)))
        assert isinstance(pong, ipc.Pong)
        return pong.batches

    def stream(self, name: str) -> dict[str, Any]:
        """Return the state of a stream and of its consumers from the broker's monitor."""
        report = httpx.get(
            f"{self.stack.monitor_urls[0]}/jsz?streams=true&consumers=true", timeout=30, trust_env=False
        ).json()
        streams = {
            detail["name"]: detail for account in report["account_details"] for detail in account["stream_detail"]
        }
        return streams.get(name, {"state": {"messages": 0}})

    def waiting(self) -> int:
        """Return the number of messages of the work stream, leased ones included."""
        return int(self.stream(topology.stream_name(POOL))["state"]["messages"])

    def leased(self) -> int:
        consumers = self.stream(topology.stream_name(POOL)).get("consumer_detail") or []
        return sum(consumer["num_ack_pending"] for consumer in consumers)

    def letters(self) -> int:
        return int(self.stream(topology.dead_letter_stream(POOL, replicas=1).name)["state"]["messages"])

    def settled(self) -> None:
        """Assert that the work stream becomes empty, whichever process died."""
        self.supervise(lambda: not self.waiting(), BUDGET_S + ACK_WAIT_S + GRACE_S, "the work stream is empty")

    def with_broker(self, body: Callable[[Broker], Awaitable[T]]) -> T:
        async def run() -> T:
            broker = await connect(self.stack.broker_urls, name="test")
            try:
                return await body(broker)
            finally:
                await broker.close()

        return asyncio.run(run())
