"""Time of small batches: the engine with and without CUDA graphs, the forward pass alone and as a CUDA graph, and the
share of time without a running kernel.

`engine`: time from the bytes of a message to its vectors, on the calling thread. `forward`, `CUDA graph`: time of the
model alone, whose inputs are already on the device. Times are median milliseconds. `graphs`: number of the engine's
graphs after the row; `eager` if the engine has stopped using graphs, for the reason in its log. `cosine`: lowest cosine
between vectors with and without graphs. A cell that failed has the name of the error; the log has its traceback.
"""

from __future__ import annotations

import statistics
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import numpy as np
import torch
from kit import DEVICE, REHEARSAL
from transformers import BertConfig

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.pass_graphs import cuda_recorder
from sie_contracts.wire.ipc import RunBatch

Run = Callable[[], Any]
SIZES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bert-base": {},
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
BATCHES = ((1, 16), (1, 128), (8, 32), (32, 32))
COLUMNS = (
    "model",
    "texts x tokens",
    "engine, eager",
    "engine",
    "eager to graphs",
    "graphs",
    "cosine",
    "forward",
    "CUDA graph",
    "kernels",
    "idle",
    "gap, us",
)


def captured(run: Run) -> Run:
    """Capture the run as a CUDA graph and return its replay. On a CPU, return the run itself."""
    if DEVICE.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def cell(make: Callable[[], Run]) -> str:
    """Return the milliseconds of the run that `make` returns, or the name of its error."""
    try:
        run = make()
        run()
        return f"{1e3 * kit.seconds_of(run, least=5, budget_s=0.3):.3f}"
    except Exception as error:  # noqa: BLE001  model code and the compiler may raise anything
        traceback.print_exc()
        return type(error).__name__


def ratio(before: str, after: str) -> str:
    """Return the first cell divided by the second, or a dash if one of them failed."""
    try:
        return f"{float(before) / float(after):.2f}"
    except ValueError:
        return "-"


def measure(engine: AdapterEngine, name: str, config: BertConfig, table: kit.Table) -> None:
    """Measure one model with all batch sizes and write a row for each."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        resident = engine.residency.ensure(name, kit.entry_of(name, kit.save(Path(folder), config), config.hidden_size))
        backbone: Any = resident.weights.backbone
        recorder = cuda_recorder(DEVICE) if DEVICE.type == "cuda" else None
        for texts, length in BATCHES:
            message = kit.batch(name, kit.random_ids([length] * texts))

            def whole(message: RunBatch = message) -> np.ndarray:
                return kit.vectors(engine.execute(message))

            backbone.use_graphs(None)
            expected, eager = whole(), cell(lambda whole=whole: whole)
            backbone.use_graphs(recorder)
            for _ in range(2):  # the engine captures a graph at the second batch of a shape
                whole()
            got, replayed = whole(), cell(lambda whole=whole: whole)
            graphs = backbone._graphs
            state = "none" if graphs is None else "eager" if graphs.is_eager else len(graphs)
            run = kit.forward_of(backbone, [length] * texts)
            forward, captured_ms = cell(lambda run=run: run), cell(lambda run=run: captured(run))
            profile = kit.profiled(run)
            gap = statistics.median(profile.gaps_us or [0.0])
            kernels = sum(count for _, count, _ in profile.rows)
            norms = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
            cosine = f"{((got * expected).sum(1) / norms).min():.6f}"
            gain = ratio(eager, replayed)
            idle = f"{100 * profile.idle_share:.0f} %"
            table.row(
                *(name, f"{texts} x {length}", eager, replayed, gain, state, cosine, forward, captured_ms),
                *(kernels, idle, f"{gap:.1f}"),
            )
        engine.residency.release(name)


def main() -> None:
    table = kit.Table("small", "Small batches on one device", COLUMNS)
    with kit.new_engine() as engine:
        for name, sizes in {"tiny": kit.TINY}.items() if REHEARSAL else SIZES.items():
            measure(engine, name, BertConfig(**sizes), table)


if __name__ == "__main__":
    main()
