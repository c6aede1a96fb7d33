"""Model folders that become entries by inspection, and their results for a client, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from msgspec.structs import replace

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.inspection import Inspection, inspect
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.models.options import run_options
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import Input, Ok, Operation
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare import rows as rowing
from sie_sidecar.prepare.rows import ModelTokenizer


def entry_of(report: Inspection) -> ModelEntry:
    return parse_entry(yaml.safe_load(yaml.safe_dump(report.entry)))


def inspected(folder: Path) -> ModelEntry:
    return entry_of(inspect(folder, f"test/{folder.name}", {"path": str(folder)}))


def run(
    engine: AdapterEngine, entry: ModelEntry, operation: Operation, texts: Sequence[str], query: str = "", **body: Any
) -> list[Any]:
    """Return the result of a client for each of `texts`: a map of arrays, a score or the extracted map. Options merge
    as in the gateway. The model runs on torch, because a load compares a graph with torch.
    """
    entry = replace(entry, load=replace(entry.load, engine="torch"))
    weights = engine.residency.ensure(entry.id, entry).weights
    options = run_options(Catalogue({entry.id: entry}).resolve(entry.id), body, operation, strict=True)[1].run
    work = rowing.WorkItemInput([Input(text) for text in texts], Input(query) if query else None, options)
    layout = weights.rows[operation]
    (work_rows,) = layouts.make(
        ModelTokenizer(weights.tokenizer, min(entry.max_tokens, weights.max_tokens)), layout, [work]
    )
    message = rowing.to_batch(
        "test", entry.id, operation, layout.layout, [rowing.BatchPart(work_rows.rows, work)], pooling=options.pooling
    )
    replies: list[Any] = []
    job = DeviceJob(message, replies.append)
    engine.device_threads.submit(job)
    assert job.finished.wait(60)
    reply = replies[-1]
    assert isinstance(reply, BatchDone), reply
    outputs: list[Any] = []
    for outcome in reply.outcomes:
        assert isinstance(outcome, Ok), outcome
        arrays = {
            name: np.frombuffer(reply.block, part.dtype, int(np.prod(part.shape)), part.offset).reshape(part.shape)
            for name, part in outcome.outputs.items()
        }
        outputs.append(
            outcome.data if outcome.data is not None else outcome.score if outcome.score is not None else arrays
        )
    return outputs


def check_that_it_loads(
    folder: Path, engine: AdapterEngine, family: str, outputs: dict[str, int], max_tokens: int, file: str = "image"
) -> Any:
    """Inspect a folder of a model that reads a `file`, check the entry, and return the loaded model."""
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.max_tokens) == (family, outputs, max_tokens)
    assert file in entry.inputs
    assert {"preprocessor_config.json", "open_clip_config.json"} & set(entry.weights.digests)
    return engine.residency.ensure(f"me/{family}-{folder.parent.name}", entry).weights


def check_processor_alone(folder: Path, engine: AdapterEngine, part: str) -> None:
    """Check that the processor of a folder may be in processor_config.json alone: transformers 5 writes no other file
    of the processor.
    """
    before = engine.residency.ensure("me/before", replace(inspected(folder), id="me/before")).weights.rows
    own = folder / "preprocessor_config.json"
    (folder / "processor_config.json").write_text(json.dumps({part: json.loads(own.read_text())}))
    own.unlink()
    entry = replace(inspected(folder), id="me/after")
    assert "processor_config.json" in entry.weights.digests
    assert engine.residency.ensure("me/after", entry).weights.rows == before
