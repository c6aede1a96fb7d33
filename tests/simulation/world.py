"""A whole cluster under a virtual clock: the real `serve` of gateways and sidecars, the memory broker, simulated
adapters of one or two devices, a config service, a payload store, clients, an operator, faults.

    seed ─► Plan ─► World.run: start, traffic with faults, heal, settle, stop ─► Report: events, their digest, what was
    violated

Nothing sleeps and nothing depends on the machine: one seed is one run, event for event.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import hashlib
import itertools
import logging
import os
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
from fake_adapter import TOKENIZER
from inprocess import settings_of
from simulation.adapter import Adapter, Costs, Faults
from simulation.catalogue import ALIAS, MAX_TOKENS, ConfigService, alias_of
from simulation.checks import Checks
from simulation.clients import Answered, Asked, Client, Mode
from simulation.network import Connection, Network, Rates
from simulation.payloads import Payloads
from simulation.virtual import EPOCH_S, SCOPE, Scope, VirtualLoop, virtual_time
from tokenizers import Tokenizer

import sie_gateway.process
import sie_sidecar.process
from sie_broker.memory import MemoryServer
from sie_broker.memory.broker import MemoryWatch
from sie_contracts.settings import BY_NAME, Settings
from sie_contracts.wire import ipc
from sie_runtime.http import server as http
from sie_runtime.process import Stop
from sie_sidecar.prepare.fetching import PayloadFetching

MODELS = ("toy/a", "toy/b", "toy/c")
LORAS = ("org/x", "org/y", "org/z")
OPERATOR = "key-of-the-operator"
PAYLOAD_MEMORY_BYTES = 20_000  # of inputs from the payload store in a sidecar: a few of them wait for memory
REQUESTS = 96
TRIES, AGAIN_S = 4, 1.0  # tries of a request that was refused, and the pause between them
AGAIN = ("QUEUE_UNAVAILABLE", "MODEL_LOAD_FAILED", "refused", "closed")
START_S = 60.0  # until everything must be up
SETTLE_S = 60.0  # after the last client, until nothing is left
NOTICED_S = 4.0  # until a sidecar has noticed by its pings that an adapter is silent, has ended or answers again
OPERATION_S = 40.0  # until a load or unload that an operator requests at rest has come true
STOP_S = 40.0
MAX_S = 600.0  # limit for the whole run, in virtual time


@dataclass
class Plan:
    """The plan that a seed stands for. `faults` are (time, name) from the begin of the traffic."""

    gateways: int
    workers: int
    devices: int
    lanes: int
    room: int
    models: int
    requests: int
    traffic_s: float
    costs: Costs
    rates: Rates
    settings: dict[str, str]
    storage: str
    faults: list[tuple[float, str]]
    failing: dict[str, list[str]]
    poison: int

    @property
    def kinds(self) -> set[str]:
        return {kind for _, kind in self.faults}


FAULTS = (
    "adapter dies",
    "adapter dies",
    "adapter freezes",
    "device away",
    "memory short",
    "sidecar crashes",
    "gateway crashes",
    "worker cut off",
    "gateway cut off",
    "broker restarts",
    "worker leaves",
    "worker joins",
    "everybody cut off",
    "model changed",
    "model restored",
    "model removed",
    "alias moved",
    "operator loads",
    "operator unloads",
)
STORE_FAULTS = ("payloads expire", "payload store away")


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_buffer(TOKENIZER)


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed. It has only a few kinds of faults, because others would hide the effects of one."""
    draw = random.Random(seed)
    kinds = draw.sample(FAULTS, draw.choice((0, 1, 2, 2, 3, 4)))
    traffic_s = draw.choice((2.0, 4.0, 8.0))
    faults = (
        sorted((draw.uniform(0.1, traffic_s), draw.choice(kinds)) for _ in range(draw.randint(1, 6))) if kinds else []
    )
    noisy = draw.random() < 0.6
    rate = lambda most: draw.choice((0.0, most / 4, most)) if noisy else 0.0  # noqa: E731
    models = draw.randint(1, len(MODELS))
    settings = {
        "SIE_MAX_BATCH_COST": str(draw.choice((100, 300, 1000))),
        "SIE_CHUNK_COST": str(draw.choice((24, 60, 200))),
        "SIE_BATCHER_MAX_BATCH_REQUESTS": str(draw.choice((2, 4, 12))),
        "SIE_BATCHER_COALESCE_MS": str(draw.choice((0, 2, 20))),
        "SIE_BULK_MAX_OVERTAKES": str(draw.choice((1, 2, 4))),
        "SIE_RUST_PIPELINE_DEPTH": str(draw.choice((1, 2, 3))),
        "SIE_SWAP_AFTER_MS": str(draw.choice((200, 1000))),
        "SIE_ACK_WAIT_S": str(draw.choice((4, 6))),
    }
    plan = Plan(
        gateways=draw.randint(1, 2),
        workers=draw.randint(1, 3),
        devices=draw.choice((1, 1, 2)),
        lanes=draw.choice((1, 1, 2)),
        room=draw.randint(1, models),
        models=models,
        requests=REQUESTS,
        traffic_s=traffic_s,
        costs=Costs(
            draw.choice((0.002, 0.02, 0.1)),
            draw.choice((2e-6, 1e-4)),
            draw.choice((0.05, 0.6, 0.6, 5.0)),
            draw.choice((0.02, 0.5)),
        ),
        rates=Rates(rate(0.04), rate(0.04), rate(0.04), rate(0.06)),
        settings=settings,
        storage=draw.choice(("file", "memory")),
        faults=faults,
        failing={MODELS[0]: ["NETWORK"] * draw.randint(1, 2)} if draw.random() < 0.15 else {},
        poison=draw.randint(1, 2) if draw.random() < 0.25 else 0,
    )
    # where models take turns, the time between their loads must be enough for all work, even with one worker
    if plan.room < plan.models:
        plan.costs = replace(plan.costs, batch_s=min(plan.costs.batch_s, 0.02))
        if plan.costs.load_s > 1:
            plan.settings["SIE_SWAP_AFTER_MS"], plan.poison = "1000", 0  # each death costs a load
    if seed % 3 == 1 and "SIE_CACHE_BYTES" in BY_NAME:  # gateways with a small cache, and texts that occur again
        plan.settings["SIE_CACHE_BYTES"] = str(64 << 10)
    if plan.devices > 1 and draw.random() < 0.3:
        plan.faults = sorted([*plan.faults, (draw.uniform(0.1, traffic_s / 2), "device full")])
    if draw.random() < 0.3:  # large inputs are in the payload store
        plan.settings |= {"SIE_PAYLOAD_STORE_URL": "/simulated", "SIE_INLINE_PAYLOAD_BYTES": "1024"}
        plan.faults += [
            (draw.uniform(0.1, traffic_s), draw.choice(STORE_FAULTS)) for _ in range(draw.choice((0, 0, 1, 3)))
        ]
        plan.faults.sort()
    if seed % 12 == 5:  # loads that fail while their worker is away: the error comes when another worker has the work
        plan.workers, plan.devices, plan.models, plan.room = 2, 1, 1, 1
        plan.storage, plan.rates = "file", Rates()
        plan.settings.pop("SIE_PAYLOAD_STORE_URL", None)
        plan.costs, plan.poison = Costs(0.4, 1e-4, 5.0, 0.1), 0
        plan.settings |= {"SIE_ACK_WAIT_S": "4", "SIE_BATCHER_MAX_BATCH_REQUESTS": "12", "SIE_MAX_BATCH_COST": "1000"}
        plan.faults = [(draw.uniform(0.5, 2.5), "worker away")]
    return plan


@dataclass
class Process:
    """One run of `serve`. Clients reach its `server` while it listens."""

    scope: Scope
    stop: Stop
    connection: Connection
    task: asyncio.Task[int]
    settings: Settings
    part: Any = None  # the Gateway or the Worker that `serve` made
    server: _Http | None = None
    adapters: tuple[Adapter, ...] = ()  # of a worker, one for each device
    asked: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def epoch(self) -> str:
        """Return the version of the catalogue that the process has; an empty string before the first."""
        if self.part is None:
            return ""
        feed = self.part.inference._feed if not self.adapters else self.part.loading._feed
        return str(feed.catalogue.epoch)


@dataclass
class Report:
    seed: int
    events: list[str]
    violations: list[str]
    answers: dict[str, int]
    digest: str = ""


class World:
    """One run."""

    def __init__(self, seed: int, plan: Plan, loop: VirtualLoop, folder: str) -> None:
        """`folder` is an empty folder for files of the processes."""
        self.seed, self.plan, self.loop, self._folder = seed, plan, loop, folder
        self.random = random.Random(seed + 1)
        self.events: list[str] = []
        self.violations: list[str] = []
        self.gateways: list[Process] = []
        self.workers: list[Process] = []
        self.ended: list[Process] = []
        self.adapters: list[Adapter] = []
        self.healed_s = 0.0
        self.gateway_crashes = 0
        self._begin_s = loop.now_s
        self._names = itertools.count()
        self._chores: set[asyncio.Task[None]] = set()
        self._tokenizer = _tokenizer()
        self._ids: dict[str, bytes] = {}
        server = MemoryServer(clock=loop.time, wall_clock=lambda: loop.now_s + EPOCH_S)
        self.network = Network(loop, server, plan.rates, seed + 2, self.log, self.violate, self._was_well)
        self.payloads = Payloads(self.network)
        self.source = ConfigService(self._connect(Scope("config")), MODELS[: plan.models])
        self.faults = Faults({model: list(kinds) for model, kinds in plan.failing.items()})
        self.checks = Checks(self)

    # the record

    def log(self, kind: str, text: str = "") -> None:
        self.events.append(self.line(kind, text))

    def line(self, kind: str, text: str) -> str:
        return f"{self.loop.now_s - self._begin_s:10.4f} {SCOPE.get().name:>10}  {kind:<14} {text}"

    def violate(self, text: str) -> None:
        self.violations.append(f"{self.loop.now_s - self._begin_s:.4f} {text}")
        self.log("VIOLATION", text)

    # processes

    def spawn(self, scope: Scope, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(SCOPE.set, scope)
        return self.loop.create_task(work, name=name, context=context)

    def chore(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task of the world itself. An error in it is a violation."""
        task = self.loop.create_task(work, name=name)
        self._chores.add(task)
        task.add_done_callback(self._chore_done)

    def _chore_done(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.violate(f"{task.get_name()}: {error!r}")

    @property
    def loads_fail(self) -> bool:
        """Return True if the plan has loads that are refused. A worker refuses them too if one device is full and its
        other device is away for longer than the worker waits for it.
        """
        kinds = self.plan.kinds
        return bool(self.plan.failing) or "worker away" in kinds or {"device full", "device away"} <= set(kinds)

    def _scope(self, kind: str) -> Scope:
        return Scope(f"{kind}{next(self._names)}", self.random.uniform(-30, 30))

    def _settings(self, **more: str) -> Settings:
        return settings_of(
            **{
                "SIE_GATEWAY_REQUEST_TIMEOUT": "90",
                "SIE_LOAD_HOLD_S": "29",
                "SIE_MACHINE_PROFILE": "cpu",
                "SIE_HEALTH_PUBLISH_INTERVAL_MS": "1000",
                "SIE_HEARTBEAT_TIMEOUT_MS": "4000",
                "SIE_WORKER_PING_INTERVAL_MS": "500",
                "SIE_WORKER_CONFIG_POLL_INTERVAL_MS": "5000",
                "SIE_STREAM_STORAGE": self.plan.storage,
                "SIE_AUTH_MODE": "static",
                "SIE_AUTH_TOKENS": "key-one,key-two,key-three",
                "SIE_ADMIN_TOKEN": OPERATOR,
                **self.plan.settings,
                **more,
            }
        )

    def start_gateway(self) -> Process:
        scope, stop, settings = self._scope("gateway"), Stop(), self._settings()
        connection = self._connect(scope)
        serving = sie_gateway.process.serve(settings, connection, self.source, stop, host="", port=0)
        process = Process(scope, stop, connection, self.spawn(scope, serving, scope.name), settings)
        self.gateways.append(process)
        self.log("started", scope.name)
        return process

    def start_worker(self, adapters: tuple[Adapter, ...]) -> Process:
        """Start the sidecar of a machine's adapters. A later one has the same worker id and the same machine."""
        scope, stop = self._scope("worker"), Stop()
        first = adapters[0]
        settings = self._settings(SIE_WORKER_ID=f"w-{first.name}", SIE_IPC_SOCKET_PATH=first.path)
        connection = self._connect(scope)
        serving = sie_sidecar.process.serve(settings, connection, self.source, stop, host="")
        process = Process(scope, stop, connection, self.spawn(scope, serving, scope.name), settings, adapters=adapters)
        self.workers.append(process)
        self.log("started", scope.name)
        return process

    def _connect(self, scope: Scope) -> Connection:
        context = contextvars.copy_context()
        context.run(SCOPE.set, scope)
        return context.run(self.network.connect, scope)

    async def start_adapters(self) -> tuple[Adapter, ...]:
        """Start the adapters of a new machine, one for each of its devices."""
        number = len(self.adapters)
        adapters = tuple(
            Adapter(
                self.loop,
                ipc.device_socket(f"{self._folder}/{number}", device),
                f"adapter{number}" + (f".{device}" if device else ""),
                is_last=device == self.plan.devices - 1,
                lanes=self.plan.lanes,
                room=self.plan.room,
                devices=self.plan.devices,
                costs=self.plan.costs,
                faults=self.faults,
                seed=self.seed + 100 + number + 50 * device,
                log=self.log,
                on_batch=self.checks.on_batch,
                on_alone=self.checks.on_alone,
            )
            for device in range(self.plan.devices)
        )
        self.adapters += adapters
        for adapter in adapters:
            await adapter.start()
        return adapters

    def process_of(self, scope: Scope) -> Process | None:
        return next((process for process in (*self.gateways, *self.workers) if process.scope is scope), None)

    def _was_well(self, scope: Scope, since_s: float) -> bool:
        process = self.process_of(scope)
        return process is not None and any(adapter.was_well_since(since_s - NOTICED_S) for adapter in process.adapters)

    async def crash(self, process: Process) -> None:
        """Kill a process as SIGKILL does: no later action of its tasks has an effect."""
        self.log("crash", process.scope.name)
        process.scope.dead = True
        process.connection.disconnect()
        self.network.excuse(process.scope)
        _drop_files(process)
        for task in process.asked:
            task.cancel()
        if process.server is not None:
            process.server.listening = False
        for processes in (self.gateways, self.workers):
            if process in processes:
                processes.remove(process)
        await process.connection.close()
        for _ in range(1000):
            left = self.loop.of(process.scope)
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0.01)
        self.violate(f"{process.scope.name} has tasks that nobody can end: {left}")

    async def leave(self, process: Process) -> None:
        """End a process as SIGTERM does, and check how it ends."""
        self.log("leaves", process.scope.name)
        process.stop.request()
        done, _ = await asyncio.wait({process.task}, timeout=STOP_S)
        if process.scope.dead:
            return  # the process was killed while it drained
        if not done:
            self.violate(f"{process.scope.name} did not end within {STOP_S} s")
        elif process.task.cancelled() or process.task.exception() is not None or process.task.result():
            self.violate(f"{process.scope.name} ended badly: {process.task!r}")
        for processes in (self.gateways, self.workers):
            if process in processes:
                processes.remove(process)
        self.network.excuse(process.scope)
        await process.connection.close()
        self.checks.on_end(process)

    # faults

    async def fault(self, kind: str) -> None:
        self.log("fault", kind)
        draw = self.random
        match kind:
            case "adapter dies":
                draw.choice(self.adapters).die()
            case "adapter freezes":
                adapter = draw.choice(self.adapters)
                seconds, dies = draw.choice((0.3, 2.0, 9.0)), draw.random() < 0.5
                adapter.freeze()
                await asyncio.sleep(seconds)
                adapter.thaw()
                if dies:
                    adapter.die()
            case "device away":
                draw.choice(self.adapters).die(draw.choice((2.0, 15.0)))
            case "device full":  # the first device takes over what cannot be loaded there
                draw.choice([adapter for adapter in self.adapters if adapter.is_last]).full_loads = 1
            case "memory short":
                adapter = draw.choice(self.adapters)
                adapter.is_short = True
                self.loop.call_later(draw.choice((0.5, 3.0)), adapter.has_memory)
            case "sidecar crashes" if self.workers:
                worker = draw.choice(self.workers)
                await self.crash(worker)
                await asyncio.sleep(draw.uniform(0.1, 3.0))
                self.start_worker(worker.adapters)
            case "gateway crashes" if self.gateways:
                self.gateway_crashes += 1
                await self.crash(draw.choice(self.gateways))
                await asyncio.sleep(draw.uniform(0.1, 1.0))
                self.start_gateway()
            case "worker cut off" if self.workers:
                await self._cut_off([draw.choice(self.workers).connection], draw.choice((0.05, 1.0, 7.0)))
            case "worker away" if self.workers:
                loading = [worker for worker in self.workers if worker.adapters[0].loads]
                away = draw.choice(loading or self.workers)
                away.adapters[0].fails_next = True
                await self._cut_off([away.connection], 9.0)
            case "gateway cut off" if self.gateways:
                await self._cut_off([draw.choice(self.gateways).connection], draw.choice((0.05, 1.0, 7.0)))
            case "everybody cut off":
                await self._cut_off(
                    [process.connection for process in (*self.gateways, *self.workers)], draw.choice((0.05, 1.0, 4.0))
                )
            case "broker restarts":
                await self._broker_restarts(draw.choice((0.2, 2.0)))
            case "worker leaves" if (
                len(staying := [worker for worker in self.workers if not worker.stop.requested]) > 1
            ):
                worker = draw.choice(staying)  # a worker that leaves twice would come back as two at one adapter
                await self.leave(worker)
                await asyncio.sleep(1.0)
                if not worker.scope.dead:  # otherwise the fault that killed the worker starts the next one
                    self.start_worker(worker.adapters)
            case "operator loads" | "operator unloads" if self.gateways:
                action = kind.removeprefix("operator ").removesuffix("s")
                model, gateway = draw.choice(MODELS[: self.plan.models]), draw.choice(self.gateways)
                epoch = gateway.epoch
                answer = await self._operate(gateway, model, action)
                self.checks.on_operation(action, model, answer, epoch)
            case "payloads expire":
                self.log("expired", f"{self.payloads.expire()} payloads")
            case "payload store away":
                self.payloads.is_away = True
                await asyncio.sleep(draw.choice((0.3, 4.0)))
                self.payloads.is_away = False
            case "model changed" | "model restored" | "model removed" | "alias moved":
                await self._catalogue_changes(kind)
            case "worker joins" if len(self.workers) < 4:
                self.start_worker(await self.start_adapters())

    async def _catalogue_changes(self, kind: str) -> None:
        draw, source = self.random, self.source
        model = draw.choice(source.models())
        match kind:
            case "model changed":
                await source.write(model, source.next_version(model))
            case "model restored":
                earlier = [document for document in source.documents(model, "") if document is not None]
                await source.write(model, draw.choice(earlier))
            case "model removed" if len(source.models()) > 1:  # a catalogue without models is not accepted
                (entry,) = source.documents(model, source.present_epoch)
                await source.write(model, None)
                await asyncio.sleep(draw.choice((0.01, 0.5, 4.0)))
                await source.write(model, draw.choice((entry, source.next_version(model))))
            case "alias moved":
                await source.write(ALIAS, alias_of(model))

    async def _operate(self, gateway: Process, model: str, action: str) -> Answered:
        headers = {"authorization": f"Bearer {OPERATOR}"}
        answer = await Client(self, gateway, f"/v1/models/{model}/{action}", headers, {}).run()
        self.log("operator", f"{action} {model} {answer.status} {answer.code}")
        return answer

    async def _operator_has_the_last_word(self) -> None:
        """Load and unload a model while no work needs any: a worker must load it, and those that have it unload it. A
        worker that should have it too, but has not loaded it yet, gets no message, and may load it later.
        """
        model = self.random.choice(self.source.models())

        def is_settled() -> bool:
            """Return True if no load runs, which may evict the model, and each worker has noticed the last end of its
            adapters: an idle worker notices it at the next ping, and until then counts the lost models as loaded.
            """
            return not any(
                hosted.state == "loading" for worker in self.workers for hosted in worker.part.models
            ) and all(
                adapter.was_well_since(self.loop.now_s - NOTICED_S)
                for worker in self.workers
                for adapter in worker.adapters
            )

        await self._until(is_settled, OPERATION_S, "the end of all loads and the return of all adapters")
        for adapter in self.adapters:
            adapter.full_loads = 0  # a fault that met no load: nobody repeats an operator's load that fails

        def having() -> list[Process]:
            return [worker for worker in self.workers if worker.part.models.is_open(model)]

        await self._obeyed(model, "load", having)
        before = having()
        await self._obeyed(model, "unload", lambda: not any(worker in before for worker in having()))

    async def _obeyed(self, model: str, action: str, condition: Callable[[], Any]) -> None:
        answer = await self._operate(self.gateways[0], model, action)
        if answer.status not in (200, 202):
            self.violate(f"the operator's {action} of {model} ended in {answer.status} {answer.code}")
        await asyncio.sleep(1.0)  # messages of one connection overtake each other here, unlike in NATS
        await self._until(condition, OPERATION_S, f"the operator's {action} of {model}")

    async def _cut_off(self, connections: list[Connection], seconds: float) -> None:
        for connection in connections:
            connection.disconnect()
        await asyncio.sleep(seconds)
        for connection in connections:
            connection.reconnect()

    async def _broker_restarts(self, seconds: float) -> None:
        """Restart the broker: the state in memory is lost, the state in files is not."""
        connections = [process.connection for process in (*self.gateways, *self.workers)]
        for connection in connections:
            connection.disconnect()
        for name, stream in list(self.network.server.streams.items()):
            if stream.spec.storage == "memory":
                self.network.server.lose_stream(name)
        await asyncio.sleep(seconds)
        for connection in connections:
            connection.reconnect()

    def heal(self) -> None:
        self.log("healed")
        self.healed_s = self.loop.now_s
        self.plan.rates.heal()
        for adapter in self.adapters:
            adapter.has_memory()
            if adapter.frozen:
                adapter.thaw()
        for process in (*self.gateways, *self.workers):
            process.connection.reconnect()

    # the run

    async def run(self) -> None:
        for _ in range(self.plan.workers):
            self.start_worker(await self.start_adapters())
        for _ in range(self.plan.gateways):
            self.start_gateway()
        await self._until(self._is_up, START_S, "the cluster is up")
        start_s = self.loop.now_s
        clients = [
            self.loop.create_task(self._client(index, request), name=f"client {index}")
            for index, request in enumerate(self._traffic())
        ]
        for due_s, kind in self.plan.faults:
            await asyncio.sleep(max(0.0, start_s + due_s - self.loop.now_s))
            self.chore(self.fault(kind), f"fault: {kind}")
        await asyncio.sleep(max(0.0, start_s + self.plan.traffic_s - self.loop.now_s))
        while self._chores:
            await asyncio.wait(self._chores)
        self.heal()
        await asyncio.gather(*clients)
        await self._until(
            lambda: not self.checks.left(), SETTLE_S, lambda: f"nothing is left, but {self.checks.left()}"
        )
        self.checks.at_rest()
        if self.gateways and self.workers and not self.loads_fail:
            await self._operator_has_the_last_word()
        for process in [*self.workers, *self.gateways]:
            await self.leave(process)
        for adapter in self.adapters:
            if adapter.listens:
                adapter.die()
        self.log("end")

    def _is_up(self) -> bool:
        listening = all(process.server is not None and process.server.listening for process in self.gateways)
        serving = all(process.part is not None and process.part.source is not None for process in self.workers)
        return (
            listening
            and serving
            and all(len(gateway.part.fleet.healthy()) >= len(self.workers) for gateway in self.gateways)
        )

    async def _until(self, condition: Callable[[], Any], seconds: float, event: str | Callable[[], str]) -> None:
        end_s = self.loop.now_s + seconds
        while not condition():
            if self.loop.now_s >= end_s:
                self.violate(f"not within {seconds} s: {event if isinstance(event, str) else event()}")
                return
            await asyncio.sleep(0.25)

    async def until_bound(self, gateway: Process) -> None:
        """Wait until a gateway has its port, or has died."""
        while not gateway.scope.dead and gateway.server is None:  # noqa: ASYNC110  time costs nothing here
            await asyncio.sleep(0.05)

    def _traffic(self) -> list[Asked]:
        """Return the requests of the clients and their times, bursts included."""
        draw, plan = self.random, self.plan
        requests = []
        times = [
            draw.choice((draw.uniform(0, plan.traffic_s), round(draw.uniform(0, plan.traffic_s))))
            for _ in range(plan.requests)
        ]
        poisoned = set(draw.sample(range(plan.requests), plan.poison))
        letters = "abcdefghijklmnopqrstuvwxyz "
        for index, at_s in enumerate(sorted(times)):
            count = draw.choice((1, 1, 1, 2, 5, 20))
            lengths = [draw.choice((6, 14, 40, 100, 250 if draw.random() < 0.2 else 20)) for _ in range(count)]
            texts = [
                f"{index}.{place} " + "".join(draw.choices(letters, k=length)) for place, length in enumerate(lengths)
            ]
            if "SIE_PAYLOAD_STORE_URL" in plan.settings:
                large = lambda: "".join(draw.choices(letters, k=draw.choice((1100, 3000, 9000))))  # noqa: E731
                texts = [text + large() if draw.random() < 0.2 else text for text in texts]
            if "SIE_CACHE_BYTES" in plan.settings:
                before = [text for earlier in requests[-20:] for text in earlier.texts]
                usual = [text for text in before if self.ids(text) not in self.faults.poison]
                texts = [draw.choice(usual) if usual and draw.random() < 0.5 else text for text in texts]
            model = MODELS[min(int(draw.expovariate(1.0)), plan.models - 1)]
            if "alias moved" in plan.kinds and draw.random() < 0.3:
                model = ALIAS
            lora = draw.choice(LORAS) if model == MODELS[0] and draw.random() < 0.3 else ""
            patient = draw.random() < 0.7
            budget_s = plan.traffic_s + 45.0 if patient else draw.choice((0.3, 1.5, 5.0))
            mode: Mode = "bulk" if draw.random() < 0.35 else "interactive"
            leaves_s = draw.uniform(0.01, 2.0) if draw.random() < 0.06 else None
            if index in poisoned:  # a text that occurs again would end adapters again with another model or LoRA
                place = draw.randrange(count)
                texts[place] = f"{index}.{place} poison"
                self.faults.poison.add(self.ids(texts[place]))
            requests.append(
                Asked(
                    at_s,
                    texts,
                    model,
                    lora,
                    mode,
                    budget_s,
                    patient,
                    leaves_s,
                    f"key-{draw.choice(('one', 'two', 'three'))}",
                )
            )
        return requests

    def ids(self, text: str) -> bytes:
        """Return the truncated token ids that the model reads, as the wire has them."""
        if text not in self._ids:
            token_ids = self._tokenizer.encode(text).ids
            if len(token_ids) > MAX_TOKENS:
                token_ids = [*token_ids[: MAX_TOKENS - 1], token_ids[-1]]
            self._ids[text] = np.array(token_ids, "<i4").tobytes()
        return self._ids[text]

    async def _client(self, index: int, request: Asked) -> None:
        """Send a request. A patient client sends it again a few times after a temporary failure."""
        await asyncio.sleep(request.at_s)
        for _ in range(TRIES):
            gateway = self.random.choice(self.gateways) if self.gateways else None
            self.log(
                "ask",
                f"{index} {len(request.texts)} x {request.model} {request.lora} {request.mode} {request.budget_s} s",
            )
            epoch = gateway.epoch if gateway is not None else ""
            answer = await Client.for_request(self, request, gateway).run()
            self.log("answer", f"{index} {answer.status} {answer.code}")
            self.checks.on_answer(index, request, answer, epoch)
            if not request.patient or answer.left or answer.code not in AGAIN:
                return
            await asyncio.sleep(AGAIN_S)


def _drop_files(process: Process) -> None:
    """Close the files of a killed process as they are, as the kernel does."""
    ledger = getattr(process.part, "_ledger", None)
    if ledger is not None:
        process.part._ledger = process.part.leases._ledger = None
        ledger._map.close()
        os.close(ledger._file)


class _Http:
    """A stand-in for the HTTP server. Clients of the simulation call its application directly."""

    def __init__(self, world: World, app: Any) -> None:
        self.app = app
        self.listening = False
        self.port = 1
        self._process = world.process_of(SCOPE.get())

    async def start(self) -> None:
        self.listening = True

    def leave(self) -> None:
        """Do nothing: clients of the simulation keep no connection."""

    async def stop(self, within_s: float = http.STOP_S) -> None:
        """Refuse new requests, and cancel those that still run after `within_s`."""
        self.listening = False
        running = [task for task in self._process.asked if not task.done()] if self._process is not None else []
        if running:
            await asyncio.wait(running, timeout=within_s)
            for task in running:
                task.cancel()


class _Errors(logging.Handler):
    """A log handler that reports each logged exception as a violation, because no code handled it."""

    def __init__(self, world: World, log: Callable[[str], None] | None) -> None:
        super().__init__(logging.INFO if log else logging.ERROR)
        self._world, self._told = world, log

    def emit(self, record: logging.LogRecord) -> None:
        if self._told is not None:
            self._told(self._world.line(f"log {record.levelname}", record.getMessage()))
        if record.exc_info and record.levelno >= logging.ERROR and not SCOPE.get().dead:
            self._world.violate(
                f"{SCOPE.get().name} logged an exception: {record.getMessage()}: {record.exc_info[1]!r}"
            )


@contextlib.contextmanager
def _in_place(world: World, sink: Callable[[str], None] | None) -> Iterator[None]:
    """Replace HTTP servers, logs and other parts of the processes by those of the world."""
    numbers = itertools.count(1)

    def number(watch: Any) -> int:
        return int(watch.__dict__.setdefault("_order", next(numbers)))

    def made(kind: Any) -> Callable[..., Any]:
        def make(*args: Any, **more: Any) -> Any:
            part = kind(*args, **more)
            process = world.process_of(SCOPE.get())
            if process is not None:
                process.part = part
            return part

        return make

    def http(app: Any, *_: Any, **__: Any) -> _Http:
        server, process = _Http(world, app), world.process_of(SCOPE.get())
        if process is not None and process.server is None:
            process.server = server
        return server

    def stored(url: str | None) -> Payloads | None:
        return world.payloads if url else None

    handler = _Errors(world, sink)
    logger = logging.getLogger("sie")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    logger.propagate = False
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (sie_gateway.process, "HttpServer", http),
            (sie_gateway.process, "open_store", stored),
            (sie_sidecar.process, "open_store", stored),
            (PayloadFetching.__init__, "__defaults__", (PAYLOAD_MEMORY_BYTES,)),
            (sie_gateway.process, "Gateway", made(sie_gateway.process.Gateway)),
            (sie_sidecar.process, "HttpServer", http),
            (sie_sidecar.process, "Worker", made(sie_sidecar.process.Worker)),
            (MemoryWatch, "__hash__", number),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # threads of the tokenizers' Rust code would be real threads
        stack.enter_context(mock.patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"}))
        stack.enter_context(world.checks.watching())
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates


async def _cancelled(tasks: list[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def simulate(seed: int, *, log: Callable[[str], None] | None = None) -> Report:
    """Run one seed."""
    gc.disable()
    loop = VirtualLoop()
    try:
        with tempfile.TemporaryDirectory() as folder, virtual_time(loop, seed):
            world = World(seed, plan_of(seed), loop, folder)
            loop.on_jump = world.checks.on_jump
            with _in_place(world, log):
                try:
                    loop.run_until_complete(asyncio.wait_for(world.run(), MAX_S))
                except Exception as error:  # noqa: BLE001  the report has the error
                    world.violate(f"the run ended in {error!r}")
                gc.collect(0)  # asyncio reports errors that were never retrieved when they are collected
                for context in loop.failures:
                    scope = getattr(context.get("future"), "scope", None)
                    if scope is None or not scope.dead:  # a dead process cannot retrieve its errors
                        world.violate(f"{context.get('message')}: {context.get('exception')!r}")
                left = [task for task in loop.tasks if not task.done()]
                if left and not world.violations:
                    world.violate(f"tasks are left: {left[:5]}")
                loop.run_until_complete(_cancelled(left))
    finally:
        loop.close()
        gc.enable()
    lines = "\n".join(world.events).encode()
    return Report(seed, world.events, world.violations, world.checks.answers, hashlib.sha256(lines).hexdigest())
