"""Engine of one process: device, loader, resident models and device threads. The engine has no sockets, since the
server and the benchmark both use it. `BatchRun` runs one batch, from its bytes to its outcomes.

    RunBatch ──► Items ──► fit? ──► pack ──► forward ──► heads ──► answers, per work item ──► BatchDone

Each input has exactly one outcome, at its own position: an invalid input gets a typed error, and the other inputs get
results. If memory runs out, cached memory is freed, then models are evicted, then the batch is split into halves of
equal cost until each part fits. An input that does not fit alone gets RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from sie_adapter.engine import device as devices
from sie_adapter.engine import engines
from sie_adapter.engine.device import to_device
from sie_adapter.engine.device_threads import DeviceThreads, set_torch_threads
from sie_adapter.engine.instrumentation import Instrumentation
from sie_adapter.engine.item_results import ClientVectors, ItemResult, ItemResults, batch_reply, check_groups
from sie_adapter.engine.late_chunks import LateChunks, results_of
from sie_adapter.engine.raw import extract_options, run_raw
from sie_adapter.generation.reading import Readings
from sie_adapter.heads import Row, States
from sie_adapter.loading.loading import Loader, classed
from sie_adapter.memory import oom
from sie_adapter.memory.batch_limits import RECORDED_TOKENS, DeviceLimits, PassRecords, limits_key, split_off
from sie_adapter.memory.device_errors import GraphLost, is_device_fatal, is_out_of_memory
from sie_adapter.memory.oom import OomCounters, OomRecovery, Relief, Remedy, on_new_thread
from sie_adapter.memory.residency import DeviceMemory, Permission, ResidentModels
from sie_adapter.packed.packing import Int64, Items, MalformedBatch, images, items, sounds
from sie_adapter.packed.pass_graphs import drop_graphs
from sie_adapter.packed.tower_outputs import SHARE, TowerOutputs
from sie_contracts.errors import InferenceFailed, InternalFailure, InvalidInput, LoraLoadFailed, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.load_errors import lora_failed, lora_of_entry, lora_rejected
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc
from sie_contracts.wire.ipc import BatchDone, Group, Layout, Refused, Reply, RunBatch
from sie_store.configured import weight_sources
from sie_store.weights.sources import named_loras

if TYPE_CHECKING:
    from sie_adapter.families.text_encoder import PackedModel

_logger = logging.getLogger("sie.adapter")
DEVICE_LOST_STATUS = 70  # exit status of the process after the device was lost
# Seconds after which a waiting thread makes the running thread release Python's GIL (`sys.setswitchinterval`). The
# default of 5 ms slows two device threads by 2 to 4 %.
_SWITCH_INTERVAL_S = 0.0005
# Largest number of tokens of a batch that torch computes on one thread. Two threads are not faster for so few tokens,
# and wait for each other while another process uses one of the cores (bench/results/engine.md).
_TOKENS_OF_ONE_THREAD = 32
_KEPT_PRODUCTS = "64"  # number of matrix sizes for which oneDNN and torch cache data (see `prepare_process`)


def _end_process() -> None:
    os._exit(DEVICE_LOST_STATUS)


class WorkerDevices(NamedTuple):
    """Number of the worker's devices, and name of this process's device. Each device has its own adapter process."""

    number: int
    name: str


class AdapterEngine:
    """One device with its models and device threads. Owns the device threads until `stop`. Raises SettingError for a
    device that is absent.

    `on_device_lost` is called when the device context is lost, on the thread in which the error occurred. The default
    ends the process, so that the supervisor restarts it.
    """

    def __init__(
        self,
        settings: Settings,
        on_device_lost: Callable[[], None] = _end_process,
        worker_devices: WorkerDevices | None = None,
    ) -> None:
        self.device = devices.resolve_device(settings.device)
        self._on_device_lost = on_device_lost
        self._settings = settings
        self._worker_devices = worker_devices or WorkerDevices(1, str(self.device))
        self._label = devices.label(self.device) or self.device.type
        self.outputs = TowerOutputs(devices.capacity_bytes(self.device) // SHARE)
        self.loader = Loader(self.device, weight_sources(settings), settings, self.outputs)
        self.oom_counters = OomCounters()
        self._use = devices.UtilisationProbe(self.device)
        memory = DeviceMemory(
            functools.partial(devices.memory, self.device),
            functools.partial(devices.give_memory_back, self.device),
            settings.memory_pressure_threshold_percent,
            self._shed,
        )
        self.residency = ResidentModels(
            self._load,
            memory,
            needed_bytes=self.loader.needed_bytes,
            warm_up=self._warm_up,
            ended=self.loader.ended,
            count=self.oom_counters.count,
        )
        self._written, self._writing = threading.Condition(), 0
        self._preprocessing = threading.BoundedSemaphore(settings.preprocessor_workers)
        self.batch_limits = DeviceLimits.for_machine(settings)
        self._pass_records = PassRecords.for_socket(settings) if self.device.type == "cpu" else None
        cores = devices.usable_cores()
        # A GPU gets one device thread, because a second thread would only compete for the GPU. A CPU gets one per core.
        # Texts/s on two cores in bfloat16 (bench/engine.py), with mixed lengths and with 8 tokens: two threads 324 and
        # 3,623; two processes 333 and 3,608; one thread that uses both cores 292 and 2,567.
        self.device_threads = DeviceThreads(cores if self.device.type == "cpu" else 1, self.execute)
        self.readings = Readings(self.device, memory.fits, torch_threads=max(1, cores // 2), shed=self._shed)
        self._instrumentation: Instrumentation | None = None
        if settings.instrumentation:
            self._instrumentation = Instrumentation(lambda: devices.memory(self.device).used_bytes)
            self.device_threads.listeners.append(self._instrumentation.ran)
        self._log_choices(settings)

    def _shed(self) -> bool:
        """Drop cached outputs of image encoders, and CUDA graphs, to free memory. Return whether any was dropped."""
        return any([self.outputs.clear(), drop_graphs()])

    def _load(self, resolved: Resolved) -> Any:
        # a new thread loads the model, because oneDNN may fail for new shapes on a thread that once ran out of memory
        with self._ending_if_lost(), classed(resolved.entry), devices.weights_apart():
            return on_new_thread(self.loader.load, resolved)

    def _warm_up(self, resolved: Resolved, weights: Any) -> int:
        """Run one tiny pass, so that no request waits for the initialisation of libraries. Return the peak bytes of the
        pass beyond the weights. Raises ModelLoadFailed.
        """

        def once() -> None:
            with torch.inference_mode():
                weights.forward(weights.pack(Items(np.array([2]), np.zeros(2, np.int32)), np.arange(1)))

        if not hasattr(weights, "pack"):
            return 0
        with self._ending_if_lost(), classed(resolved.entry):
            return devices.peak_of(self.device, functools.partial(on_new_thread, once))

    @contextlib.contextmanager
    def _ending_if_lost(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._end_if_lost(error)
            raise

    def _end_if_lost(self, error: Exception) -> None:
        """End the process if the CUDA context or a graph is lost: later batches would fail or be wrong."""
        if is_device_fatal(error) or isinstance(error, GraphLost):
            _logger.critical("the device or a graph is lost, so the process ends: %s", error)
            self._on_device_lost()

    def prepare(
        self, message: RunBatch, permission: Permission, start: Callable[[], None]
    ) -> Callable[[RunBatch], Reply] | None:
        """Tokenise the texts of a batch outside the device threads, if the model has a method `prepare`. At most
        SIE_PREPROCESSOR_WORKERS calls run at once. Return the function that a device thread calls to run the batch, or
        None if nothing was prepared. Never raises: after an error, the device thread tokenises again and replies.

        `start` is called before the first text is processed, and sends BatchStarted: if a text crashes this process,
        the sidecar knows which batch may be the cause.
        """
        try:
            with self.residency.use(message.model, message.fingerprint) as resident:
                prepare: Any = getattr(resident.weights, "prepare", None)
                if prepare is None or message.operation != "extract":
                    return None
                with self._preprocessing:
                    start()
                    preparation = prepare(message.texts, extract_options(message))
                    return functools.partial(self.execute, preparation=preparation, permission=permission)
        except SIEError:
            return None
        except Exception as error:  # noqa: BLE001  model code may raise anything; the device thread logs its own error
            _logger.debug("a batch of the model %s could not be prepared: %s", message.model, type(error).__name__)
            return None

    def writes(self, message: RunBatch) -> bool:
        """Return whether a batch of the operation extract generates text. The caller then runs `execute` outside the
        device threads.
        """
        try:
            with self.residency.use(message.model, message.fingerprint) as resident:
                rows = resident.weights.rows.get(message.operation)
                return rows is not None and rows.writes
        except SIEError:
            return False

    def execute(
        self,
        message: RunBatch,
        preparation: Any = None,
        permission: Permission | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """Run a batch on the calling thread. Return BatchDone or Refused, with the models that were evicted for the
        batch. Evict models if memory is above the threshold after the batch. Never raises. The caller must be in
        inference mode; for a batch that generates text, the thread of `Readings` sets the mode instead.

        `preparation`: the result of the family's `prepare`. `permission`: the models that this batch may evict,
        determined when the batch arrived. `is_gone`: returns True if no client waits for the reply. A model that
        generates text calls `is_gone` after each token, and stops if it returns True.
        """
        permission = permission or self.residency.permission(message.may_drop)
        make_room = functools.partial(self.residency.make_room, permission)
        reply: BatchDone | Refused
        try:
            with self.residency.use(message.model, message.fingerprint) as resident:
                # a PackedModel, or a model with the methods encode, score or extract (`raw.VerbModel`)
                weights: Any = resident.weights
                count_remedy = functools.partial(self.oom_counters.count, message.model)
                rows = weights.rows.get(message.operation)
                if rows is not None and rows.writes:
                    weights = weights.reading(self.readings.read, is_gone)
                if rows is not None and rows.layout == "raw":
                    set_torch_threads()
                    reply = run_raw(weights, message, self.device, make_room, count_remedy, preparation)
                else:
                    key = limits_key(resident.fingerprint, weights.precision, self._label)
                    reply = BatchRun(
                        weights,
                        self.device,
                        message,
                        make_room,
                        self.batch_limits,
                        key,
                        count_remedy,
                        self._pass_records,
                    ).run()
        except SIEError as error:
            reply = Refused(error.info(), message.batch)
        except Exception as error:
            self._end_if_lost(error)
            _logger.exception("a batch of the model %s failed", message.model)
            reply = Refused(InternalFailure("the batch failed, see the log of the adapter").info(), message.batch)
        try:
            self.residency.relieve(permission)
        except Exception as error:
            self._end_if_lost(error)
            _logger.exception("memory could not be freed after a batch of the model %s", message.model)
        return msgspec.structs.replace(reply, dropped=permission.dropped) if permission.dropped else reply

    def ensure_lora(self, model: str, lora: str) -> str:
        """Load a LoRA for a loaded model. Return the digest of its files. Raises LoraLoadFailed, ModelLoading."""
        with self.residency.use(model) as resident:
            loras = getattr(resident.weights, "loras", None)
            if loras is None:
                raise lora_rejected(lora, f"{model} supports no LoRA")
            try:
                located = self.loader.sources.locate_lora(lora, resident.resolved.entry, self._settings.models_dir)
                digest = str(on_new_thread(loras.load, lora, located.folder, self._settings.max_loras_per_model))
                loras.leases = {
                    name: lease
                    for name, lease in {**loras.leases, lora: located.lease}.items()
                    if name in loras.names()
                }
                return digest
            except LoraLoadFailed as error:
                raise lora_of_entry(error) if lora in named_loras(resident.resolved.entry) else error from None
            except SIEError:
                raise
            except Exception as error:
                self._end_if_lost(error)
                # the log omits the exception's message, which may contain the name that a client gave to the LoRA
                trace = "".join(traceback.format_tb(error.__traceback__))
                _logger.error("loading a LoRA of %s failed: %s\n%s", model, type(error).__qualname__, trace)
                is_short = is_out_of_memory(error)
                cause = "the device has too little memory" if is_short else f"{type(error).__name__}: {error}"
                raise lora_failed(lora, cause) from error

    def _log_choices(self, settings: Settings) -> None:
        chosen = self.loader.compute(None)
        names = (str(self.device), devices.label(self.device))
        level = logging.INFO if settings.attention_backend in ("auto", chosen.backend) else logging.WARNING
        _logger.log(
            level,
            "device %s, default precision %s, requested %s%s, attention %s (%s), device threads %d",
            " ".join(filter(None, names)),
            chosen.precision,
            chosen.requested,
            chosen.precision_reason and f" ({chosen.precision_reason})",
            chosen.backend,
            chosen.reason,
            len(self.device_threads),
        )

    def describe(self) -> ipc.Description:
        memory = devices.memory(self.device)
        return ipc.Description(
            protocol=ipc.PROTOCOL,
            pid=os.getpid(),
            device=self._worker_devices.name,
            version=importlib.metadata.version("sie-cluster"),
            lanes=len(self.device_threads),
            gpu=devices.label(self.device),
            memory_used_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
            models=self.residency.describe(),
            utilization_percent=self._use.percent(),
            threshold_percent=self._settings.memory_pressure_threshold_percent,
            shortages=self.oom_counters.all(),
            towers=self.outputs.use(),
            batches=self._instrumentation.batches() if self._instrumentation else None,
            devices=self._worker_devices.number,
        )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Context manager for a batch that generates text. `stop` waits until every such batch has ended."""
        with self._written:
            self._writing += 1
        try:
            yield
        finally:
            with self._written:
                self._writing -= 1
                self._written.notify_all()

    def stop(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        ended = self.device_threads.stop(timeout_s)
        ended = self.readings.stop(max(0.0, end_s - time.monotonic())) and ended
        with self._written:
            ended = self._written.wait_for(lambda: not self._writing, max(0.0, end_s - time.monotonic())) and ended
        self.batch_limits.save()
        return ended


def prepare_process() -> None:
    """Configure the whole process. torch uses one thread per operation, because the device threads run in parallel. The
    C allocator keeps freed memory, the caches of oneDNN are small, and telemetry is off.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    devices.keep_freed_memory()
    # By default, oneDNN stores data for 1,024 sizes of matrix products, and so does torch in each thread. The data of a
    # size takes 0.5 MB (bench/results/memory.md).
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.putenv(name, _KEPT_PRODUCTS)
    # onnxruntime (which gliner imports) and openvino store and send telemetry as soon as they are imported
    os.putenv("ORT_DISABLE_TELEMETRY", "1")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


class BatchRun:
    """Forward passes and results of one batch, on the thread that calls `run`, under inference mode."""

    def __init__(
        self,
        model: PackedModel,
        device: torch.device,
        message: RunBatch,
        make_room: Callable[[], Relief | None] = lambda: None,
        batch_limits: DeviceLimits | None = None,
        key: str = "",
        count_remedy: Callable[[Remedy], None] = lambda remedy: None,
        pass_records: PassRecords | None = None,
    ) -> None:
        """Check the batch. Raises InvalidInput or InternalFailure if the batch cannot run.

        `batch_limits`: the measured limits for the tokens of a pass. `key`: the key of this model in `batch_limits`.
        `make_room`: frees memory after memory ran out, and returns how (a `Relief`), or None if nothing can be freed.
        `count_remedy`: called with the name of a counter to increment (`OomCounters`). `pass_records`: keeps a record
        on disk of each running pass. If a pass kills this process, the record lowers the limit for the next process.
        """
        if message.operation not in model.rows:
            raise InvalidInput(f"{message.model} does not {message.operation}", reason="unsupported_task")
        try:
            rows = model.rows[message.operation]
            image_files, sound_files = None, None
            if message.images:
                image_files = images(message.images, message.pixels, rows.images, message.image_keys)
            if message.sounds or message.features:
                sound_files = sounds(message.sounds, message.features, rows.sounds)
            self._items = items(message.lengths, message.ids, message.types, image_files, sound_files)
            chunked = [group for group in message.groups if group.chunked]
            self._late = LateChunks(message.groups, self._items.lengths) if chunked else None
        except MalformedBatch as error:
            raise InternalFailure(str(error), reason="malformed_batch") from error
        count = len(self._items.lengths)
        check_groups(message.groups, count)
        self._model = model
        self._device = device
        self._message = message
        self._recovery = OomRecovery(device, make_room, count_remedy)
        self._batch_limits = batch_limits
        self._key = key
        self._pass_records = pass_records
        self._layout: Layout = rows.layout
        self._errors: dict[int, SIEError] = {}
        self._engine = model.engine_choice.engine
        if message.lora or engines.rules()[self._engine].runs is not None:
            self._engine = engines.of_batch(model.engine_choice, message)
        self._padding = 0
        self._queries = np.zeros(count, bool)
        self._masks: dict[str, np.ndarray] = {}
        self._rows: dict[str, list[Row]] = {}
        self._client_vectors: dict[int, np.ndarray] = {}
        if message.given:
            self._client_vectors = _client_vectors(message, self._items, rows.vectors)
        for group in message.groups:
            self._plan(group, count)

    def _plan(self, group: Group, count: int) -> None:
        self._queries[group.start : group.stop] = group.options.is_query
        if self._layout == "sides" and group.stop > group.start:
            self._queries[group.start] = True
        for head in self._model.heads_for(self._message.operation, group.options):
            if head not in self._model.heads:
                error = InvalidInput(
                    f"the model lacks a requested output; its outputs are {', '.join(self._model.heads)}",
                    reason="unsupported_output",
                )
                self._errors.update(dict.fromkeys(range(group.start, group.stop), error))
                continue
            mask = self._masks.setdefault(head, np.zeros(count, bool))
            mask[group.start : group.stop] = True
            self._rows.setdefault(head, [None] * count)
            if self._client_vectors and head != "multivector":
                error = InvalidInput(
                    f"{head}: the input has vectors, which can be used only for the output multivector",
                    reason="unsupported_modality",
                )
                own = [row for row in self._client_vectors if group.start <= row < group.stop]
                self._errors.update(dict.fromkeys(own, error))

    def run(self) -> BatchDone:
        """Return a result or an error for every input. Raises InternalFailure if the model returns a wrong number of
        states or results. Raises errors of the device other than out of memory.
        """
        started = time.perf_counter()
        is_small = self._items.costs.sum() <= _TOKENS_OF_ONE_THREAD
        set_torch_threads(is_small=is_small or engines.rules()[self._engine].has_own_threads)
        lengths, ids = self._items.lengths, self._items.ids
        is_known = ids.min(initial=0) >= 0 and ids.max(initial=0) < self._model.vocabulary
        if not is_known or lengths.max(initial=0) > self._model.max_tokens:
            self._errors |= _unfit(self._items, self._model)
        chosen = self._without_pass()
        self._prepared = self._model.prepare(self._items, self._queries)
        while len(chosen):
            part, limit = chosen, self._batch_limits.limit(self._key) if self._batch_limits else None
            if limit is None:
                chosen = chosen[:0]
            else:
                part, chosen = split_off(chosen, self._prepared.costs, limit)
            is_tried = not oom.thread_state.is_unusable
            if not (is_tried and _fits(self._measured, part)):
                self._recover(part, is_tried=is_tried)
        if self._late is not None:
            for head, rows in self._late.joined(self._model.heads, self._message.pooling).items():
                self._rows[head] += rows
        if self._device.type == "cuda":
            # wait only for this thread's CUDA stream: a wait for the whole device would break the capture of a CUDA
            # graph on another thread
            torch.cuda.current_stream(self._device).synchronize()
        forwarded = time.perf_counter()
        results: list[tuple[ItemResult | SIEError, int]] = []
        for group in self._message.groups:
            results += self._answers(group)
        return batch_reply(
            self._message.batch,
            results,
            1e3 * (forwarded - started),
            forwarded,
            padding=self._padding,
            engine=self._engine,
        )

    def _without_pass(self) -> Int64:
        """Compute the results of rows (sequences of token ids, or vectors of a client) that need no forward pass.
        Return the indices of the other rows.
        """
        needing = np.zeros(len(self._items.lengths), bool)
        for row, vectors in self._client_vectors.items():
            if not np.isfinite(vectors).all():
                self._errors[row] = InvalidInput.at("multivector", "expected finite numbers")
            elif "multivector" in self._masks:
                self._rows["multivector"][row] = ClientVectors(to_device(vectors, self._device))
                self._masks["multivector"][row] = False
        for head, mask in self._masks.items():
            mask[list(self._errors)] = False
            table = self._model.query_tables.get(head)
            if table is not None:
                for row in np.flatnonzero(mask & self._queries).tolist():
                    start = int(self._items.starts[row])
                    ids = self._items.ids[start : start + int(self._items.lengths[row])].astype(np.int64)
                    self._rows[head][row] = table.row(ids)
                    mask[row] = False
            needing |= mask
        for row in (needing & (self._items.costs < 1)).nonzero()[0].tolist():
            self._errors[row] = InvalidInput("expected at least 1 token, got 0", reason="no_tokens")
            needing[row] = False
        return needing.nonzero()[0]  # np.flatnonzero runs more Python code

    def _recover(self, chosen: Int64, *, is_tried: bool) -> None:
        """Run items in as many passes as the memory requires. Run them on a new thread if oneDNN cannot run new shapes
        on the calling thread. `is_tried`: whether memory ran out when all the items ran in one pass.
        """

        def refuse(item: int) -> None:
            self._errors[item] = oom.exhausted()

        def halves(items: Int64) -> tuple[Int64, Int64]:
            return _halves(items, self._prepared.costs)

        def failed(items: Int64) -> None:
            if self._batch_limits is not None:
                self._batch_limits.failed(self._key, int(self._prepared.costs[items].sum()))

        self._recovery.run(self._measured, chosen, refuse, halves=halves, failed=failed, is_tried=is_tried)

    def _measured(self, chosen: Int64) -> None:
        """Run a pass, and count its tokens as tokens that fit. On a CPU, keep a record on disk while a pass of at least
        RECORDED_TOKENS tokens runs: if the pass kills this process, the record lowers the model's limit before the next
        process starts (`CrashRecord.learn`).
        """
        limits = self._batch_limits
        if limits is None:
            self._pass(chosen)
            return
        tokens = int(self._prepared.costs[chosen].sum())
        record: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._pass_records is not None and tokens >= RECORDED_TOKENS:
            record = self._pass_records.during(self._key, tokens, limits.fitted(self._key))
        with record:
            try:
                self._pass(chosen)
            except GraphLost:  # lower the limit now, because this error ends the process
                limits.failed(self._key, tokens, killed=True)
                raise
        limits.fits(self._key, tokens)

    def _pass(self, chosen: Int64) -> None:
        packed = self._model.pack(self._prepared, chosen)
        packed.engine = self._engine
        with self._model.loras.acting(self._message.lora) if self._message.lora else contextlib.nullcontext():
            hidden = self._model.forward(packed)
            self._padding += packed.padding
            states, tokens = hidden.shape[0], len(packed.ids)
            if states != tokens:
                raise InternalFailure(f"the model returned {states} states for {tokens} tokens", reason="wrong_length")
            doubtful = self._reduce(States(hidden, packed, self._queries[packed.order], self._message.pooling))
        if len(chosen) > 1:
            # each of these items runs again alone: an overflow of another item in the pass may have caused the NaN
            for item in sorted(doubtful):
                self._pass(np.array([item], np.int64))
        elif doubtful:
            error = InferenceFailed("the model returned a value that is NaN or infinite", reason="non_finite")
            self._errors.update(dict.fromkeys(doubtful, error))

    def _reduce(self, states: States) -> set[int]:
        """Compute the heads (output layers) on the states of a pass, and store the results. Return the indices of rows
        with NaN or infinite values.
        """
        packed = states.packed
        doubtful: set[int] = set()
        for head, mask in self._masks.items():
            sequences = mask[packed.order].nonzero()[0]
            if self._late is not None:
                is_window = self._late.windows[packed.order[sequences]]
                windows, sequences = packed.order[sequences[is_window]], sequences[~is_window]
                if len(windows):
                    doubtful |= self._late.reduce(head, self._model.heads[head], states, windows)
            if not len(sequences):
                continue
            reduced = self._model.heads[head].reduce(states, sequences)
            if len(reduced.rows) != len(sequences):
                raise InternalFailure(
                    f"the head {head} gave {len(reduced.rows)} rows for {len(sequences)} sequences",
                    reason="wrong_length",
                )
            rows = packed.order[sequences].tolist()
            for row, output, is_usable in zip(rows, reduced.rows, reduced.usable.tolist(), strict=True):
                self._rows[head][row] = output
                if not is_usable:
                    doubtful.add(row)
        return doubtful

    def _answers(self, group: Group) -> list[tuple[ItemResult | SIEError, int]]:
        """Return the result of each input of a work item (inputs of one request), with the number of its tokens. The
        tokens of a query that all inputs share count for the first input.
        """
        if self._late is not None and group.chunked:
            return self._chunk_answers(group, self._late)
        shared = [group.start] if self._layout == "sides" and group.stop > group.start else []
        first = group.start + len(shared)
        due = group.stop - first if group.inputs < 0 else group.inputs
        rows_per_input = (group.stop - first) // due if due else 0
        if due * rows_per_input != group.stop - first or (due and not rows_per_input):
            raise InternalFailure(f"{group.stop - first} rows cannot belong to {due} inputs", reason="malformed_batch")
        units = np.arange(first, group.stop).reshape(due, rows_per_input).tolist()
        tokens = self._items.lengths[first : group.stop].reshape(due, rows_per_input).sum(1).tolist()
        if shared and due:
            tokens[0] += int(self._items.lengths[group.start])
        if not self._errors:
            return list(zip(self._group_results(group, shared, units), tokens, strict=True))
        faults = [next((self._errors[row] for row in (*shared, *unit) if row in self._errors), None) for unit in units]
        good = [unit for unit, fault in zip(units, faults, strict=True) if fault is None]
        answers = iter(self._group_results(group, shared, good))
        results = [fault if fault is not None else next(answers) for fault in faults]
        return list(zip(results, tokens, strict=True))

    def _chunk_answers(self, group: Group, late: LateChunks) -> list[tuple[ItemResult | SIEError, int]]:
        units = late.units(group)
        faults = [next((self._errors[row] for row in own if row in self._errors), None) for own, _ in units]
        good = [[row] for (_, rows), fault in zip(units, faults, strict=True) if fault is None for row in rows]
        answers = iter(self._group_results(group, [], good))
        results: ItemResults = [
            fault if fault is not None else next(answers)
            for (_, rows), fault in zip(units, faults, strict=True)
            for _ in rows
        ]
        tokens = [int(self._items.lengths[own].sum()) for own, _ in units]
        return list(zip(results_of(group, results), tokens, strict=True))

    def _group_results(self, group: Group, shared: list[int], units: list[list[int]]) -> ItemResults:
        """Return the result of each input of a work item (inputs of one request). `shared`: the rows of the query that
        all inputs share. `units`: for each input, the rows that belong to it.
        """
        heads = self._model.heads_for(self._message.operation, group.options)
        query: dict[str, Any] = {}
        if shared:
            query = {head: self._rows[head][shared[0]] for head in heads}
        results: list[ItemResult | SIEError | None] = [None] * len(units)
        counts: list[tuple[int, int]] = []

        def answer(items: Int64) -> None:
            places: list[int] = []
            for item in items.tolist():
                places += units[item]
            rows = {}
            for head in heads:
                computed = self._rows[head]
                rows[head] = [computed[row] for row in places]
            answers = self._model.answer(self._message, group, query, rows, places)
            counts.append((len(answers), len(items)))
            for item, result in zip(items.tolist(), answers, strict=False):
                results[item] = result

        try:
            places = np.arange(len(units))
            if oom.thread_state.is_unusable:
                self._recovery.run(answer, places, lambda item: None)
            elif len(units) and not _fits(answer, places):
                self._recovery.run(answer, places, lambda item: None, is_tried=True)
        except SIEError as error:
            return [error] * len(units)
        except Exception as error:
            if is_device_fatal(error):
                raise
            # the options of this work item's request probably caused the error, so other work items still get results
            _logger.exception("the outputs of a work item could not be computed, so its inputs get an error")
            return [
                InternalFailure("the outputs of this input could not be computed, see the log of the adapter")
            ] * len(units)
        for got, expected in counts:
            if got != expected:
                raise InternalFailure(f"the model returned {got} answers for {expected} inputs", reason="wrong_length")
        return [result if result is not None else oom.exhausted() for result in results]


def _client_vectors(message: RunBatch, batch: Items, width: int) -> dict[int, np.ndarray]:
    """Return the vectors that clients sent instead of texts, by row, each float32 [vectors, width]. Raises
    InternalFailure if the vectors do not match the rows.
    """
    if not message.given:
        return {}
    counts = np.frombuffer(message.given, "<i4")
    rows = np.flatnonzero(counts >= 0)
    vectors = np.frombuffer(message.vectors, "<f4").copy()  # a copy, because torch needs a writable array
    if (
        len(counts) != len(batch.lengths)
        or batch.lengths[rows].any()
        or not width
        or counts[rows].sum() * width != len(vectors)
    ):
        raise InternalFailure("the vectors of clients do not match the rows of the batch", reason="malformed_batch")
    if not len(rows):
        return {}
    ends = np.cumsum(counts[rows])
    parts = np.split(vectors.reshape(-1, width), ends[:-1])
    return dict(zip(rows.tolist(), parts, strict=True))


def _unfit(batch: Items, model: PackedModel) -> dict[int, SIEError]:
    """Return an error for each row that must not reach the device. A token id without an embedding, or a text that is
    longer than the model's table of positions, would break the CUDA context.
    """
    low, high = batch.extremes()
    wrong = (batch.lengths > model.max_tokens) | (low < 0) | (high >= model.vocabulary)
    errors: dict[int, SIEError] = {}
    for item in np.flatnonzero(wrong).tolist():
        length = int(batch.lengths[item])
        if length > model.max_tokens:
            errors[item] = InvalidInput(f"expected at most {model.max_tokens} tokens, got {length}", reason="too_long")
        else:
            # an InternalFailure, because no client can cause this: the sidecar refuses ids that the tokenizer lacks,
            # and a load checks that the tokenizer's ids fit this table
            cause = f"a token id is not within the table of {model.vocabulary} embeddings"
            errors[item] = InternalFailure(cause, reason="token_out_of_range")
    return errors


def _fits(work: Callable[[Int64], None], items: Int64) -> bool:
    """Call `work` with all the items. Return False if memory ran out."""
    # A separate function frees the tensors of a failed pass: its frame is freed when the function returns. In an
    # `except` block of the caller, the traceback would still refer to these tensors.
    try:
        work(items)
    except (RuntimeError, MemoryError) as error:
        if not oom.ran_out(error):
            raise
        return False
    return True


def _halves(chosen: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Split the items into two parts with about equal numbers of tokens, short items first. No part is empty."""
    ordered = chosen[np.argsort(lengths[chosen], kind="stable")]
    costs = np.cumsum(lengths[ordered])
    cut = int(np.searchsorted(costs, costs[-1] / 2, side="right")) or 1
    return ordered[: min(cut, len(ordered) - 1)], ordered[min(cut, len(ordered) - 1) :]
