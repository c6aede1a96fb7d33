"""A child process whose main thread oneDNN has given up on: what works there, and what works all the same, as JSON.

The soft limit on data is what is held while a primitive of a new shape is made, so the memory for its code fails; then
there is no limit.
"""

from __future__ import annotations

import json
import resource

import numpy as np
import torch
import torch.nn.functional as F

from sie_adapter.engine.device_threads import Job, Lanes
from sie_adapter.memory.onednn import afresh, is_spoilt, unspoilt
from sie_adapter.memory.oom import Shortage
from sie_adapter.packed.packing import Int64
from sie_contracts.wire.ipc import BatchDone, Reply, RunBatch

_WIDTH = 2048


def gelu(states: torch.Tensor) -> str:
    try:
        return (
            "right" if torch.allclose(unspoilt(F.gelu, states), F.gelu(states.double()).float(), atol=1e-6) else "wrong"
        )
    except RuntimeError as error:
        return str(error)


def spoil() -> str:
    """What the first failure says, of a shape that this process has not met."""
    free = resource.getrlimit(resource.RLIMIT_DATA)
    states = torch.randn(1, 7, _WIDTH)
    F.gelu(torch.randn(1, 5, _WIDTH))
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, free[1]))
    try:
        unspoilt(F.gelu, states)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, free)


def lanes() -> dict[str, object]:
    """A lane that is spoilt by its first batch: whether it was and is, and what came of the others."""
    told: list[tuple[str, bool]] = []

    def execute(message: RunBatch) -> Reply:
        before = is_spoilt()
        told.append((spoil() if message.batch == "b0" else gelu(torch.randn(1, 40 + len(told), _WIDTH)), before))
        return BatchDone(message.batch, (), b"", 0.0)

    running = Lanes(1, execute)
    for number in range(3):
        job = Job(RunBatch(f"b{number}", "m", "encode", b"", b"", ()), lambda reply: None)
        running.submit(job)
        job.finished.wait(60)
    return {"told": told, "ended": running.stop(60)}


def main() -> None:
    lane = lanes()
    refusal = spoil()
    results: dict[int, str] = {}

    def work(items: Int64) -> None:
        states = torch.randn(1, 10 + len(items), _WIDTH)
        results.update(dict.fromkeys(items.tolist(), "right" if F.gelu(states).isfinite().all() else "wrong"))

    refused: list[int] = []
    Shortage(torch.device("cpu"), lambda: None).run(work, np.arange(3), refused.append)
    print(
        json.dumps(
            {
                "lane": lane,
                "refusal": refusal,
                "spoilt": is_spoilt(),
                "afresh": afresh(is_spoilt),
                "here": gelu(torch.randn(1, 30, _WIDTH)),
                "results": list(results.values()),
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main()
