"""Object stores by URL: opened in one way, each call bounded in time, and their errors as one set of classes.

s3://bucket/prefix, gs://bucket/prefix, file:///path or a path ──opened──► ObjectStore ──within──► answer or error
                                                                    └── Patience.asked: repeated, where that helps

StoreError             no answer in time, or a failure that may pass
├── ObjectMissing      no such object
├── BucketMissing      no such bucket
├── AccessRefused      credentials are missing, wrong, expired or not allowed to do this
├── RangeMissing       the object is shorter than the requested range
├── WrittenMeanwhile   somebody else wrote the object since it was read
└── StoreFull          there is no room for the object
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sie_contracts.settings import SettingError, store_url

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

_T = TypeVar("_T")
_logger = logging.getLogger("sie.store")

MAX_PAUSE_S = 30.0
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.1, 256 << 20  # of a disk
PAYLOADS, FILES = 1, 2  # reserves that each leaves free
EXIT_PAUSE_S = 0.1
_claimed: Counter[int] = Counter()  # bytes by file system that writers of this process have, disks perhaps not yet
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_IN = re.compile(r" in [0-9.]+(ns|µs|ms|s)\b")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_FULL = frozenset(str(number) for number in (errno.ENOSPC, errno.EDQUOT))
_USER = re.compile(r"://[^/@\s]+@")
_REFUSED = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
# asked where nothing else names credentials
_INSTANCE = (
    "169.254.169.254",
    "169.254.170.2",
    "metadata.google.internal",
)


class StoreError(Exception):
    """The store refused, or did not answer in time. Another attempt may help, unless it is one of the subclasses.
    `after_s`: how long the store asked to wait before it.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class ObjectMissing(StoreError):
    """Absence of an object."""


class BucketMissing(StoreError):
    """Absence of a bucket."""


class AccessRefused(StoreError):
    """The credentials are missing, wrong, expired, or do not allow it."""


class RangeMissing(StoreError):
    """The object ends before the requested range begins."""


class WrittenMeanwhile(StoreError):
    """Somebody else wrote the object since it was read."""


class StoreFull(StoreError):
    """The disk of the store is full, or a quota of it is used up."""


def opened(url: str, setting: str) -> ObjectStore:
    """The store at `url`; its keys are below the path of the URL. Raises SettingError, which names `setting`.

    A folder is created if it does not exist, with permissions for its owner alone. Buckets are not checked: they may be
    created later. Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables, from files that these name,
    or from the machine.
    """
    from obstore.exceptions import BaseError
    from obstore.store import GCSStore, LocalStore, S3Store

    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)

    where = store_url(url)
    limits: dict[str, Any] = {
        # plain HTTP only where the operator's endpoint says so; options given here replace those of the environment
        # (obstore 0.12)
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=120),
        },
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    }
    try:
        if where.scheme == "file":
            Path(where.path).mkdir(mode=0o700, parents=True, exist_ok=True)
            return LocalStore(where.path)
        kind: Callable[..., ObjectStore] = S3Store if where.scheme == "s3" else GCSStore
        return kind(where.bucket, prefix=where.path or None, **limits)
    except (BaseError, OSError) as error:
        raise SettingError(setting, _first_line(error)) from error


@contextmanager
def room(store: ObjectStore, *, reserves: int) -> Iterator[Callable[[int], None]]:
    """A function that claims bytes of a folder's file system before they are written there. A bucket has quotas of
    its own.

    The queue may share that disk, and takes no work when it is full. So payloads leave it one reserve, and what waits
    for no answer, such as files and outputs of jobs, leaves payloads another one. What other writers of this process
    have claimed counts until they end: their bytes are perhaps not on the disk yet.

    Raises StoreFull where fewer than `reserves` would be left.
    """
    from obstore.store import LocalStore

    folder = str(store.prefix) if isinstance(store, LocalStore) else None
    device = os.stat(folder).st_dev if folder is not None else None
    own = 0

    def claim(size: int) -> None:
        nonlocal own
        if folder is None or device is None:
            return
        own, _claimed[device] = own + size, _claimed[device] + size
        disk = shutil.disk_usage(folder)
        reserve = min(MAX_RESERVE_BYTES, int(disk.total * RESERVE_SHARE))
        if disk.free - _claimed[device] < reserves * reserve:
            raise StoreFull(f"its disk has {disk.free} bytes free, {reserves * reserve} are kept free for the queue")

    try:
        yield claim
    finally:
        if device is not None:
            _claimed[device] -= own


def _let_threads_finish() -> None:
    """Let the threads of obstore finish at exit: they release Python objects a moment after an answer. If the
    interpreter is being finalized then, the process is aborted (SIGABRT).
    """
    time.sleep(EXIT_PAUSE_S)


async def within(timeout_s: float, work: Awaitable[_T]) -> _T:
    """The result of `work`, a call of a store, within a time-out. Raises StoreError."""
    from obstore.exceptions import BaseError

    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise StoreError(f"no answer within {timeout_s:.3g} s") from error
    except (BaseError, OSError) as error:
        raise failure(error) from error


async def first_bytes(store: ObjectStore, key: str, most: int) -> tuple[GetResult, bytes]:
    """An object's first bytes, at most `most`, and what the store says of it. No more is read, however long the store
    says that it is.
    """
    import obstore

    answer, data = await obstore.get_async(store, key), bytearray()
    async for chunk in answer.stream():
        data += chunk
        if len(data) >= most:
            break
    return answer, bytes(data[:most])


@dataclass(frozen=True)
class RetryPolicy:
    """Waiting times and attempts at a store. The pause before the second attempt is `pause_s`; each later one doubles,
    or is what the store asked for; at most MAX_PAUSE_S. It has jitter, because many nodes may ask at once.
    """

    stall_s: float = 30.0
    tries: int = 5
    pause_s: float = 0.5

    async def asked(self, call: Callable[[], Awaitable[_T]], timeout_s: float | None = None) -> _T:
        """The result of `call`, repeated where that may help; each attempt has `timeout_s` (default: stall_s). Raises
        StoreError.
        """
        return await self.repeated(lambda: within(timeout_s or self.stall_s, call()))

    async def repeated(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call that bounds its own time and raises StoreError; see `asked`."""
        tries = 0
        while True:
            try:
                return await call()
            except StoreError as error:
                tries += 1
                await self.pause(error, tries, "a store")

    async def pause(self, error: StoreError, tries: int, what: str, at: int | None = None) -> None:
        """Wait before the next attempt, which asks for `what` from byte `at` on. Raises `error` after the last attempt,
        and if another one cannot help.
        """
        if type(error) is not StoreError or tries >= self.tries:
            raise error
        _logger.info("%s is asked for again%s: %s", what, "" if at is None else f" from byte {at}", error)
        pause_s = min(MAX_PAUSE_S, max(error.after_s, self.pause_s * 2.0 ** (tries - 1)))
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311


def failure(error: Exception) -> StoreError:
    """The StoreError for an exception of obstore. Its message never contains a credential: it has the status and code
    of the store's own answer.
    """
    from obstore.exceptions import (
        AlreadyExistsError,
        NotFoundError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    text = str(error)
    status, code = _found(_STATUS, text), _found(_CODE, text)
    answer = " ".join(part for part in (status and f"status {status}", code) if part)
    if any(f"http://{host}" in text for host in _INSTANCE):
        return AccessRefused("there are no credentials, and this machine gives none")
    if code == "NoSuchBucket":
        return BucketMissing("there is no such bucket")
    if isinstance(error, NotFoundError | FileNotFoundError):
        return ObjectMissing("there is no such object")
    if isinstance(error, AlreadyExistsError | PreconditionError | FileExistsError):
        return WrittenMeanwhile("somebody else wrote it meanwhile")
    if _found(_OS_ERROR, text) in _FULL:
        return StoreFull("there is no room for it")
    if code == "InvalidRange" or status == "416":
        return RangeMissing("the object is shorter than what was asked of it")
    if (
        isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
        or code in _REFUSED
        or status in ("401", "403")
    ):
        return AccessRefused(answer or _first_line(error))
    return StoreError(answer or _first_line(error))


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""


def _first_line(error: Exception) -> str:
    return _USER.sub("://", _IN.sub("", str(error).strip().split("\n")[0]))[:200]
