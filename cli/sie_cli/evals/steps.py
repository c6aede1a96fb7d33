"""Steps of a measurement: a source with one of its outputs, and what it computed so far."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sie_cli.evals.inputs import key
from sie_cli.evals.kept import Kept
from sie_cli.evals.outputs import DENSE, Output
from sie_cli.evals.sources import Source

PART = 1024  # texts that are asked for, and kept, at once


@dataclass(frozen=True)
class Step:
    """What is measured: a source with one of its outputs, whose nearest documents `reranker` orders again if there is
    one.
    """

    source: Source
    output: Output
    reranker: Source | None = None

    @property
    def name(self) -> str:
        """As a row of a report."""
        output = () if self.output == DENSE else (self.output.name,)
        reranker = (self.reranker.name,) if self.reranker else ()
        return ", ".join([self.source.name, *output, *reranker])


class Work:
    """How far a measurement is. `kept`: what an interrupted one had computed; `told` hears of texts that are done."""

    def __init__(self, kept: Kept, told: Callable[[int], None]) -> None:
        self._kept, self._told = kept, told

    def vectors(self, step: Step, texts: Sequence[str], *, is_query: bool) -> list[Any]:
        source, output = step.source, step.output
        found: list[Any] = []
        for part in batched(texts, PART):
            asked = [*source.identity, output.name, str(is_query)] if source.identity else []
            compute = functools.partial(source.vectors, part, output, is_query=is_query)
            found += self._kept.part(asked, [key(text) for text in part], compute)
            self._told(len(part))
        return found

    def scores(self, source: Source, query: str, documents: Sequence[str]) -> Sequence[float]:
        asked = [*source.identity, "score", key(query)] if source.identity else []
        found = self._kept.part(asked, [key(text) for text in documents], lambda: source.scores(query, documents))
        self._told(len(documents))
        return found


def batched(texts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))
