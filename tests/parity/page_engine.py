"""A model that reads images in the engine of this process, asked as gateway and sidecar ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from parity.dual_checkpoints import png, seen
from PIL import Image

from sie_adapter.engine import Engine
from sie_contracts.catalogue import Catalogue
from sie_contracts.entries import ModelEntry
from sie_contracts.errors import InvalidInput
from sie_contracts.ipc import BatchDone
from sie_contracts.messages import Failed, Input, Ok, Operation
from sie_contracts.options import run_options
from sie_sidecar import layouts
from sie_sidecar import rows as rowing
from sie_sidecar.rows import OF_QUERY, Made, Part, Work
from sie_sidecar.tokens import ModelTokenizer

Given = str | Image.Image | Input
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Served:
    """A model in the engine of this process, asked as gateway and sidecar ask."""

    engine: Engine
    entry: ModelEntry
    weights: Any
    tokenizer: ModelTokenizer

    def run(
        self, operation: Operation, given: Sequence[Given], query: Given | None = None, **options: Any
    ) -> list[Any]:
        """Of each input its vectors, its score, or its error: all of them one batch."""
        work, made = self._made(operation, given, query, options)
        assert made.error is None, made.error
        assert not made.unfit, made.unfit
        parts, layout = [Part(made.rows, work)], self.weights.rows[operation].layout
        batch = rowing.to_batch("b", self.entry.id, operation, layout, parts, lora=work.options.lora)
        with torch.inference_mode():
            reply = self.engine.execute(batch)
        assert isinstance(reply, BatchDone), reply
        return [self._value(reply, outcome) for outcome in reply.outcomes]

    def rows(self, operation: Operation, given: Sequence[Given], query: Given | None = None) -> Made:
        """The rows of the inputs, or why there are none."""
        return self._made(operation, given, query, {})[1]

    def _made(
        self, operation: Operation, given: Sequence[Given], query: Given | None, options: dict[str, Any]
    ) -> tuple[Work, Made]:
        _, asked = run_options(Catalogue({self.entry.id: self.entry}).resolve(self.entry.id), options, operation)
        layout, inputs = self.weights.rows[operation], [_input(each) for each in given]
        images: dict[int, Any] = {**seen(inputs, layout)}
        question = None if query is None else _input(query)
        if question is not None and question.images:
            try:
                images[OF_QUERY] = seen([question], layout)[0]
            except InvalidInput as error:
                images[OF_QUERY] = error
        work = Work(inputs, question, asked.run, images)
        (made,) = layouts.make(self.tokenizer, layout, [work])
        return work, made

    @staticmethod
    def _value(reply: BatchDone, outcome: object) -> Any:
        if isinstance(outcome, Failed):
            return outcome.error
        assert isinstance(outcome, Ok)
        if outcome.score is not None:
            return outcome.score
        (part,) = outcome.outputs.values()
        return np.frombuffer(reply.block, part.dtype, int(np.prod(part.shape)), part.offset).reshape(part.shape)


def _input(given: Given) -> Input:
    if isinstance(given, Input):
        return given
    return Input(given) if isinstance(given, str) else Input(images=(png(given),))
