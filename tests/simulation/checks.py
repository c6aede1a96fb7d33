"""Properties of answers, batches, waiting work and the end of a run that hold in every run, whatever goes wrong."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from simulation.adapter import Adapter, ModelInput, computed, inputs_of, lora_digest
from simulation.catalogue import ALIAS
from simulation.virtual import SCOPE

import sie_sidecar.batch
from sie_contracts.models.aliases import Alias
from sie_contracts.models.catalogue import answer_fingerprint, fingerprint
from sie_contracts.wire import ipc
from sie_sidecar.batch import Batch

if TYPE_CHECKING:
    from simulation.clients import Answered, Asked
    from simulation.world import Process, World

GRACE_S = 1.0  # a request may be open so long after its deadline
IDLE_S = 0.05  # a device may be idle so long while work is past its bound: some round trips
MAX_SKIPPED = 40  # so many later batches of the same priority may not overtake a work item
MAX_HELD = 512  # entries of any map or queue of a process
FIXED = {("LeaseLedger", "_free")}  # containers that have one size from the start
# packages whose objects are not searched: those that processes share; objects of processes and extras are
SHARED = ("sie_contracts", "sie_broker", "sie_runtime", "sie_store")
# A patient request may end in one of these refusals.
REFUSED = frozenset(
    {"QUEUE_FULL", "QUEUE_UNAVAILABLE", "NOT_READY", "SHUTTING_DOWN", "PROVISIONING", "MODEL_LOADING", "LORA_LOADING"}
)


def _is_of_process(module: str) -> bool:
    return module.startswith("sie_") and not module.startswith(SHARED)


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self.answers: Counter[str] = Counter()
        self._overtakes: dict[int, int] = defaultdict(int)
        self._skipped: dict[int, int] = defaultdict(int)
        self._idle_s: dict[str, float] = {}  # by worker and device: since when it has due work and a free device

    # answers

    def on_answer(self, index: int, request: Asked, answer: Answered, epoch: str) -> None:
        """Check an answer. `epoch`: version of the catalogue that the gateway had when the request began."""
        world = self._world
        self.answers[answer.code or str(answer.status)] += 1
        if answer.took_s > request.budget_s + GRACE_S:
            world.violate(f"request {index} was open for {answer.took_s:.2f} s, its budget was {request.budget_s} s")
        if answer.left:
            return
        if answer.status == 0:
            if not world.gateway_crashes and answer.code == "closed":
                world.violate(f"request {index} was closed without an answer, and no gateway died")
            return
        poisoned = bool(world.faults.poison) and any(world.ids(text) in world.faults.poison for text in request.texts)
        if answer.status != 200:
            # a request with several kinds of failure has one entry for each input
            mixed = (
                answer.body["errors"]
                if answer.code == "ALL_ITEMS_FAILED"
                else [answer.body.get("error", {"code": answer.code})]
            )
            for error in mixed:
                self._check_error(index, request, error, poisoned, epoch)
            return
        slots = answer.body.get("items", [])
        if len(slots) != len(request.texts):
            world.violate(f"request {index} has {len(request.texts)} inputs and {len(slots)} slots")
            return
        by_loaded = self._allowed(request, epoch)
        served = tuple(answer.headers[name] for name in ("x-sie-model", "x-sie-model-revision"))
        loaded = by_loaded.get((*served, answer.body["fingerprint"]))
        if loaded is None and any("error" not in slot for slot in slots):
            world.violate(
                f"request {index} was served by {served} {answer.body['fingerprint']}, not one of {by_loaded}"
            )
            return
        for place, (text, slot) in enumerate(zip(request.texts, slots, strict=True)):
            if "error" in slot:
                self._check_error(index, request, slot["error"], poisoned, epoch)
                continue
            ids = world.ids(text)
            if ids in world.faults.poison:
                world.violate(f"request {index} slot {place}: poison was answered")
            expected = computed(ids, request.lora, loaded or "")
            if not np.array_equal(np.array(slot["dense"]["values"], np.float32), expected):
                world.violate(f"request {index} slot {place}: this is not the vector of its text")

    def _models(self, request: Asked, epoch: str) -> list[Any]:
        """Return the entries, or None for a removed one, that a request may be answered by since this epoch."""
        source = self._world.source
        names = [request.model]
        if request.model == ALIAS:
            aliases = source.documents(ALIAS, epoch)
            names = [alias.heaviest.model for alias in aliases if isinstance(alias, Alias)]
        return [document for name in names for document in source.documents(name, epoch)]

    def _allowed(self, request: Asked, epoch: str) -> dict[tuple[str, ...], str]:
        """Return what a request may get since this epoch: (model, its revision, fingerprint of the answers) -> the
        fingerprint of the loaded model.
        """
        allowed: dict[tuple[str, ...], str] = {}
        for entry in filter(None, self._models(request, epoch)):
            loaded = fingerprint(entry, entry.load, "float32")
            allowed[entry.id, entry.revision, answer_fingerprint(loaded, lora_digest(request.lora), "")] = loaded
        return allowed

    def _check_error(self, index: int, request: Asked, error: dict[str, Any], poisoned: bool, epoch: str) -> None:
        world, code, reason = self._world, error["code"], error.get("reason", "")
        if code == "INTERNAL_ERROR":
            world.violate(f"request {index} ended in INTERNAL_ERROR")
        elif code == "INFERENCE_ERROR" and reason == "poison":
            if not poisoned and sum(adapter.deaths for adapter in world.adapters) < 3:
                world.violate(f"request {index} is called poison and is not")
        elif code == "MODEL_NOT_FOUND":
            if None not in self._models(request, epoch):
                world.violate(f"request {index} ended in {code}, and {request.model} was not removed meanwhile")
        elif request.patient and code not in REFUSED and not (code == "MODEL_LOAD_FAILED" and world.loads_fail):
            world.violate(f"request {index} had {request.budget_s} s and ended in {code} {reason}")

    def on_operation(self, action: str, model: str, answer: Answered, epoch: str) -> None:
        """Check the answer to an operator. `epoch`: as in `on_answer`."""
        is_removed = answer.code == "MODEL_NOT_FOUND" and None in self._world.source.documents(model, epoch)
        is_away = answer.status == 0 and (answer.code == "refused" or self._world.gateway_crashes)
        if not (answer.status in (200, 202) or answer.code in REFUSED or is_removed or is_away):
            self._world.violate(f"the operator's {action} of {model} ended in {answer.status} {answer.code}")

    # batches

    def on_alone(self, inputs: set[ModelInput]) -> None:
        """Clear inputs of suspicion that ran alone and did not end their adapter."""
        for adapter in self._world.adapters:
            adapter.suspects -= inputs

    def on_batch(self, adapter: Adapter, batch: ipc.RunBatch) -> None:
        """Check a batch as the adapter receives it."""
        world = self._world
        worker = next((process for process in world.workers if adapter in process.adapters), None)
        if worker is None:
            return
        settings, tokens = worker.settings, len(batch.ids) // 4
        world.log(
            "batch",
            f"{batch.batch} at {adapter.name}: {batch.model} {batch.lora} {len(batch.groups)} items, {tokens} tokens",
        )
        if len(batch.groups) > 1:
            if tokens > settings.max_batch_cost:
                world.violate(f"batch {batch.batch} has {tokens} tokens, the budget is {settings.max_batch_cost}")
            if any(device.suspects & inputs_of(batch) for device in worker.adapters):
                world.violate(f"batch {batch.batch} has an input that was in a batch that ended an adapter, and others")
        if len(batch.groups) > settings.batcher_max_batch_requests:
            world.violate(
                f"batch {batch.batch} has {len(batch.groups)} work items, the limit is "
                f"{settings.batcher_max_batch_requests}"
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check each decision of a scheduler within the block."""
        core = sie_sidecar.batch
        decide = core.next_batch

        def watched(waiting: Any, *args: Any, **more: Any) -> Any:
            decision = decide(waiting, *args, **more)
            if isinstance(decision, Batch):
                self._on_decision(waiting, decision)
            return decision

        with mock.patch.object(core, "next_batch", watched):
            yield

    def _on_decision(self, waiting: Any, batch: Any) -> None:
        """Check that interactive work overtakes bulk work at most the set number of times, and that no work starves."""
        world, left = self._world, list(waiting)
        worker = world.process_of(SCOPE.get())
        if worker is None:
            return
        most = worker.settings.bulk_max_overtakes
        first = batch.entries[0]
        if first.bulk or not any(job.bulk for job in left):
            self._overtakes[id(waiting)] = 0
        else:
            self._overtakes[id(waiting)] += 1
            if most and self._overtakes[id(waiting)] > most:
                world.violate(
                    f"{worker.scope.name}: bulk work was overtaken {self._overtakes[id(waiting)]} times, the limit is "
                    f"{most}"
                )
        newest_s = min(job.arrived_s for job in batch.entries)
        for job in left:
            if job.bulk == first.bulk and job.arrived_s < newest_s:
                self._skipped[id(job)] += 1
                if self._skipped[id(job)] == MAX_SKIPPED:
                    world.violate(f"{worker.scope.name}: a work item was passed over {MAX_SKIPPED} times")

    # waiting

    def on_jump(self) -> None:
        """Check before the clock moves that no due work waits while a device is free."""
        world, now_s = self._world, self._world.loop.now_s
        for process in world.workers:
            if process.part is None or process.scope.dead:
                continue
            for device, adapter in zip(process.part.queues.all, process.adapters, strict=False):
                self._check_idle(process, device, adapter, now_s)

    def _check_idle(self, process: Process, device: Any, adapter: Adapter, now_s: float) -> None:
        link, bound_s = device.link, process.settings.batcher_coalesce_ms / 1000
        name = f"{process.scope.name} before {adapter.name}"
        is_free = link.connected and link.is_fresh() and not adapter.frozen and not adapter.running and adapter.listens
        if is_free and device.waiting and now_s > min(job.arrived_s for job in device.waiting) + bound_s:
            since_s = self._idle_s.setdefault(name, now_s)
            if now_s > since_s + IDLE_S:
                self._idle_s[name] = math.inf  # reported once
                self._world.violate(f"{name}: work is due for more than {IDLE_S} s before an idle device")
        else:
            self._idle_s.pop(name, None)

    # the end

    def left(self) -> str:
        """Return the work that some process still holds, or an empty string."""
        world = self._world
        streams = world.network.server.streams.items()
        leftovers = [
            f"{len(stream.messages)} messages in {name}"
            for name, stream in streams
            if name.startswith("WORK_") and stream.messages
        ]
        leftovers += [
            f"{len(process.part.leases)} leases of {process.scope.name}"
            for process in world.workers
            if len(process.part.leases)
        ]
        leftovers += [
            f"{process.part.inference.slots.used} requests of {process.scope.name}"
            for process in world.gateways
            if process.part is not None and process.part.inference.slots.used
        ]
        newest = world.source.present_epoch
        leftovers += [
            f"the catalogue {process.epoch} of {process.scope.name}, which is not {newest}"
            for process in (*world.workers, *world.gateways)
            if process.epoch != newest
        ]
        return ", ".join(leftovers)

    def at_rest(self) -> None:
        """Check at rest that no process holds work, permits, collectors or growing containers."""
        for process in self._world.workers:
            worker = process.part
            self._expect(process, "held cost", worker.inventory.load(bulk=True)[0])
            if (fetching := worker._settle._fetching) is not None:
                self._expect(process, "bytes of payloads", fetching.held_bytes)
            for device in worker.queues.all:
                self._expect(process, "batches sent", device.sent)
                self._expect(process, "work items waiting", len(device.waiting))
            for hosted in worker.models:
                self._expect(process, f"work held for {hosted.name}", hosted.held)
                self._expect(process, f"work parked for {hosted.name}", hosted.parked)
        for process in self._world.gateways:
            for quantity, count in zip(
                ("tokens with a permit", "messages with a permit", "waiting bytes"),
                process.part.inference._admission.occupied(),
                strict=True,
            ):
                self._expect(process, quantity, count)
            for (_, priority), shares in process.part.inference._admission._shares.items():
                self._expect(process, f"{priority} tokens of keys", shares.total + len(shares.tokens))
            self._expect(process, "open collectors", len(process.part.inference._runner._inbox._open))
        for process in (*self._world.workers, *self._world.gateways):
            self._bounded(process)

    def _expect(self, process: Process, quantity: str, count: int) -> None:
        if count:
            self._world.violate(f"{process.scope.name}: {quantity} is {count} at rest")

    def _bounded(self, process: Process) -> None:
        """Check that no container of the objects of a process has grown with the traffic."""
        visited_ids: set[int] = set()
        open_: list[tuple[str, Any]] = [(type(process.part).__name__, process.part)]
        while open_:
            path, node = open_.pop()
            if id(node) in visited_ids or len(path) > 300:
                continue
            visited_ids.add(id(node))
            if isinstance(node, (dict, list, set)) or type(node).__name__ in ("deque", "OrderedDict", "defaultdict"):
                if len(node) > MAX_HELD:
                    self._world.violate(f"{process.scope.name}: {path} has {len(node)} entries")
                values = node.values() if hasattr(node, "values") else node
                open_ += [(f"{path}[]", value) for value in values]
            elif isinstance(node, tuple):
                open_ += [(f"{path}[]", value) for value in node]
            elif _is_of_process(type(node).__module__) and hasattr(node, "__dict__"):
                open_ += [
                    (f"{path}.{name}", value)
                    for name, value in vars(node).items()
                    if (type(node).__name__, name) not in FIXED
                ]

    def on_end(self, process: Process) -> None:
        """Check that no task of a process runs after its `serve` returned."""
        running = [task for task in self._world.loop.of(process.scope) if task is not process.task]
        if running:
            self._world.violate(
                f"{process.scope.name} has ended and still runs "
                f"{[task.get_coro().__qualname__ for task in running][:5]}"
            )
