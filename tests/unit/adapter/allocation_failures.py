"""A child process that runs adversarial batches through a real engine under a hard memory limit and prints the outcomes
as JSON.

    python allocation_failures.py MODEL_FOLDER CACHE_FOLDER HEADROOM_MIB BATCHES SEED STEP_S ENGINE

The limit (RLIMIT_DATA) is set once the model is loaded and warm, so every failure is one of the allocator in a pass.
Batches mix lengths from 2 to 512 tokens up to MAX_TOKENS, so the large ones cannot fit at once and every single item
can. The clock of the learnt limits advances STEP_S for each batch. With a large step the limits rise before each batch,
and passes fail again and again.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from sie_adapter.engine import device as devices
from sie_adapter.engine import engine as engines
from sie_adapter.memory.batch_limits import DeviceLimits
from sie_contracts.models.entries import LoadOptions, ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Ok

WIDTH, LONGEST, VOCABULARY, MAX_TOKENS = 64, 512, 500, 16_384


class Failures(logging.Handler):
    """Counts the log messages of the engine about passes that ran out of memory."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "out of memory" in record.getMessage()


def adversarial(generator: np.random.Generator) -> list[int]:
    """Lengths of a batch: all long, all short, one long among short ones, or any."""
    most = int(generator.integers(1, MAX_TOKENS))
    kind = generator.integers(4)
    if kind == 0:
        return [LONGEST] * max(1, most // LONGEST)
    if kind == 1:
        return [8] * min(512, max(1, most // 8))
    if kind == 2:
        return [2] * 63 + [LONGEST]
    lengths = generator.integers(2, LONGEST + 1, 64)
    return lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), most)))].tolist()


def run(engine: engines.AdapterEngine, lengths: list[int], seed: int) -> tuple[Counter[str], np.ndarray]:
    """The codes of the outcomes, and the vectors [items, width]."""
    ids = np.random.default_rng(seed).integers(6, VOCABULARY, sum(lengths), dtype=np.int32)
    message = ipc.RunBatch(
        "b",
        "m",
        "encode",
        np.array(lengths, "<i4").tobytes(),
        ids.tobytes(),
        (ipc.Group(0, len(lengths)),),
        pooling="mean",
    )
    with torch.inference_mode():
        reply = engine.execute(message)
    if not isinstance(reply, ipc.BatchDone):
        return Counter({f"refused: {reply.error.message}": len(lengths)}), np.zeros((0, WIDTH))  # type: ignore[union-attr]
    codes = Counter("ok" if isinstance(outcome, Ok) else outcome.error.code for outcome in reply.outcomes)
    return codes, np.frombuffer(reply.block, "<f4").reshape(-1, WIDTH)


def main(folder: str, cache: str, headroom_mib: str, batches: str, seed: str, step_s: str, engine_name: str) -> None:
    failures = Failures()
    logging.getLogger("sie.adapter").addHandler(failures)
    engines.prepare_process()
    engine = engines.AdapterEngine(Settings(device="cpu", local_cache=cache))
    entry = ModelEntry(
        id="m",
        weights=Weights(path=folder),
        family="text-encoder",
        outputs={"dense": WIDTH},
        max_tokens=LONGEST,
        load=LoadOptions(precision="float32", engine=engine_name),
    )
    now_s = time.time()
    engine.batch_limits = DeviceLimits(Path(cache) / "sie" / "frontier.json", lambda: now_s)
    engine.residency.ensure("m", entry)
    expected = [run(engine, [length], 7)[1] for length in (8, LONGEST)]
    held = 1024 * int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")).split()[
            1
        ]
    )
    limit = held + (int(headroom_mib) << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    devices.keep_freed_memory()  # A process that starts under a limit calls this too.
    generator = np.random.default_rng(int(seed))
    codes: Counter[str] = Counter()
    for number in range(int(batches)):
        now_s += float(step_s)
        codes += run(engine, adversarial(generator), number)[0]
    got = [run(engine, [length], 7)[1] for length in (8, LONGEST)]
    right = all(
        np.allclose(reference, vector_row, atol=1e-5) for reference, vector_row in zip(expected, got, strict=True)
    )
    memory = devices.memory(engine.device)
    engine.stop(5)
    print(
        json.dumps(
            {"codes": codes, "failures": failures.count, "right": right, "limit": limit, "total": memory.total_bytes}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
