"""Batches of models that get texts and files instead of token ids: models that extract, detect or generate text, static
embeddings, and models of other packages.

RunBatch with texts and files ──► encode | score | extract of the model: a list of inputs, a list of results
──► BatchDone
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from sie_adapter.engine import item_results
from sie_adapter.engine.item_results import ItemResult, ItemResults, check_groups
from sie_adapter.families.extraction import ExtractOptions, Preparation
from sie_adapter.memory.device_errors import is_device_fatal, is_out_of_memory
from sie_adapter.memory.oom import OomRecovery, Relief, Remedy, exhausted
from sie_adapter.packed.packing import BatchFiles, Int64, MalformedBatch, images, sounds
from sie_contracts.errors import InferenceFailed, InternalFailure, InvalidInput, ShuttingDown, SIEError
from sie_contracts.media import documents
from sie_contracts.models.output_schemas import parts_of
from sie_contracts.wire.ipc import BatchDone, Group, RunBatch
from sie_contracts.wire.messages import RunOptions

_logger = logging.getLogger("sie.adapter")
_CPU = torch.device("cpu")


class VerbModel(Protocol):
    """Model with one or more of three methods: encode, score, extract. Each method may run on several threads at once.

    `encode(texts, options)` returns for each text a map of outputs, float32 arrays: `dense` [width], `multivector`
    [tokens, width], `sparse` a pair (ids, weights). `score(query, texts, options)` returns a number for each text.
    `extract(texts, options)` returns for each text the map that the client gets. `options` of `extract` has an entry
    for each text; `options` of `encode` and `score` applies to all texts. A method may return an SIEError for a text.

    `extract` gets up to two more arguments, in this order:
    1. If the model has `prepare(texts, options)`, which tokenises outside the device threads: its Preparation.
    2. If the attribute `rows` declares files: for each text a list of images (`Shown`), a list of sounds (`Heard`), or
       a document or None.
    """


def extract_options(message: RunBatch) -> list[ExtractOptions]:
    options = []
    for group in message.groups:
        parameters = {name: value for name, value in group.options.parameters.items() if name != "parts"}
        parts = parts_of(group.options.parameters)
        options += [
            ExtractOptions(
                group.options.labels,
                group.options.threshold,
                parameters,
                message.mentions[row] if message.mentions else (),
                group.options.instruction,
                parts,
            )
            for row in range(group.start, group.stop)
        ]
    return options


def run_raw(
    model: Any,
    message: RunBatch,
    device: torch.device = _CPU,
    make_room: Callable[[], Relief | None] = lambda: None,
    remedied: Callable[[Remedy], None] = lambda remedy: None,
    preparation: Preparation | None = None,
) -> BatchDone:
    """Run a batch of texts and return its reply. OomRecovery handles a lack of memory. If the model raises another
    error, each text runs alone, so that only texts that cause an error fail. Raises InvalidInput if the model lacks the
    operation, InternalFailure if the batch is malformed or the model does not return one result for each text, and the
    error of a lost device.

    `preparation`: the result of the model's own `prepare` for this batch. If None, the model tokenises now.
    """
    started = time.perf_counter()
    if preparation is None and hasattr(model, "prepare"):
        preparation = Preparation()
    before_s = preparation.seconds if preparation is not None else 0.0
    run = getattr(model, message.operation, None)
    if run is None:
        raise InvalidInput(f"{message.model} does not {message.operation}", reason="unsupported_task")
    lengths = np.frombuffer(message.lengths, "<i4")
    check_groups(message.groups, len(lengths))
    if len(message.texts) != len(lengths) or len(message.mentions) not in (0, len(lengths)):
        raise InternalFailure(
            f"the batch has {len(message.texts)} texts and {len(lengths)} lengths", reason="malformed_batch"
        )

    shortage = OomRecovery(device, make_room, remedied)

    def fitting(call: Call, count: int) -> list[Any]:
        results: list[Any] = [exhausted()] * count

        def work(texts: Int64) -> None:
            for text, result in zip(texts.tolist(), _isolated(call, texts.tolist(), message), strict=True):
                results[text] = result

        shortage.run(work, np.arange(count), lambda text: None)
        return results

    if message.operation == "extract":
        group_results = _extracted(run, message, fitting, preparation, _files(model, message))
    else:
        group_results = [_run(run, message, group, fitting) for group in message.groups]
    ended = time.perf_counter()
    costs = _costs(message, lengths)
    counted = (
        (answer, costs[row] + (costs[group.start] if row == group.stop - len(answered) > group.start else 0))
        for group, answered in zip(message.groups, group_results, strict=True)
        for row, answer in enumerate(answered, group.stop - len(answered))
    )
    if preparation is None:
        return item_results.batch_reply(message.batch, counted, 1e3 * (ended - started), ended)
    inference_s = ended - started - (preparation.seconds - before_s)
    done = item_results.batch_reply(message.batch, counted, 1e3 * inference_s, ended, padding=preparation.padding)
    return msgspec.structs.replace(done, preprocess_ms=1e3 * preparation.seconds)


def _costs(message: RunBatch, lengths: Int64) -> list[int]:
    """Return the cost of each text together with its document, as a number of tokens."""
    costs: list[int] = lengths.tolist()
    for row, document in enumerate(message.documents):
        if document is not None:
            costs[row] += documents.cost(len(document.data))
    return costs


Call = Callable[[Sequence[int]], Sequence[Any]]  # returns the results of the texts with these indices
Fitting = Callable[[Call, int], list[Any]]


def _files(model: Any, message: RunBatch) -> Sequence[Any] | None:
    """Return for each text its images, sounds or document, or None if the model accepts no files. Raises
    InternalFailure for files that do not match the texts.
    """
    rows = getattr(model, "rows", {}).get(message.operation)
    if len(message.documents) not in (0, len(message.texts)):
        cause = f"the batch has {len(message.documents)} documents and {len(message.texts)} texts"
        raise InternalFailure(cause, reason="malformed_batch")
    if rows is not None and rows.documents is not None:
        return message.documents or [None] * len(message.texts)
    image_recipe, sound_recipe = (rows.images, rows.sounds) if rows is not None else (None, None)
    try:
        files: BatchFiles[Any] | None = images(message.images, message.pixels, image_recipe, message.image_keys)
        files = sounds(message.sounds, message.features, sound_recipe) or files
    except MalformedBatch as error:
        raise InternalFailure(str(error), reason="malformed_batch") from error
    if image_recipe is None and sound_recipe is None:
        return None
    texts = np.arange(len(message.texts))
    return files.for_items(texts) if files is not None else [[] for _ in texts]


def _extracted(
    run: Any,
    message: RunBatch,
    fitting: Fitting,
    preparation: Preparation | None,
    files: Sequence[Any] | None,
) -> list[ItemResults]:
    """Call `extract` with the texts of all requests: the model itself forms passes of texts with equal options."""
    options, texts = extract_options(message), message.texts
    own = () if preparation is None else (preparation,)

    def call(some: Sequence[int]) -> Sequence[Any]:
        beside = () if files is None else ([files[number] for number in some],)
        outputs: Sequence[Any] = run(
            tuple(texts[number] for number in some), [options[number] for number in some], *own, *beside
        )
        return outputs

    outputs = fitting(call, len(texts))
    results: ItemResults = [result if isinstance(result, SIEError) else _extraction(dict(result)) for result in outputs]
    return [results[group.start : group.stop] for group in message.groups]


def _extraction(data: dict[str, Any]) -> ItemResult | SIEError:
    if _has_only_finite(data):
        return ItemResult(data=data)
    return InferenceFailed("the model returned a result with a number that is not finite", reason="non_finite")


def _has_only_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_has_only_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_has_only_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _run(run: Any, message: RunBatch, group: Group, fitting: Fitting) -> ItemResults:
    texts = message.texts[group.start : group.stop]
    if not texts:
        return []
    is_encoding = message.operation == "encode"
    query, texts = ((), texts) if is_encoding else (texts[:1], texts[1:])

    def call(some: Sequence[int]) -> Sequence[Any]:
        outputs: Sequence[Any] = run(*query, tuple(texts[number] for number in some), group.options)
        return outputs

    results = fitting(call, len(texts))
    if is_encoding:
        return _encoded(results, group.options)
    return [score if isinstance(score, SIEError) else item_results.scored(float(score)) for score in results]


def _encoded(results: list[Any], options: RunOptions) -> ItemResults:
    encoded: ItemResults = []
    for result in results:
        if isinstance(result, SIEError):
            encoded.append(result)
            continue
        rows = {name: [_tensors(value)] for name, value in result.items()}
        try:
            encoded += (
                item_results.vectors(options, rows)
                if all(_is_finite(row) for (row,) in rows.values())
                else [item_results.not_finite()]
            )
        except KeyError as error:
            encoded.append(InvalidInput(f"the model did not return the output {error}", reason="unsupported_output"))
        except SIEError as error:
            encoded.append(error)
    return encoded


def _is_finite(row: Any) -> bool:
    return bool(torch.isfinite(row[1] if isinstance(row, tuple) else row).all())


def _tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.as_tensor(np.asarray(value[0], np.int32)), torch.as_tensor(np.asarray(value[1], np.float32))
    return torch.as_tensor(np.asarray(value, np.float32))


def _isolated(call: Call, texts: list[int], message: RunBatch) -> list[Any]:
    """Return the results of the texts with these indices. If the call fails, run each text alone, so that a text that
    causes an error does not fail the texts of other clients. Raises the errors of exhausted memory, a lost device, a
    cancelled call and a stopping adapter, and InternalFailure for a wrong number of results.
    """
    failure: SIEError
    try:
        results = call(texts)
    except SIEError as error:
        if isinstance(error, ShuttingDown) or error.reason == "cancelled":
            raise
        failure = error
    except Exception as error:
        if is_out_of_memory(error) or is_device_fatal(error):
            raise
        if len(texts) == 1:
            _logger.exception("%s of one text by %s failed; the text gets an error", message.operation, message.model)
        failure = InferenceFailed(f"the model code failed with {type(error).__name__}")
    else:
        return _of_length(results, len(texts))
    if len(texts) == 1:
        return [failure]
    return [result for text in texts for result in _isolated(call, [text], message)]


def _of_length(results: Sequence[Any], count: int) -> list[Any]:
    if len(results) != count:
        raise InternalFailure(f"the model returned {len(results)} results for {count} inputs", reason="wrong_length")
    return list(results)
