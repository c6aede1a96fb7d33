"""Object stores by URL. `within` limits the time of a call, and makes all kinds of stores raise the same error classes.

s3://bucket/prefix, gs://bucket/prefix, file:///path or a path ──opened──► ObjectStore ──within──► reply or error
                                                                    └── RetryPolicy.repeated: another attempt
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sie_contracts.settings import SettingError, store_url
from sie_runtime.process import cancel_all
from sie_store import durable

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_logger = logging.getLogger("sie.store")

PIECE_BYTES = 1 << 20  # bytes that `open_object` reads at a time
CALL_S = 30.0  # seconds within which the store must answer a call that transfers few bytes
MAX_PAUSE_S = 30.0
# A reserve is 10 % of the disk, at most 256 MiB. A write must leave one or more reserves free.
RESERVE_SHARE, MAX_RESERVE_BYTES = 0.1, 256 << 20
# reserves that must stay free after a write: one for a payload, two for a file, so that payloads can still be written
# when files are refused
PAYLOADS, FILES = 1, 2
EXIT_PAUSE_S = 0.1
_claimed: Counter[int] = Counter()  # device number of a disk -> bytes that writers of this process have claimed on it
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_UNUSABLE = re.compile(r'object with invalid path: (?:Error parsing )?Path "(.*?)"')
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
# addresses of cloud metadata services, from which obstore requests credentials if the process has none
_INSTANCE = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")


class StoreError(Exception):
    """Error of a store that refuses a call or does not reply in time. The caller may repeat the call, except after
    an error of a subclass. `after_s`: seconds that the store asks the client to wait before another attempt.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class ObjectMissing(StoreError):
    """Error for an object that does not exist."""


class BucketMissing(StoreError):
    """Error for a bucket that does not exist."""


class NameUnusable(StoreError):
    """Error for a listing that obstore (0.12) cannot finish, because the name of an object has a control character, or
    a segment that is empty, `.` or `..`.
    """


class AccessRefused(StoreError):
    """Error for credentials that are missing, wrong, expired, or do not permit the call."""


class RangeMissing(StoreError):
    """Error for a range that begins after the end of the object."""


class WrittenMeanwhile(StoreError):
    """Error of a conditional write: another writer has changed the object since the read, or has created it first."""


class StoreFull(StoreError):
    """Error for a write without space: the disk is full, the quota is used up, or the write would leave too little free
    space (see `room`).
    """


def opened(url: str, setting: str) -> ObjectStore:
    """Return the store at `url`. Its keys are relative to the path of the URL. Raises SettingError, which names
    `setting`.

    A missing folder is created, readable only by its owner. Buckets are not checked, because they may be created later.
    Credentials and endpoint come from the usual AWS_ and GOOGLE_ variables, from files that these variables name, or
    from the role of the machine.
    """
    from obstore.exceptions import BaseError
    from obstore.store import GCSStore, LocalStore, S3Store

    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)

    where = store_url(url)
    limits: dict[str, Any] = {
        # `allow_http` lets an operator's endpoint begin with http://; other endpoints use TLS. These options replace
        # options in environment variables (obstore 0.12).
        "client_options": {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=120),
        },
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    }
    try:
        if where.scheme == "file":
            folder = Path(where.path)
            missing = [part for part in (folder, *folder.parents) if not part.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in missing:  # write the names of the new folders to the disk: `sync` does this only below `folder`
                durable.sync(part.parent)
            return LocalStore(where.path)
        kind: Callable[..., ObjectStore] = S3Store if where.scheme == "s3" else GCSStore
        return kind(where.bucket, prefix=where.path or None, **limits)
    except (BaseError, OSError) as error:
        raise SettingError(setting, _first_line(error)) from error


@contextmanager
def room(store: ObjectStore, *, reserves: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that claims disk space for a number of bytes. A writer calls the function before it writes these
    bytes to a folder. For a bucket the function does nothing, because a bucket has its own quota.

    The queue may use the same disk, and accepts no work when the disk is full. So a write must leave `reserves` times
    the reserve (RESERVE_SHARE) free: payloads leave one reserve, for the queue; files and outputs of jobs leave two,
    for the queue and for payloads. The claims of a writer count until the `with` block ends, because its bytes may not
    be on the disk before that.

    The function raises StoreFull if less than these reserves would stay free. Raises StoreError if the folder of the
    store cannot be read, for example because its disk is not mounted.
    """
    from obstore.store import LocalStore

    folder = str(store.prefix) if isinstance(store, LocalStore) else None
    try:
        device = os.stat(folder).st_dev if folder is not None else None
    except OSError as error:
        raise StoreError(f"the folder of the store cannot be read: {error.strerror}") from error
    own = 0

    def claim(size: int) -> None:
        nonlocal own
        if folder is None or device is None:
            return
        own, _claimed[device] = own + size, _claimed[device] + size
        disk = shutil.disk_usage(folder)
        reserve = min(MAX_RESERVE_BYTES, int(disk.total * RESERVE_SHARE))
        if disk.free - _claimed[device] < reserves * reserve:
            raise StoreFull(f"the disk has {disk.free} bytes free, of which {reserves * reserve} must stay free")

    try:
        yield claim
    finally:
        if device is not None:
            _claimed[device] -= own


async def sync(store: ObjectStore, key: str) -> None:
    """Wait until an object and its name are on the disk, if the store is a folder. Without this wait, a power failure
    could lose the object after a caller has recorded it as complete. Nothing is done for a bucket, which replies only
    when an object is durable. Raises StoreError.
    """
    from obstore.store import LocalStore

    def synced(path: Path) -> None:
        for part in (path, *path.parents[: len(Path(key).parts)]):
            durable.sync(part)

    if isinstance(store, LocalStore):
        try:
            await asyncio.to_thread(synced, Path(str(store.prefix)) / key)
        except OSError as error:
            raise failure(error) from error


def _let_threads_finish() -> None:
    """Sleep for EXIT_PAUSE_S at exit. The threads of obstore release Python objects shortly after a reply. If the
    interpreter ended before that, the process would abort (SIGABRT).
    """
    time.sleep(EXIT_PAUSE_S)


async def within(timeout_s: float, work: Awaitable[_T]) -> _T:
    """Await `work`, a call of a store, for at most `timeout_s` seconds. A time-out, exceptions of obstore and OSError
    become StoreError.
    """
    from obstore.exceptions import BaseError

    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise StoreError(f"no answer within {timeout_s:.3g} s") from error
    except (BaseError, OSError) as error:
        raise failure(error) from error


async def gather(call: Callable[[_Item], Awaitable[_T]], items: Iterable[_Item], at_once: int) -> list[_T]:
    """Return the results of `call` for all items, in the order of the items. At most `at_once` calls run at a time. The
    first exception of a call is raised, and cancels the other calls.
    """
    turns = asyncio.Semaphore(at_once)

    async def call_in_turn(item: _Item) -> _T:
        async with turns:
            return await call(item)

    tasks = [asyncio.create_task(call_in_turn(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def first_bytes(store: ObjectStore, key: str, most: int) -> tuple[GetResult, bytes]:
    """Return the store's response (with metadata) and the first bytes of an object, at most `most`."""
    import obstore

    answer, data = await obstore.get_async(store, key), bytearray()
    async for chunk in answer.stream():
        data += chunk
        if len(data) >= most:
            break
    return answer, bytes(data[:most])


async def whole_object(store: ObjectStore, key: str) -> bytes:
    import obstore

    return bytes(await (await obstore.get_async(store, key)).bytes_async())


async def open_object(store: ObjectStore, key: str) -> tuple[int, AsyncIterator[bytes]]:
    """Return the number of bytes of an object, and its bytes in pieces. The store has CALL_S seconds for each piece."""
    import obstore

    answer = await obstore.get_async(store, key)
    return answer.meta["size"], _pieces(aiter(answer.stream(PIECE_BYTES)))


async def _pieces(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        while (piece := await within(CALL_S, anext(stream, None))) is not None:
            yield bytes(piece)
    finally:
        del stream  # closes the response: otherwise the traceback of a cancelled download would keep the response open


async def objects_below(store: ObjectStore, prefix: str) -> list[ObjectMeta]:
    """Return name, size, time of the last change and ETag of each object below a prefix."""
    import obstore

    return [entry async for page in obstore.list(store, prefix=prefix) for entry in page]


@dataclass(frozen=True)
class RetryPolicy:
    """Time limit and number of attempts for calls of a store. `stall_s`: time limit of one attempt in seconds. `tries`:
    number of attempts. `pause_s`: seconds before the second attempt. Each later pause is twice as long, or as long as
    the store requests if this is longer. A pause has at most MAX_PAUSE_S seconds, and is then multiplied by a random
    factor from 0.75 to 1.25, because many nodes may retry at the same time.
    """

    stall_s: float = 30.0
    tries: int = 5
    pause_s: float = 0.5

    async def call(self, call: Callable[[], Awaitable[_T]], timeout_s: float | None = None) -> _T:
        """Await `call`, and repeat it after each StoreError for which another attempt may help (see `pause`). Return
        its result. Each attempt may take `timeout_s`, by default `stall_s`. Raises StoreError.
        """
        return await self.repeated(lambda: within(timeout_s or self.stall_s, call()))

    async def repeated(self, call: Callable[[], Awaitable[_T]], label: str = "a store") -> _T:
        """Await the function `call`, which limits its own time, and repeat it after each StoreError for which another
        attempt may help. Return its result. `label` names the requested object in the log. Raises StoreError.
        """
        tries = 0
        while True:
            try:
                return await call()
            except StoreError as error:
                tries += 1
                await self.pause(error, tries, label)

    async def pause(self, error: StoreError, tries: int, label: str, at: int | None = None) -> None:
        """Wait before the next attempt. `tries`: number of failed attempts. `at`: first byte of the next request, for
        the log. Raises `error` if all attempts are used up, and at once if its class is a subclass of StoreError: then
        another attempt cannot help.
        """
        if type(error) is not StoreError or tries >= self.tries:
            raise error
        _logger.info("%s is requested again%s: %s", label, "" if at is None else f" from byte {at}", error)
        pause_s = min(MAX_PAUSE_S, max(error.after_s, self.pause_s * 2.0 ** (tries - 1)))
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311


def failure(error: Exception) -> StoreError:
    """Return the StoreError for an exception of obstore. Its message has no credentials."""
    from obstore.exceptions import (
        AlreadyExistsError,
        NotFoundError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    text = str(error)
    status, code = _first_group(_STATUS, text), _first_group(_CODE, text)
    answer = " ".join(part for part in (status and f"status {status}", code) if part)
    if any(f"http://{host}" in text for host in _INSTANCE):
        return AccessRefused("no credentials are set, and this machine has none")
    if code == "NoSuchBucket":
        return BucketMissing("there is no such bucket")
    if name := _first_group(_UNUSABLE, text):
        return NameUnusable(
            f"the object {name[:200]!r} has a name with a control character or with a segment that is empty, `.` or "
            "`..`: rename or remove it"
        )
    if isinstance(error, NotFoundError | FileNotFoundError):
        return ObjectMissing("there is no such object")
    if isinstance(error, AlreadyExistsError | PreconditionError | FileExistsError):
        return WrittenMeanwhile("another writer has written the object in the meantime")
    if _first_group(_OS_ERROR, text) in _FULL:
        return StoreFull("the store has no space for the object")
    if code == "InvalidRange" or status == "416":
        return RangeMissing("the requested range begins after the end of the object")
    if (
        isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError)
        or code in _REFUSED
        or status in ("401", "403")
    ):
        return AccessRefused(answer or _first_line(error))
    return StoreError(answer or _first_line(error))


def remedy(error: StoreError, url: str, setting: str) -> str:
    """Return an error text with a fix, for the operator who has named the bucket at `url` in `setting`."""
    if isinstance(error, BucketMissing):
        return f"there is no bucket {store_url(url).bucket}: create it, or name another bucket in {setting}"
    if isinstance(error, AccessRefused):
        return (
            f"access is refused ({error}): set credentials by variables such as AWS_ACCESS_KEY_ID and "
            "GOOGLE_SERVICE_ACCOUNT, or by the machine's role; they must allow listing and reading the bucket, and "
            "writing to it for a push"
        )
    if isinstance(error, NameUnusable):
        return f"{error} in the bucket of {setting}"
    return f"the store did not reply properly ({error}): check that AWS_ENDPOINT_URL is right and that the store runs"


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match is not None else ""


def _first_line(error: Exception) -> str:
    return _USER.sub("://", _IN.sub("", str(error).strip().split("\n")[0]))[:200]
