"""Interface between the engine and the families that extract: options, results of groups with equal options, inputs
that are prepared in another thread, and a cache of labels.

inputs, options ──► groups with equal options ──► make ──► run, on the device ──► results
                                                └─ Preparation: may run in another thread ──┘
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_contracts.errors import InferenceFailed, InvalidInput, SIEError
from sie_contracts.models.output_schemas import SchemaPart
from sie_contracts.wire.messages import Mention

_logger = logging.getLogger("sie.adapter")

Result = dict[str, Any] | SIEError

_LABELS_CACHED, _LABELS_PER_PASS = 4096, 64  # largest number of labels in the cache, and in a pass of the label encoder


@dataclass(frozen=True)
class ExtractOptions:
    """Options of the request for one text. `labels` are in the client's order and case. `threshold`: None if neither
    the request nor the entry sets one.

    `parameters`: options of the family, merged with the options of the entry; their types are checked. `mentions`:
    ranges of the text that the client names. `instruction`: the prompt of a model that generates its answer. `parts`:
    the parts of the output schema that the model fills, in addition to the labels. `part`: the only schema part that a
    run with these options fills (see `by_part`); None in a run for the labels.
    """

    labels: tuple[str, ...]
    threshold: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    mentions: tuple[Mention, ...] = ()
    instruction: str = ""
    parts: tuple[SchemaPart, ...] = ()
    part: SchemaPart | None = None

    def threshold_or(self, default: float) -> float:
        """Return the lowest allowed score: the threshold of the request, else of the entry, else `default`."""
        least: float = self.parameters.get("threshold", default) if self.threshold is None else self.threshold
        return float(least)

    def same(self) -> bytes:
        """Return a key of these options: equal bytes for equal options."""
        named = (self.labels, self.threshold, self.parameters, self.mentions, self.instruction, self.parts, self.part)
        return msgspec.json.encode(named, order="deterministic")


class LabelVectors:
    """LRU cache of the vectors of labels. Thread-safe. The argument `encode` is a function that computes the vectors of
    at most _LABELS_PER_PASS labels, [labels, width]. The keys of the cache are digests, because a label may have any
    length.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Tensor]) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._cached: OrderedDict[bytes, Tensor] = OrderedDict()

    def encode(self, labels: Sequence[str], *, keep: bool = True) -> Tensor:
        """Return the vectors of labels, [labels, width]. If `keep` is False, the cache is neither read nor written."""
        keys = {label: hashlib.sha256(label.encode()).digest() for label in labels} if keep else {}
        with self._lock:
            vectors = {label: self._cached[key] for label, key in keys.items() if key in self._cached}
        missing = [label for label in dict.fromkeys(labels) if label not in vectors]
        for start in range(0, len(missing), _LABELS_PER_PASS):
            some = missing[start : start + _LABELS_PER_PASS]
            # vectors are cloned, because a cached view of a vector would keep the memory of all vectors of the call
            vectors.update(zip(some, (vector.clone() for vector in self._encode(some)), strict=True))
        if keep:
            with self._lock:
                for label, key in keys.items():
                    self._cached[key] = vectors[label]
                    self._cached.move_to_end(key)
                while len(self._cached) > _LABELS_CACHED:
                    self._cached.popitem(last=False)
        return torch.stack([vectors[label] for label in labels])


class PreparedTexts(Protocol):
    """Tokenised, padded texts with equal options. `padding`: number of positions without a token, in all passes."""

    @property
    def padding(self) -> int: ...


T = TypeVar("T")
M = TypeVar("M", bound=PreparedTexts)
Make = Callable[[Sequence[str], ExtractOptions], M]


class Preparation:
    """Texts of a batch that are tokenised before the batch runs. `seconds`: time spent on tokenisation. `padding`:
    positions without a token in the passes that ran.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.padding = 0
        self._prepared: dict[tuple[bytes, tuple[str, ...]], Any] = {}

    def make(self, texts: Sequence[str], options: Sequence[ExtractOptions], make: Make[Any]) -> None:
        """Tokenise the texts. Ignore errors: `pop_or_make` tokenises again, and `by_options` returns the error."""
        for option, chosen in _alike(options):
            some = [texts[index] for index in chosen]
            try:
                self._prepared[option.same(), tuple(some)] = self._timed(some, option, make)
            except SIEError:
                continue
            except Exception as error:  # noqa: BLE001  model code may raise anything; `by_options` returns it
                _logger.debug("tokenising texts failed, so the device thread tries again: %s", type(error).__name__)

    def pop_or_make(self, texts: Sequence[str], option: ExtractOptions, make: Make[M]) -> M:
        """Remove and return the tokenised form of these texts. If `Preparation.make` has not tokenised the texts, call
        the argument `make`.
        """
        prepared: M | None = self._prepared.pop((option.same(), tuple(texts)), None)
        if prepared is None:
            prepared = self._timed(texts, option, make)
        self.padding += prepared.padding
        return prepared

    def _timed(self, texts: Sequence[str], option: ExtractOptions, make: Make[M]) -> M:
        began_s = time.perf_counter()
        try:
            return make(texts, option)
        finally:
            self.seconds += time.perf_counter() - began_s


def by_options(
    inputs: Sequence[T], options: Sequence[ExtractOptions], run: Callable[[Sequence[T], ExtractOptions], list[Result]]
) -> list[Result]:
    """Call `run` once for each set of equal options, with the inputs that have these options. If a call raises a
    SIEError, this error is the result of all its inputs. After any other error, the inputs of the call run again one by
    one. Return results in the order of the inputs. Raises only out-of-memory errors and errors of a lost device.
    """
    results: dict[int, Result] = {}
    for option, chosen in _alike(options):
        results.update(zip(chosen, _attempt([inputs[index] for index in chosen], option, run), strict=True))
    return [results[index] for index in range(len(inputs))]


def _alike(options: Sequence[ExtractOptions]) -> list[tuple[ExtractOptions, list[int]]]:
    alike: dict[bytes, list[int]] = {}
    for index, option in enumerate(options):
        alike.setdefault(option.same(), []).append(index)
    return [(options[chosen[0]], chosen) for chosen in alike.values()]


def _attempt(
    inputs: Sequence[T], option: ExtractOptions, run: Callable[[Sequence[T], ExtractOptions], list[Result]]
) -> list[Result]:
    try:
        return run(inputs, option)
    except SIEError as error:
        return [error] * len(inputs)
    except Exception as error:
        if is_out_of_memory(error) or is_device_fatal(error):
            raise
        if len(inputs) > 1:
            return [_attempt([text], option, run)[0] for text in inputs]
        _logger.exception("the extraction from one input failed, so this input gets an error")
        return [InferenceFailed(f"the model code failed with {type(error).__name__}")]


def scores_not_finite() -> InferenceFailed:
    return InferenceFailed("the model returned scores that are NaN or infinite", reason="non_finite")


def labels_refused(message: str) -> InvalidInput:
    """Return an error about the labels of one request, without the text of the labels."""
    return InvalidInput.at("labels", message, reason="labels")


def miscounted(field: str, files: int) -> InvalidInput | None:
    """Return an error if an input has no file or several files in `field`, and None if it has one."""
    if files == 1:
        return None
    if not files:
        return InvalidInput(f"{field}: expected one file, got none", reason="unsupported_modality", param=field)
    return InvalidInput(
        f"{field}: expected one file, got {files}", reason="invalid_media", param=field, extras={"limit": 1}
    )
