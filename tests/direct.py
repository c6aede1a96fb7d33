"""A sidecar without a gateway: a test publishes work items to the broker in memory and reads results from it. Some
inputs end the adapter.

test ──publish──► MemoryServer ──► sidecar ──Unix socket──► DeadlyAdapter
                       ▲ results ──────┘
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from fake_adapter import FakeAdapter, ids_of, texts_of, toy_entry, vector_of
from inprocess import WAIT_S, InProcess, until
from numpy.typing import NDArray

from sie_broker import Broker, CoreMessage
from sie_contracts.wire import ipc, messages, topology
from sie_contracts.wire.messages import Confirmation, Failed, Input, Ok, Operation, RunOptions, WorkItem, WorkResult
from sie_contracts.wire.topology import Lane
from sie_sidecar import intake

ENTRY = toy_entry()
_PLAIN = RunOptions()


class DeadlyAdapter(FakeAdapter):
    """An adapter that dies of every batch with one of `deadly`, after it reported its start, and is back at once.
    `deaths` has the texts of those batches.
    """

    def __init__(self, path: Path | str, *deadly: str, **options: Any) -> None:
        super().__init__(path, **options)
        self.deadly = set(deadly)
        self.deaths: list[list[str]] = []
        self._dying: set[asyncio.Task[None]] = set()

    async def _run(self, batch: ipc.RunBatch, writer: asyncio.StreamWriter) -> None:
        texts = texts_of(batch)
        if batch.model not in self.loaded or not self.deadly.intersection(texts):
            await super()._run(batch, writer)
            return
        self.batches.append(batch)
        self.deaths.append(texts)
        await self._send(writer, ipc.BatchStarted(batch.batch))
        task = asyncio.get_running_loop().create_task(self.die(), name="death")
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)
        await asyncio.Event().wait()  # until the connection goes


class Direct(InProcess):
    """A sidecar whose test publishes work and collects `results` as a gateway does. The sidecar does not wait for a
    placement table, because none is written.
    """

    lane = Lane("_default", "_default", "default")

    async def __aenter__(self) -> Direct:
        await super().__aenter__()
        self._no_wait = mock.patch.object(intake, "FIRST_S", 0.0)
        self._no_wait.start()
        self.results: dict[tuple[str, int], WorkResult] = {}
        self.broker: Broker = self.server.connect("gateway")
        self.stream = topology.work_stream("_default", storage="memory", replicas=1, max_bytes=-1, max_age_s=0.0)
        await self.broker.ensure_stream(topology.dead_letter_stream("_default", replicas=1))
        await self.broker.ensure_stream(self.stream)
        await self.broker.ensure_consumer(topology.work_consumer(self.lane, "interactive", ENTRY.id, 10.0))
        await self.broker.subscribe("inbox", self._on_result)
        self.sent = 0
        return self

    async def close(self) -> None:
        self._no_wait.stop()
        await super().close()
        await self.broker.close()

    async def deadly(self, *texts: str, **options: Any) -> DeadlyAdapter:
        """Start an adapter that these texts end."""
        adapter = DeadlyAdapter(self.folder / "deadly.sock", *texts, **options)
        await adapter.start()
        self.adapters.append(adapter)
        return adapter

    async def _on_result(self, message: CoreMessage) -> None:
        result = messages.decode_result(message.data)
        verdict = "duplicate" if (result.request, result.chunk) in self.results else "taken"
        self.results.setdefault((result.request, result.chunk), result)
        await self.broker.send(message.reply, messages.encode(Confirmation(verdict)))  # type: ignore[arg-type]

    async def publish(
        self,
        *texts: str | Input,
        request: str = "",
        chunk: int = 0,
        budget_ms: int = 60_000,
        operation: Operation = "encode",
        options: RunOptions = _PLAIN,
        reply: str = "inbox",
        **more: Any,
    ) -> WorkItem:
        self.sent += 1
        inputs = tuple(text if isinstance(text, Input) else Input(text) for text in texts)
        item = WorkItem(
            request or f"r{self.sent}",
            chunk,
            ENTRY.id,
            ENTRY.revision,
            operation,
            inputs,
            options,
            reply,
            budget_ms,
            cost=sum(text_input.nbytes + 2 for text_input in inputs),
            **more,
        )
        subject = topology.work_subject(self.lane, "interactive", ENTRY.id)
        await self.broker.publish(subject, messages.encode(item), f"{item.request}.{chunk}")
        return item

    async def result(self, item: WorkItem, timeout_s: float = WAIT_S) -> WorkResult:
        key = (item.request, item.chunk)
        await until(lambda: key in self.results, f"a result of {key}", timeout_s)
        return self.results[key]

    async def left(self, count: int) -> None:
        """Wait until the stream of work holds so many messages."""
        await until(lambda: self.server.streams[self.stream.name].state().messages == count, f"{count} messages left")

    async def letters(self) -> list[messages.DeadLetter]:
        dead_letters, sequence = [], 0
        while (stored := await self.broker.first_stored("DEAD__default", sequence)) is not None:
            dead_letters.append(messages.decode_dead_letter(stored.data))
            sequence = stored.sequence + 1
        return dead_letters


def vector(result: WorkResult, index: int) -> NDArray[np.float32]:
    outcome = result.outcomes[index]
    assert isinstance(outcome, Ok), outcome
    piece = outcome.outputs["dense"]
    return np.frombuffer(result.block, piece.dtype, piece.shape[0], piece.offset)


def is_right(result: WorkResult, item: WorkItem, index: int) -> bool:
    return bool(np.array_equal(vector(result, index), vector_of(ids_of(item.inputs[index].text or ""))))


def reasons(result: WorkResult) -> list[str]:
    """Return the code and reason of each outcome's error, empty for a value."""
    return [
        f"{outcome.error.code} {outcome.error.reason}".strip() if isinstance(outcome, Failed) else ""
        for outcome in result.outcomes
    ]
