"""Steps of a measurement. A step measures one source with one output, which is a kind of vectors. Answers are cached in
files, so that an interrupted evaluation can continue.

A file has the answers to some texts. Its name is a digest of all data that the answers depend on, such as model,
fingerprint, output and texts. A completed evaluation removes its files. Each evaluation of quality first removes files
that are a week old.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from sie_cli.refusal import CommandRefused
from sie_contracts import arrays
from sie_contracts.errors import UNDECODABLE
from sie_evals.labelled import Fact, FactTask
from sie_evals.outputs import DENSE, VectorOutput
from sie_evals.sources import EvalSource, FactSource, key

KEEP_S = 7 * 86_400
T = TypeVar("T")


class ResultCache:
    """Cache of answers in files. `reused_texts`: number of texts whose answers came from an earlier evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self.reused_texts = 0

    def part(
        self, identity: Sequence[str], texts: Sequence[str], compute: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """Return one answer for each text: an array, a number, a list, or a map of arrays. If the cache lacks these
        answers, compute and store them. Raises CommandRefused, and the errors of `compute`.

        `identity`: all data that the answers depend on, except the texts. An empty (unknown) identity skips the cache.
        """
        if not identity:
            return compute()
        digest = hashlib.blake2b(msgspec.msgpack.encode([list(identity), list(texts)]), digest_size=20).hexdigest()
        file = self._folder / f"{digest}.msgpack"
        # a file with this name is always complete, because the code below writes another file and then renames it
        with contextlib.suppress(FileNotFoundError, *UNDECODABLE):
            earlier: Sequence[Any] = arrays.unpack(arrays.decode_msgpack(file.read_bytes()))
            if len(earlier) == len(texts):
                if file not in self._files:  # not counted before, and not written by this evaluation
                    self.reused_texts += len(texts)
                    self._files.append(file)
                return earlier
        answers = compute()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # a random name, because another evaluation may write the same answers at the same time
            half = file.with_suffix(f".{secrets.token_hex(8)}")
            half.write_bytes(msgspec.msgpack.encode([_packed(answer) for answer in answers]))
            half.replace(file)
        except OSError as error:
            raise CommandRefused(f"{file}: {error.strerror}: name another folder with --results") from error
        self._files.append(file)
        return answers

    @contextlib.contextmanager
    def until_done(self) -> Iterator[None]:
        """Remove files older than KEEP_S when the context opens, and the files of this evaluation when it closes. If an
        exception ends the context, the files of this evaluation stay for the next run.
        """
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


# largest number of texts in one call of a source for vectors or facts; the answers of a call are cached in one file
PART = 1024


@dataclass(frozen=True)
class EvalStep:
    """Step of an evaluation: a source with one of its outputs. `reranker`: if set, its scores sort the nearest
    documents of each query.
    """

    source: EvalSource
    output: VectorOutput
    reranker: EvalSource | None = None

    @property
    def name(self) -> str:
        output = () if self.output == DENSE else (self.output.name,)
        reranker = (self.reranker.name,) if self.reranker else ()
        return ", ".join([self.source.name, *output, *reranker])


class EncodeCost(NamedTuple):
    """Mean cost of encoding one document. `tokens`: tokens that the model read, 0 if the source does not count them.
    `ms`: milliseconds.
    """

    tokens: float
    ms: float


class EvalWork:
    """Calls of the sources in one measurement, with a cache of their answers. `advance`: called after each part of the
    texts, with the number of texts in this part.
    """

    def __init__(self, cache: ResultCache, advance: Callable[[int], None]) -> None:
        self._cache, self._advance = cache, advance
        self._documents, self._tokens, self._seconds = 0, 0, 0.0

    @property
    def cost(self) -> EncodeCost | None:
        """Mean cost of the encoded documents; None without such documents, for example if the cache had all vectors."""
        if not self._documents:
            return None
        return EncodeCost(self._tokens / self._documents, 1000 * self._seconds / self._documents)

    def vectors(self, step: EvalStep, texts: Sequence[str], *, is_query: bool) -> list[Any]:
        source, output = step.source, step.output
        rows: list[Any] = []
        for part in batched(texts, PART):
            identity = [*source.identity, output.name, str(is_query)] if source.identity else []
            compute = functools.partial(self._encoded, step, part, is_query=is_query)
            rows += self._cache.part(identity, [key(text) for text in part], compute)
            self._advance(len(part))
        return rows

    def _encoded(self, step: EvalStep, part: Sequence[str], *, is_query: bool) -> Sequence[Any]:
        began_s, began = time.perf_counter(), step.source.tokens
        vectors = step.source.vectors(part, step.output, is_query=is_query)
        if not is_query:
            self._seconds += time.perf_counter() - began_s
            self._tokens += step.source.tokens - began
            self._documents += len(part)
        return vectors

    def facts(self, source: FactSource, task: FactTask) -> list[Sequence[Fact]]:
        """Return the facts that the source finds in each text of the task."""
        rows: list[Sequence[Fact]] = []
        for part in batched(task.texts, PART):
            identity = [*source.identity, task.kind, *task.labels] if source.identity else []
            contents = [repr((text.text, text.mentions)) for text in part]
            answers = self._cache.part(identity, contents, functools.partial(source.facts, task, part))
            rows += [[tuple(fact) for fact in facts] for facts in answers]
            self._advance(len(part))
        return rows

    def scores(self, source: EvalSource, query: str, documents: Sequence[str]) -> Sequence[float]:
        identity = [*source.identity, "score", key(query)] if source.identity else []
        values = self._cache.part(identity, [key(text) for text in documents], lambda: source.scores(query, documents))
        self._advance(len(documents))
        return values


def batched(texts: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))
