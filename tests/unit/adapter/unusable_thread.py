"""A child process whose main thread oneDNN refuses. It prints as JSON which computations still work.

A soft limit on data lets the memory for the code of a new primitive fail. Then the limit is lifted.
"""

from __future__ import annotations

import json
import resource

import numpy as np
import torch
import torch.nn.functional as F

from sie_adapter.engine.device_threads import DeviceJob, DeviceThreads
from sie_adapter.memory.oom import OomRecovery, on_new_thread, on_usable_thread, thread_state
from sie_adapter.packed.packing import Int64
from sie_contracts.wire.ipc import BatchDone, Reply, RunBatch

_WIDTH = 2048


def gelu(states: torch.Tensor) -> str:
    try:
        return (
            "right"
            if torch.allclose(on_usable_thread(F.gelu, states), F.gelu(states.double()).float(), atol=1e-6)
            else "wrong"
        )
    except RuntimeError as error:
        return str(error)


def spoil() -> str:
    """Make oneDNN fail for a shape that this process has not run, and return the message."""
    free = resource.getrlimit(resource.RLIMIT_DATA)
    states = torch.randn(1, 7, _WIDTH)
    F.gelu(torch.randn(1, 5, _WIDTH))
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, free[1]))
    try:
        on_usable_thread(F.gelu, states)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, free)


def serve_on_one_thread() -> dict[str, object]:
    """Run three batches on a device thread that the first batch makes unusable. Return the results, and whether the
    device threads ended.
    """
    observations: list[tuple[str, bool]] = []

    def execute(message: RunBatch) -> Reply:
        before = thread_state.is_unusable
        observations.append(
            (spoil() if message.batch == "b0" else gelu(torch.randn(1, 40 + len(observations), _WIDTH)), before)
        )
        return BatchDone(message.batch, (), b"", 0.0)

    running = DeviceThreads(1, execute)
    for number in range(3):
        job = DeviceJob(RunBatch(f"b{number}", "m", "encode", b"", b"", ()), lambda reply: None)
        running.submit(job)
        job.finished.wait(60)
    return {"told": observations, "ended": running.stop(60)}


def main() -> None:
    device_thread = serve_on_one_thread()
    refusal = spoil()
    results: dict[int, str] = {}

    def work(items: Int64) -> None:
        states = torch.randn(1, 10 + len(items), _WIDTH)
        results.update(dict.fromkeys(items.tolist(), "right" if F.gelu(states).isfinite().all() else "wrong"))

    refused: list[int] = []
    OomRecovery(torch.device("cpu"), lambda: None).run(work, np.arange(3), refused.append)
    print(
        json.dumps(
            {
                "device_thread": device_thread,
                "refusal": refusal,
                "unusable": thread_state.is_unusable,
                "new_thread": on_new_thread(lambda: thread_state.is_unusable),
                "here": gelu(torch.randn(1, 30, _WIDTH)),
                "results": list(results.values()),
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main()
