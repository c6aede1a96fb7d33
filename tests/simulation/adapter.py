"""The adapter of a simulation. It speaks the frames of `sie_contracts.wire.ipc`, takes time by a cost model, has memory
for a number of models, and fails in many ways.

A vector is a function of its token ids and its LoRA (`fake_adapter.vector_of`), so the simulation knows the right
answer of every input.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fake_adapter import TOKENIZER, WIDTH, vector_of
from simulation.virtual import SCOPE, Listening, Scope, VirtualLoop

from sie_contracts.errors import LoraLoading, ModelLoadFailed, ModelLoading, SIEError
from sie_contracts.models.catalogue import Catalogue, fingerprint
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import ArraySlice, Ok

LORAS_KEPT = 2
ModelInput = tuple[str, str, bytes]  # model, LoRA, token ids
RESTART_S = 0.1  # until a spare process takes over


@dataclass(frozen=True)
class Costs:
    """Durations: `batch_s` and `token_s` of a batch, `load_s` of the load of a model, `lora_s` of that of a LoRA."""

    batch_s: float = 0.004
    token_s: float = 4e-6
    load_s: float = 0.4
    lora_s: float = 0.1


@dataclass
class Faults:
    """Planned faults. `failing`: error classes of the next loads, by model. `poison`: rows that end the process."""

    failing: dict[str, list[str]] = field(default_factory=dict)
    poison: set[bytes] = field(default_factory=set)


class Adapter:
    """One adapter process after the other at `path`. It calls `log(kind, text)` for events, `on_batch` for each batch
    that arrives, and `on_alone` with the inputs of each finished batch of one work item.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        path: str,
        name: str,
        *,
        lanes: int,
        room: int,
        costs: Costs,
        faults: Faults,
        seed: int,
        log: Callable[[str, str], None],
        on_batch: Callable[[Adapter, ipc.RunBatch], None],
        on_alone: Callable[[set[ModelInput]], None],
    ) -> None:
        self.path, self.name = path, name
        self.lanes, self.room, self.costs, self.faults = lanes, room, costs, faults
        self.loaded: dict[str, ipc.LoadedModel] = {}
        self.loras: dict[str, list[str]] = {}
        self.running: dict[str, tuple[ipc.RunBatch, asyncio.StreamWriter]] = {}
        # inputs that ran when the process died, and have not run alone since then at any adapter
        self.suspects: set[ModelInput] = set()
        self.deaths = 0
        self.frozen = False
        self.fails_next = False  # the load that is under way will be refused
        self.trouble_s = -1e9  # time of the last fault in which the adapter did not answer
        self._loop, self._log, self._on_batch, self._on_alone = loop, log, on_batch, on_alone
        self._random = random.Random(seed)
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._device = asyncio.Semaphore(lanes)
        self._listening: Listening | None = None
        self._loading: dict[str, asyncio.Future[ipc.Reply]] = {}
        self.scope = Scope(name)

    @property
    def listens(self) -> bool:
        return self._listening is not None

    @property
    def loads(self) -> bool:
        """Return True if a load is under way."""
        return bool(self._loading)

    def was_well_since(self, since_s: float) -> bool:
        return self.listens and not self.frozen and self.trouble_s < since_s

    async def start(self) -> None:
        """Start the next process, which has loaded nothing."""
        self.scope = Scope(f"{self.name}.{self.deaths}")
        self.loaded, self.loras, self.running, self._loading = {}, {}, {}, {}
        self._device = asyncio.Semaphore(self.lanes)
        context = contextvars.copy_context()
        context.run(SCOPE.set, self.scope)
        starting = self._loop.create_task(asyncio.start_unix_server(self._accept, self.path), context=context)
        await starting
        self.trouble_s = self._loop.now_s
        self._listening = self._loop._listening[self.path]

    def die(self) -> None:
        """End the process at once. The inputs on the device become suspects. A spare takes over after RESTART_S."""
        if self._listening is None:
            return
        self._log("adapter dies", f"{self.name} with {len(self.running)} batches, {len(self.loaded)} models")
        for batch, writer in self.running.values():
            if not writer.is_closing():  # otherwise the sidecar has given up the connection
                self.suspects.update(inputs_of(batch))
        self.deaths += 1
        self.thaw()
        self._listening.cut()
        self._listening = None
        self.running = {}
        for task in self._loop.of(self.scope):
            task.cancel()
        self._loop.call_later(RESTART_S, self._restart)

    def _restart(self) -> None:
        self._loop.create_task(self.start(), name=f"restart {self.name}")

    def freeze(self) -> None:
        self.frozen = True
        self._thawed.clear()

    def thaw(self) -> None:
        self.frozen = False
        self.fails_next = False
        self.trouble_s = self._loop.now_s
        self._thawed.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._loop.create_task(self._attend(reader, writer), name=f"connection of {self.name}")

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = ipc.request(await ipc.read_frame(reader))
                await self._thawed.wait()
                match request:
                    case ipc.RunBatch():
                        await self._run(request, writer)
                    case ipc.EnsureReady():
                        await self._send(writer, await self._load(request))
                    case ipc.EnsureLora():
                        await self._send(writer, await self._load_lora(request))
                    case _:
                        await self._send(writer, self._at_once(request))
        except (EOFError, OSError, ipc.FrameError):
            pass  # the sidecar went away
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, reply: ipc.Reply) -> None:
        await self._thawed.wait()
        writer.write(ipc.frame(reply))
        await writer.drain()

    def _at_once(self, request: ipc.Request) -> ipc.Reply:
        match request:
            case ipc.Ping():
                return ipc.Pong(1)
            case ipc.Describe():
                models = tuple(self.loaded.values())
                return ipc.Description(
                    ipc.PROTOCOL, 1, "simulated", "0", self.lanes, "", len(models) << 20, self.room << 20, models
                )
            case ipc.Release(model):
                self._unload(model)
        return ipc.Done()

    def _unload(self, model: str) -> None:
        self.loaded.pop(model, None)
        self.loras.pop(model, None)

    async def _load(self, request: ipc.EnsureReady) -> ipc.Reply:
        """Load a model once at a time. Requests for it that come meanwhile get the same outcome."""
        entry = parse_entry(request.entry)
        name = request.model
        if name in self._loading:
            return await asyncio.shield(self._loading[name])
        evicted: tuple[str, ...] = ()
        if name not in self.loaded:
            free = self.room - len(self.loaded) - len(self._loading)
            going = [candidate for candidate in request.may_drop if candidate in self.loaded][: max(0, 1 - free)]
            if free + len(going) < 1:
                return _refused("no room beside the others", "OOM", arriving=list(self._loading))
            for model in going:
                self._unload(model)
            evicted = tuple(going)
            outcome = self._loading[name] = self._loop.create_future()
            try:
                reply = await self._loaded(request, entry)
            except BaseException:
                outcome.cancel()
                raise
            finally:
                self._loading.pop(name, None)
            outcome.set_result(reply)
            if isinstance(reply, ipc.Refused):
                return reply
        return ipc.Ready(
            self.loaded[name], TOKENIZER, entry.max_tokens, {"encode": ipc.Rows()}, self.costs.load_s, evicted
        )

    async def _loaded(self, request: ipc.EnsureReady, entry: Any) -> ipc.Reply:
        name = request.model
        took_s = self.costs.load_s * self._random.uniform(0.7, 1.6)
        self._log("load", f"{self.name} {name} {took_s:.3f} s")
        await asyncio.sleep(took_s)
        await self._thawed.wait()
        failing = self.faults.failing.get(name)
        if failing:
            return _refused("the simulation wants it to fail", failing.pop(0))
        if self.fails_next:
            self.fails_next = False
            return _refused("the simulation wants it to fail", "NETWORK")
        resolved = Catalogue.resolve_profile(entry, request.profile, name)
        model = ipc.LoadedModel(
            name, entry.revision, fingerprint(entry, resolved.load, "float32"), "float32", "toy", 1 << 20
        )
        self.loaded[name] = model
        return ipc.Ready(model, TOKENIZER, entry.max_tokens, {"encode": ipc.Rows()}, took_s)

    async def _load_lora(self, request: ipc.EnsureLora) -> ipc.Reply:
        await asyncio.sleep(self.costs.lora_s)
        if request.model not in self.loaded:
            return ipc.Refused(ModelLoading(f"{request.model} is not loaded").info())
        names = self.loras.setdefault(request.model, [])
        names[:] = [*(name for name in names if name != request.lora), request.lora][-LORAS_KEPT:]
        return ipc.Done(f"files of {request.lora}")

    async def _run(self, batch: ipc.RunBatch, writer: asyncio.StreamWriter) -> None:
        refusal: SIEError | None = None
        if batch.model not in self.loaded:
            refusal = ModelLoading(f"{batch.model} is not loaded")
        elif batch.lora and batch.lora not in self.loras.get(batch.model, ()):
            refusal = LoraLoading(f"{batch.lora} is not loaded")
        if refusal is not None:
            await self._send(writer, ipc.Refused(refusal.info(), batch.batch))
            return
        self._on_batch(self, batch)
        async with self._device:
            self.running[batch.batch] = batch, writer
            await self._send(writer, ipc.BatchStarted(batch.batch))
            tokens = len(batch.ids) // 4
            await asyncio.sleep((self.costs.batch_s + self.costs.token_s * tokens) * self._random.uniform(0.8, 1.3))
            await self._thawed.wait()
            if self.faults.poison.intersection(rows_of(batch)):
                self._loop.call_soon(self.die)
                await asyncio.Event().wait()  # the process ends here
            self.running.pop(batch.batch, None)
            if len(batch.groups) == 1:
                self._on_alone(inputs_of(batch))
        await self._send(writer, _computed(batch))


def _refused(message: str, error_class: str, **extras: list[str]) -> ipc.Refused:
    return ipc.Refused(ModelLoadFailed(message, extras={"error_class": error_class, **extras}).info())


def rows_of(batch: ipc.RunBatch) -> list[bytes]:
    """Return the token ids of each row."""
    ends = np.cumsum(np.frombuffer(batch.lengths, "<i4")) * 4
    return [batch.ids[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def inputs_of(batch: ipc.RunBatch) -> set[ModelInput]:
    """Return the inputs of a batch. The same text with another LoRA is another input, as for
    `contents.content_keys`.
    """
    return {(batch.model, batch.lora, row) for row in rows_of(batch)}


def _computed(batch: ipc.RunBatch) -> ipc.BatchDone:
    rows = rows_of(batch)
    outcomes = tuple(
        Ok({"dense": ArraySlice("<f4", (WIDTH,), 4 * WIDTH * number)}, len(row) // 4) for number, row in enumerate(rows)
    )
    block = b"".join(vector_of(np.frombuffer(row, "<i4"), batch.lora).tobytes() for row in rows)
    return ipc.BatchDone(batch.batch, outcomes, block, 1.0)
