"""The packed engine against padded transformers on one device, same weights, in turn: texts per second.

BERT-base geometry with random weights (speed does not depend on them), texts as token ids. Padded: stock class with SDPA, texts sorted by
length, in batches of 64, the result of each on the host. Packed: this engine, batches within SIE_MAX_BATCH_COST, ditto.
Run `python bench/device.py --device cuda`; writes bench/results/device-<name>.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, BertConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from unit.adapter.toys import save_tokenizer

from sie_adapter.engine import Engine
from sie_contracts import ipc
from sie_contracts.catalogue import ModelEntry, Weights
from sie_contracts.settings import load


def lengths_of(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.full(count, 8) if kind == "short" else np.clip(rng.lognormal(4.1, 0.82, count), 4, 512).astype(int)


def padded_pass(model: torch.nn.Module, ids: list[np.ndarray], device: torch.device) -> Callable[[], None]:
    ordered = sorted(ids, key=len)

    def run() -> None:
        for start in range(0, len(ordered), 64):
            part = ordered[start : start + 64]
            width = max(map(len, part))
            tokens = np.zeros((len(part), width), np.int64)
            mask = np.zeros((len(part), width), np.int64)
            for row, each in enumerate(part):
                tokens[row, : len(each)], mask[row, : len(each)] = each, 1
            on_device = torch.from_numpy(mask).to(device)
            hidden = model(input_ids=torch.from_numpy(tokens).to(device), attention_mask=on_device)[0]
            pooled = (hidden.float() * on_device[..., None]).sum(1) / on_device.sum(1, keepdim=True)
            torch.nn.functional.normalize(pooled, dim=1).cpu()

    return run


def packed_pass(engine: Engine, ids: list[np.ndarray], budget: int) -> Callable[[], None]:
    batches: list[ipc.RunBatch] = []
    part: list[np.ndarray] = []
    for each in [*ids, None]:
        if part and (each is None or sum(map(len, part)) + len(each) > budget):
            lengths = np.array([len(one) for one in part], np.int32)
            group = (ipc.Group(0, len(part)),)
            batches.append(ipc.RunBatch("b", "bert", "encode", lengths.tobytes(), np.concatenate(part).tobytes(), group, pooling="mean"))
            part = []
        if each is not None:
            part.append(each)

    def run() -> None:
        for batch in batches:
            done = engine.execute(batch)
            assert isinstance(done, ipc.BatchDone), done

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    settings = load(environ={"SIE_DEVICE": arguments.device}).settings
    engine = Engine(settings)
    name = torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu"
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        config = BertConfig(max_position_embeddings=512)
        AutoModel.from_config(config).save_pretrained(folder)
        save_tokenizer(Path(folder))
        entry = ModelEntry(id="bert", weights=Weights(path=folder), family="text-encoder", outputs={"dense": 768}, max_tokens=512)
        loaded = engine.residency.ensure("bert", entry, "default", ())[0].describe(0.0)
        dtype = getattr(torch, loaded.precision)
        padded = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval().to(engine.device)
        lines.append(
            f"# Packed engine against padded transformers\n\n{name}, torch {torch.__version__}, BERT-base, {loaded.precision}, "
            f"{loaded.attention}, batches of {settings.max_batch_cost} tokens; median of {arguments.rounds} rounds, in turn.\n\n"
            "| texts | padded, texts/s | packed, texts/s | ratio |\n|---|---|---|---|"
        )
        for kind in ("mix", "short"):
            rng = np.random.default_rng(5)
            ids = [rng.integers(5, 100, length).astype(np.int32) for length in lengths_of(kind, arguments.texts)]
            passes = (padded_pass(padded, ids, engine.device), packed_pass(engine, ids, settings.max_batch_cost))
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(arguments.rounds + 1):
                for run, found in zip(passes, seconds, strict=True):
                    started_s = time.perf_counter()
                    run()
                    if number:  # the first round warms up
                        found.append(time.perf_counter() - started_s)
            rates = [arguments.texts / statistics.median(found) for found in seconds]
            ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
            mean = np.mean([len(each) for each in ids])
            lines.append(f"| {kind}, mean {mean:.0f} tokens | {rates[0]:.0f} | {rates[1]:.0f} | {ratio:.2f} |")
    engine.stop(5)
    text = "\n".join(lines) + "\n"
    print(text)
    out = arguments.out or Path(__file__).parent / "results" / f"device-{name.lower().replace(' ', '-')}.md"
    out.write_text(text)


if __name__ == "__main__":
    main()
