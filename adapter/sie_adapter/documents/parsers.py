"""The processes that parse documents: started at the load of their model, ended with it.

    extract (any thread) ──► a thread of the pool ──► its process ──► Parsed, or why the document is unusable
                                   ├── the process died or took too long: that document fails, another one is started
                                   └── nobody waits any more: the process is killed, another one is started

Processes, because a parser is native code that reads what a client sent, and obeys no time limit of Python: what it
breaks is one document. Each thread has a process of its own, which only it speaks to.
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

from sie_adapter.documents import parser_frames
from sie_adapter.documents.parser_frames import Parsed, ParseJob
from sie_adapter.memory.device_errors import cancelled
from sie_contracts.errors import InternalFailure, ResourceExhausted, SIEError
from sie_contracts.media.documents import DocumentFile
from sie_contracts.media.media import fault
from sie_contracts.wire.child_frames import Hello, Unusable
from sie_contracts.wire.ipc import FrameError, receive_frame

DEADLINE_S = 60.0  # of one document, from the moment that a process is given it
MEMORY_BYTES = 4 << 30  # address space of a process
KEPT_BYTES = 1 << 30  # of memory between two documents; a process that holds more is replaced
START_S = 120.0  # its imports take seconds, on a busy machine many
LOOK_S = 0.2  # between two questions whether somebody still waits
_DIED_S = 1.0  # until a process whose socket ended has ended too
_logger = logging.getLogger("sie.adapter.documents")


class ParserNotStarted(Exception):
    """No process, no memory, or its imports fail."""


class Parsers:
    """At most `most` processes; one more is started when a document finds none free. For any number of threads.

    `module` is run by the interpreter of this process; it speaks as `parser_frames` says.
    """

    def __init__(
        self,
        most: int,
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int = MEMORY_BYTES,
        module: str = "sie_adapter.documents.parser_worker",
    ) -> None:
        """Raises ParserNotStarted if not even one can be."""
        self._deadline_s = deadline_s
        self._arguments = (module, str(os.getpid()), str(memory_bytes))
        self._processes: dict[int, _ParserProcess] = {}  # by thread
        # A process ends with the thread that started it (`confined.die_with`), so these start them and nobody else.
        self._threads = ThreadPoolExecutor(most, "parser")
        try:
            self._threads.submit(self._started).result()
        except BaseException:
            self._threads.shutdown()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the parsers."""
        return tuple(sorted(process.pid for process in list(self._processes.values()) if process.runs))

    def parse(
        self, documents: Sequence[DocumentFile], is_gone: Callable[[], bool] = lambda: False
    ) -> list[Parsed | SIEError]:
        """Each of them, or why it is unusable: InvalidInput, reason invalid_media, whose message begins with the cause,
        or another error where it is not the document.

        `is_gone` is asked whether nobody waits any more. Then no document of the call is parsed any further, and this
        raises InternalFailure, reason cancelled.
        """
        call = _ParseCall()
        left = futures = [self._threads.submit(self._parse, document, call) for document in documents]
        while left := list(wait(left, LOOK_S).not_done):
            if is_gone():
                for future in futures:
                    future.cancel()
                call.end()
                raise cancelled()
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all processes, whatever they do."""
        for process in list(self._processes.values()):
            process.end()
        self._threads.shutdown(cancel_futures=True)

    def _parse(self, document: DocumentFile, call: _ParseCall) -> Parsed | SIEError:
        try:
            return self._answered(document, call)
        except SIEError as error:
            return error
        except ParserNotStarted as error:
            _logger.error("a process that parses documents could not be started: %s", error)
            return ResourceExhausted("no process that parses documents could be started")
        except Exception as error:  # of one document: its mates are right
            _logger.exception("parsing a document failed")
            self._dismiss()
            return InternalFailure(f"parsing the document failed: {type(error).__name__}")

    def _started(self) -> _ParserProcess:
        """The process of the calling thread."""
        process = self._processes.get(threading.get_ident())
        if process is not None and not process.runs:
            _logger.warning("the parsing process %d ended while it had no document; it is replaced", process.pid)
            self._dismiss()
            process = None
        if process is None:
            process = self._processes[threading.get_ident()] = _ParserProcess(self._arguments)
        return process

    def _dismiss(self) -> None:
        process = self._processes.pop(threading.get_ident(), None)
        if process is not None:
            process.end()

    def _answered(self, document: DocumentFile, call: _ParseCall) -> Parsed:
        process = self._started()
        try:
            with call.running(process):
                answer = process.run(document, self._deadline_s)
        except _Late as error:
            self._dismiss()
            _logger.warning("the parsing process %d took longer than %g s; it is ended", process.pid, self._deadline_s)
            raise fault("timeout", f"parsing the document took longer than {self._deadline_s:g} s") from error
        except _ParserLost as error:
            status = process.status()
            self._dismiss()
            if call.is_over:
                raise cancelled() from error
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}: {error}"
            _logger.warning("the parsing process %d %s", process.pid, how)
            if status == -signal.SIGKILL:  # by nobody here: the kernel wanted memory, and the file may be a good one
                message = "the process that parsed the document was killed, as when a machine runs out of memory"
                raise ResourceExhausted(message) from error
            raise fault("undecodable", "the parser of the document crashed") from error
        if (held := process.resident_bytes()) > KEPT_BYTES:  # libraries keep what a document took
            _logger.info(
                "the parsing process %d holds %d MiB after a document; it is replaced", process.pid, held >> 20
            )
            self._dismiss()
        if isinstance(answer, Unusable):
            _logger.debug("a document is unusable, %s (%s)", answer.cause, answer.raised or "by its content")
            raise fault(answer.cause, answer.what)
        return answer


class _ParseCall:
    """The documents of one caller, and the processes that have one of them now."""

    def __init__(self) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._processes: set[_ParserProcess] = set()

    @contextlib.contextmanager
    def running(self, process: _ParserProcess) -> Iterator[None]:
        """Raises InternalFailure, reason cancelled."""
        with self._lock:
            if self.is_over:
                raise cancelled()
            self._processes.add(process)
        try:
            yield
        finally:
            with self._lock:  # what is killed after this may have another caller's document
                self._processes.discard(process)

    def end(self) -> None:
        """Kill what its processes do."""
        with self._lock:
            self.is_over = True
            for process in self._processes:
                process.kill()


class _ParserLost(Exception):
    """The process ended, or says what it must not."""


class _Late(Exception):
    """It took too long, and was killed."""


class _ParserProcess:
    """One process and its socket. Only the thread that made it calls `run`."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        """Start a process with the module paths of this one, and no other part of its environment. Raises
        ParserNotStarted.
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
                        "OMP_NUM_THREADS": "1",  # the processes are what runs at once; threads take address space
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
                raise ParserNotStarted("its first words are wrong")
        except (_ParserLost, _Late) as error:
            status = self.status()
            self.end()
            raise ParserNotStarted(f"it ended with status {status}, its last lines are above") from error
        except BaseException:
            self.end()
            raise

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Memory that it has now; 0 where the system does not tell."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        return 0

    def run(self, document: DocumentFile, deadline_s: float) -> Parsed | Unusable:
        """Raises _Lost, _Late."""
        self._number += 1
        job = ParseJob(self._number, document)
        answer = self._waited(deadline_s, parser_frames.frame(job))
        if isinstance(answer, Hello) or answer.number != job.number:
            raise _ParserLost("its answer is to something else")
        return answer

    def _waited(self, deadline_s: float, parts: Sequence[bytes] = ()) -> parser_frames.Answer:
        """The answer of the process to these bytes. It is killed when the time is over, which ends any wait for it."""
        timer = threading.Timer(deadline_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            self._socket.settimeout(None)
            for part in parts:
                self._socket.sendall(part)
            return parser_frames.answer(receive_frame(self._socket, parser_frames.MAX_ANSWER_BYTES))
        except (EOFError, FrameError, OSError, msgspec.DecodeError) as error:
            raise (_Late if self._late else _ParserLost)(str(error)) from error
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self.kill()

    def kill(self) -> None:
        """Kill the process, which ends any wait for its answer."""
        self._process.kill()

    def status(self) -> int:
        """The exit status of a lost process; 0 if it had to be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_DIED_S)
        self.end()
        return 0

    def end(self) -> None:
        """Kill it, whatever it does: it has nothing that would be lost."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
