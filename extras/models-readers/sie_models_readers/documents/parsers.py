"""Pool of the processes that parse documents for a model. The first process starts when the model is loaded, more
processes start when documents need them. All processes end when the model is unloaded or evicted.

    extract (any thread) ──► a thread of the pool ──► its process ──► Parsed, or the reason why the document is unusable
                                   ├── the process died or took too long: the document fails
                                   └── no client waits any more: the process is killed
    After a process has died or was killed, its thread starts a new process for the next document.

Documents are parsed in separate processes, one for each thread of the pool, because the parsers are native code that
reads files of clients: a crash fails only one document, and a process can be killed at a time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from sie_adapter.memory.device_errors import cancelled
from sie_contracts.errors import UNDECODABLE, InternalFailure, ResourceExhausted, SIEError
from sie_contracts.media.media import fault
from sie_contracts.wire.child_frames import Hello, Unusable
from sie_contracts.wire.ipc import FrameError, receive_frame
from sie_models_readers.documents import parser_frames
from sie_models_readers.documents.parser_frames import Parsed, ParseJob

DEADLINE_S = 60.0  # time limit for one document, in seconds
MEMORY_BYTES = 4 << 30  # bytes of address space that a parser process may use
# a parser process is replaced if its resident memory exceeds this number of bytes after a document
KEPT_BYTES = 1 << 30
START_S = 120.0  # seconds within which a process must start; the imports take seconds, more on a busy machine
LOOK_S = 0.2  # seconds between two checks whether a client still waits (`is_gone`)
_DIED_S = 1.0  # seconds in which a process must end after its socket was closed
_logger = logging.getLogger("sie.adapter.documents")


class ParserNotStarted(Exception):
    """Raised if a parser process could not start, or was not ready within START_S."""


class Parsers:
    """Pool of at most `most` parser processes. If all running processes are busy when a document arrives, one more
    process starts. Thread-safe.

    `module`: the Python module that each process runs. The module must implement the protocol of `parser_frames`.
    """

    def __init__(
        self,
        most: int,
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int = MEMORY_BYTES,
        module: str = "sie_models_readers.documents.parser_worker",
    ) -> None:
        """Start the first process. Raises ParserNotStarted if the process does not start."""
        self._deadline_s = deadline_s
        self._arguments = (module, str(os.getpid()), str(memory_bytes))
        self._processes: dict[int, _ParserProcess] = {}  # id of a thread of the pool -> its process
        # A process ends with the thread that started it (`confined`), so only the threads of the pool start
        # processes.
        self._threads = ThreadPoolExecutor(most, "parser")
        try:
            self._threads.submit(self._started).result()
        except BaseException:
            self._threads.shutdown()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(process.pid for process in list(self._processes.values()) if process.runs))

    def parse(self, jobs: Sequence[ParseJob], is_gone: Callable[[], bool] = lambda: False) -> list[Parsed | SIEError]:
        """Return the parsed document of each job, or its error. For an unusable document the error is an InvalidInput
        with the reason `invalid_media`, whose message begins with the cause.

        `is_gone` is called repeatedly. When it returns True, parsing stops, and InternalFailure with the reason
        `cancelled` is raised.
        """
        call = _ParseCall()
        left = futures = [self._threads.submit(self._parse, job, call) for job in jobs]
        while left := list(wait(left, LOOK_S).not_done):
            if is_gone():
                for future in futures:
                    future.cancel()
                call.end()
                raise cancelled()
        return [future.result() for future in futures]

    def close(self) -> None:
        for process in list(self._processes.values()):
            process.end()
        self._threads.shutdown(cancel_futures=True)

    def _parse(self, job: ParseJob, call: _ParseCall) -> Parsed | SIEError:
        try:
            return self._answered(job, call)
        except SIEError as error:
            return error
        except ParserNotStarted as error:
            _logger.error("a process that parses documents could not be started, so a document fails: %s", error)
            return ResourceExhausted("no process that parses documents could be started")
        except Exception as error:
            # the error concerns one document, so the other documents of the call still get results
            _logger.exception("parsing a document failed; the parsing process is replaced")
            self._dismiss()
            return InternalFailure(f"parsing the document failed: {type(error).__name__}")

    def _started(self) -> _ParserProcess:
        """Return the running process of this thread, or a new one if it has none. Raises ParserNotStarted."""
        process = self._processes.get(threading.get_ident())
        if process is not None and not process.runs:
            _logger.warning("the parsing process %d ended while it parsed no document, and is replaced", process.pid)
            self._dismiss()
            process = None
        if process is None:
            process = self._processes[threading.get_ident()] = _ParserProcess(self._arguments)
        return process

    def _dismiss(self) -> None:
        process = self._processes.pop(threading.get_ident(), None)
        if process is not None:
            process.end()

    def _answered(self, job: ParseJob, call: _ParseCall) -> Parsed:
        process = self._started()
        try:
            with call.running(process):
                answer = process.run(job, self._deadline_s)
        except _Late as error:
            self._dismiss()
            _logger.warning("the parsing process %d exceeded %g s and is killed", process.pid, self._deadline_s)
            raise fault("timeout", f"parsing the document took longer than {self._deadline_s:g} s") from error
        except _ParserLost as error:
            status = process.status()
            self._dismiss()
            if call.is_over:
                raise cancelled() from error
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}: {error}"
            _logger.warning("the parsing process %d %s", process.pid, how)
            # Neither a time limit nor a cancelled call sent the SIGKILL, so probably the kernel did, for lack of
            # memory. The error is no InvalidInput, because the document may be valid.
            if status == -signal.SIGKILL:
                message = "the process that parsed the document was killed, probably for lack of memory"
                raise ResourceExhausted(message) from error
            raise fault("undecodable", "the parser of the document crashed") from error
        # `_ParseCall.end` may have killed the process after the process had answered, so the process must get no other
        # document
        if call.is_over:
            self._dismiss()
            raise cancelled()
        # libraries do not free the memory that they needed for a large document
        if (held := process.resident_bytes()) > KEPT_BYTES:
            _logger.info(
                "the parsing process %d has %d MiB of memory after a document, so it is replaced",
                process.pid,
                held >> 20,
            )
            self._dismiss()
        if isinstance(answer, Unusable):
            _logger.debug("a document cannot be parsed: cause %s, exception %s", answer.cause, answer.raised or "none")
            raise fault(answer.cause, answer.message)
        return answer


class _ParseCall:
    def __init__(self) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._processes: set[_ParserProcess] = set()

    @contextlib.contextmanager
    def running(self, process: _ParserProcess) -> Iterator[None]:
        """Register this process with the call while it parses, so that `end` can kill it. Raises InternalFailure with
        the reason `cancelled` if the call has ended.
        """
        with self._lock:
            if self.is_over:
                raise cancelled()
            self._processes.add(process)
        try:
            yield
        finally:
            # from now on `end` must not kill the process, because its next document may belong to another call
            with self._lock:
                self._processes.discard(process)

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            for process in self._processes:
                process.kill()


class _ParserLost(Exception):
    """Raised if a parser process ended before its next message, or sent an invalid message."""


class _Late(Exception):
    """Raised if a parser process exceeded the time limit and was killed."""


class _ParserProcess:
    """Parser process and the socket to it. Only the thread that created the object may call `run`."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        """Start a process, and wait until it is ready. The process inherits no environment variables, and imports from
        the same path as this process. Raises ParserNotStarted.
        """
        self._number = 0
        self._late = False
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *arguments],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        "HF_HUB_OFFLINE": "1",
                        # one thread per process for the libraries: the pool runs several processes at once, and each
                        # thread needs some of the limited address space of its process
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise ParserNotStarted(str(error)) from error
        self.pid = self._process.pid
        try:
            if not isinstance(self._waited(START_S), Hello):
                raise ParserNotStarted("the first message of the process is no Hello")
        except (_ParserLost, _Late) as error:
            status = self.status()
            self.end()
            raise ParserNotStarted(
                f"the process ended with status {status}; the log above has its last lines"
            ) from error
        except BaseException:
            self.end()
            raise

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return the resident memory of the process in bytes; 0 if the system does not report it."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return 0

    def run(self, job: ParseJob, deadline_s: float) -> Parsed | Unusable:
        """Return the answer for a document. Raises _ParserLost if the process ended or its answer is invalid, and _Late
        after the deadline.
        """
        self._number += 1
        job = msgspec.structs.replace(job, number=self._number)
        answer = self._waited(deadline_s, parser_frames.FRAMES.frame(job))
        if isinstance(answer, Hello) or answer.number != job.number:
            raise _ParserLost("its answer belongs to another document")
        return answer

    def _waited(self, deadline_s: float, parts: Sequence[bytes] = ()) -> parser_frames.Answer:
        """Send `parts` (bytes of a frame), and return the answer. After `deadline_s` seconds, kill the process."""
        timer = threading.Timer(deadline_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._socket.settimeout(None)
            for part in parts:
                self._socket.sendall(part)
            return parser_frames.FRAMES.answer(receive_frame(self._socket, parser_frames.MAX_ANSWER_BYTES))
        except (EOFError, FrameError, OSError, *UNDECODABLE) as error:
            raise _ParserLost(str(error)) from error
        finally:
            timer.cancel()
            timer.join()
            if self._late:  # the process was killed, maybe after its answer, so the process must get no other document
                raise _Late

    def _expire(self) -> None:
        self._late = True
        self.kill()

    def kill(self) -> None:
        self._process.kill()

    def status(self) -> int:
        """Return the exit status of the process. If the process does not end within _DIED_S, kill it and return 0."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_DIED_S)
        self.end()
        return 0

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
