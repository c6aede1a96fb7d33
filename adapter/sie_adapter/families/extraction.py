"""What the extraction families share.

texts, one ExtractOptions each ──► those with equal options together ──► make: words, ids, padded passes ──► run: the
device ──► results
                                                       └─ off the device lane, in a Preparation ─┘
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.loading.tokenizer import fault
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_contracts.errors import InferenceFailed, InvalidInput, SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import load_failed
from sie_contracts.wire.messages import Mention

_logger = logging.getLogger("sie.adapter")

Result = dict[str, Any] | SIEError

_HARMLESS = ("pooler.", "position_ids")
_WASTE = 1.25  # padded positions for each real one, at most
_OVERLAP = 8  # a window shares this part of itself with the next


@dataclass(frozen=True)
class ExtractOptions:
    """What to look for in one text. `labels` keep the client's order and case, `threshold` None is the model's own
    default.

    `parameters`: options of the family, merged with the entry's own and checked for their types. `mentions`: places of
    the text that the client names. `instruction`: what a reader is asked of a page.
    """

    labels: tuple[str, ...]
    threshold: float | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    mentions: tuple[Mention, ...] = ()
    instruction: str = ""

    def same(self) -> bytes:
        """Equal for options that mean the same."""
        named = (self.labels, self.threshold, self.parameters, self.mentions, self.instruction)
        return msgspec.json.encode(named, order="deterministic")


class Made(Protocol):
    """What a family makes of texts with equal options before the device reads them. `padding`: positions beside their
    tokens.
    """

    @property
    def padding(self) -> int: ...


T = TypeVar("T")
M = TypeVar("M", bound=Made)
Make = Callable[[Sequence[str], ExtractOptions], M]
Run = Callable[[Sequence[str], ExtractOptions, M], list[Result]]


class Preparation:
    """What was made of the texts of one batch. `seconds` is what making took, `padding` that of what has run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.padding = 0
        self._made: dict[tuple[bytes, tuple[str, ...]], Any] = {}

    def make(self, texts: Sequence[str], options: Sequence[ExtractOptions], make: Make[Any]) -> None:
        """Make what can be made now. What fails is left to `run_alike`, which meets the failure again and tells it of
        the right text.
        """
        for option, chosen in _alike(options):
            some = [texts[index] for index in chosen]
            try:
                self._made[option.same(), tuple(some)] = self._timed(some, option, make)
            except SIEError:
                continue
            except Exception as error:  # noqa: BLE001  model code may raise anything, and the lane isolates the text
                _logger.debug("preparing failed with %s", type(error).__name__)

    def of(self, texts: Sequence[str], option: ExtractOptions, make: Make[M]) -> M:
        """What was made of these texts, made now if it was not."""
        made: M | None = self._made.pop((option.same(), tuple(texts)), None)
        if made is None:
            made = self._timed(texts, option, make)
        self.padding += made.padding
        return made

    def _timed(self, texts: Sequence[str], option: ExtractOptions, make: Make[M]) -> M:
        began_s = time.perf_counter()
        try:
            return make(texts, option)
        finally:
            self.seconds += time.perf_counter() - began_s


class Extractor(ABC, Generic[M]):
    """A family that tokenises and collates by itself: `_make` on the host, `_extract` on the device, both of texts with
    equal options.
    """

    def prepare(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> Preparation:
        """What `extract` needs of these texts before the device: may be called off the device lane, on several threads
        at once.
        """
        preparation = Preparation()
        preparation.make(texts, options, self._make)
        return preparation

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], preparation: Preparation | None = None
    ) -> list[Result]:
        """The result of each text, or an error instead of it."""
        with torch.inference_mode():
            return run_alike(texts, options, self._make, self._extract, preparation)

    @abstractmethod
    def _make(self, texts: Sequence[str], options: ExtractOptions) -> M: ...

    @abstractmethod
    def _extract(self, texts: Sequence[str], options: ExtractOptions, made: M) -> list[Result]: ...


def run_alike(
    texts: Sequence[str],
    options: Sequence[ExtractOptions],
    make: Make[M],
    run: Run[M],
    preparation: Preparation | None = None,
) -> list[Result]:
    """Call `run` once for each set of equal options, and once for each text of a set that fails as a whole. Results in
    text order.

    Raises only what concerns the whole device: out of memory, or a device that is lost.
    """
    prepared = preparation or Preparation()
    return by_options(texts, options, lambda some, option: run(some, option, prepared.of(some, option, make)))


def by_options(
    inputs: Sequence[T], options: Sequence[ExtractOptions], run: Callable[[Sequence[T], ExtractOptions], list[Result]]
) -> list[Result]:
    """Call `run` once for each set of equal options, and once for each input of a set that fails as a whole. Results in
    the order of the inputs. Raises as `run_alike`.
    """
    results: dict[int, Result] = {}
    for option, chosen in _alike(options):
        results.update(zip(chosen, _attempt([inputs[index] for index in chosen], option, run), strict=True))
    return [results[index] for index in range(len(inputs))]


def _alike(options: Sequence[ExtractOptions]) -> list[tuple[ExtractOptions, list[int]]]:
    """Each different one of the options, with the places where it stands."""
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
            return [_attempt([each], option, run)[0] for each in inputs]
        _logger.exception("extraction from one input failed")
        return [InferenceFailed(f"the model code failed with {type(error).__name__}")]


def padding_of(lengths: Sequence[int], chosen: Iterable[Sequence[int]]) -> int:
    """Positions beside the tokens in passes over sequences of these lengths, each padded to its longest."""
    return sum(
        len(each) * max(lengths[index] for index in each) - sum(lengths[index] for index in each) for each in chosen
    )


def passes(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of sequences that are padded to one length and run together, shortest first.

    A pass has at most `budget` padded positions, or one sequence.
    """
    chosen: list[int] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = (len(chosen) + 1) * lengths[index]
        if chosen and padded > min(budget, _WASTE * (real + lengths[index])):
            yield chosen
            chosen, real = [], 0
        chosen.append(index)
        real += lengths[index]
    if chosen:
        yield chosen


def windows(sizes: Sequence[int], room: int, max_words: int, min_shared: int) -> Iterator[tuple[int, int]]:
    """First word, and last word + 1, of each window over words of `sizes` tokens: at most `max_words` that fit `room`
    tokens, but at least one. A window shares an eighth of its words with the next, at least `min_shared` if that is
    no more than half.
    """
    start, stop, tokens = 0, 0, 0
    while start < len(sizes):
        while stop < len(sizes) and stop - start < max_words and (stop == start or tokens + sizes[stop] <= room):
            tokens += sizes[stop]
            stop += 1
        yield start, stop
        if stop == len(sizes):
            return
        shared = min(max((stop - start) // _OVERLAP, min_shared), (stop - start) // 2)
        tokens = sum(sizes[stop - shared : stop])
        start = stop - shared


def bound_length(tokenizer: Any, encoder: Any, otherwise: int) -> int:
    """Make a transformers tokenizer cut at what its encoder can take, and return that, in tokens with special tokens.

    It is the least of the tokenizer's own limit, the encoder's table of absolute positions and, for encoders without
    one, `otherwise`.
    """
    table = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    positions = (
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        if table is not None
        else otherwise
    )
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return int(tokenizer.model_max_length)


def without_remote_code(config: dict[str, Any] | None, *, trusted: bool) -> None:
    """Drop from a backbone's configuration what would make the packages import code from elsewhere. They always allow
    it.
    """
    if config is not None and not trusted:
        config.pop("auto_map", None)


def describe_backbone(raw: dict[str, Any], name: str, part: str, folder: Path, entry: ModelEntry) -> None:
    """Replace the backbone `name` by its local folder: inside of the model's own, else of the hub cache. Fill in its
    configuration.
    """
    backbone = folder / raw[name]
    if not backbone.is_dir():
        # the cache that the model itself came from, where it came from one
        cache = folder.parents[2] if folder.parent.name == "snapshots" else None
        try:
            backbone = Path(snapshot_download(raw[name], cache_dir=cache, local_files_only=True))
        except (OSError, ValueError) as error:
            cause = f"its backbone {raw[name]} is neither in the hub cache nor below the model's folder"
            fix = f"`hf download {raw[name]} --include '*.json' '*.model'` fetches its configuration and tokenizer"
            raise load_failed("NOT_FOUND", f"{entry.id}: {cause}; {fix}") from error
    raw[name] = str(backbone)
    if raw.get(part) is None:
        raw[part] = json.loads((backbone / "config.json").read_text())
        if part == "encoder_config" and raw.get("vocab_size", -1) != -1:
            raw[part]["vocab_size"] = raw["vocab_size"]


def check_encoder(config: dict[str, Any] | None, entry: ModelEntry, load: LoadOptions) -> None:
    """Drop remote code from a backbone's configuration. Raises ModelLoadFailed INCOMPATIBLE for a kind that
    transformers does not have.
    """
    if config is None:
        return
    without_remote_code(config, trusted=load.trust_remote_code)
    if (kind := config.get("model_type", "deberta-v2")) not in CONFIG_MAPPING:
        raise load_failed("INCOMPATIBLE", f"{entry.id}: transformers knows no encoder {kind}")


def read_weights(folder: Path, entry: ModelEntry) -> dict[str, Tensor]:
    """Of model.safetensors, else of pytorch_model.bin, which must hold tensors alone. Raises ModelLoadFailed
    INCOMPATIBLE.
    """
    if (file := folder / "model.safetensors").is_file():
        weights: dict[str, Tensor] = load_file(file)
        return weights
    if (file := folder / "pytorch_model.bin").is_file():
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise load_failed("INCOMPATIBLE", f"{entry.id}: pytorch_model.bin holds more than tensors") from error
        return weights
    raise load_failed("INCOMPATIBLE", f"{entry.id}: its folder has neither model.safetensors nor pytorch_model.bin")


def fill(model: torch.nn.Module, weights: dict[str, Tensor], entry: ModelEntry) -> None:
    """Copy the weights in. Raises as `compare`."""
    own = model.state_dict()
    compare(own, weights, entry)
    model.load_state_dict({name: weights[name] for name in own.keys() & weights.keys()}, strict=False)


def compare(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], entry: ModelEntry) -> None:
    """Raises ModelLoadFailed INCOMPATIBLE unless the names and shapes of the weights are those of the model."""
    faults = {
        "missing": own.keys() - weights.keys(),
        "unexpected": weights.keys() - own.keys(),
        "mismatched": {name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape},
    }
    for misfit, found in faults.items():
        refuse_misfits(entry, misfit, found)


def refuse_misfits(entry: ModelEntry, misfit: str, names: Iterable[str]) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE if weights are `misfit`, other than a pooler, which is never run, and position
    ids.
    """
    if found := sorted(name for name in names if not any(part in name for part in _HARMLESS)):
        raise load_failed(
            "INCOMPATIBLE", f"{entry.id}: the weights have {len(found)} {misfit} keys: {', '.join(found[:5])}"
        )


def tokenizer_fault(tokenizer: Tokenizer, encoder: Any) -> str:
    """Why the ids of the tokenizer cannot be those of the encoder's table, empty if they can."""
    return fault(tokenizer, encoder.get_input_embeddings().num_embeddings)


def bytes_of(model: torch.nn.Module) -> int:
    """Weights and buffers, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in [*model.parameters(), *model.buffers()]
    }
    return sum(storage.nbytes() for storage in storages.values())


def labels_refused(message: str) -> InvalidInput:
    """An error of the labels of one request, without their text."""
    return InvalidInput(f"labels: {message}", reason="labels", param="labels")
