"""A child process that loads and unloads models and prints the resident memory after each cycle, in bytes, as JSON.

    python load_cycles.py SMALL_FOLDER LARGE_FOLDER CYCLES

The small model is of the same kind and is loaded first. The memory that imports and kernels keep is not counted as
memory of the large model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from sie_adapter.engine import engine as engines
from sie_contracts.models.entries import LoadOptions, ModelEntry, Weights
from sie_contracts.settings import Settings


def main(small: str, large: str, cycles: str) -> None:
    engines.prepare_process()
    no_cache = str(Path(__file__) / "cache")  # below a file: nothing can be kept, so that each load converts the model
    engine = engines.AdapterEngine(Settings(device="cpu", local_cache=no_cache))
    process = psutil.Process()
    resident, weights = [], 0
    for folder in (small, *[large] * int(cycles)):
        width = json.loads(Path(folder, "config.json").read_text())["hidden_size"]
        entry = ModelEntry(
            id="m",
            weights=Weights(path=folder),
            family="text-encoder",
            outputs={"dense": width},
            max_tokens=64,
            load=LoadOptions(precision="float32"),
        )
        weights = engine.residency.ensure("m", entry).weights.memory_bytes
        engine.residency.release("m")
        resident.append(process.memory_info().rss)
    engine.stop(5)
    print(json.dumps({"resident": resident, "weights": weights}))


if __name__ == "__main__":
    main(*sys.argv[1:])
