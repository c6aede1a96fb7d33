"""Plans (see `core`) that upload, read and delete files. Only `content` reads a whole file into memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from sie_client.core import BlockingWork, Plan, Send, Session, UploadStream, call, delete_call, json_call, reading
from sie_client.errors import ServerError, invalid
from sie_client.types import Progress
from sie_contracts.api.batches import FileDeleted, FileObject

PIECE_BYTES = 1 << 18
PURPOSE = "jobs"
_ID = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)


def identifier(value: object, noun: str) -> str:
    """Return `value`, an id for a URL path. Raises InvalidInputError for any other value. `noun`: "file" or "job"."""
    if isinstance(value, str) and _ID.fullmatch(value):
        return value
    raise invalid(f"{noun}: expected an id, such as {noun}-0192f0c17d3e70008000000000000000, got {str(value)[:80]!r}")


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Context manager: an OSError in its block becomes an InvalidInputError that names the file."""
    try:
        yield
    except OSError as error:
        raise invalid(f"{path}: {error.strerror or type(error).__name__}") from error


def uploaded(
    path: str | os.PathLike[str],
    purpose: str,
    on_progress: Callable[[Progress], None] | None,
    session: Session,
    expires_after_s: int | None = None,
) -> Plan[FileObject]:
    """Upload a file and return its description. Raises InvalidInputError if the file cannot be read, or if its size
    changes during the upload. If the connection breaks after the last byte of the file, no second upload follows: the
    server may have stored the file.
    """
    location = Path(path)
    size_bytes: int = yield BlockingWork(lambda: _size_of(location))
    boundary = secrets.token_hex(16)
    # As browsers do, escape characters of the file name that would end the multipart header; send all others as UTF-8.
    name = location.name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
    fields = {"purpose": purpose}
    if expires_after_s is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
    letters = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'
        for field, value in fields.items()
    )
    head = (
        f'{letters}--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode("utf-8", "surrogateescape")
    tail = f"\r\n--{boundary}--\r\n".encode()

    is_whole = False

    def pieces() -> Generator[bytes]:
        nonlocal is_whole
        is_whole = False
        yield head
        sent = 0
        with on_disk(location):
            file = location.open("rb")
        with file:
            while True:
                with on_disk(location):
                    piece = file.read(min(PIECE_BYTES, size_bytes - sent + 1))
                sent += len(piece)
                if not piece or sent > size_bytes:
                    break
                yield piece
                if on_progress is not None:
                    on_progress(Progress(sent, size_bytes))
        if sent != size_bytes:
            raise invalid(f"{location}: the file was changed during the upload")
        is_whole = True
        yield tail

    headers = {
        **session.sent_headers(),
        "accept": "application/json",
        "content-type": f"multipart/form-data; boundary={boundary}",
    }
    body = UploadStream(pieces, len(head) + size_bytes + len(tail))
    request = Send("POST", "/v1/files", headers, body, may_repeat=lambda: not is_whole)
    answer = yield from call(request, session)
    with reading(answer.headers):
        return msgspec.json.decode(answer.body, type=FileObject)


def _size_of(path: Path) -> int:
    with on_disk(path):
        if path.is_dir():
            raise invalid(
                f"{path} is a folder; a job reads one uploaded file, or all files under a URL such as s3://…/"
            )
        return path.stat().st_size


def get(file: str, session: Session) -> Plan[FileObject]:
    path = f"/v1/files/{identifier(file, 'file')}"
    return cast(FileObject, (yield from json_call("GET", path, session, type=FileObject)))


def deleted(file: str, session: Session) -> Plan[None]:
    yield from delete_call(f"/v1/files/{identifier(file, 'file')}", session, type=FileDeleted)


def content(file: str, session: Session) -> Plan[bytes]:
    path = f"/v1/files/{identifier(file, 'file')}/content"
    return (yield from call(Send("GET", path, session.sent_headers()), session)).body


def saved(
    file: str, path: str | os.PathLike[str], on_progress: Callable[[Progress], None] | None, session: Session
) -> Plan[Path]:
    """Save the content of a file to `path`. The file appears there only when it is complete. Raises InvalidInputError
    before the download if `path` is a folder.
    """
    target = Path(path)
    if (yield BlockingWork(target.is_dir)):
        raise invalid(f"{target} is a folder: name a file")
    info = yield from get(file, session)
    if on_progress is not None:
        on_progress(Progress(0, info.bytes))
    arriving = Arriving(target, info.bytes, "", Fetching(info.bytes, on_progress).came)
    yield from fetched(f"/v1/files/{info.id}/content", arriving, session)
    return target


class Fetching:
    """Progress of a download: counts the bytes that are on the disk, out of `total` bytes. Thread-safe."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._lock = threading.Lock()
        self._progress = Progress(0, total)
        self._on_progress = on_progress

    def came(self, count: int) -> None:
        with self._lock:
            self._progress = Progress(self._progress.done + count, self._progress.total)
            if self._on_progress is not None and count:
                self._on_progress(self._progress)


class Arriving:
    """BodySink that writes a download to a hidden file in the target folder. `finish` renames the hidden file to
    `path`. `tell` is called with the number of bytes of each piece, and before a new attempt with minus the number of
    bytes of the failed attempt. If another download to `path` begins meanwhile, that download replaces the hidden file,
    and only that download can finish.
    """

    def __init__(self, path: Path, size_bytes: int, sha256: str, tell: Callable[[int], None]) -> None:
        self.path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._size_bytes = size_bytes
        self._sha256 = sha256
        self._tell = tell
        self._file: BinaryIO | None = None
        self._is_own = False  # set by `_close`: True if no other download has replaced `_partial`
        self._digest = hashlib.sha256()
        self._come = 0

    def begin(self) -> None:
        """Start with an empty file, also after a failed attempt. Raises InvalidInputError if no file can be created."""
        self._close()
        self._tell(-self._come)
        self._digest, self._come = hashlib.sha256(), 0
        with on_disk(self._partial):
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            self._partial.unlink(missing_ok=True)
            self._file = self._partial.open("xb")

    def write(self, piece: bytes) -> None:
        assert self._file is not None
        with on_disk(self._partial):
            self._file.write(piece)
        self._digest.update(piece)
        self._come += len(piece)
        self._tell(len(piece))

    def finish(self) -> None:
        """Rename the complete file to `path`. If its size or digest is not the expected value, delete the file and
        raise ServerError. Raises InvalidInputError if another download to `path` has begun.
        """
        self._close()
        if not self._is_own:
            raise invalid(f"{self.path}: another download to this file began meanwhile")
        is_whole = self._come == self._size_bytes and self._sha256 in ("", self._digest.hexdigest())
        with on_disk(self.path):
            if is_whole:
                self._partial.replace(self.path)
                return
            self._partial.unlink()
        raise ServerError(
            f"{self.path.name}: the {self._come} received bytes differ from the size or digest that the server "
            "reported: download it again",
            status=200,
        )

    def drop(self) -> None:
        self._close()
        if self._is_own:
            with on_disk(self._partial):
                self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with on_disk(self._partial), file:
                self._is_own = self._partial.exists() and os.path.samestat(
                    self._partial.stat(), os.fstat(file.fileno())
                )


def fetched(path: str, arriving: Arriving, session: Session) -> Plan[None]:
    """Download from `path` on the server into `arriving`. If the download fails, delete the incomplete file."""
    try:
        yield from call(Send("GET", path, session.sent_headers(), sink=arriving), session)
        yield BlockingWork(arriving.finish)
    except BaseException:
        arriving.drop()
        raise
