"""Answers of an evaluation so far, in files, so that an interrupted evaluation continues where it was.

Each file has the answers to some texts under a digest of all that they depend on; another model, fingerprint, output or
text is another file. They are removed once the evaluation has ended, and by any later one when they are a week old.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sie_cli.refusal import CommandRefused
from sie_contracts import arrays

KEEP_S = 7 * 86_400


class ResultCache:
    """`found`: how many answers came from an earlier evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self.found = 0

    def part(
        self, identity: Sequence[str], texts: Sequence[str], compute: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """One answer of each text: arrays, numbers, or maps of arrays. Raises CommandRefused, and what `compute`
        raises.

        `what`: all that the answers depend on beside the texts. Empty where that is not known: nothing is kept then.
        """
        if not identity:
            return compute()
        digest = hashlib.blake2b(msgspec.msgpack.encode([list(identity), list(texts)]), digest_size=20).hexdigest()
        file = self._folder / f"{digest}.msgpack"
        with contextlib.suppress(FileNotFoundError, ValueError):  # half a file cannot be: it is moved when it is whole
            earlier: Sequence[Any] = arrays.unpack(arrays.decode_msgpack(file.read_bytes()))
            if len(earlier) == len(texts):
                self.found += len(texts)
                self._files.append(file)
                return earlier
        answers = compute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            half = file.with_suffix(".half")
            half.write_bytes(msgspec.msgpack.encode([_packed(answer) for answer in answers]))
            half.replace(file)
        except OSError as error:
            raise CommandRefused(
                f"{file}: {error.strerror}: --results names another folder for what is computed"
            ) from error
        self._files.append(file)
        return answers

    @contextlib.contextmanager
    def until_done(self) -> Iterator[None]:
        """Remove what was kept once the context ends without an exception, and what is too old at its begin."""
        for file in self._folder.glob("*.*"):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < time.time() - KEEP_S:
                    file.unlink()
        yield
        for file in self._files:
            file.unlink(missing_ok=True)


def _packed(answer: Any) -> Any:
    match answer:
        case np.ndarray():
            return arrays.pack(answer)
        case dict():
            return {name: _packed(value) for name, value in answer.items()}
    return answer
