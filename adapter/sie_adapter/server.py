"""Unix socket of the adapter: one thread per connection, one request at a time on each connection.

    accept ──► peer's uid ──► frame ──┬─► RunBatch ──► a device thread runs the batch and sends the reply
                                      ├─► RunBatch that generates text ──► the connection's thread runs the batch
                                      └─► other requests ──► the connection's thread replies

The sidecar sends health checks (pings) on a connection without loads and batches, so that no check waits for a load or
a batch. Every request except Cancel gets exactly one final reply. A malformed frame closes only its own connection.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.memory.residency import Permission
from sie_contracts.errors import InternalFailure, ModelLoadFailed, SIEError
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.trust import Trust
from sie_contracts.places import public
from sie_contracts.wire import ipc
from sie_contracts.wire.ipc import FrameError, Refused, Reply, Request
from sie_runtime.failpoints import failpoint

_logger = logging.getLogger("sie.adapter")

MAX_CONNECTIONS = 256
SEND_TIMEOUT_S = 30.0
# Pause after a failed accept. If no file descriptor is free, the listener stays readable: without this pause, the loop
# in `serve` would keep a core busy.
_FAILED_ACCEPT_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # process id, user id and group id of the peer


class AdapterServer:
    """Server for requests to `engine` on the socket `listener`. The caller must close `listener`."""

    def __init__(self, listener: socket.socket, engine: AdapterEngine, drain: Callable[[], None], trust: Trust) -> None:
        """`drain`: called after the reply to an ipc.Drain of a sidecar. `trust`: decides which catalogue entries may
        run their own code in this process, and which files an entry may name.
        """
        self._trust = trust
        self._listener = listener
        self._engine = engine
        self._drain = drain
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def serve(self, wake: socket.socket) -> None:
        """Accept connections until `wake` becomes readable, which happens at a signal to end and at a drain."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake in ready:
                    return
                if self._listener in ready:
                    self._accept()

    def close(self) -> None:
        """Shut down all connections, so that threads that wait for a frame return at once."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # the sidecar may have closed the connection
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _logger.warning("accepting a connection failed: %s", error)
            time.sleep(_FAILED_ACCEPT_S)
            return
        with self._lock:
            is_full = len(self._connections) >= MAX_CONNECTIONS
        if is_full or not _is_trusted(connection):
            _logger.warning(
                "refused a connection: %s",
                f"{MAX_CONNECTIONS} connections are open" if is_full else "its peer runs as another user",
            )
            connection.close()
            return
        with self._lock:
            self._connections.add(connection)
        try:
            threading.Thread(target=self._attend, args=(connection,), name="connection", daemon=True).start()
        except RuntimeError as error:  # no memory for the stack of a new thread
            _logger.warning("refused a connection: %s", error)
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _attend(self, connection: socket.socket) -> None:
        torch.set_num_threads(1)  # without this call, torch uses the number of threads that another thread has set last
        try:
            while True:
                request = ipc.request(bytes(ipc.receive_frame(connection, ipc.MAX_REQUEST_BYTES)))
                if isinstance(request, ipc.RunBatch):
                    self._run_batch(connection, request)
                    continue
                if isinstance(request, ipc.Cancel):
                    continue  # a Cancel that arrived after its batch had ended has no effect
                try:
                    _send(connection, self._answer(request))
                finally:
                    if isinstance(request, ipc.Drain):
                        self._drain()  # the reply is sent first, because the drain closes all connections
        except EOFError:
            pass
        except FrameError as error:
            # the error names only a field of the request, such as `$.lengths`, so no input of a client reaches the log
            _logger.warning("closed a connection after an invalid or incomplete frame: %s", error)
        except OSError as error:
            _logger.info("closed a connection that broke: %s", error)
        except Exception:
            _logger.exception("closed a connection after an unexpected error")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _run_batch(self, connection: socket.socket, request: ipc.RunBatch) -> None:
        broken: list[OSError] = []

        def answer(reply: Reply) -> None:
            if broken:
                return
            try:
                _send(connection, reply)
            except FrameError as error:
                # the reply is too large, and no byte of it was sent, so a smaller reply can follow
                _send(connection, Refused(InternalFailure(str(error), reason="reply_too_large").info(), request.batch))
            except (TypeError, ValueError, OverflowError, RecursionError, MemoryError):
                # MessagePack cannot carry a value of the reply, such as half of a surrogate pair in a text, or there is
                # no memory for the frame of the reply. No byte of the reply was sent, so another reply can follow.
                _logger.exception("the reply to batch %s cannot be encoded", request.batch)
                failure = InternalFailure("the reply of the model cannot be encoded, see the log of the adapter")
                _send(connection, Refused(failure.info(), request.batch))
            except OSError as error:
                broken.append(error)

        # created before the batch waits: a `Permission` excludes all models that other batches use after its creation
        permission = self._engine.residency.permission(request.may_drop)
        if request.operation == "extract" and self._engine.writes(request):
            with self._engine.writing():
                self._write(request, answer, permission, functools.partial(_is_gone, connection))
            if broken:
                raise broken[0]
            return
        run: Callable[[ipc.RunBatch], Reply] | None = None
        is_started = False

        def start() -> None:
            nonlocal is_started
            is_started = True
            answer(ipc.BatchStarted(request.batch))

        if request.texts and not request.ids:
            run = self._engine.prepare(request, permission, start)
        run = run or functools.partial(self._engine.execute, permission=permission)
        job = DeviceJob(request, answer, run, is_started=is_started)
        self._engine.device_threads.submit(job)
        job.finished.wait()
        if broken:
            raise broken[0]

    def _write(
        self,
        request: ipc.RunBatch,
        answer: Callable[[Reply], None],
        permission: Permission,
        is_gone: Callable[[], bool],
    ) -> None:
        """Run a batch that generates text, on the calling thread instead of a device thread."""
        answer(ipc.BatchStarted(request.batch))
        job = DeviceJob(request, answer, is_started=True)
        began_ns, start_ns = time.time_ns(), time.perf_counter_ns()
        reply = self._engine.execute(request, permission=permission, is_gone=is_gone)
        ended_ns = began_ns + time.perf_counter_ns() - start_ns
        answer(reply)
        self._engine.device_threads.notify(job, reply, began_ns, ended_ns)

    def _answer(self, request: Request) -> Reply:
        may_drop = request.may_drop if isinstance(request, (ipc.Ping, ipc.EnsureReady)) else ()
        permission = self._engine.residency.permission(may_drop)
        try:
            return self._answer_or_raise(request, permission)
        except SIEError as error:
            reply_error = public(error.info())
            if reply_error.message != error.message:
                # the message names a path of this machine; clients read the reply, so only the log may show the path
                _logger.warning("the request %s was refused: %s", type(request).__name__, error.message)
            return Refused(reply_error, dropped=permission.dropped)
        except Exception:
            _logger.exception("the request %s failed", type(request).__name__)
            failure = InternalFailure(f"{type(request).__name__} failed, see the log of the adapter")
            return Refused(failure.info(), dropped=permission.dropped)

    def _answer_or_raise(self, request: Request, permission: Permission) -> Reply:
        lanes, residency = self._engine.device_threads, self._engine.residency
        match request:
            case ipc.Ping():
                residency.relieve(permission)
                fetching = self._engine.loader.sources.fetching()
                busy_s = max(lanes.busy_s(), self._engine.readings.busy_s())
                return ipc.Pong(os.getpid(), busy_s, lanes.batches, permission.dropped, fetching)
            case ipc.Describe():
                return self._engine.describe()
            case ipc.EnsureReady():
                failpoint("adapter.before_load")
                resident = residency.ensure(request.model, self._entry(request.entry), request.profile, permission)
                failpoint("adapter.loaded")
                weights = resident.weights
                loaded = resident.describe(time.monotonic())
                return ipc.Ready(
                    loaded,
                    weights.tokenizer,
                    weights.max_tokens,
                    dict(weights.rows),
                    round(resident.load_s, 3),
                    permission.dropped,
                )
            case ipc.EnsureLora():
                return ipc.Done(self._engine.ensure_lora(request.model, request.lora))
            case ipc.Release():
                residency.release(request.model)
        return ipc.Done()

    def _entry(self, raw: dict[str, Any]) -> ModelEntry:
        """Return the catalogue entry of a request. Raises ModelLoadFailed if the settings of this adapter forbid code
        or paths that the entry names.
        """
        entry = parse_entry(raw)
        refused = self._trust.refused(entry, is_here=True)
        if refused is not None:
            message = f"{entry.id}: {refused.message}"
            raise ModelLoadFailed(
                message, reason=refused.reason, param=refused.loc, extras={"error_class": "INCOMPATIBLE"}
            )
        return entry


def _send(connection: socket.socket, reply: Reply) -> None:
    connection.settimeout(SEND_TIMEOUT_S)
    connection.sendall(ipc.frame(reply))


def _is_gone(connection: socket.socket) -> bool:
    """Return whether the running batch must stop, because the peer closed the connection or sent a Cancel. Never waits,
    and leaves a frame unread: while a batch runs, the peer may send no frame except a Cancel.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN | getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def _is_trusted(connection: socket.socket) -> bool:
    """Return whether the peer is a process of this user or of root. Without SO_PEERCRED, the system does not name the
    peer's user: then return True, because the mode of the socket file already keeps out other users.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid in (0, os.getuid())
