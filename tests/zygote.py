"""Starts processes of the product by fork from one process that has imported them, since imports take most of a start.

    Part.start ──socket──► zygote, one of each kind ──fork──► a process of its own: pid, group, memory, signals, output
       ▲                                                             │
       └────────────────── pid, and then its exit status ────────────┘

What is forked is what `sie gateway` and the others are after their imports: the same entry with the same arguments and
the same environment. The zygote has one thread and has run nothing. All processes of a run of the tests share it: it
ends with the first of them, and what it forked ends with it, or with the process of tests that asked for it.

`sie serve` starts processes itself. One that is forked has a zygote of its own beside it, a fork that has run nothing
either, which forks those: they end with it, as what it starts would.
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
# the last ones are imported when a connection to the broker is opened, and by the first HTTP client and server
_PROCESSES = (
    *("sie_gateway.process", "sie_config_service.process", "sie_sidecar.process", "sie_sidecar.device.recording"),
    *("sie_broker.nats", "anyio._backends._asyncio", "uvloop", "uvicorn.lifespan.on", "public_certificates"),
)
# what `sie adapter` has imported when it forks the process that serves: it starts no thread
_ENGINE = ("sie_adapter.process", "transformers", "sie_adapter.families.text_encoder", "sie_adapter.server")
IMPORTS: dict[Kind, tuple[str, ...]] = {  # what the entry imports at its first use
    "sie": _PROCESSES,
    "engine": (*_ENGINE, *_PROCESSES, "sie_cli.serve.command", "sie_cli.serve.standalone"),
    "fixed_cost_adapter": (),
    "qdrant": ("qdrant_edge", "qdrant_client.models"),
    "tests": (),
}
RUN_FIRST = "PYTEST_RUN_FIRST"  # in the environment: a file that a forked process runs before its entry
_SHARED = "PYTEST_ZYGOTES"  # in the environment: the process with which they end, and the folder of their sockets
_LIBC = ctypes.CDLL(None)
_lock = threading.Lock()
_started_here: list[subprocess.Popen[bytes]] = []  # kept, since they outlive whoever forgets them
_given: Path | None = None  # in a zygote: where the environments are told that it gave
_beside: socket.socket | None = None  # the control connection to the zygote of this `sie serve`


class Forked:
    """A process that the zygote forked, with what is used of `subprocess.Popen`. `stdout` has its errors too."""

    def __init__(self, kind: Kind, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        reading, writing = os.pipe()
        with open(os.devnull, "rb") as devnull:
            self._start(kind, argv, environ, (devnull.fileno(), writing, writing))
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8")

    @classmethod
    def in_place(cls, kind: Kind) -> Forked:
        """Return the record of this process: its arguments, its environment and its standard streams."""
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
        self.status_file = read_end  # readable when it has ended
        self._told = os.fdopen(read_end, encoding="ascii")
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        return self.returncode if self._ended(0) else None

    def wait(self, timeout_s: float | None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._ended(timeout_s) or self.returncode is None:
            raise subprocess.TimeoutExpired(self.argv, timeout_s)
        return self.returncode

    def _ended(self, timeout_s: float | None) -> bool:
        with self._ending:  # which several threads may ask for
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
    """Return the files that can be read within the time limit. `select.select` takes no number above 1023."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


class Awaited:
    """A forked process as the supervisor of `sie serve` knows those that it starts."""

    def __init__(self, forked: Forked, stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self._forked = forked
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(forked.status_file, self._end)

    @classmethod
    async def started(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Awaited | supervisor.ChildProcess:
        """In the place of `supervisor.started`."""
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
    """Whether there is a setting of the C library, which it reads when a process starts and not when one is forked."""
    return any(name.startswith("MALLOC_") for name in environ)


def _prepare(kind: Kind) -> None:
    """Make what each process would make at its first use."""
    if kind in ("sie", "engine"):
        httpx.AsyncClient(trust_env=False)  # the public certificates
    if kind in ("engine", "tests"):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("bert")  # a thousand regular expressions, at the first load of any model


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment of a process. For a forked one the kernel has that of the zygote."""
    environ_path = _given_to(Path(os.environ[_SHARED].partition(":")[2]), pid)
    if environ_path.exists():
        return dict(json.loads(environ_path.read_text("utf-8")))
    return psutil.Process(pid).environ()


def _given_to(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.environ"


def folder_of_this_process(kind: str) -> str:
    """Make a temporary folder, which the caller removes at its end. Those of processes that were killed before that are
    removed now.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}-*-*"):
        pid = folder.name.removeprefix(f"{kind}-").partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)  # another process may remove it now, or it is another user's
    return tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-")


def share() -> None:
    """Have this process and those that it starts share their zygotes, which end with this one."""
    if _SHARED not in os.environ:
        folder = folder_of_this_process("zygotes")
        os.environ[_SHARED] = f"{os.getpid()}:{folder}"
        atexit.register(shutil.rmtree, folder)


@functools.cache
def _zygote(kind: Kind) -> socket.socket:
    """A control connection to the zygote of a kind, which is started if nobody has yet."""
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
                # a library of linear algebra that is imported with more starts threads, of which a fork takes none
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
    """The next request and its descriptors; None when nobody is there any more."""
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
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(descriptor, b"%d\n" % number)


def fork_on_request(
    *, listener: socket.socket | None = None, owner: int | None = None, control: socket.socket | None = None
) -> list[str]:
    """Serve those who connect until the owner of the zygote (a descriptor of that process) is gone, or one connection
    until its other side is, and end. In each child: return its arguments.
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
    """In a child, before it is what it is started for: a session of its own, so that no signal of a terminal reaches
    it, and SIGKILL when the thread that started it ends.
    """
    os.setsid()
    _LIBC.prctl(1, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    _LIBC.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def _become(job: dict[str, object], streams: Sequence[int], parent: int) -> list[str]:
    """Set up the process as a start would: a session, standard streams, folder, environment. It is killed when the
    zygote ends.
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
    from setproctitle import setproctitle  # here: tools that start processes of their own do without it

    setproctitle(" ".join([sys.executable, *argv]))
    if _given is not None:
        _given_to(_given, os.getpid()).write_text(json.dumps(job["environ"]), "utf-8")
    return argv


def _read_hub() -> None:
    """Have the library of the hub read HF_ENDPOINT again, which it does as it is imported."""
    if (api := sys.modules.get("huggingface_hub.hf_api")) is not None:
        api.api.endpoint = importlib.reload(api.constants).ENDPOINT


def have_children_forked() -> None:
    """To be called in a process that is about to be `sie serve`. Returns in it, and in each process that is forked for
    it, with the arguments of that one.
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

    getproctitle()  # finds the place of the title, which it does not once the environment has moved
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
