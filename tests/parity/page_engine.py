"""A model of images or sounds in the engine of this process. Its batches are made as gateway and sidecar make them.

FOLDERS[kind] ──► files ──► served_by: an entry in the engine ──► Served ──► vectors, scores, results
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity.toys import png, seen
from PIL import Image

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import InvalidInput
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import run_options
from sie_contracts.wire.ipc import BatchDone, Rows, RunBatch
from sie_contracts.wire.messages import Failed, Input, Ok, Operation, RunOptions
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare import rows as rowing
from sie_sidecar.prepare.media_frames import SoundFeatures
from sie_sidecar.prepare.rows import OF_QUERY, BatchPart, ModelTokenizer, WorkItemInput, WorkRows

Given = str | Image.Image | Sequence[Image.Image] | bytes | Input  # bytes: a sound file
Vectors = NDArray[np.float32]
Oracle = TypeVar("Oracle")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Served:
    """A model in the engine of this process. Its requests are those of the client `asker`."""

    engine: AdapterEngine
    entry: ModelEntry
    weights: Any
    tokenizer: ModelTokenizer
    asker: str = ""

    @property
    def path(self) -> str:
        """Return `packed` or `padded`."""
        return "padded" if "padded" in self.weights.attention else "packed"

    def run(
        self, operation: Operation, given: Sequence[Given], query: Given | None = None, **options: Any
    ) -> list[Any]:
        """Return the vectors, score, extraction or error of each input. All inputs are one batch. `options`: those of a
        request.
        """
        return self.answers(self.asked(operation, given, query, **options))

    def asked(
        self, operation: Operation, sources: Sequence[Given], query: Given | None = None, **options: Any
    ) -> RunBatch:
        """The batch of `run`."""
        work, work_rows = self._made(operation, sources, query, options)
        assert work_rows.error is None, work_rows.error
        assert not work_rows.unfit, work_rows.unfit
        return self.batch(operation, [BatchPart(work_rows.rows, work, asker=self.asker)], lora=work.options.lora)

    def extract(self, requests: Sequence[tuple[Sequence[bytes], RunOptions]]) -> list[Any]:
        """Return the result or error of each request, which is image files and options. All requests are one batch."""
        layout, parts = self.weights.rows["extract"], []
        for files, options in requests:
            inputs = [Input(text=None if files else "", images=tuple(files))]
            work = WorkItemInput(inputs, None, options, seen(inputs, layout))
            (work_rows,) = layouts.make(self.tokenizer, layout, [work])
            parts.append(BatchPart(work_rows.rows, work))
        return self.answers(self.batch("extract", parts))

    def rows(self, operation: Operation, sources: Sequence[Given], query: Given | None = None) -> WorkRows:
        """The rows of the inputs, or why there are none."""
        return self._made(operation, sources, query, {})[1]

    def answers(self, batch: RunBatch) -> list[Any]:
        """Return the results as `run` does."""
        with torch.inference_mode():
            reply = self.engine.execute(batch)
        assert isinstance(reply, BatchDone), reply
        return [_value(reply, outcome) for outcome in reply.outcomes]

    def batch(self, operation: Operation, parts: list[BatchPart], **named: Any) -> RunBatch:
        """Return the batch that the sidecar sends."""
        layout = self.weights.rows[operation].layout
        return rowing.to_batch("b", self.entry.id, operation, layout, parts, **named)

    def _made(
        self, operation: Operation, sources: Sequence[Given], query: Given | None, options: dict[str, Any]
    ) -> tuple[WorkItemInput, WorkRows]:
        _, settings = run_options(Catalogue({self.entry.id: self.entry}).resolve(self.entry.id), options, operation)
        layout, inputs = self.weights.rows[operation], [_input(source) for source in sources]
        images: dict[int, Any] = {**seen(inputs, layout)} if layout.images is not None else {}
        question = None if query is None else _input(query)
        if question is not None and question.images:
            try:
                images[OF_QUERY] = seen([question], layout)[0]
            except InvalidInput as error:
                images[OF_QUERY] = error
        work = WorkItemInput(inputs, question, settings.run, images, _heard(inputs, layout))
        (work_rows,) = layouts.make(self.tokenizer, layout, [work])
        return work, work_rows


def _value(reply: BatchDone, outcome: object) -> Any:
    if isinstance(outcome, Failed):
        return outcome.error
    assert isinstance(outcome, Ok)
    if outcome.score is not None:
        return outcome.score
    if outcome.data is not None:
        return outcome.data
    (part,) = outcome.outputs.values()
    return np.frombuffer(reply.block, part.dtype, int(np.prod(part.shape)), part.offset).reshape(part.shape)


def _heard(inputs: Sequence[Input], layout: Rows) -> dict[int, SoundFeatures]:
    """The features of the inputs that have a sound, by their index, as worker processes make them."""
    recordings = {index: source.audio for index, source in enumerate(inputs) if source.audio}
    if not recordings:
        return {}
    from sie_sidecar.prepare import sounds  # imports libraries that other tests do not need

    assert layout.sounds is not None
    prepared = {index: sounds.prepare(file, layout.sounds) for index, file in recordings.items()}
    return {
        index: SoundFeatures(1, *sound.shape, sound.seconds, sound.digest(), sound.values.tobytes())
        for index, sound in prepared.items()
    }


def _input(source: Given) -> Input:
    if isinstance(source, Input):
        return source
    if isinstance(source, bytes):
        return Input(audio=source)
    if isinstance(source, str):
        return Input(source)
    return Input(images=tuple(map(png, [source] if isinstance(source, Image.Image) else source)))


def served_by(engine: AdapterEngine, entry: ModelEntry) -> Served:
    """The model of an entry. Skips the test where this machine does not compute in its precision."""
    weights: Any = engine.residency.ensure(entry.id, entry).weights
    if entry.load.precision not in (None, weights.precision):
        pytest.skip(f"this CPU does not compute in {entry.load.precision}")
    return Served(engine, entry, weights, ModelTokenizer(weights.tokenizer, weights.max_tokens))


@dataclass(frozen=True)
class Pair(Generic[Oracle]):
    """A model and the oracle with which its numbers are compared."""

    served: Served
    oracle: Oracle
    folder: Path


Load = Callable[..., Pair[Oracle]]  # (kind, precision="float32")


def pairs(
    engine: AdapterEngine,
    root: Path,
    folders: Mapping[str, Callable[[Path], Path]],
    entry_of: Callable[..., ModelEntry],
    oracle: Callable[[str, Path], Oracle],
) -> Load[Oracle]:
    """Return a function that makes the files of a kind below `root`, its oracle, and its model in each precision, once
    each. `entry_of` gets the kind, the folder, and the fields `id` and `load`.
    """

    @functools.cache
    def files(kind: str) -> Path:
        return folders[kind](root / kind.replace(" ", "-"))

    @functools.cache
    def compared(kind: str) -> Oracle:
        return oracle(kind, files(kind))

    @functools.cache
    def load(kind: str, precision: str = "float32") -> Pair[Oracle]:
        name = f"{root.name}/{kind.replace(' ', '-')}-{precision}"
        entry = entry_of(kind, files(kind), id=name, load={"precision": precision})
        return Pair(served_by(engine, entry), compared(kind), files(kind))

    return load


def at_once(run: Callable[[], Found], rounds: int) -> list[Found]:
    """Return the results of two threads that call `run` at the same time, each of them `rounds` times."""
    outputs: list[Found] = []
    threads = [threading.Thread(target=lambda: outputs.extend(run() for _ in range(rounds))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(outputs) == 2 * rounds, "a thread has failed or has not ended"
    return outputs
