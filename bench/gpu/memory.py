"""Checks of device memory: figures of NVML, eviction, memory that an unload returns to the driver. The last rows are
the results of tests/gpu/test_memory.py: after failed allocations, the engine recovers and limits its batches.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kit
import suites
from kit import DEVICE, MIB, REHEARSAL
from transformers import BertConfig

HELD_MIB = 64 if REHEARSAL else 2048
WIDTH = 64 if REHEARSAL else 1024
CONTEXT_MIB = 512  # largest memory in MiB that a CUDA context and the workspaces of its libraries may take
LARGE = BertConfig(
    hidden_size=WIDTH,
    num_attention_heads=WIDTH // 64,
    num_hidden_layers=2 if REHEARSAL else 24,
    intermediate_size=4 * WIDTH,
)
_HOLDER = (
    "import sys, torch; held = torch.ones({}, dtype=torch.uint8, device='{}'); print(1, flush=True); sys.stdin.read()"
)


def other_process(table: kit.Table) -> None:
    """Check that used_mib() counts the memory of another process."""
    before = kit.used_mib()
    command = [sys.executable, "-c", _HOLDER.format(HELD_MIB * MIB, DEVICE.type)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        during = kit.used_mib()
        holder.stdin.close()
    verdict = kit.check(
        HELD_MIB <= during - before <= HELD_MIB + 2 * CONTEXT_MIB, f"another process's {HELD_MIB} MiB are seen"
    )
    table.row("another process", before, during, kit.used_mib(), verdict)


def unload(table: kit.Table, folder: Path) -> None:
    """Check that the unload of a model that has run a batch returns the model's device memory."""
    with kit.new_engine() as engine:
        kit.synchronize()
        before = kit.used_mib()
        entry = kit.entry_of("first", folder, WIDTH)
        size = engine.residency.ensure("first", entry).weights.memory_bytes / MIB
        message = kit.batch("first", kit.random_ids([16 if REHEARSAL else 512] * 16))
        kit.vectors(engine.execute(message))
        during = kit.used_mib()
        started_s = time.perf_counter()
        engine.residency.release("first")
        taken_s, after = time.perf_counter() - started_s, kit.used_mib()
        bound = f"the memory of {size:.0f} MiB of weights is returned, in {1e3 * taken_s:.0f} ms"
        table.row(
            "unload", before, during, after, kit.check(during - before >= size and after - before <= CONTEXT_MIB, bound)
        )


def eviction(table: kit.Table, folder: Path) -> None:
    """Check that the load of a second model evicts the first, because both together exceed the memory threshold."""
    entries = {name: kit.entry_of(name, folder, WIDTH) for name in ("first", "second")}
    with kit.new_engine() as engine:
        size = engine.residency.ensure("first", entries["first"]).weights.memory_bytes
        use = kit.devices.memory(DEVICE, size // 2)
        before = use.used_bytes / MIB
    with kit.new_engine(memory_pressure_threshold_percent=min(99.0, use.percent)) as engine:
        engine.residency.ensure("first", entries["first"])
        permission = engine.residency.permission(("first",))
        engine.residency.ensure("second", entries["second"], "default", permission)
        after = kit.used_mib()
    table.row("eviction", before, "", after, kit.check(permission.dropped == ("first",), "the idle model is evicted"))


def main() -> None:
    table = kit.Table("memory", "Memory of the device", ("what", "before, MiB", "during", "after", "bound"))
    with tempfile.TemporaryDirectory() as root:
        folder = kit.save(Path(root), LARGE)
        other_process(table)
        unload(table, folder)
        eviction(table, folder)
    if REHEARSAL:  # test_memory.py needs a GPU
        return
    for test, outcome, seconds, _ in suites.outcomes("memory", ["tests/gpu/test_memory.py"]):
        table.row(test.rpartition("::")[2], "", "", "", kit.check(outcome != "failed", f"{outcome} in {seconds:.1f} s"))


if __name__ == "__main__":
    main()
