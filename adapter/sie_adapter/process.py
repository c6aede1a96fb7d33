"""Start, serving and exit of the adapter's process.

    bundle ──► imports ──► bind the socket ──► fork (`forkserver`) ──► serve ──► drain ──► exit

A worker with several devices has one child process and one socket for each device. The import of this module is cheap,
because only `run` imports torch and the model code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sie_adapter import forkserver
from sie_adapter.engine import spans
from sie_adapter.loading import dependencies
from sie_contracts.models.trust import Allowed
from sie_contracts.settings import MAX_DEVICES, SettingError, Settings
from sie_contracts.wire import ipc
from sie_runtime import tracing
from sie_runtime.process import end_signals
from sie_store.models_folder import examined, worker_trust

_logger = logging.getLogger("sie.adapter")

DRAIN_S = 10.0
_BACKLOG = 128


def run(settings: Settings, *, spare: bool = False) -> int:
    """Serve on `settings.ipc_socket_path` until a signal to end or an ipc.Drain arrives. Then give running batches
    DRAIN_S seconds to finish, and refuse waiting batches. Return the exit status. Call this on the main thread.

    `spare`: on Linux, serve in a child process, and replace the child when it dies. This function then returns in the
    parent and in the child. With several devices, child processes always serve. Raises SettingError if a device or a
    dependency of the bundle is absent, or the models folder is not trusted.
    """
    dependencies.check(settings)
    if warning := examined(allowed(settings)):
        _logger.warning("%s", warning)
    # keep these signals pending until `keep_serving` waits for them or `_woken_by_signals` sets their handlers
    signal.pthread_sigmask(signal.SIG_BLOCK, forkserver.SIGNALS)
    _import()
    # check the devices before a socket exists, because probes treat an adapter with a socket as ready
    adapters = _one_for_each_device(settings)
    for adapter in adapters:
        if _is_served(path := Path(adapter.ipc_socket_path)):
            _logger.error("another adapter serves on %s, so this process ends", path)
            return 1
    # a killed adapter with more devices may have left sockets behind: remove those beyond the number of devices
    for number in range(len(adapters), MAX_DEVICES):
        # a socket file that cannot be removed does no harm: no process connects to it, and `sie doctor` reports it
        with contextlib.suppress(OSError):
            Path(ipc.device_socket(settings.ipc_socket_path, number)).unlink(missing_ok=True)
    with contextlib.ExitStack() as sockets:
        listeners = [sockets.enter_context(_listener(Path(adapter.ipc_socket_path))) for adapter in adapters]
        learns = [_learning(adapter) for adapter in adapters]
        process = forkserver.ForkResult(0)
        if (spare or len(adapters) > 1) and sys.platform.startswith("linux"):
            process = forkserver.keep_serving(len(adapters), lambda dead: learns[dead]())
        if process.number is None:
            return process.status
        with _woken_by_signals() as (wake, waker):
            _serve(listeners[process.number], adapters[process.number], len(adapters), wake, waker)
    return 0


def allowed(settings: Settings) -> Allowed:
    """Return the limits for catalogue entries: whether remote code may run, and which model paths are allowed."""
    return Allowed(settings.allow_remote_code, settings.model_paths, settings.models_dir)


def _import() -> None:
    """Import all modules that a load of a text encoder needs. Start no thread. Make no CUDA call, not even a query for
    devices: forked processes could not use CUDA after a CUDA call in the parent.
    """
    _name_temporary_folder()
    _import_losses()
    import transformers

    import sie_adapter.families.text_encoder
    import sie_adapter.server  # noqa: F401  imported here so that no child has to import it
    from sie_adapter.engine import engine

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # remove the handlers of huggingface_hub: the root logger writes the same lines
    logging.getLogger("huggingface_hub").handlers.clear()
    engine.prepare_process()
    # Imported objects are never freed. After gc.freeze, the garbage collector skips these objects. Its pauses become
    # shorter, and child processes still share the memory pages of the objects.
    gc.collect()
    gc.freeze()


def _import_losses() -> None:
    """Import the loss functions of transformers without their import of scipy. All model classes import them, but only
    training calls them. scipy, which the loss of object detection uses, needs 40 MB in each adapter process.
    """
    from transformers import utils

    is_scipy_available = utils.is_scipy_available
    utils.is_scipy_available = lambda: False
    try:
        import transformers.loss.loss_utils  # noqa: F401  only its import matters
    finally:
        utils.is_scipy_available = is_scipy_available


def _name_temporary_folder() -> None:
    """Set a path for temporary files if Python finds no writable folder, for example because all disks are full. The
    import of torch reads this path, and raises if there is none, although it writes no file there.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        tempfile.tempdir = folder = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  no file is written into this folder
        # without this variable, torch would try to create a cache folder in the temporary folder, and fail
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        _logger.warning("no temporary file can be written: %s", error)


def _learning(settings: Settings) -> Callable[[], None]:
    """Lower the batch limits if the previous adapter process died in a forward pass, probably for lack of memory.
    Return the function that `forkserver` calls for the same purpose after the death of a child.
    """
    from sie_adapter.memory.batch_limits import CrashRecord, DeviceLimits, PassRecords

    crash_record = CrashRecord(PassRecords.for_socket(settings), functools.partial(DeviceLimits.for_machine, settings))
    crash_record.learn()
    return crash_record.learn


def _one_for_each_device(settings: Settings) -> list[Settings]:
    """Return the settings for the adapter process of each device. Raises SettingError for a CUDA device on a machine
    without CUDA, and for several devices on a system other than Linux.
    """
    from sie_adapter.engine import device

    names = device.names_of(settings.device)
    for name in names:
        device.require(name)
    if len(names) > 1 and not sys.platform.startswith("linux"):
        raise SettingError("SIE_DEVICE", "several devices are supported only on Linux: name one device")
    return [
        dataclasses.replace(settings, device=name, ipc_socket_path=ipc.device_socket(settings.ipc_socket_path, number))
        for number, name in enumerate(names)
    ]


def _serve(
    listener: socket.socket, settings: Settings, devices: int, wake: socket.socket, waker: socket.socket
) -> None:
    """Serve one device on `listener`, until `wake` is readable. `devices`: the number of devices of the worker."""
    from sie_adapter.engine.device import hide_other_gpus
    from sie_adapter.engine.engine import AdapterEngine, WorkerDevices
    from sie_adapter.server import AdapterServer
    from sie_store.weights import disk

    tracer = tracing.start(settings.tracing, "adapter")
    path, name = Path(settings.ipc_socket_path), settings.device
    if devices > 1 and name.startswith("cuda:"):
        hide_other_gpus(name)
        settings = dataclasses.replace(settings, device="cuda:0")
    engine = AdapterEngine(settings, worker_devices=WorkerDevices(devices, name) if devices > 1 else None)
    if tracer is not None:
        engine.device_threads.listeners.append(functools.partial(spans.ran, tracer))
    server = AdapterServer(listener, engine, lambda: _wake(waker), worker_trust(allowed(settings)))
    cache = engine.loader.sources.cache
    watch = disk.DiskWatch(cache.relieve, cache.folder)
    _logger.info("adapter ready on %s, pid %d", path, os.getpid())
    server.serve(wake)
    _logger.info("adapter stopping")
    watch.close()
    # remove the path first: the parent still has the socket open, so a new client would connect and never get a reply
    path.unlink(missing_ok=True)
    listener.close()
    if not engine.stop(DRAIN_S):
        _logger.warning(
            "a batch was still running %g s after the drain began; the process exits without its result", DRAIN_S
        )
    server.close()
    if tracer is not None:
        tracer.close()
    _logger.info("adapter stopped")


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a pair of sockets. The first becomes readable when a signal to end arrives, or when a byte is written to
    the second. At the start of the context, unblock the signals that `run` has blocked.
    """
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    before = signal.set_wakeup_fd(waker.fileno())
    # the handlers do nothing, because set_wakeup_fd already writes a byte to `waker` for each signal
    handlers = {number: signal.signal(number, lambda *_: None) for number in end_signals()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forkserver.SIGNALS)
    try:
        yield wake, waker
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake.close()
        waker.close()


def _wake(waker: socket.socket) -> None:
    # the socket is closed if the process is already ending
    with contextlib.suppress(OSError):
        waker.send(b"\0")


def _is_served(path: Path) -> bool:
    """Return whether a process listens at `path`. The socket file of a killed process remains, without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # a process listens, and its queue of connections is full
            pass
    return True


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """Yield a listening socket at `path`, mode 0600. Replace an existing file, which belongs to a dead process. At the
    end of the context, remove the file, but not in a forked child.
    """
    owner = os.getpid()
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        try:
            yield listener
        finally:
            if os.getpid() == owner:  # a forked child keeps the file, because the next child uses the socket
                path.unlink(missing_ok=True)
