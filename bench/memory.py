"""Growth of an adapter's memory over time: batches of varying shapes for several models, one process for each engine.

    python bench/memory.py [--minutes 30] [--rate 11] [--engines auto torch] [--out bench/results/memory.md]

Seven models of texts, MiniLM with its weights and six others with random ones, get --rate batches a second in turn, of
1 to 8 texts of log-normal lengths with a mean of about 87 tokens. First, every model runs each number of texts with
each length on each lane (device thread): otherwise the first allocation for a rare shape would look like growth. The
anonymous memory of each process is read every five seconds (Linux). Growth is the slope of a line through the samples
after the first third of the time. A plot is written beside the report. `auto`: the product's rules choose the engine.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from engine import model_folder
from matplotlib.figure import Figure
from report import Report, machine

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_contracts.models.entries import LoadOptions, ModelEntry, RunDefaults, Weights
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, Group, Reply, RunBatch
from sie_engines.graph import GROUP_TOKENS, filled_length

STEP_S = 5.0
MAX_TOKENS = 256
ENGINES = ("auto", "torch")
_TEXTS = (1, 2, 4, 8)
_LENGTHS = sorted({filled_length(length, MAX_TOKENS) for length in range(1, MAX_TOKENS + 1)})
# class of transformers -> (hidden size, layers); all models have the vocabulary of MiniLM
GEOMETRIES: Sequence[tuple[str, int, int]] = (
    ("Bert", 384, 12),
    ("Bert", 256, 4),
    ("Bert", 128, 2),
    ("DistilBert", 384, 6),
    ("Electra", 256, 6),
    ("ModernBert", 256, 6),
)


def models(folder: Path) -> list[ModelEntry]:
    """Write the weights of the models to `folder` and return their entries."""
    import transformers

    package = model_folder()
    entries = [entry("minilm", Weights(path=str(package)), 384)]
    for number, (name, width, layers) in enumerate(GEOMETRIES):
        model_path = folder / str(number)
        sizes = {"num_hidden_layers": layers, "n_layers": layers, "num_attention_heads": 8, "n_heads": 8}
        wide = {"hidden_size": width, "dim": width, "intermediate_size": 4 * width, "hidden_dim": 4 * width}
        config = getattr(transformers, f"{name}Config")(vocab_size=30_522, pad_token_id=0, **sizes, **wide)
        torch.manual_seed(number)
        transformers.AutoModel.from_config(config).save_pretrained(model_path)
        shutil.copy(package / "tokenizer.json", model_path)
        entries.append(entry(str(number), Weights(path=str(model_path)), width))
    return entries


def entry(name: str, weights: Weights, width: int) -> ModelEntry:
    return ModelEntry(
        name, weights, "text-encoder", outputs={"dense": width}, max_tokens=MAX_TOKENS, run=RunDefaults(pooling="mean")
    )


def batches(names: Sequence[str]) -> Iterator[RunBatch]:
    """Yield endless batches of random shapes, for the models in turn."""
    rng = np.random.default_rng(0)
    for number in itertools.count():
        lengths = np.clip(rng.lognormal(np.log(87) - 0.32, 0.8, rng.integers(1, 9)), 4, MAX_TOKENS).astype("<i4")
        ids = rng.integers(1000, 20_000, int(lengths.sum()), dtype="<i4")
        yield RunBatch(
            str(number),
            names[number % len(names)],
            "encode",
            lengths.tobytes(),
            ids.tobytes(),
            (Group(0, len(lengths)),),
        )


def warm_up(engine: AdapterEngine, names: Sequence[str]) -> None:
    """Run each shape on each model: first one batch alone. Then run one batch on each lane at the same time, and repeat
    that once.
    """
    shapes = [(texts, length) for length in _LENGTHS for texts in _TEXTS if texts * length <= GROUP_TOKENS]
    for name in names:
        for texts, length in shapes:
            lengths = np.full(texts, length, "<i4").tobytes()
            ids = np.full(texts * length, 1000, "<i4").tobytes()
            message = RunBatch("", name, "encode", lengths, ids, (Group(0, texts),))
            for beside in (1, len(engine.device_threads), len(engine.device_threads)):
                for sent in [Sent(engine, message) for _ in range(beside)]:
                    sent.wait()


class Sent:
    """Batch that the constructor submits to the lanes. `wait` waits for the reply; raises TypeError for a refusal."""

    def __init__(self, engine: AdapterEngine, message: RunBatch) -> None:
        self._replies: list[Reply] = []
        self._job = DeviceJob(message, self._replies.append)
        engine.device_threads.submit(self._job)

    def wait(self) -> None:
        self._job.finished.wait()
        if not isinstance(self._replies[-1], BatchDone):
            raise TypeError(f"the engine refused a batch: {self._replies[-1]}")


def work(engine: str, rate: float, minutes: float) -> None:
    """Run `rate` batches a second for `minutes`. Print seconds, batches and bytes of memory every five seconds."""
    prepare_process()
    adapter_engine = AdapterEngine(Settings(device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        entries = models(Path(folder))
        for model_entry in entries:
            load = LoadOptions(engine="torch" if engine == "torch" else None)
            adapter_engine.residency.ensure(model_entry.id, ModelEntry(**{**fields(model_entry), "load": load}))
    warm_up(adapter_engine, [model.id for model in entries])
    started, told_s = time.monotonic(), 0.0
    under_way: list[Sent] = []
    for number, message in enumerate(batches([model.id for model in entries])):
        time.sleep(max(0.0, started + number / rate - time.monotonic()))
        past_s = time.monotonic() - started
        if past_s >= told_s:
            told_s += STEP_S
            print(round(past_s), number, anonymous_bytes(), flush=True)
        if past_s >= 60 * minutes:
            break
        under_way.append(Sent(adapter_engine, message))
        # Wait for the oldest batches. Otherwise the queue would grow if the engine is slower than the rate.
        while len(under_way) > 2 * len(adapter_engine.device_threads):
            under_way.pop(0).wait()
    adapter_engine.stop(30)


def fields(model_entry: ModelEntry) -> dict[str, object]:
    return {name: getattr(model_entry, name) for name in model_entry.__struct_fields__}


def anonymous_bytes() -> int:
    """Return the bytes of this process's anonymous memory (memory that is not backed by a file)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def growth(samples: np.ndarray) -> float:
    """Return the growth in MB an hour after the first third. Columns of `samples`: seconds, batches, bytes."""
    late = samples[samples[:, 0] >= samples[-1, 0] / 3]
    return float(np.polyfit(late[:, 0] / 3600, late[:, 2] / 1e6, 1)[0])


def plot(series: Mapping[str, np.ndarray], path: Path) -> None:
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, samples in series.items():
        axes.plot(samples[:, 0] / 60, samples[:, 2] / 1e6, label=name)
    axes.set(xlabel="minutes", ylabel="anonymous memory, MB", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=11, help="batches a second of each process")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, help="file to which the report is written as well; the plot goes beside it")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.rate, options.minutes)
        return
    arguments = ["--rate", str(options.rate), "--minutes", str(options.minutes)]
    fleet = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--work", name, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in options.engines
    }
    series = {}
    for name, worker in fleet.items():
        lines = worker.communicate()[0].splitlines()
        if worker.returncode:
            raise SystemExit(f"{name} failed; run `--work {name}` to see why")
        series[name] = np.array([[float(part) for part in line.split()] for line in lines])
    say = Report()
    say("# Memory of an adapter that runs for long\n")
    say(f"`python bench/memory.py --minutes {options.minutes:g} --rate {options.rate:g}`, {machine()},")
    say(f"torch {torch.__version__}. {1 + len(GEOMETRIES)} models, anonymous memory in MB.\n")
    marks = [0, *(60 * options.minutes * share for share in (0.1, 0.33, 0.67, 1))]
    say(f"| engine | batches | {' | '.join(f'{mark / 60:.0f} min' for mark in marks)} | growth after a third, MB/h |")
    say(f"|---|---|{'---|' * len(marks)}---|")
    for name, samples in series.items():
        at = [samples[np.searchsorted(samples[:, 0], mark).clip(max=len(samples) - 1), 2] / 1e6 for mark in marks]
        figures = " | ".join(f"{value:.0f}" for value in at)
        say(f"| {name} | {samples[-1, 1]:,.0f} | {figures} | {growth(samples):+.1f} |")
    if options.out:
        picture = options.out.with_suffix(".svg")
        say(f"\n![memory over time]({picture.name})")
        plot(series, picture)
    say.save(options.out)


if __name__ == "__main__":
    main()
