"""Time to load and swap models of 0.6 to 8 billion parameters (random weights), and the rate of only the copy to the
GPU: from pageable memory, as the engine copies, and through two pinned buffers.

`load`: from files in the page cache to a resident model, with the check of the files and the load certificate. `again`:
a second load, which reuses the check and the certificate. `swap`: unload of one model and load of another, while a
request waits for the second model. The copies alone use all cores, a load uses one.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kit
import torch
from kit import DEVICE, REHEARSAL
from safetensors import safe_open
from transformers import Qwen3Config

# billions of parameters -> layers, width, heads, key-value heads, width of the feed-forward layers
SIZES = {
    "0.6": (28, 1024, 16, 8, 3072),
    "1.7": (28, 2048, 16, 8, 6144),
    "4": (36, 2560, 32, 8, 9728),
    "8": (36, 4096, 32, 8, 12288),
}
TINY = {"0.0001": (2, 64, 4, 2, 128)}
STAGE_BYTES = 256 * kit.MIB
COLUMNS = ("billions", "GB", "load, s", "again, s", "swap, s", "unload, s", "pageable, GB/s", "pinned, GB/s")


def config_of(layers: int, width: int, heads: int, key_heads: int, inner: int) -> Qwen3Config:
    """Return the configuration of a Qwen3 decoder of this size, with the vocabulary size of the published models."""
    return Qwen3Config(
        vocab_size=len(kit.TOKENS) if REHEARSAL else 151_936,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=max(16, 128 if width >= 1024 else width // heads),
        intermediate_size=inner,
        pad_token_id=0,
    )


def stored(folder: Path) -> Iterator[torch.Tensor]:
    """Yield the tensors of the folder's safetensors files, memory-mapped."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                yield opened.get_tensor(name)


def pageable(folder: Path) -> None:
    """Copy each tensor from the mapped file to the device."""
    for tensor in stored(folder):
        tensor.to(DEVICE)


def pinned(folder: Path, stages: list[torch.Tensor]) -> None:
    """Copy each tensor through two pinned buffers: the CPU fills one while the GPU copies the other."""
    sent: list[torch.cuda.Event | None] = [None, None]
    turn = 0
    for tensor in stored(folder):
        flat = tensor.reshape(-1).view(torch.uint8)
        target = torch.empty_like(flat, device=DEVICE)
        for part, into in zip(flat.split(STAGE_BYTES), target.split(STAGE_BYTES), strict=True):
            if (event := sent[turn]) is not None:
                event.synchronize()
            stage = stages[turn][: len(part)]
            stage.copy_(part)
            into.copy_(stage, non_blocking=True)
            if DEVICE.type == "cuda":
                sent[turn] = torch.cuda.Event()
                sent[turn].record()  # type: ignore[union-attr]
            turn = 1 - turn


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a run, including the kernels that are still queued on the device when `run` returns."""
    kit.synchronize()
    started_s = time.perf_counter()
    run()
    kit.synchronize()
    return time.perf_counter() - started_s


def main() -> None:
    """Measure the models, the smallest first, and write a row for each."""
    table = kit.Table("load", "Loading of models", COLUMNS)
    shared = Path("/dev/shm")
    stages = [torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda") for _ in range(2)]
    with kit.new_engine() as engine, tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as root:
        for name, sizes in (TINY if REHEARSAL else SIZES).items():
            folder = kit.save(Path(root, name), config_of(*sizes))
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
            width = sizes[1]
            models = [kit.entry_of(f"{name}-{number}", folder, width) for number in range(2)]
            first = timed(lambda: engine.residency.ensure(models[0].id, models[0]))  # noqa: B023
            unload = timed(lambda: engine.residency.release(models[0].id))  # noqa: B023
            again = timed(lambda: engine.residency.ensure(models[0].id, models[0]))  # noqa: B023
            swap = timed(
                lambda: (engine.residency.release(models[0].id), engine.residency.ensure(models[1].id, models[1]))  # noqa: B023
            )
            engine.residency.release(models[1].id)
            torch.set_num_threads(kit.devices.usable_cores())
            copies = [size / timed(lambda: pageable(folder)), size / timed(lambda: pinned(folder, stages))]  # noqa: B023
            torch.set_num_threads(1)
            table.row(name, size, first, again, swap, unload, *copies)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
