"""Code for the families whose models extract entities, relations or classes from texts: tokenisation, windows over long
texts, padded passes, weights.

texts, options ──► groups with equal options ──► make: words, ids, padded passes ──► run, on the device ──► results
                                               └─ Preparation: may run in another thread ──┘
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sie_adapter.engine.device import Compute
from sie_adapter.engine.schema_answers import answer_parts, ranked_classes
from sie_adapter.families.extraction import (
    ExtractOptions,
    M,
    Preparation,
    Result,
    by_options,
    labels_refused,
    scores_not_finite,
)
from sie_adapter.loading.tokenizer import bare_tokenizer, fault
from sie_adapter.packed.linear import bytes_of
from sie_adapter.packed.packing import evenly_long
from sie_contracts.errors import InvalidInput, SIEError
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_contracts.models.output_schemas import Decision, SchemaPart, TextRecord
from sie_contracts.wire.ipc import Rows

# a tensor whose name contains one of these may be missing in the weights, or additional in them
_HARMLESS = ("pooler.", "position_ids")
# at least 1 / _MIN_ROOM of the tokens of a sequence are for the text; a request whose labels leave fewer is refused
_MIN_ROOM = 8
_WORDS_PER_COUNT = 8192  # largest number of words in one call of the tokenizer
_OVERLAP = 8  # 1 / _OVERLAP of the words of a window are also in the next window


class Extractor(ABC, Generic[M]):
    """Base of extraction families. The adapter, not the sidecar, tokenises the texts: `_make` tokenises on the host,
    then `_extract` runs on the device. Each call has texts with equal options. `max_tokens`: limit for the tokens of
    one sequence, labels included. `pass_tokens`: limits for the tokens of a pass, padding and labels included, on a CPU
    and on other devices.
    """

    max_tokens: int
    pass_tokens: ClassVar[tuple[int, int]]

    rows: ClassVar[dict[str, Rows]] = {"extract": Rows("raw")}

    def _describe(self, model: torch.nn.Module, encoder: Any, tokenizer: Any, compute: Compute) -> None:
        self._device = compute.device
        self.precision = compute.precision
        self._counter = bare_tokenizer(tokenizer)
        self.tokenizer: bytes = self._counter.to_str().encode()
        self.vocabulary: int = encoder.get_input_embeddings().num_embeddings
        self.memory_bytes = bytes_of(model)
        self.attention = f"{encoder.config._attn_implementation} padded"

    def _passes(self, lengths: Sequence[int], options: ExtractOptions) -> list[list[int]]:
        on_cpu, elsewhere = self.pass_tokens
        return list(passes(lengths, on_cpu if self._device.type == "cpu" else elsewhere))

    def _check_room(self, tokens: int) -> None:
        """Raise InvalidInput if a prompt of `tokens` tokens leaves less than an eighth of `max_tokens` to the text."""
        if self.max_tokens - tokens < self.max_tokens // _MIN_ROOM:
            raise labels_refused(f"they use {tokens} of {self.max_tokens} tokens, which leaves too few for the text")

    def prepare(self, texts: Sequence[str], options: Sequence[ExtractOptions]) -> Preparation:
        """Prepare these texts for `extract`. Several threads outside of the device threads may call this at once."""
        preparation = Preparation()
        preparation.make(*by_part(texts, options), self._make)
        return preparation

    def extract(
        self, texts: Sequence[str], options: Sequence[ExtractOptions], preparation: Preparation | None = None
    ) -> list[Result]:
        prepared = preparation or Preparation()

        def run(some: Sequence[str], option: ExtractOptions) -> list[Result]:
            return self._extract(some, option, prepared.pop_or_make(some, option, self._make))

        with torch.inference_mode():
            results = by_options(*by_part(texts, options), run)
        return with_answers(results, options)

    @abstractmethod
    def _make(self, texts: Sequence[str], options: ExtractOptions) -> M: ...

    @abstractmethod
    def _extract(self, texts: Sequence[str], options: ExtractOptions, prepared: M) -> list[Result]: ...


def by_part(texts: Sequence[str], options: Sequence[ExtractOptions]) -> tuple[list[str], list[ExtractOptions]]:
    """Return the text and the options of each run: one run for the labels of a text, and one per part of its schema."""
    expanded = [(text, own) for text, option in zip(texts, options, strict=True) for own in _options_of_parts(option)]
    return [text for text, _ in expanded], [own for _, own in expanded]


def _options_of_parts(options: ExtractOptions) -> list[ExtractOptions]:
    if not options.parts:
        return [options]
    own = [replace(options, parts=())] if options.labels or options.parameters.get("relation_labels") else []
    return own + [_options_of_part(options, part) for part in options.parts]


def _options_of_part(options: ExtractOptions, part: SchemaPart) -> ExtractOptions:
    """Return the options of the run for one part of a schema. A decision needs the scores of all labels, so the
    threshold of its run is 0.
    """
    if isinstance(part, TextRecord):
        return replace(options, labels=(), parts=(), part=part)
    prompt = " ".join(filter(None, (options.instruction, part.question)))
    task = " ".join(part.path)
    parameters = dict(options.parameters)
    parameters |= {
        "multi_label": part.is_many or part.is_boolean,
        "task": f"{task}: {prompt}" if prompt else task,
        "examples": _examples_of(options, part),
        "label_thresholds": {},
    }
    return replace(
        options, labels=part.labels, threshold=0.0, parameters=parameters, instruction=prompt, parts=(), part=part
    )


def _examples_of(options: ExtractOptions, part: Decision) -> list[dict[str, Any]]:
    """Return the examples that have labels of this decision. An example writes a label as `label` or `path.label`."""
    names = {f"{'.'.join(part.path)}.{label}": label for label in part.labels} | {label: label for label in part.labels}
    examples = [
        {"text": example["text"], "labels": [names[label] for label in example["labels"] if label in names]}
        for example in options.parameters.get("examples", ())
    ]
    return [example for example in examples if example["labels"]]


def with_answers(results: Sequence[Result], options: Sequence[ExtractOptions]) -> list[Result]:
    """Return a result for each text: the joined results of the runs that `by_part` lists for the text, or the error of
    the first failed run.
    """
    remaining = iter(results)
    return [_with_answer(list(islice(remaining, len(_options_of_parts(option)))), option) for option in options]


def _with_answer(results: list[Result], options: ExtractOptions) -> Result:
    done = [result for result in results if not isinstance(result, SIEError)]
    for result, of_part in zip(results, _options_of_parts(options), strict=True):
        if isinstance(result, InvalidInput) and of_part.part is not None and result.param:
            name = ".".join(of_part.part.path) or "output_schema"
            return InvalidInput(f"{name}: {result.message}", reason=result.reason, param=result.param)
        if isinstance(result, SIEError):
            return result
    if not options.parts:
        return done[0]
    own = done[: len(done) - len(options.parts)]
    by_part = [
        {row["label"]: row["score"] for row in result["classifications"]}
        if isinstance(part, Decision)
        else result["objects_of_record"]
        for part, result in zip(options.parts, done[len(own) :], strict=True)
    ]
    answer = answer_parts(options.parts, by_part, options.parameters.get("label_thresholds", {}))
    labelled = own[0] if own else {}
    return {
        "entities": [*labelled.get("entities", ()), *answer.entities],
        "classifications": [*labelled.get("classifications", ()), *answer.classifications],
        "data": answer.data,
        **({"relations": labelled["relations"]} if "relations" in labelled else {}),
    }


def padding_of(lengths: Sequence[int], chosen: Iterable[Sequence[int]]) -> int:
    """Return the number of positions without a token in these passes. `chosen`: for each pass the indices of its
    sequences, which are padded to the longest sequence of the pass.
    """
    return sum(
        len(part) * max(lengths[index] for index in part) - sum(lengths[index] for index in part) for part in chosen
    )


def passes(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield passes, shortest sequences first. A pass is a list of indices of sequences that run together, padded to one
    length. `evenly_long` limits the size of a pass.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start, stop in evenly_long([lengths[index] for index in order], budget=budget):
        yield order[start:stop]


def windows(sizes: Sequence[int], room: int, max_words: int, min_shared: int) -> Iterator[tuple[int, int]]:
    """Yield the windows of a text, as (first word, last word + 1). `sizes`: the tokens of each word. A window has at
    most `max_words` words and `room` tokens, but at least one word. The next window repeats the last eighth of the
    words of this window, at least `min_shared` and at most half of the words.
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


@dataclass(frozen=True)
class TextWindow:
    """Window of words of one text: from the word `start` to before the word `stop`."""

    text: int
    start: int
    stop: int


def own_ranges(spans: Sequence[TextWindow]) -> list[tuple[int, int]]:
    """Return for each window a range of words (begin, end). An entity in a window is used only if its first word is in
    the range. The ranges of two windows meet in the middle of their overlap, so an entity is taken from the window that
    has more words around it.
    """
    middles = [(following.start + window.stop) // 2 for window, following in pairwise(spans)]
    return list(zip([0, *middles], [*middles, spans[-1].stop], strict=True)) if spans else []


def words_with_tokens(
    tokenizer: Tokenizer, split: Sequence[tuple[str, int, int]], longest: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], list[tuple[str, int, int]]]:
    """Return the token ids of the words, the number of tokens of each word, and the words' rows of `split` (word,
    start, end). Words without tokens, such as a variation selector, are left out, because the model cannot read them.
    Only the first `longest` characters of a word are tokenised.
    """
    counted = [
        tokens_of(tokenizer, [word[:longest] for word, _, _ in split[begin : begin + _WORDS_PER_COUNT]])
        for begin in range(0, len(split), _WORDS_PER_COUNT)
    ]
    ids = np.concatenate([np.zeros(0, np.int32), *(part for part, _ in counted)])
    sizes = np.concatenate([np.zeros(0, np.int64), *(part for _, part in counted)])
    return ids, sizes[sizes > 0], [row for row, size in zip(split, sizes.tolist(), strict=True) if size]


def tokens_of(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids of all words, and the number of tokens of each word."""
    encoding = tokenizer.encode(list(words), is_pretokenized=True, add_special_tokens=False)
    owners = np.array(encoding.word_ids, np.int64)
    return np.array(encoding.ids, np.int32), np.bincount(owners, minlength=len(words)).astype(np.int64)


def classified(logits: Tensor, labels: list[str], options: ExtractOptions) -> Result:
    """Return the labels with a score of at least the threshold, best first. The threshold of a label is its value in
    the parameter `label_thresholds`, else the threshold of the options, else 0. `logits`: float32 [labels], on the
    host. Scores are a softmax, or sigmoids if `multi_label` is set.
    """
    if not bool(torch.isfinite(logits).all()):
        return scores_not_finite()
    scores = torch.sigmoid(logits) if options.parameters.get("multi_label") else torch.softmax(logits, -1)
    by_label = options.parameters.get("label_thresholds", {})
    return {"classifications": ranked_classes(labels, scores.tolist(), options.threshold_or(0.0), by_label)}


def absolute_positions(encoder: Any) -> int:
    """Return the number of tokens in the encoder's table of absolute positions; 0 for an encoder without a table."""
    table = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    if table is None:
        return 0
    return int(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))


def bound_length(tokenizer: Any, encoder: Any, otherwise: int) -> int:
    """Set and return the limit of a transformers tokenizer, in tokens, special tokens included. The limit becomes at
    most the encoder's number of absolute positions, or `otherwise` for an encoder without them.
    """
    tokenizer.model_max_length = min(tokenizer.model_max_length, absolute_positions(encoder) or otherwise)
    return int(tokenizer.model_max_length)


def describe_backbone(raw: dict[str, Any], name: str, part: str, folder: Path, entry: ModelEntry) -> None:
    """Replace the name of a backbone, `raw[name]`, by the path of its folder: below the model's folder, else in the hub
    cache. If `raw` has no configuration of the backbone (`raw[part]`), read the configuration from this folder. Raises
    ModelLoadFailed NOT_FOUND if neither place has the folder.
    """
    backbone = folder / raw[name]
    if not backbone.is_dir():
        # a model in a hub cache has its backbones in the same cache
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
    """Remove references to code from a backbone's configuration, if load.trust_remote_code is not set. Raises
    ModelLoadFailed INCOMPATIBLE for a model type that transformers does not have.
    """
    if config is None:
        return
    if not load.trust_remote_code:
        config.pop("auto_map", None)  # the extraction packages would import the code that this field names
    if (kind := config.get("model_type", "deberta-v2")) not in CONFIG_MAPPING:
        raise incompatible(f"{entry.id}: transformers has no encoder {kind}")


def read_weights(folder: Path, entry: ModelEntry) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, else of pytorch_model.bin. Raises ModelLoadFailed INCOMPATIBLE if
    neither file exists, or if pytorch_model.bin contains anything but tensors.
    """
    if (file := folder / "model.safetensors").is_file():
        weights: dict[str, Tensor] = load_file(file)
        return weights
    if (file := folder / "pytorch_model.bin").is_file():
        try:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise incompatible(f"{entry.id}: pytorch_model.bin contains objects other than tensors") from error
        return weights
    raise incompatible(f"{entry.id}: its folder has neither model.safetensors nor pytorch_model.bin")


def fill(model: torch.nn.Module, weights: dict[str, Tensor], entry: ModelEntry) -> None:
    """Copy the weights into the tensors of the model. Raises the errors of `compare`."""
    own = model.state_dict()
    compare(own, weights, entry)
    # a pooler whose stored weights have another shape keeps its initial weights, which are never used
    fitting = {name: weights[name] for name in own.keys() & weights.keys() if own[name].shape == weights[name].shape}
    model.load_state_dict(fitting, strict=False)


def compare(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], entry: ModelEntry) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE if `own` and `weights` differ in a name or shape. See `refuse_misfits`."""
    faults = {
        "missing": own.keys() - weights.keys(),
        "unexpected": weights.keys() - own.keys(),
        "mismatched": {name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape},
    }
    for misfit, names in faults.items():
        refuse_misfits(entry, misfit, names)


def refuse_misfits(entry: ModelEntry, misfit: str, names: Iterable[str]) -> None:
    """Raise ModelLoadFailed INCOMPATIBLE if `names` has names of weights other than those of poolers and position ids.
    Poolers never run. `misfit`: adjective for the message, such as "missing".
    """
    if misfits := sorted(name for name in names if not any(part in name for part in _HARMLESS)):
        raise incompatible(f"{entry.id}: the weights have {len(misfits)} {misfit} keys: {', '.join(misfits[:5])}")


def tokenizer_fault(tokenizer: Tokenizer, encoder: Any) -> str:
    """Return why the tokenizer's ids do not fit the encoder's table of embeddings; an empty string if they fit."""
    return fault(tokenizer, encoder.get_input_embeddings().num_embeddings)
