"""Corpus of a migration, read on this machine: its digest, and a sample of its texts. A span is a range of consecutive
rows of an object.

    FILE | URL ──► objects ──► digest
                      └──► some objects ──► spans of rows ──► some spans ──► texts, each once
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from sie_bulk_jobs.datasets import templates
from sie_bulk_jobs.datasets.objects import ObjectEntry
from sie_bulk_jobs.datasets.places import Place
from sie_bulk_jobs.datasets.plans import Broken, inputs, plan
from sie_bulk_jobs.datasets.rows import read
from sie_bulk_jobs.records import RowSpan
from sie_cli.refusal import CommandRefused, refusing
from sie_contracts.api.jobs import JobInput
from sie_contracts.errors import InvalidInput
from sie_store.object_stores import StoreError
from sie_store.weights.manifest import digest as digest_of_file

OBJECTS, SPANS = 8, 20  # a sample reads at most 20 spans (ranges of rows), of at most 8 files of the corpus
SPAN_ROWS = 500  # largest number of rows of a span


@dataclass(frozen=True)
class CorpusSample:
    """Sample of a corpus. `rows`: number of rows read. `faults`: reason -> number of rows without a text."""

    texts: list[str]
    rows: int
    faults: Counter[str]

    @property
    def trouble(self) -> str:
        if not self.faults:
            return ""
        (first, _), *_ = self.faults.most_common(1)
        return f"{self.faults.total()} of {self.rows} rows have no text: {first}"


@dataclass(frozen=True)
class Corpus:
    """Corpus of a migration. `source`: the user's file or URL. `input`: how to read texts from its rows."""

    source: str
    input: JobInput
    place: Place

    @classmethod
    def from_source(cls, source: str, text: str, id_column: str, file_format: str | None) -> Corpus:
        """Return the corpus at a path or URL. Raises CommandRefused for a missing file or an invalid template."""
        is_url = "://" in source
        file = Path(os.path.expanduser(source))
        if not is_url and not file.is_file():
            raise CommandRefused(f"--corpus {source}: there is no such file")
        where = source if is_url else str(file.resolve())
        with refusing():
            how = JobInput(url=where, text=text, id=id_column, format=file_format)  # type: ignore[arg-type]
            templates.check(how, "encode")
            folder = where if where.endswith("/") else where.rpartition("/")[0] + "/"
            if is_url and folder.endswith("//"):  # the URL of a whole bucket has no parent folder
                folder = where
            # `where` is the target of a symbolic link, but the suffix of the link itself decides the format
            return cls(source, how, replace(Place.opened(where, (folder,)), label="" if is_url else file.name))

    @property
    def is_url(self) -> bool:
        """Return whether the source is a URL, which the server reads. A local file is sent to the server."""
        return "://" in self.source

    async def digest(self) -> str:
        """Return a digest that changes when the corpus changes. It covers the bytes of a local file, or a URL with the
        names, sizes and tags of its objects. Raises CommandRefused.
        """
        if not self.is_url:
            with refusing():
                return await asyncio.to_thread(digest_of_file, Path(self.input.url))
        content = hashlib.sha256(self.source.encode())
        for part in await self._objects():
            content.update(f"\0{part.source}\0{part.size}\0{part.tag}".encode())
        return content.hexdigest()

    async def sample(self, count: int, seed: str) -> CorpusSample:
        """Sample at most `count` texts. The same seed gives the same sample. Raises CommandRefused."""
        draw = random.Random(seed)  # noqa: S311  a sample, not a secret
        objects = await self._objects()
        spans: list[tuple[Place, RowSpan]] = []
        for part in draw.sample(objects, min(OBJECTS, len(objects))):
            place = self.place
            if place.is_folder:
                place = Place(place.store, place.folder, part.source, root=place.root)
            spans += [(place, span) for span in await self._spans(place)]
        texts: dict[str, None] = {}
        faults = Counter[str]()
        total = 0
        try:
            for place, span in draw.sample(spans, min(SPANS, len(spans))):
                with refusing():
                    rows = await read(place, span, self.input)
                total += len(rows)
                faults.update(row.fault.message for row in rows if row.fault is not None)
                texts |= dict.fromkeys(row.text for row in rows if row.fault is None and row.text)
        except StoreError as error:
            raise CommandRefused(f"--corpus {self.source}: {error}") from error
        return CorpusSample(draw.sample(list(texts), min(count, len(texts))), total, faults)

    async def _objects(self) -> list[ObjectEntry]:
        try:
            with refusing():
                objects = await inputs(self.place, self.input)
        except StoreError as error:
            raise CommandRefused(
                f"--corpus {self.source}: this machine cannot read the corpus ({error}); with --sample 0 only the "
                "server reads it"
            ) from error
        if not objects:
            raise CommandRefused(f"--corpus {self.source}: there is nothing to read")
        return objects

    async def _spans(self, place: Place) -> list[RowSpan]:
        try:
            spans: list[RowSpan] = []
            async for planned in plan(place, self.input, SPAN_ROWS):
                if isinstance(planned, Broken):
                    raise InvalidInput(planned.error.message)
                spans += planned
            return spans
        except (InvalidInput, StoreError) as error:
            raise CommandRefused(f"--corpus {self.source}: {error}") from error
