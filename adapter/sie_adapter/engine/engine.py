"""The engine of one process: it connects device, loader, residency and lanes. It has no sockets, since both the server
and the benchmark drive it.
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
from typing import Any

import msgspec
import numpy as np
import torch

from sie_adapter.engine import device as devices
from sie_adapter.engine.batch import BatchRun
from sie_adapter.engine.device_threads import DeviceThreads
from sie_adapter.engine.instrumentation import Instrumentation
from sie_adapter.engine.raw import extract_options, run_raw
from sie_adapter.loading.loading import Loader, classed
from sie_adapter.memory.batch_limits import DeviceLimits, PassRecords, limits_key
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_adapter.memory.oom import OomCounters, Remedy, on_new_thread
from sie_adapter.memory.residency import DeviceMemory, Permission, ResidentModels
from sie_adapter.packed.packing import Items
from sie_adapter.packed.tower_outputs import SHARE, TowerOutputs
from sie_adapter.readers.reading import Readings
from sie_contracts.errors import InternalFailure, LoraLoadFailed, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.load_errors import lora_failed, lora_of_entry, lora_rejected
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc
from sie_contracts.wire.ipc import BatchDone, Refused, Reply, RunBatch
from sie_store.configured import weight_sources
from sie_store.weights.sources import named_loras

_logger = logging.getLogger("sie.adapter")
DEVICE_LOST_STATUS = 70
# Seconds that a lane which needs the interpreter waits before it asks the running lane to release it. Python's default
# of 5 ms slows two lanes by 2 to 4 %.
_SWITCH_INTERVAL_S = 0.0005
_KEPT_PRODUCTS = "64"


def _end_process() -> None:
    os._exit(DEVICE_LOST_STATUS)


class AdapterEngine:
    """One device with its models and lanes. Owns the lanes until `stop`. Raises SettingError for a device that is
    absent.

    `on_device_lost` is called from a lane when the device context is lost. By default it ends the process, so that the
    supervisor restarts it.
    """

    def __init__(self, settings: Settings, on_device_lost: Callable[[], None] = _end_process) -> None:
        self.device = devices.resolve_device(settings.device)
        self._on_device_lost = on_device_lost
        self._settings = settings
        self._label = devices.label(self.device) or self.device.type
        self.outputs = TowerOutputs(devices.capacity_bytes(self.device) // SHARE)
        self.loader = Loader(self.device, weight_sources(settings), settings, self.outputs)
        self.oom_counters = OomCounters()
        self._use = devices.UtilisationProbe(self.device)
        memory = DeviceMemory(
            functools.partial(devices.memory, self.device),
            functools.partial(devices.give_memory_back, self.device),
            settings.memory_pressure_threshold_percent,
            self.outputs.clear,
        )
        self.residency = ResidentModels(
            self._load,
            memory,
            needed_bytes=self.loader.needed_bytes,
            warm_up=self._warm_up,
            ended=self.loader.ended,
            count=self.oom_counters.count,
        )
        self._preprocessing = threading.BoundedSemaphore(settings.preprocessor_workers)
        self.batch_limits = DeviceLimits.for_machine(settings)
        self._pass_records = PassRecords.for_socket(settings) if self.device.type == "cpu" else None
        # A second stream of kernels on one GPU only adds contention. On a CPU bench/engine.py measured, with mixed
        # lengths in bfloat16: two lanes 324 texts/s, two processes 333, one pass on both cores 292. On texts of 8
        # tokens: 3,623, 3,608 and 2,567.
        self._instrumentation = (
            Instrumentation(lambda: devices.memory(self.device).used_bytes) if settings.instrumentation else None
        )
        cores = devices.usable_cores()
        self.device_threads = DeviceThreads(cores if self.device.type == "cpu" else 1, self.execute)
        self.readings = Readings(self.device, memory.fits, torch_threads=max(1, cores // 2), shed=self.outputs.clear)
        if self._instrumentation is not None:
            self.device_threads.listeners.append(self._instrumentation.ran)
        self._log_choices(settings)

    def _load(self, resolved: Resolved) -> Any:
        # the thread that loads may run out of memory too
        with self._ending_if_lost(), classed(resolved.entry), devices.weights_apart():
            return on_new_thread(self.loader.load, resolved)

    def _warm_up(self, resolved: Resolved, weights: Any) -> int:
        """Run one tiny pass, so that the first request does not wait for the warm-up. Return the peak of its
        activations, bytes. Raises ModelLoadFailed, as a load does.
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
        """End the process if the device is lost: on a dead context later batches would fail or give wrong results."""
        if is_device_fatal(error):
            _logger.critical("the device is lost, the process ends: %s", error)
            self._on_device_lost()

    def prepare(self, message: RunBatch, permission: Permission) -> Callable[[RunBatch], Reply] | None:
        """Tokenise the texts for a family that has its own tokenisation, on the calling thread and off the device lane,
        at most SIE_PREPROCESSOR_WORKERS at once. Return the function that a lane then calls to run the batch, or None
        if there is nothing to prepare. Never raises: an error here occurs again on the lane, which answers it.
        """
        try:
            with self.residency.use(message.model, message.fingerprint) as resident:
                prepare: Any = getattr(resident.weights, "prepare", None)
                if prepare is None or message.operation != "extract":
                    return None
                with self._preprocessing:
                    preparation = prepare(message.texts, extract_options(message))
                    return functools.partial(self.execute, preparation=preparation, permission=permission)
        except SIEError:
            return None
        except Exception as error:  # noqa: BLE001  model code may raise anything; the lane logs it
            _logger.debug("a batch of %s could not be prepared: %s", message.model, type(error).__name__)
            return None

    def writes(self, message: RunBatch) -> bool:
        """Return whether the batch generates text beside the lanes. If so, the caller runs `execute` on its own
        thread.
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
        """Run a batch on the calling thread, under inference mode. Return BatchDone or Refused, with the models that
        were unloaded for it. Relieve memory afterwards if it is above the threshold. Never raises.

        `preparation`: the result of the family's `prepare` for these texts. `permission`: created when the batch
        arrived. `is_gone`: returns True if no client waits for the batch any more; a model that generates text then
        refuses the batch between two steps.
        """
        permission = permission or self.residency.permission(message.may_drop)
        reply = self._run(message, functools.partial(self.residency.make_room, permission), preparation, is_gone)
        try:
            self.residency.relieve(permission)
        except Exception as error:
            self._end_if_lost(error)
            _logger.exception("memory could not be freed after a batch of %s", message.model)
        return msgspec.structs.replace(reply, dropped=permission.dropped) if permission.dropped else reply

    def _run(
        self, message: RunBatch, make_room: Callable[[], Remedy | None], preparation: Any, is_gone: Callable[[], bool]
    ) -> BatchDone | Refused:
        """Run a batch and return the reply, without relieving memory. Never raises."""
        try:
            with self.residency.use(message.model, message.fingerprint) as resident:
                weights: Any = resident.weights  # one of two protocols: TextModel, or VerbModel of `raw`
                count_remedy = functools.partial(self.oom_counters.count, message.model)
                rows = weights.rows.get(message.operation)
                if rows is not None and rows.writes:
                    weights = weights.reading(self.readings.read, is_gone)
                if rows is not None and rows.layout == "raw":
                    return run_raw(weights, message, self.device, make_room, count_remedy, preparation)
                key = limits_key(resident.fingerprint, weights.precision, self._label)
                batch = BatchRun(
                    weights, self.device, message, make_room, self.batch_limits, key, count_remedy, self._pass_records
                )
                return batch.run()
        except SIEError as error:
            return Refused(error.info(), message.batch)
        except Exception as error:
            self._end_if_lost(error)
            _logger.exception("a batch of %s failed", message.model)
            return Refused(InternalFailure("the batch failed, see the log of the adapter").info(), message.batch)

    def ensure_lora(self, model: str, lora: str) -> str:
        """Load a LoRA of a loaded model, on the calling thread. Return the digest of its files. Raises LoraLoadFailed,
        ModelLoading.
        """
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
                # no message of the exception in the log: the name of the LoRA may come from a client, and the message
                # may hold it
                trace = "".join(traceback.format_tb(error.__traceback__))
                _logger.error("loading a LoRA of %s failed: %s\n%s", model, type(error).__qualname__, trace)
                cause = (
                    "the device has too little memory"
                    if is_out_of_memory(error)
                    else f"{type(error).__name__}: {error}"
                )
                raise lora_failed(lora, cause) from error

    def _log_choices(self, settings: Settings) -> None:
        chosen = self.loader.compute(None)
        names = (str(self.device), devices.label(self.device))
        level = logging.INFO if settings.attention_backend in ("auto", chosen.backend) else logging.WARNING
        _logger.log(
            level,
            "device %s, default precision %s for %s%s, attention %s (%s), lanes %d",
            " ".join(filter(None, names)),
            chosen.precision,
            chosen.requested,
            chosen.precision_reason and f" ({chosen.precision_reason})",
            chosen.backend,
            chosen.reason,
            len(self.device_threads),
        )

    def describe(self) -> ipc.Description:
        """Return the description of this process and its models."""
        memory = devices.memory(self.device)
        return ipc.Description(
            protocol=ipc.PROTOCOL,
            pid=os.getpid(),
            device=str(self.device),
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
        )

    def stop(self, timeout_s: float) -> bool:
        """Finish running batches and refuse waiting ones. Return whether all ended in time."""
        began_s = time.monotonic()
        ended = self.device_threads.stop(timeout_s)
        ended = self.readings.stop(max(0.0, timeout_s - (time.monotonic() - began_s))) and ended
        self.batch_limits.save()
        return ended


def prepare_process() -> None:
    """Set what holds for the whole process. One torch thread per operation, since the lanes are the parallelism. Also
    the allocator, the caches of oneDNN, and switches that keep libraries from sending telemetry.
    """
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    devices.keep_freed_memory()
    # oneDNN, and torch in each thread, cache what they prepared for a product of any size: by default 1,024 entries of
    # half a megabyte each (bench/results/memory.md)
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.putenv(name, _KEPT_PRODUCTS)
    # without these, onnxruntime (which gliner imports) and openvino store and send telemetry from their import on
    os.putenv("ORT_DISABLE_TELEMETRY", "1")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
