"""The engine on a GPU beside sentence-transformers on the same card and the same weights: texts a second, FLOPs
utilisation, busy share.

    python bench/device.py [--device cuda] [--precision bfloat16] [--sizes ...] [--lengths 50 512] [--texts 4096]
    [--rounds 5]
    python bench/device.py --device cpu --precision float32 --sizes tiny --lengths 16 --texts 64 --rounds 1 --out -
        a rehearsal

Random weights in the geometry of the named models, since speed does not depend on weights. All variants are loaded at
once and run in turn; figures are medians of rounds. Results are written to bench/results/device-<name>.md, or printed
only with `--out -`.

    engine                  token ids in batches of SIE_MAX_BATCH_COST tokens, queued on the engine's lanes as
                            connections queue them
    sentence-transformers   encode(), tokenising included, which the engine leaves to another process: default (float32,
                            batches of 32), and in --precision with batches of 32 and of 256

Utilisation: the products of linear layers and attention, 2 operations for each multiplication, a second of the engine,
divided by the dense 16-bit peak of the data sheet, or by a measured product where the card is not in the list or the
precision is float32. Busy share: the mean of NVML's utilisation while the engine runs. `cosine`: the worst of all texts
between engine and default.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, PreTrainedConfig, PreTrainedTokenizerFast, XLMRobertaConfig

from sie_adapter.engine.device_threads import DeviceJob
from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, Group, Reply, RunBatch

WORDS = 120
LONGEST = 512
_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
SIZES: dict[str, PreTrainedConfig] = {
    "bert-large": BertConfig(**_LARGE),
    "xlm-r-large": XLMRobertaConfig(
        **_LARGE, vocab_size=250_002, max_position_embeddings=LONGEST + 2, type_vocab_size=1
    ),
    "tiny": BertConfig(**_TINY, vocab_size=WORDS),
}
# Dense 16-bit operations a second, without sparsity, from the vendor's data sheets.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "T4": 65e12,
}

Run = Callable[[], np.ndarray]  # vectors [texts, width]


@dataclass(frozen=True)
class Load:
    """Texts of one length. `ids` int32 [texts, length]: word n has the id n."""

    ids: np.ndarray
    texts: list[str]

    @classmethod
    def of(cls, count: int, length: int) -> Load:
        ids = np.random.default_rng(length).integers(5, WORDS - 1, (count, length), dtype=np.int32)
        return cls(ids, [" ".join(f"w{number}" for number in row) for row in ids])


def save(folder: Path, config: PreTrainedConfig) -> None:
    """Random weights and a tokenizer of WORDS words, without special tokens, so that a text has as many tokens as
    words.
    """
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token=f"w{WORDS - 1}")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=f"w{WORDS - 1}",
        pad_token=f"w{config.pad_token_id}",
        model_max_length=LONGEST,
    ).save_pretrained(folder)


def engine_run(engine: AdapterEngine, model: str, load: Load, batch_tokens: int) -> Run:
    size = max(1, batch_tokens // load.ids.shape[1])
    messages = []
    for start in range(0, len(load.ids), size):
        part = load.ids[start : start + size]
        lengths = np.full(len(part), part.shape[1], "<i4").tobytes()
        options = (Group(0, len(part)),)
        messages.append(
            RunBatch(
                str(start), model, "encode", lengths, np.ascontiguousarray(part).tobytes(), options, pooling="mean"
            )
        )

    def run() -> np.ndarray:
        replies: list[list[Reply]] = [[] for _ in messages]
        jobs = [DeviceJob(message, found.append) for message, found in zip(messages, replies, strict=True)]
        for job in jobs:
            engine.device_threads.submit(job)
        vectors = []
        for job, found in zip(jobs, replies, strict=True):
            job.finished.wait()
            done = found[-1]
            if not isinstance(done, BatchDone):
                raise TypeError(f"a batch was refused: {done}")
            vectors.append(np.frombuffer(done.block, "<f4").reshape(len(done.outcomes), -1))
        return np.concatenate(vectors)

    return run


def stock_run(model: SentenceTransformer, load: Load, batch: int) -> Run:
    return lambda: np.asarray(
        model.encode(load.texts, batch_size=batch, normalize_embeddings=True, show_progress_bar=False), np.float32
    )


def stock(folder: str, device: torch.device, precision: str) -> SentenceTransformer:
    model = SentenceTransformer(folder, device=str(device), local_files_only=True, model_kwargs={"dtype": precision})
    model.max_seq_length = LONGEST
    return model


def operations(config: Any, length: int) -> float:
    """Floating-point operations of one text: linear layers, then scores and their mixing with values."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return float(config.num_hidden_layers * length * (2 * (4 * hidden**2 + 2 * hidden * inner) + 4 * length * hidden))


def peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Operations a second, and where the figure is from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((peak for part, peak in PEAKS.items() if part in name), None)
    if known is not None and dtype.itemsize == 2:
        return known, "data sheet"
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device).to(dtype)
    times = []
    for _ in range(10):
        wait(device)
        started_s = time.perf_counter()
        torch.mm(left, left)
        wait(device)
        times.append(time.perf_counter() - started_s)
    return 2 * size**3 / min(times), "measured product"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def utilisation(device: torch.device, into: list[int]) -> Iterator[None]:
    """Samples of NVML's utilisation, percent, while the block runs; none on another device than a GPU."""
    if device.type != "cuda":
        yield
        return
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.1):
            into.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(runs: dict[str, Run], rounds: int, device: torch.device, busy: list[int]) -> tuple[dict[str, float], float]:
    """The median seconds of each run, in turn, and the worst cosine of the first against the second."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    vectors = {name: run() for name, run in runs.items()}  # warms up
    first, second, *_ = vectors.values()
    for _ in range(rounds):
        for number, (name, run) in enumerate(runs.items()):
            with utilisation(device, busy) if not number else contextlib.nullcontext():
                wait(device)
                started_s = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started_s)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return {name: statistics.median(found) for name, found in seconds.items()}, float(
        ((first * second).sum(1) / norms).min()
    )


def rows(size: str, arguments: argparse.Namespace, engine: AdapterEngine, batch_tokens: int) -> Iterator[str]:
    """Lines of the table for the lengths of one model."""
    config, device = SIZES[size], engine.device
    ceiling, source = peak(device, getattr(torch, arguments.precision))
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), config)
        width = int(config.hidden_size)
        entry = ModelEntry(
            id=size, weights=Weights(path=folder), family="text-encoder", outputs={"dense": width}, max_tokens=LONGEST
        )
        loaded = engine.residency.ensure(size, entry).describe(0.0)
        if loaded.precision != arguments.precision:
            raise SystemExit(f"this device computes in {loaded.precision}, not in {arguments.precision}")
        default, same = stock(folder, device, "float32"), stock(folder, device, arguments.precision)
        for length in arguments.lengths:
            load = Load.of(arguments.texts, length)
            runs = {
                "engine": engine_run(engine, size, load, batch_tokens),
                "default": stock_run(default, load, 32),
                "same 32": stock_run(same, load, 32),
                "same 256": stock_run(same, load, 256),
            }
            busy: list[int] = []
            seconds, cosine = measure(runs, arguments.rounds, device, busy)
            rate = {name: arguments.texts / found for name, found in seconds.items()}
            cells = [size, str(length), loaded.attention, *(f"{found:.0f}" for found in rate.values())]
            cells += [
                f"{rate['engine'] / rate['default']:.2f}",
                f"{rate['engine'] / max(rate['same 32'], rate['same 256']):.2f}",
            ]
            cells.append(
                f"{100 * operations(config, length) * rate['engine'] / ceiling:.0f} % of {ceiling / 1e12:.1f} T "
                f"({source})"
            )
            cells += [f"{statistics.mean(busy):.0f} %" if busy else "-", f"{cosine:.6f}"]
            yield f"| {' | '.join(cells)} |"
    engine.residency.release(size)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["bert-large", "xlm-r-large"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[50, LONGEST], help=f"tokens, at most {LONGEST}")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attention", default="auto", choices=("auto", "flash_attention_2", "sdpa", "eager"))
    parser.add_argument("--out", default="")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse()
    prepare_process()
    settings = Settings(
        device=arguments.device, default_compute_precision=arguments.precision, attention_backend=arguments.attention
    )
    engine = AdapterEngine(settings)
    name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    batch_tokens = settings.max_batch_cost
    lines = [
        (
            f"# The engine beside sentence-transformers on one device\n\n{name}, torch {torch.__version__}, "
            f"{arguments.precision}, batches of {batch_tokens} tokens, {arguments.texts} texts of one length, random "
            f"weights; medians of {arguments.rounds} rounds, in turn.\n"
        ),
        "| model | tokens | attention | engine, texts/s | default, texts/s | same precision, 32 | same precision, 256 |"
        " to default | to the better of the same | utilisation | busy | cosine |\n|" + "---|" * 12,
    ]
    for size in arguments.sizes:
        lines += rows(size, arguments, engine, batch_tokens)
    engine.stop(5)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out != "-":
        default = Path(__file__).parent / "results" / f"device-{name.lower().replace(' ', '-')}.md"
        (Path(arguments.out) if arguments.out else default).write_text(text)


if __name__ == "__main__":
    main()
