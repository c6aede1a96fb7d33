"""The adapter of a simulation. It speaks the frames of `sie_contracts.wire.ipc`, takes time by a cost model, has memory
for a number of models, and fails in many ways.

A vector is a function of its token ids, its LoRA and the fingerprint of its model (`computed`), so the simulation knows
the right answer of every input by every entry of its model.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from fake_adapter import TOKENIZER, WIDTH, vector_of
from numpy.typing import NDArray
from simulation.virtual import SCOPE, Listening, Scope, VirtualLoop

from sie_contracts.errors import LoraLoading, ModelLoadFailed, ModelLoading, SIEError
from sie_contracts.models.catalogue import Catalogue, fingerprint
from sie_contracts.models.entries import parse_entry
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import ArraySlice, Ok

LORAS_KEPT = 2
MODEL_BYTES = 1 << 20
ModelInput = tuple[str, str, bytes]  # fingerprint of the model, LoRA, token ids
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
        is_last: bool,
        lanes: int,
        room: int,
        devices: int,
        costs: Costs,
        faults: Faults,
        seed: int,
        log: Callable[[str, str], None],
        on_batch: Callable[[Adapter, ipc.RunBatch], None],
        on_alone: Callable[[set[ModelInput]], None],
    ) -> None:
        self.path, self.name = path, name
        self.is_last = is_last  # the last device of its worker
        self.lanes, self.room, self.devices, self.costs, self.faults = lanes, room, devices, costs, faults
        self.loaded: dict[str, ipc.LoadedModel] = {}
        self.loras: dict[str, list[str]] = {}
        self.running: dict[str, tuple[ipc.RunBatch, asyncio.StreamWriter]] = {}
        # inputs that ran when the process died, and have not run alone since then at any adapter
        self.suspects: set[ModelInput] = set()
        self.deaths = 0
        self.frozen = False
        self.fails_next = False  # the load that is under way will be refused
        self.full_loads = 0  # number of next loads that will find no memory
        self.is_short = False  # memory is above the threshold: requests evict the models that they may
        self.trouble_s = -1e9  # time of the last fault in which the adapter did not answer
        self._loop, self._log, self._on_batch, self._on_alone = loop, log, on_batch, on_alone
        self._random = random.Random(seed)
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._device = asyncio.Semaphore(lanes)
        self._listening: Listening | None = None
        self._loading: dict[str, asyncio.Future[ipc.Ready | ipc.Refused]] = {}
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
        self.loaded, self.loras, self.running, self._loading, self._used_s = {}, {}, {}, {}, {}
        self._device = asyncio.Semaphore(self.lanes)
        context = contextvars.copy_context()
        context.run(SCOPE.set, self.scope)
        starting = self._loop.create_task(asyncio.start_unix_server(self._accept, self.path), context=context)
        await starting
        self.trouble_s = self._loop.now_s
        self._listening = self._loop._listening[self.path]

    def die(self, away_s: float = RESTART_S) -> None:
        """End the process at once. The inputs on the device become suspects. A spare takes over after `away_s`."""
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
        self._loop.call_later(away_s, self._restart)

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
            case ipc.Ping(may_drop):
                return ipc.Pong(1, dropped=self._relieve(may_drop, self._loop.now_s))
            case ipc.Describe():
                models = tuple(self.loaded.values())
                return ipc.Description(
                    ipc.PROTOCOL,
                    1,
                    "simulated",
                    "0",
                    self.lanes,
                    "",
                    len(models) * MODEL_BYTES,
                    self.room * MODEL_BYTES,
                    models,
                    devices=self.devices,
                )
            case ipc.Release(model):
                self._unload(model)
        return ipc.Done()

    def has_memory(self) -> None:
        self.is_short = False

    def _relieve(self, may_drop: tuple[str, ...], asked_s: float) -> tuple[str, ...]:
        """Evict the first permitted model if memory is short, unless it was used after `asked_s`, or runs a batch."""
        busy = {batch.model for batch, _ in self.running.values()}
        able = [
            name
            for name in may_drop
            if name in self.loaded and name not in busy and self._used_s.get(name, 0.0) <= asked_s
        ]
        if not self.is_short or not able:
            return ()
        self._log("evicted", f"{self.name} {able[0]}")
        self._unload(able[0])
        return (able[0],)

    def _unload(self, model: str) -> None:
        self.loaded.pop(model, None)
        self.loras.pop(model, None)

    async def _load(self, request: ipc.EnsureReady) -> ipc.Reply:
        """Load an entry of a model once at a time. Requests for it that come meanwhile get the same outcome. A load of
        another entry of the model waits for the end of the load, and replaces the model.
        """
        entry, name = parse_entry(request.entry), request.model
        resolved = Catalogue.resolve_profile(entry, request.profile, name)
        requested_model = ipc.LoadedModel(
            name, entry.revision, fingerprint(entry, resolved.load, "float32"), "float32", "toy", MODEL_BYTES
        )
        self._used_s[name] = self._loop.now_s
        ready = ipc.Ready(requested_model, TOKENIZER, entry.max_tokens, {"encode": ipc.Rows()}, self.costs.load_s)
        while self.loaded.get(name) != requested_model:
            if name in self._loading:
                reply = await asyncio.shield(self._loading[name])
                if isinstance(reply, ipc.Refused) or reply.loaded == requested_model:
                    return reply
                continue
            self._unload(name)
            if self.full_loads:
                self.full_loads -= 1
                return _refused("the simulation wants no memory for it", "OOM")
            free = self.room - len(self.loaded) - len(self._loading)
            going = [candidate for candidate in request.may_drop if candidate in self.loaded][: max(0, 1 - free)]
            if free + len(going) < 1:
                return _refused("no room beside the others", "OOM", arriving=list(self._loading))
            for model in going:
                self._unload(model)
            outcome = self._loading[name] = self._loop.create_future()
            try:
                refused = await self._refusal_of_load(name)
            except BaseException:
                outcome.cancel()
                raise
            finally:
                self._loading.pop(name, None)
            outcome.set_result(refused or ready)
            if refused is not None:
                return refused
            self.loaded[name] = requested_model
            self._used_s[name] = self._loop.now_s
            return msgspec.structs.replace(ready, dropped=tuple(going))
        return ready

    async def _refusal_of_load(self, name: str) -> ipc.Refused | None:
        """Spend the time of a load. Return its refusal, or None if it succeeds."""
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
        return None

    async def _load_lora(self, request: ipc.EnsureLora) -> ipc.Reply:
        await asyncio.sleep(self.costs.lora_s)
        if request.model not in self.loaded:
            return ipc.Refused(ModelLoading(f"{request.model} is not loaded").info())
        names = self.loras.setdefault(request.model, [])
        names[:] = [*(name for name in names if name != request.lora), request.lora][-LORAS_KEPT:]
        return ipc.Done(lora_digest(request.lora))

    async def _run(self, batch: ipc.RunBatch, writer: asyncio.StreamWriter) -> None:
        refusal: SIEError | None = None
        model = self.loaded.get(batch.model)
        if model is None or batch.fingerprint not in ("", model.fingerprint):
            refusal = ModelLoading(f"{batch.model} is not loaded")
        elif batch.lora and batch.lora not in self.loras.get(batch.model, ()):
            refusal = LoraLoading(f"{batch.lora} is not loaded")
        if model is None or refusal is not None:
            assert refusal is not None
            await self._send(writer, ipc.Refused(refusal.info(), batch.batch))
            return
        self._on_batch(self, batch)
        asked_s = self._used_s[batch.model] = self._loop.now_s
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
        done = _computed(batch, model.fingerprint)
        await self._send(writer, msgspec.structs.replace(done, dropped=self._relieve(batch.may_drop, asked_s)))


def _refused(message: str, error_class: str, **extras: list[str]) -> ipc.Refused:
    return ipc.Refused(ModelLoadFailed(message, extras={"error_class": error_class, **extras}).info())


def lora_digest(lora: str) -> str:
    return f"files of {lora}" if lora else ""


def rows_of(batch: ipc.RunBatch) -> list[bytes]:
    """Return the token ids of each row."""
    ends = np.cumsum(np.frombuffer(batch.lengths, "<i4")) * 4
    return [batch.ids[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def inputs_of(batch: ipc.RunBatch) -> set[ModelInput]:
    """Return the inputs of a batch. The same text with another LoRA, or another revision of the model, is another
    input, as for `contents.content_keys`.
    """
    return {(batch.fingerprint, batch.lora, row) for row in rows_of(batch)}


def computed(row: bytes, lora: str, fingerprint: str) -> NDArray[np.float32]:
    """Return the vector of token ids by the entry with this fingerprint: float32 [WIDTH]."""
    return vector_of(np.frombuffer(row, "<i4"), f"{lora} {fingerprint}")


def _computed(batch: ipc.RunBatch, fingerprint: str) -> ipc.BatchDone:
    rows = rows_of(batch)
    outcomes = tuple(
        Ok({"dense": ArraySlice("<f4", (WIDTH,), 4 * WIDTH * number)}, len(row) // 4) for number, row in enumerate(rows)
    )
    block = b"".join(computed(row, batch.lora, fingerprint).tobytes() for row in rows)
    return ipc.BatchDone(batch.batch, outcomes, block, 1.0)
