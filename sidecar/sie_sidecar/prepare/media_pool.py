"""Pool of worker processes that turn image files into pixels and sound files into features. A process is started when a
file needs one, and ends with the sidecar.

    prepare ──► queue ──► keeper task ──► its worker process ──► PreparedImage or SoundFeatures, or Unusable
                             └── the process died or took too long: this file fails, a new process is started

Decoders run in processes because they are C code that reads the data of clients: a crash then loses only one file.
For each process, one task (the keeper) sends files and reads replies. It sends a file only after the reply to the
previous file, so replies cannot be mixed up. If a caller is cancelled, the keeper discards the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args, overload

from sie_contracts.errors import (
    UNDECODABLE,
    InternalFailure,
    InvalidInput,
    QueueFull,
    ResourceExhausted,
    ShuttingDown,
    SIEError,
)
from sie_contracts.media.images import Recipe, check, pixels_of
from sie_contracts.media.media import Cause, cause_of, fault
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire.child_frames import Hello, Unusable
from sie_contracts.wire.ipc import FrameError, read_frame
from sie_runtime.process import cancel_all
from sie_sidecar.prepare import media_frames
from sie_sidecar.prepare.media_frames import ImageJob, Job, PreparedFile, PreparedImage, SoundFeatures, SoundJob

DEADLINE_S = 10.0  # seconds that a process may take for one file
MEMORY_BYTES = 2 << 30  # bytes of address space of a process: decoding 100 megapixels takes 1.3 GB
# maximum number of waiting files for each process: at 25 ms each, the last file waits 25 s, about as long as a request
# may take
MAX_WAITING = 1000
RESULTS = ("prepared", *get_args(Cause), "failed")
START_S = 30.0  # seconds that a process may take to start, on a busy machine too
DIED_S = 1.0  # seconds for which the pool waits for the exit of a lost process before it kills the process
_logger = logging.getLogger("sie.sidecar.media")


@dataclass(frozen=True)
class _ImageFile:
    data: bytes
    recipe: Recipe
    noun = "image"

    def job(self, number: int) -> Job:
        return ImageJob(number, self.recipe, self.data)

    def check(self, reply: PreparedFile) -> None:
        """Raise _WorkerLost if the reply of a media worker does not fit this file."""
        if not isinstance(reply, PreparedImage):
            raise _WorkerLost("its reply is not an image")
        try:
            check(self.recipe, reply.upright)
            expected = pixels_of(self.recipe, reply.upright)
        except InvalidInput as error:
            raise _WorkerLost("its reply has an image size that the recipe does not allow") from error
        if (reply.height, reply.width) != expected or len(reply.pixels) != 3 * reply.height * reply.width:
            raise _WorkerLost("its pixels do not have the size that the recipe requires")


@dataclass(frozen=True)
class _SoundFile:
    data: bytes
    recipe: SoundRecipe
    from_s: float | None
    noun = "sound"

    def job(self, number: int) -> Job:
        return SoundJob(number, self.recipe, self.data, self.from_s)

    def check(self, reply: PreparedFile) -> None:
        """Raise _WorkerLost if the reply of a media worker does not fit this file."""
        if not isinstance(reply, SoundFeatures):
            raise _WorkerLost("its reply is not a sound")
        if not self.recipe.can_make(reply.shape) or len(reply.features) != 4 * math.prod(reply.shape):
            raise _WorkerLost("its features do not have the shape that the recipe requires")


class _PendingFile:
    """File that waits or is being decoded, with the future of its outcome."""

    def __init__(self, file: _ImageFile | _SoundFile) -> None:
        self.file = file
        self.done: asyncio.Future[PreparedFile] = asyncio.get_running_loop().create_future()

    def fail(self, error: SIEError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def succeed(self, reply: PreparedFile) -> None:
        """Pass the reply of a media worker to the caller. Raises _WorkerLost if the reply does not fit the file."""
        self.file.check(reply)
        if not self.done.done():
            self.done.set_result(reply)


class MediaPool:
    """Pool of at most `workers` processes, used by one event loop. It starts a process if a file waits and no process
    is free. `count` is called for each file whose caller was not cancelled, with "image" or "sound" and one of RESULTS.
    """

    def __init__(
        self,
        workers: int,
        count: Callable[[str, str], None] = lambda noun, result: None,
        *,
        deadline_s: float = DEADLINE_S,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._most = workers
        self._count = count
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._queue: asyncio.Queue[_PendingFile] = asyncio.Queue()
        self._keepers: list[asyncio.Task[None]] = []
        self._workers: set[_MediaProcess] = set()
        self._free = 0  # number of keepers (tasks with one process each) that wait for a file
        self._number = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(worker.pid for worker in self._workers))

    @overload
    async def prepare(self, data: bytes, recipe: Recipe) -> PreparedImage: ...

    @overload
    async def prepare(self, data: bytes, recipe: SoundRecipe, from_s: float | None = None) -> SoundFeatures: ...

    async def prepare(
        self, data: bytes, recipe: Recipe | SoundRecipe, from_s: float | None = None
    ) -> PreparedImage | SoundFeatures:
        """Return the pixels of an image file, or the features of a sound file. Raises InvalidInput (invalid_media, with
        the cause) for an unusable file; QueueFull, ResourceExhausted, ShuttingDown or InternalFailure if the file is
        not the cause.
        """
        file = _ImageFile(data, recipe) if isinstance(recipe, Recipe) else _SoundFile(data, recipe, from_s)
        try:
            self._admit(file)
            job = _PendingFile(file)
            self._queue.put_nowait(job)
            if self.waiting > self._free and len(self._keepers) < self._most:
                self._keepers.append(asyncio.create_task(self._keep(), name="media worker"))
            outcome = await job.done
        except InvalidInput as error:
            self._count(file.noun, cause_of(error)[0])
            raise
        except SIEError:
            self._count(file.noun, "failed")
            raise
        self._count(file.noun, "prepared")
        return outcome

    def _admit(self, file: _ImageFile | _SoundFile) -> None:
        """Raise SIEError if the file is too large, too many files wait, or the pool is closed."""
        if self._closed:
            raise ShuttingDown("the worker is shutting down and decodes no more files")
        size, most = len(file.data), media_frames.MAX_FILE_BYTES
        if size > most:
            raise fault("too_large", f"the {file.noun} file has {size} bytes, at most {most}")
        if self.waiting >= MAX_WAITING * self._most:
            message = f"{self.waiting} images and sounds wait for {self._most} decoding processes"
            raise QueueFull(message, extras={"queue_depth": self.waiting})

    async def close(self) -> None:
        """End all processes. Files that wait or are being decoded get an error."""
        self._closed = True
        await cancel_all(self._keepers)
        while not self._queue.empty():
            self._queue.get_nowait().fail(ShuttingDown("the worker is shutting down and decodes no more files"))

    async def _keep(self) -> None:
        worker: _MediaProcess | None = None
        try:
            while True:
                self._free += 1
                try:
                    job = await self._queue.get()
                finally:
                    self._free -= 1
                if job.done.done():  # the caller was cancelled, so the file need not be decoded
                    continue
                try:
                    if worker is not None and worker.is_gone:
                        _logger.warning("media worker process %d ended while it had no file", worker.pid)
                        await self._end(worker)
                        worker = None
                    worker = worker or await self._start()
                    worker = await self._serve(job, worker)
                except _WorkerNotStarted as error:
                    _logger.error("a media worker process could not be started: %s", error)
                    job.fail(ResourceExhausted("the process that decodes files could not be started: try again later"))
                except Exception as error:  # catches everything, because the caller must get an outcome in any case
                    _logger.exception("decoding a file (%s) failed; its request gets an error", job.file.noun)
                    job.fail(InternalFailure(f"preparing the {job.file.noun} failed: {type(error).__name__}"))
                    if worker is not None:
                        await self._end(worker)
                    worker = None
                finally:  # ends the future if this task was cancelled before the file had an outcome
                    job.fail(ShuttingDown("the worker is shutting down and decodes no more files"))
        finally:
            if worker is not None:
                await self._end(worker)

    async def _serve(self, job: _PendingFile, worker: _MediaProcess) -> _MediaProcess | None:
        """Decode the file of `job`. Return the process for the next file, or None if no process could be started."""
        self._number += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await worker.run(job.file.job(self._number))
            if isinstance(answer, Unusable):
                _logger.debug("a file cannot be decoded: %s (%s)", answer.cause, answer.raised or "no exception")
                raise fault(answer.cause, answer.message)
            job.succeed(answer)
        except InvalidInput as error:
            job.fail(error)
            return worker
        except TimeoutError:
            how = f"took longer than {self._deadline_s:g} s"
            job.fail(fault("timeout", f"decoding the {job.file.noun} {how}"))
        except _WorkerLost as error:
            status = await worker.ended()
            how = f"was killed by signal {-status}" if status < 0 else f"ended, or sent no usable reply: {error}"
            # this pool did not kill the process, so the kernel probably did, for lack of memory: the file may be valid
            if status == -signal.SIGKILL:
                job.fail(
                    ResourceExhausted(
                        "the process that decodes files was killed, probably for lack of memory: try again later"
                    )
                )
            else:
                job.fail(fault("undecodable", f"the decoder of the {job.file.noun} crashed"))
        else:
            return worker
        _logger.warning("media worker process %d %s; it is replaced", worker.pid, how)
        await self._end(worker)
        try:
            return await self._start()  # start the next process now: the next file must not wait for the start
        except _WorkerNotStarted as error:  # the next file tries again to start a process
            _logger.error("a media worker could not be started: %s", error)
            return None

    async def _start(self) -> _MediaProcess:
        worker = await _MediaProcess.start(self._memory_bytes)
        self._workers.add(worker)
        return worker

    async def _end(self, worker: _MediaProcess) -> None:
        self._workers.discard(worker)
        await worker.end()


class _WorkerNotStarted(Exception):
    """Raised if a process could not be started, for example for lack of memory, or because an import failed."""


class _WorkerLost(Exception):
    """Raised if a process ended, or sent a reply that does not fit its job."""


class _MediaProcess:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def is_gone(self) -> bool:
        """Return True if the process has ended. Ask the kernel, because the event loop may notice the end later."""
        if self._process.returncode is not None or self._reader.at_eof() or self._writer.is_closing():
            return True
        ended = select.poll()
        ended.register(self._writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(ended.poll(0))

    @staticmethod
    async def start(memory_bytes: int) -> _MediaProcess:
        """Start a process. It inherits no environment variables of the sidecar. Raises _WorkerNotStarted."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "sie_sidecar.prepare.media_worker"),
                    *(str(os.getpid()), str(memory_bytes)),
                    stdin=theirs.fileno(),
                    stdout=asyncio.subprocess.DEVNULL,
                    env={
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                        # one thread: there are several processes, and threads need address space, which is limited
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                    start_new_session=True,  # Ctrl-C must reach only the sidecar, which first finishes its work
                )
            except BaseException as error:
                writer.close()
                if isinstance(error, OSError):
                    raise _WorkerNotStarted(str(error)) from error
                raise
        worker = _MediaProcess(process, reader, writer)
        try:
            async with asyncio.timeout(START_S):
                if not isinstance(await worker._read(), Hello):
                    raise _WorkerNotStarted("its first message was not Hello")
        except (_WorkerLost, TimeoutError) as error:
            status = await worker.ended()
            raise _WorkerNotStarted(f"it ended with status {status}; its own output is above this line") from error
        except BaseException:
            await worker.end()
            raise
        return worker

    async def run(self, job: Job) -> PreparedFile | Unusable:
        """Send a job and return the reply. Raises _WorkerLost."""
        try:
            for part in media_frames.FRAMES.frame(job):
                self._writer.write(part)
            await self._writer.drain()
        except OSError as error:
            raise _WorkerLost("the file could not be sent to it") from error
        answer = await self._read()
        if isinstance(answer, Hello) or answer.number != job.number:
            raise _WorkerLost("its reply belongs to another job")
        return answer

    async def _read(self) -> media_frames.Answer:
        try:
            return media_frames.FRAMES.answer(await read_frame(self._reader, media_frames.MAX_ANSWER_BYTES))
        except (EOFError, FrameError, OSError, *UNDECODABLE) as error:
            raise _WorkerLost(str(error)) from error

    async def ended(self) -> int:
        """Wait for the exit of a lost process, and return its status. If it still runs after DIED_S seconds, for
        example because only its reply was unusable, kill it and return 0.
        """
        status = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DIED_S):
                status = await self._process.wait()
        await self.end()
        return status

    async def end(self) -> None:
        """Kill the process, even while it runs a job: the process stores nothing."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._writer.close()
        await self._process.wait()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
