"""A text model as a graph that OpenVINO compiles for this CPU: ids of one or more texts of equal length ──► states.

stock transformers model ──TorchScript──► OpenVINO's front end for PyTorch ──► compiled once, a stream for each lane

Its weights lie in the blocked order of the kernels, and nothing of a pass is Python: one text of 8 tokens takes a third
of what the packed path of torch takes, and a batch runs in groups of equal length, so nothing is padded
(bench/results/engine.md).
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sie_adapter.checkpoint import construction
from sie_adapter.failure import is_out_of_memory
from sie_adapter.packing import Int64, Packed
from sie_contracts.errors import InternalFailure

# Tokens of a group. More take as long for each token, and the memory of a pass grows with them.
GROUP_TOKENS = 1024
_EXAMPLE_TOKENS = 300  # past the local window of ModernBERT, whose masks are made only for longer texts
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class NoGraph(Exception):
    """OpenVINO cannot convert or run this model."""


class _States(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """The model with its inputs by position, as they are traced."""

    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, given, strict=True)))[0]


class Graph:
    """The states of a model's last layer. `run` may be called on several threads at once.

    `memory_bytes`: of its weights, as far as is known.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, lanes: int) -> None:
        """`model` is on the CPU, and is as before when this returns. Raises NoGraph."""
        self._dtype = dtype
        self.memory_bytes: int = sum(each.nbytes for each in model.parameters())
        runtime = _runtime()
        names = _names_of(model)
        with _in_float32(model):  # of 16-bit weights the front end makes a graph that is wrong
            try:
                converted = _converted(_States(model, names))
            except NoGraph:
                # without a mask a decoder looks for the bounds of texts in its positions, which does not convert
                names = (*names, "attention_mask")
                converted = _converted(_States(model, names))
        self._names = names
        converted.reshape({place: runtime.PartialShape([-1, -1]) for place in range(len(self._names))})
        options = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
            "NUM_STREAMS": lanes,
            "INFERENCE_NUM_THREADS": lanes,
        }
        try:
            self._compiled = runtime.Core().compile_model(converted, "CPU", options)
        except RuntimeError as error:
            raise _no_graph("its graph does not compile", error) from error
        self._of_thread = _Request(self._compiled)

    def run(self, packed: Packed) -> Tensor:
        """Hidden states, [tokens, width], in packed order. Every token is attended to: the rules see to that."""
        if packed.visible is not None:
            raise InternalFailure("a graph attends to every token")
        parts = {"input_ids": packed.ids, "token_type_ids": packed.types, "attention_mask": np.ones_like(packed.ids)}
        given = [parts[name] for name in self._names]
        states: Tensor | None = None
        for start, count, length in groups(packed):
            tokens = slice(start, start + count * length)
            found = self._infer([_matrix(part, tokens, (count, length)) for part in given])
            if states is None:
                states = torch.empty((len(packed.ids), found.shape[-1]), dtype=self._dtype)
            states[tokens] = torch.from_numpy(found.reshape(-1, found.shape[-1]))
        assert states is not None
        return states

    def _infer(self, inputs: list[Int64]) -> Any:
        return self._of_thread.request.infer(inputs, share_inputs=True, share_outputs=True)[0]


class _Request(threading.local):
    """That of the calling thread: one runs one pass at a time."""

    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()


def groups(packed: Packed) -> Iterator[tuple[int, int, int]]:
    """Sequences of equal length side by side: their first token, how many they are, and their length. A group has 1, 2,
    4 or more of them, a power of two: what OpenVINO keeps for each shape that it met stays bounded.
    """
    for start, equal, length, _ in packed.groups.tolist():
        while equal:
            most = min(equal, max(1, GROUP_TOKENS // length))
            count = 1 << (most.bit_length() - 1)
            yield start, count, length
            start, equal = start + count * length, equal - count


def _matrix(part: Any, tokens: slice, shape: tuple[int, int]) -> Int64:
    if part is None:
        return np.zeros(shape, np.int64)
    return np.ascontiguousarray(part[tokens].reshape(shape), np.int64)


def _names_of(model: PreTrainedModel) -> tuple[str, ...]:
    """What this architecture reads. It counts positions by itself, as on its stock path."""
    known = inspect.signature(model.forward).parameters
    has_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1
    return ("input_ids", "token_type_ids") if has_types and "token_type_ids" in known else ("input_ids",)


def _runtime() -> Any:
    # its import sends an event to its maker, unless the package that does it cannot be imported (`prepare_process`)
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    before = {name: each.dtype for name, each in (*model.named_parameters(), *model.named_buffers())}
    model.float()
    try:
        yield
    finally:
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            each.data = each.data.to(before[name])


def _converted(states: _States) -> Any:
    runtime = _runtime()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    ids = torch.ones((2, _EXAMPLE_TOKENS), dtype=torch.int64)
    given = tuple(torch.zeros_like(ids) if name == "token_type_ids" else ids for name in states.names)
    failures = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, runtime.frontend.OpConversionFailure)
    try:
        # the map of modules that a trace keeps is one for the process, as are the filters of warnings
        with construction(), warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore")  # of the trace, which the trial of the backbone makes good for
            decoder = TorchScriptPythonDecoder(states, example_input=given)
            end = FrontEndManager().load_by_framework("pytorch")
            return end.convert(end.load(decoder))
    except failures as error:
        raise _no_graph("it does not convert", error) from error


def _no_graph(what: str, error: Exception) -> Exception:
    """A lack of memory is no fault of the model, and is told as what it is."""
    if is_out_of_memory(error):
        return error
    text = " ".join(str(error).split())
    return NoGraph(f"{what}: {type(error).__name__}: {text[:300]}")
