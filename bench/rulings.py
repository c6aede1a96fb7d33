"""What three choices of the adapter cost, each beside its alternative, in rounds that alternate.

    python bench/rulings.py [transforms] [processes] [lengths] [--rounds 5]

transforms   normalise, quantise and MUVERA in the lane, after the forward pass, against in a pool of threads while the
             lane goes on
processes    one process with a lane per core for all models, against a process per model, each with a lane per core
lengths      time of a token by the length of its text, beside the cost that waits are predicted with (backbones of
             random weights)

all-MiniLM-L6-v2 in bfloat16, the product's own functions, one torch thread per lane.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))

from engine import BATCH_TOKENS, CORES, model_folder
from report import Report, machine

BATCH, LENGTH, BATCHES = 16, 32, 16
MODELS = 4


# transforms


def forward() -> Callable[[], Any]:
    """A forward pass over BATCH texts of LENGTH tokens: hidden states, float32 [BATCH, LENGTH, 384]."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_folder(), dtype=torch.bfloat16).eval()
    ids = torch.randint(1000, 20_000, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def run() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.float()

    return run


def transforms(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    import torch

    from sie_adapter.engine import item_results
    from sie_contracts.models.muvera import Muvera
    from sie_contracts.wire.messages import RunOptions

    torch.set_num_threads(1)
    passed = forward()
    kinds = {
        "normalise": RunOptions(outputs=("dense",)),
        "int8": RunOptions(outputs=("dense",), dtype="int8"),
        "binary": RunOptions(outputs=("dense",), dtype="binary"),
        "token vectors, float16": RunOptions(outputs=("multivector",), dtype="float16"),
        "MUVERA": RunOptions(outputs=("dense",), muvera=Muvera()),
    }

    def transform(hidden: Any, kind: RunOptions) -> None:
        with torch.inference_mode():
            item_results.vectors(kind, {"dense": list(hidden.mean(1)), "multivector": list(hidden)})

    def run(kind: RunOptions, pool: ThreadPoolExecutor | None) -> tuple[float, float]:
        """Texts a second, and the median time from the begin of a pass to its answer."""
        took_s: list[float] = []

        def lane() -> None:
            torch.set_num_threads(1)  # it is each thread's own
            pending: list[Future[None]] = []
            for _ in range(BATCHES // CORES):
                begun_s = time.perf_counter()
                hidden = passed()
                if pool is None:
                    transform(hidden, kind)
                    took_s.append(time.perf_counter() - begun_s)
                else:
                    done = pool.submit(transform, hidden, kind)
                    done.add_done_callback(lambda _, begun_s=begun_s: took_s.append(time.perf_counter() - begun_s))  # type: ignore[misc]
                    pending.append(done)
            for each in pending:
                each.result()

        begun_s = time.perf_counter()
        lanes = [threading.Thread(target=lane) for _ in range(CORES)]
        for each in lanes:
            each.start()
        for each in lanes:
            each.join()
        return BATCH * (BATCHES // CORES * CORES) / (time.perf_counter() - begun_s), statistics.median(took_s)

    say(
        f"## Transforms: in the lane or in a pool\n\n{CORES} lanes, {BATCH} texts of {LENGTH} tokens a batch, a pool of"
        f" {CORES} threads.\n"
    )
    say(
        "| transform | alone, ms a batch | lane, texts/s | pool, texts/s | pool beside lane | lane, ms to the answer | "
        "pool, ms |"
    )
    say("|---" * 7 + "|")
    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, kind in kinds.items():
            hidden = passed()
            begun_s = time.perf_counter()
            for _ in range(10):
                transform(hidden, kind)
            alone_ms = (time.perf_counter() - begun_s) * 100
            rounds = [(run(kind, None), run(kind, pool)) for _ in range(options.rounds)]
            inline, apart = ([each[side] for each in rounds] for side in (0, 1))
            (lane, lane_s), (pooled, pooled_s) = (
                tuple(map(statistics.median, zip(*each, strict=True))) for each in (inline, apart)
            )
            figures = (
                f"{alone_ms:.1f} | {lane:.0f} | {pooled:.0f} | {pooled / lane - 1:+.1%} | {1000 * lane_s:.0f} | "
                f"{1000 * pooled_s:.0f}"
            )
            say(f"| {name} | {figures} |")
    say("")


# processes


def engine_of(models: list[str], lanes: int) -> tuple[Any, Any]:
    import yaml

    from sie_adapter.engine.engine import AdapterEngine, prepare_process
    from sie_contracts.models.catalogue import packaged_folder
    from sie_contracts.models.entries import parse_entry
    from sie_contracts.settings import Settings

    prepare_process()
    made = AdapterEngine(Settings(device="cpu", default_compute_precision="bfloat16"))
    entry = parse_entry(yaml.safe_load(next(packaged_folder().glob("models/**/all-MiniLM-L6-v2.yaml")).read_text()))
    for model in models:
        made.residency.ensure(model, entry)
    return made, entry


def serve(models: list[str], pipe: Any) -> None:
    """Run as many batches of each model as asked for, in turn; say how much memory is this process's own."""
    from sie_adapter.engine.device_threads import DeviceJob
    from sie_contracts.wire.ipc import Group, RunBatch

    made, _ = engine_of(models, CORES)
    ids = np.random.default_rng(0).integers(1000, 20_000, BATCH * LENGTH).astype("<i4").tobytes()
    lengths = np.full(BATCH, LENGTH, "<i4").tobytes()
    pipe.send(psutil.Process().memory_full_info().pss)
    while counts := pipe.recv():
        jobs = []
        for turn in range(max(counts.values())):
            for model in models:
                if turn < counts[model]:
                    jobs.append(
                        DeviceJob(RunBatch("b", model, "encode", lengths, ids, (Group(0, BATCH),)), lambda reply: None)
                    )
                    made.device_threads.submit(jobs[-1])
        for job in jobs:
            job.finished.wait()
        pipe.send(psutil.Process().memory_full_info().pss)
    made.stop(10.0)


class Served:
    """Processes with these models each."""

    def __init__(self, groups: list[list[str]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._groups, self._pipes, self._processes = groups, [], []
        begun_s = time.perf_counter()
        for models in groups:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(models, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.pss = sum(pipe.recv() for pipe in self._pipes)
        self.started_s = time.perf_counter() - begun_s

    def run(self, counts: dict[str, int]) -> float:
        """Texts a second."""
        begun_s = time.perf_counter()
        every = zip(self._pipes, self._groups, strict=True)
        used = [(pipe, models) for pipe, models in every if any(counts[model] for model in models)]
        for pipe, models in used:
            pipe.send({model: counts[model] for model in models})
        sizes = [pipe.recv() for pipe, _ in used]
        self.pss = max(self.pss, sum(sizes))
        return BATCH * sum(counts.values()) / (time.perf_counter() - begun_s)

    def stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(30)


def processes(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    names = [f"mini-{number}" for number in range(MODELS)]
    one, each = Served([names]), Served([[name] for name in names])
    traffic = {"equal": [4, 4, 4, 4], "one hot model": [13, 1, 1, 1], "one model alone": [16, 0, 0, 0]}
    say(
        f"## One process for {MODELS} models, or one each\n\n{BATCH} texts of {LENGTH} tokens a batch, {CORES} lanes in"
        " every process.\n"
    )
    say("| traffic | one process, texts/s | a process each, texts/s | each beside one |\n|---|---|---|---|")
    for name, shares in traffic.items():
        counts = dict(zip(names, shares, strict=True))
        rounds = [(one.run(counts), each.run(counts)) for _ in range(options.rounds + 1)][1:]
        ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
        say(f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours - 1:+.1%} |")
    figures = (f"{served.pss / 2**20:.0f} MiB, ready after {served.started_s:.1f} s" for served in (one, each))
    say("\nMemory (proportional set size) and start: one process {}; a process each {}.\n".format(*figures))
    for served in (one, each):
        served.stop()


# lengths


def of_width() -> dict[str, Callable[[], Any]]:
    """Backbones of random weights and a few layers, which take as long a token as trained ones."""
    from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, Qwen3Config, Qwen3Model

    small = {"vocab_size": 1000, "max_position_embeddings": 4200, "pad_token_id": 0}

    def bert(width: int) -> Callable[[], Any]:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_attention_heads": 12,
            "num_hidden_layers": 2,
        }
        return lambda: BertModel(BertConfig(**sizes, **small))

    modern = {"num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    qwen = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
    }
    return {
        "BERT, 384": bert(384),
        "BERT, 768": bert(768),
        "ModernBERT, 768, a third of the layers full": lambda: ModernBertModel(ModernBertConfig(**modern, **small)),
        "Qwen3, 1024": lambda: Qwen3Model(Qwen3Config(**qwen, head_dim=128, **small)),
    }


def lengths(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    import torch

    from sie_adapter.engine import device
    from sie_adapter.packed import attention_backend
    from sie_adapter.packed.backbone import Backbone
    from sie_contracts.models.costs import text_cost

    torch.set_num_threads(1)
    sizes = [16, 64, 128, 256, 512, 1024, 2048, 4096]
    facts = attention_backend.attention_facts(torch.device("cpu"), torch.bfloat16)
    compute = device.Compute(
        torch.device("cpu"), torch.bfloat16, *attention_backend.resolve_attention("auto", facts), facts
    )
    say(
        f"## Time of a token by the length of its text\n\n{BATCH_TOKENS} tokens a batch, one thread, bfloat16. Each "
        "beside 16 tokens:"
    )
    say("measured as processor time, then by its cost.\n")
    say(f"| backbone, width | {' | '.join(map(str, sizes))} |")
    say("|---" * (len(sizes) + 1) + "|")
    for name, made in of_width().items():
        found = dict[int, list[float]]()
        with torch.inference_mode():
            backbone = Backbone(made().to(torch.bfloat16).eval(), compute, sizes[-1])
            for _ in range(options.rounds + 1):
                for size in sizes:
                    batch = backbone.sample((size,) * (BATCH_TOKENS // size))
                    begun_s = time.thread_time()
                    backbone.forward(batch)
                    found.setdefault(size, []).append(time.thread_time() - begun_s)
        took_s = {size: statistics.median(each[1:]) for size, each in found.items()}
        cost = {size: text_cost(size, size**2, backbone.crossover_tokens) / size for size in sizes}
        ratios = [f"{took_s[size] / took_s[16]:.2f}, {cost[size] / cost[16]:.2f}" for size in sizes]
        say(f"| {name} | {' | '.join(ratios)} |")
    say("")


PARTS: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], None]] = {
    "transforms": transforms,
    "processes": processes,
    "lengths": lengths,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the report here as well")
    options = parser.parse_args()
    say = Report()
    say(
        f"# Choices of the adapter, measured\n\n`python bench/rulings.py`, {machine()}, {options.rounds} rounds; "
        "medians.\n"
    )
    for name in options.parts:
        PARTS[name](options, say)
    say.save(options.out)


if __name__ == "__main__":
    main()
