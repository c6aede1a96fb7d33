"""The adapter's life, from start to exit.

    imports ──► wait for the lock (a warm spare stays here) ──► bind the socket ──► serve ──► drain ──► exit

Whoever holds the lock file beside the socket is the adapter; the kernel drops the lock with the process, however it ends, so a spare takes
over at once. Importing this module is cheap: torch and the model code are imported inside `run`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sie_contracts.settings import Settings

if TYPE_CHECKING:
    from sie_adapter.engine import Engine

_logger = logging.getLogger("sie.adapter")

DRAIN_S = 10.0
SPARE_ATTEMPTS = 10
_BACKLOG = 128
_LOCKED, _DRAIN = b"L", b"D"  # no signal that is handled has these numbers


def run(settings: Settings) -> int:
    """Serve on `settings.ipc_socket_path` until SIGTERM, SIGINT or Drain. Returns the exit status. To be called on the main thread.

    Running batches may take DRAIN_S to finish; what waits is refused. Raises SettingError for a device that is absent.
    """
    with _woken_by_signals() as (wake, waker):
        engine = _prepare(settings)
        path = Path(settings.ipc_socket_path)
        with _lock_file(path) as lock:
            if not _wait_for_lock(path, lock, wake, waker):
                _logger.info("adapter stopped while it waited as a spare")
                return 0
            _serve(path, engine, wake, waker)
    return 0


def _prepare(settings: Settings) -> Engine:
    import transformers

    from sie_adapter import engine as engines

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").handlers.clear()  # its lines reach the root's handler as well
    engines.prepare_process()
    engine = engines.Engine(settings)
    # what was imported stays: no collection needs to look at it again, which keeps pauses of the lanes short
    gc.collect()
    gc.freeze()
    return engine


def _serve(path: Path, engine: Engine, wake: socket.socket, waker: socket.socket) -> None:
    from sie_adapter.server import Server

    with _listener(path) as listener:
        server = Server(listener, engine, lambda: _wake(waker, _DRAIN))
        _logger.info("adapter ready on %s, pid %d", path, os.getpid())
        server.serve(wake)
        _logger.info("adapter stopping")
    if not engine.stop(DRAIN_S):
        _logger.warning("a batch still ran after %g s", DRAIN_S)
    server.close()
    _logger.info("adapter stopped")


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets: the first becomes readable on SIGTERM and SIGINT, and by writing to the second."""
    wake, waker = socket.socketpair()
    waker.setblocking(False)

    def noted(_signal: int, _frame: FrameType | None) -> None:
        """The byte that set_wakeup_fd writes is the message."""

    before = signal.set_wakeup_fd(waker.fileno())
    handlers = {number: signal.signal(number, noted) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wake, waker
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        wake.close()
        waker.close()


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    # never removed: a waiting spare would hold a lock on a file that the next process no longer sees
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _known_as_spare(path: Path) -> Iterator[None]:
    """Hold the lock by which a sidecar sees that a spare is warm. One of several spares is enough."""
    known = os.open(f"{path}.spare", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(SPARE_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(known, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)  # a sidecar that looks holds it for microseconds
        yield
    finally:
        os.close(known)


def _wait_for_lock(path: Path, lock: int, wake: socket.socket, waker: socket.socket) -> bool:
    """Wait until this process holds the lock; false if a signal came first."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    _logger.info("adapter waits as a spare, pid %d", os.getpid())

    def wait() -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _wake(waker, _LOCKED)

    with _known_as_spare(path):
        threading.Thread(target=wait, name="lock", daemon=True).start()
        return wake.recv(1) == _LOCKED


def _wake(waker: socket.socket, reason: bytes) -> None:
    with contextlib.suppress(OSError):  # the process ends already, nobody reads any more
        waker.send(reason)


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """A listening socket at `path`, mode 0600. Only the holder of the lock may be here, so a file that is there is stale."""
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
            path.unlink(missing_ok=True)
