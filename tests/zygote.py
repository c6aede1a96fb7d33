"""Start processes of the product as forks of a process that has done the imports, which take most of a start.

    Part.start ──socket──► zygote, one of each kind ──fork──► a process of its own: pid, group, memory, signals, output
       ▲                                                             │
       └────────────────── pid, and then its exit status ────────────┘

A fork runs the entry point of `sie gateway` or another command, with its arguments and its environment. The zygote has
one thread and has only done imports. All processes of a run of the tests share it. The zygote ends with the first of
them. A fork ends with the zygote, or with the process of tests that asked for it.

`sie serve` starts processes itself. A forked `sie serve` has a zygote of its own, another fresh fork, which forks these
processes. They end with it, as child processes of `sie serve` do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from sie_cli.serve import supervisor

Kind = Literal["sie", "engine", "fixed_cost_adapter", "qdrant", "tests"]
ENTRIES: dict[Kind, str] = {
    "sie": "sie_cli.main",
    "engine": "sie_cli.main",
    "fixed_cost_adapter": "fixed_cost_adapter",
    "qdrant": "qdrant_server",
    "tests": "worker",
}
# the second line has modules that the first connection to the broker, HTTP client or HTTP server imports
_PROCESSES = (
    *("sie_gateway.process", "sie_config_service.process", "sie_sidecar.process"),
    *("sie_broker.nats", "anyio._backends._asyncio", "uvloop", "uvicorn.lifespan.on", "public_certificates"),
)
# modules that `sie adapter` has imported before it forks the process that serves; they start no thread
_ENGINE = ("sie_adapter.process", "transformers", "sie_adapter.families.text_encoder", "sie_adapter.server")
IMPORTS: dict[Kind, tuple[str, ...]] = {  # modules that the entry imports only at their first use
    "sie": _PROCESSES,
    "engine": (*_ENGINE, *_PROCESSES, "sie_cli.serve.command", "sie_cli.serve.standalone"),
    "fixed_cost_adapter": (),
    "qdrant": ("qdrant_edge", "qdrant_client.models"),
    "tests": (),
}
RUN_FIRST = "PYTEST_RUN_FIRST"  # a variable with a file that a forked process runs before its entry
_SHARED = "PYTEST_ZYGOTES"  # a variable with the process with which zygotes end, and the folder of their sockets
_LIBC = ctypes.CDLL(None)
_lock = threading.Lock()
_started_here: list[subprocess.Popen[bytes]] = []  # a reference, because a collected Popen of a live process warns
_given: Path | None = None  # in a zygote: the folder for files with the environments of its forks
_beside: socket.socket | None = None  # the control connection to the zygote of this `sie serve`


class Forked:
    """A process that the zygote forked, with a part of the interface of `subprocess.Popen`. `stdout` has stderr too."""

    def __init__(self, kind: Kind, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        with open(os.devnull, "rb") as devnull:
            self._start(kind, argv, environ, (devnull.fileno(), writing, writing))
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8")

    @classmethod
    def in_place(cls, kind: Kind) -> Forked:
        """Fork a process with the arguments, the environment and the standard streams of this process."""
        forked = cls.__new__(cls)
        forked._start(kind, sys.argv, os.environ, (0, 1, 2))
        return forked

    def _start(
        self, kind: Kind, argv: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int]
    ) -> None:
        self.argv = list(argv)
        self.returncode: int | None = None
        self._ending = threading.Lock()
        read_end, tells = os.pipe()
        request = json.dumps({"argv": self.argv, "environ": dict(environ), "cwd": str(Path.cwd())}).encode()
        with _lock:
            control = _beside or _zygote(kind)
            socket.send_fds(control, [len(request).to_bytes(4, "big")], [tells, *streams])
            control.sendall(request)
        os.close(tells)
        self.status_file = read_end  # readable when the process has ended
        self._told = os.fdopen(read_end, encoding="ascii")
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        return self.returncode if self._ended(0) else None

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the end and return the status. Raise subprocess.TimeoutExpired at the time-out."""
        if not self._ended(timeout_s) or self.returncode is None:
            raise subprocess.TimeoutExpired(self.argv, timeout_s)
        return self.returncode

    def _ended(self, timeout_s: float | None) -> bool:
        with self._ending:  # several threads may wait for the end
            if self.returncode is None and _readable([self._told], timeout_s):
                with self._told as status_stream:
                    self.returncode = int(status_stream.readline())
            return self.returncode is not None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _readable(files: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Return the files that become readable within the time. `select.select` takes no descriptor above 1023."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


class Awaited:
    """A forked process with the interface of the child processes of the supervisor of `sie serve`."""

    def __init__(self, forked: Forked, stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self._forked = forked
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(forked.status_file, self._end)

    @classmethod
    async def started(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Awaited | asyncio.subprocess.Process:
        """Start a process in place of `supervisor.started`."""
        if argv[0] != sys.executable:  # the broker
            return await _started(argv, environ)
        forked, reader = Forked("engine", argv[1:], environ), asyncio.StreamReader(supervisor.MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, forked.stdout)
        return cls(forked, reader)

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        self._forked.send_signal(number)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._forked.status_file)
        self._ended.set_result(self._forked.wait(0))


_started = supervisor.started


def reads_at_start(environ: Mapping[str, str]) -> bool:
    """Return True if a variable is a setting of the C library, which reads it at a start but not at a fork."""
    return any(name.startswith("MALLOC_") for name in environ)


def _prepare(kind: Kind) -> None:
    """Create objects that each process would else create at their first use."""
    if kind in ("sie", "engine"):
        httpx.AsyncClient(trust_env=False)  # the public certificates
    if kind in ("engine", "tests"):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("bert")  # a thousand regular expressions, at the first load of any model


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment of a process. For a forked one, the kernel has only that of the zygote."""
    environ_path = _given_to(Path(os.environ[_SHARED].partition(":")[2]), pid)
    if environ_path.exists():
        return dict(json.loads(environ_path.read_text("utf-8")))
    return psutil.Process(pid).environ()


def _given_to(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.environ"


def folder_of_this_process(kind: str) -> str:
    """Create a temporary folder, which the caller removes at its end. Remove folders of killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}-*-*"):
        pid = folder.name.removeprefix(f"{kind}-").partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # another process may remove it too, or another user owns it
    return tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-")


def share() -> None:
    """Let this process and its children share zygotes, which end with this process."""
    if _SHARED not in os.environ:
        folder = folder_of_this_process("zygotes")
        os.environ[_SHARED] = f"{os.getpid()}:{folder}"
        atexit.register(shutil.rmtree, folder)


@functools.cache
def _zygote(kind: Kind) -> socket.socket:
    """Return a control connection to the zygote of a kind. Start the zygote if it does not run."""
    share()
    owner, _, folder = os.environ[_SHARED].partition(":")
    path = Path(folder, kind)
    control = socket.socket(socket.AF_UNIX)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                # with more threads, an import of a linear algebra library starts threads, which a fork does not have
                environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
                argv = [sys.executable, __file__, kind, str(listener.fileno()), owner]
                process = subprocess.Popen(
                    argv,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[listener.fileno()],
                )
                _started_here.append(process)
    control.connect(str(path))
    return control


def _received(control: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """Return the next request and its descriptors, or None if the other side has closed."""
    head, descriptors, _, _ = socket.recv_fds(control, 4, 4)
    if not head:
        return None
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        body += control.recv(size - len(body))
    return json.loads(body), descriptors


def _reap(status_fds: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if _given is not None:
                _given_to(_given, ended[0]).unlink(missing_ok=True)
            _tell(status := status_fds.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))
            os.close(status)


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the other side has closed
        os.write(descriptor, b"%d\n" % number)


def fork_on_request(
    *, listener: socket.socket | None = None, owner: int | None = None, control: socket.socket | None = None
) -> list[str]:
    """Serve connections of `listener` until the process of the descriptor `owner` has ended, or only `control` until
    its other side closes. Then end this process. In each child, return its arguments.
    """
    controls = set(filter(None, [control]))
    status_fds: dict[int, int] = {}
    requesters: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    parent = os.getpid()
    while True:
        ready = _readable([woken, *controls, *filter(None, [listener, owner])])
        if owner in ready:
            sys.exit()
        if woken in ready:
            os.read(woken, 4096)
            _reap(status_fds)
        if listener in ready and listener is not None:
            controls.add(listener.accept()[0])
        for element in controls.intersection(ready):
            request = _received(element)
            if request is None:
                if listener is None:
                    sys.exit()
                controls.remove(element)
                element.close()
                for pid in [pid for pid, requester in requesters.items() if requester is element and pid in status_fds]:
                    os.kill(pid, signal.SIGKILL)
                continue
            job, (status, *streams) = request
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for connection in (*controls, *filter(None, [listener])):
                    connection.close()
                for descriptor in (woken, wakes, status, *status_fds.values(), *filter(None, [owner])):
                    os.close(descriptor)
                return _become(job, streams, parent)
            for stream in streams:
                os.close(stream)
            status_fds[pid] = status
            requesters[pid] = element
            _tell(status, pid)


def end_with_parent() -> None:
    """Prepare a child before it executes its program: give it a session of its own, so that no signal of a terminal
    reaches it, and SIGKILL when the thread that started it ends.
    """
    os.setsid()
    _LIBC.prctl(1, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    _LIBC.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _become(job: dict[str, object], streams: Sequence[int], parent: int) -> list[str]:
    """Set up the process as a start does: a session, standard streams, folder, environment. The kernel kills it when
    the zygote ends.
    """
    os.setsid()
    _end_with(parent)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    os.chdir(str(job["cwd"]))
    os.environ.clear()
    os.environ.update(job["environ"])  # type: ignore[call-overload]
    _read_hub()
    argv: list[str] = list(job["argv"])  # type: ignore[call-overload]
    sys.orig_argv = [sys.executable, *argv]
    if first := os.environ.get(RUN_FIRST):
        runpy.run_path(first)
    from setproctitle import setproctitle  # imported here, because tools that import this module may lack it

    setproctitle(" ".join([sys.executable, *argv]))
    if _given is not None:
        _given_to(_given, os.getpid()).write_text(json.dumps(job["environ"]), "utf-8")
    return argv


def _read_hub() -> None:
    """Let huggingface_hub read HF_ENDPOINT again, which it else reads only at its import."""
    if (api := sys.modules.get("huggingface_hub.hf_api")) is not None:
        api.api.endpoint = importlib.reload(api.constants).ENDPOINT


def have_children_forked() -> None:
    """Give a process that becomes `sie serve` a zygote of its own. The function returns in this process, and in each
    process that is forked for it, with the arguments of that process.
    """
    global _beside
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    beside = os.fork()
    if not beside:
        ours.close()
        _end_with(parent)
        sys.argv = fork_on_request(control=theirs)
        return
    theirs.close()
    _beside = ours

    def end() -> None:
        ours.close()
        os.waitpid(beside, 0)

    atexit.register(end)
    supervisor.started = Awaited.started  # type: ignore[assignment]


if __name__ == "__main__":
    kind: Kind = sys.argv[1]  # type: ignore[assignment]
    owner = os.pidfd_open(int(sys.argv[3]))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0) if _readable([owner], 0) else None)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)  # imports take longer than a user waits after Ctrl-C
    from setproctitle import getproctitle

    getproctitle()  # finds the place of the title, which is impossible after the environment has changed
    entry = importlib.import_module(ENTRIES[kind])
    for module in IMPORTS[kind]:
        importlib.import_module(module)
    if kind == "tests":
        entry.collect()
    _prepare(kind)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=int(sys.argv[2]))
    _given = Path(listener.getsockname()).parent
    sys.argv = fork_on_request(listener=listener, owner=owner)
    if sys.argv[1:2] == ["serve"]:
        have_children_forked()
    sys.exit(entry.main())
