"""Small batches: the engine, its forward pass alone, that pass as a CUDA graph, and with compiled layers; and how long
the card waits between kernels.

`engine`: a message from its bytes to its vectors on the calling thread. The others run the model on inputs that lie on
the device. Medians, milliseconds. A cell that failed has the name of the error; the log has its traceback.
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
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import Items

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
    "engine",
    "forward",
    "CUDA graph",
    "compiled layers",
    "kernels",
    "idle",
    "gap, us",
)


def forward_of(backbone: Backbone, lengths: list[int]) -> Run:
    """The model's pass on inputs that are on the device."""
    ids = np.concatenate(kit.random_ids(lengths))
    packed = backbone.pack(Items(np.array(lengths), ids), np.arange(len(lengths)))
    model, inputs = backbone._model, {}

    def kept(**named: Any) -> Any:
        inputs.update(named)
        return model(**named)

    backbone._model = kept
    try:
        backbone.forward(packed)
    finally:
        backbone._model = model
    return lambda: model(**inputs)


def captured(run: Run) -> Run:
    """The run as a CUDA graph; on a processor the run itself."""
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
    """Milliseconds of what `make` gives, or the name of its error."""
    try:
        run = make()
        run()
        return f"{1e3 * kit.seconds_of(run, least=5, budget_s=0.5):.3f}"
    except Exception as error:  # noqa: BLE001  model code and the compiler may raise anything
        traceback.print_exc()
        return type(error).__name__


def measure(engine: AdapterEngine, name: str, config: BertConfig, table: kit.Table) -> None:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        resident = engine.residency.ensure(name, kit.entry_of(name, kit.save(Path(folder), config), config.hidden_size))
        backbone: Any = resident.weights.backbone
        found: dict[tuple[int, int], list[str]] = {}
        for texts, length in BATCHES:
            message = kit.batch(name, kit.random_ids([length] * texts))
            run = forward_of(backbone, [length] * texts)
            cells = [
                cell(lambda message=message: lambda: kit.vectors(engine.execute(message))),
                cell(lambda run=run: run),
                cell(lambda run=run: captured(run)),
            ]
            profile = kit.profiled(run)
            gap = statistics.median(profile.gaps_us or [0.0])
            kernels = sum(count for _, count, _ in profile.rows)
            found[texts, length] = [*cells, str(kernels), f"{100 * profile.idle_share:.0f} %", f"{gap:.1f}"]
        for layer in backbone._model.encoder.layer:  # one graph for all of them
            layer.compile(backend="eager" if REHEARSAL else "inductor", dynamic=True)
        for texts, length in BATCHES:
            compiled = cell(lambda texts=texts, length=length: forward_of(backbone, [length] * texts))
            *first, kernels, idle, gap = found[texts, length]
            table.row(name, f"{texts} x {length}", *first, compiled, kernels, idle, gap)
        engine.residency.release(name)


def main() -> None:
    """All rows."""
    table = kit.Table("small", "Small batches on one device", COLUMNS)
    with kit.new_engine() as engine:
        for name, sizes in {"tiny": kit.TINY}.items() if REHEARSAL else SIZES.items():
            measure(engine, name, BertConfig(**sizes), table)


if __name__ == "__main__":
    main()
