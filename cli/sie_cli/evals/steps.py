"""Steps of a measurement: a source with one of its outputs, and what it computed so far."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sie_cli.evals.inputs import key
from sie_cli.evals.kept import ResultCache
from sie_cli.evals.outputs import DENSE, VectorOutput
from sie_cli.evals.sources import EvalSource

PART = 1024  # texts that are asked for, and kept, at once


@dataclass(frozen=True)
class EvalStep:
    """Step of an evaluation: a source with one of its outputs. `reranker`, if there is one, orders its nearest
    documents again.
    """

    source: EvalSource
    output: VectorOutput
    reranker: EvalSource | None = None

    @property
    def name(self) -> str:
        """Name of the step in a row of a report."""
        output = () if self.output == DENSE else (self.output.name,)
        reranker = (self.reranker.name,) if self.reranker else ()
        return ", ".join([self.source.name, *output, *reranker])


class EvalWork:
    """How far a measurement is. `kept`: what an interrupted one had computed; `told` hears of texts that are done."""

    def __init__(self, cache: ResultCache, advance: Callable[[int], None]) -> None:
        self._cache, self._advance = cache, advance

    def vectors(self, step: EvalStep, texts: Sequence[str], *, is_query: bool) -> list[Any]:
        source, output = step.source, step.output
        rows: list[Any] = []
        for part in batched(texts, PART):
            identity = [*source.identity, output.name, str(is_query)] if source.identity else []
            compute = functools.partial(source.vectors, part, output, is_query=is_query)
            rows += self._cache.part(identity, [key(text) for text in part], compute)
            self._advance(len(part))
        return rows

    def scores(self, source: EvalSource, query: str, documents: Sequence[str]) -> Sequence[float]:
        identity = [*source.identity, "score", key(query)] if source.identity else []
        values = self._cache.part(identity, [key(text) for text in documents], lambda: source.scores(query, documents))
        self._advance(len(documents))
        return values


def batched(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))
