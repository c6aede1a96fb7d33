"""Shared code of the parts (scripts) of the GPU kit: device, tables, models with random weights, measurements.

The environment variable `GPU_RESULTS` names the folder of the tables. If `GPU_REHEARSE` is set, the parts run tiny
models on a CPU, to exercise the code: the figures mean nothing, and no bound is checked.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.autograd import DeviceType
from transformers import AutoModel, PreTrainedConfig, PreTrainedTokenizerFast

from sie_adapter.engine import device as devices
from sie_adapter.engine.engine import AdapterEngine, prepare_process
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import Items
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.settings import Settings
from sie_contracts.wire.ipc import BatchDone, Group, RunBatch
from sie_contracts.wire.messages import Ok

REHEARSAL = bool(os.environ.get("GPU_REHEARSE"))
RESULTS = Path(os.environ.get("GPU_RESULTS", "."))
DEVICE = torch.device("cpu" if REHEARSAL else "cuda:0")
PRECISION = "float32" if REHEARSAL else "bfloat16"
LONGEST = 512
# the padding token is "<0>" or "<1>", because the `pad_token_id` of a model's configuration is 0 or 1
TOKENS = ["<0>", "<1>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
LETTERS = [TOKENS.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
MIB = 1 << 20
TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
prepare_process()  # sets threads as the adapter process does; must run before any computation
_PACKAGES = ("torch", "transformers", "sentence-transformers", "flash-attn")


class CheckFailed(Exception):
    """Raised if a measured value misses a bound of a part."""


def versions() -> str:
    """Return the GPU's name, the version of CUDA and the versions of the packages, for the head of a table."""
    parts = [f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if not REHEARSAL else "a processor"]
    for package in _PACKAGES:
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)


class Table:
    """A Markdown table in the folder RESULTS. `row` writes at once, so the rows remain if the part is stopped."""

    def __init__(self, name: str, title: str, columns: Sequence[str], *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        RESULTS.mkdir(parents=True, exist_ok=True)
        self._file = RESULTS / f"{name}.md"
        self._file.write_text(f"# {title}\n\n{versions()}.\n\n")
        self.row(*columns)
        self._write("|" + "---|" * len(columns))

    def row(self, *cells: object) -> None:
        """Add a row. Floats below 1000 get three significant digits."""
        texts = (f"{cell:.3g}" if isinstance(cell, float) and abs(cell) < 1000 else _text(cell) for cell in cells)
        self._write(f"| {' | '.join(texts)} |")

    def text(self, text: str) -> None:
        """Add a paragraph after the table."""
        self._write(f"\n{text}")

    def _write(self, line: str) -> None:
        if self._is_shown:
            print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")


def _text(cell: object) -> str:
    text = f"{cell:.0f}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "/").replace("\n", " ")


def check(holds: bool, bound: str) -> str:
    """Return the text of a table cell that says whether `bound` holds. Raise CheckFailed if it does not hold, except in
    a rehearsal.
    """
    if not holds and not REHEARSAL:
        raise CheckFailed(bound)
    return bound if holds else f"not here: {bound}"


def save(folder: Path, config: PreTrainedConfig) -> Path:
    """Save random weights, and a tokenizer of bytes without special tokens. A text has as many tokens as letters."""
    torch.manual_seed(0)
    with DEVICE:  # a GPU creates the weights of large models within seconds
        model = AutoModel.from_config(config, dtype=getattr(torch, PRECISION))
    model.save_pretrained(folder)
    del model
    devices.give_memory_back(DEVICE)
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(TOKENS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=TOKENS[config.pad_token_id or 0], model_max_length=LONGEST
    ).save_pretrained(folder)
    return folder


def entry_of(name: str, folder: Path, width: int) -> ModelEntry:
    """Return a catalogue entry for the model in `folder`, with dense vectors of `width`, in the kit's precision."""
    return parse_entry(
        {
            "id": name,
            "weights": {"path": str(folder)},
            "family": "text-encoder",
            "outputs": {"dense": width},
            "max_tokens": LONGEST,
            "load": {"precision": PRECISION, "engine": "torch"},
        }
    )


@contextlib.contextmanager
def new_engine(**settings: Any) -> Iterator[AdapterEngine]:
    """Yield an engine on DEVICE with a temporary cache folder."""
    with tempfile.TemporaryDirectory() as cache:
        engine = AdapterEngine(Settings(**{"device": str(DEVICE), "local_cache": cache, **settings}))
        try:
            yield engine
        finally:
            engine.stop(5)
            for model in engine.residency.describe():
                engine.residency.release(model.model)


def batch(model: str, ids: Sequence[np.ndarray], number: int = 0) -> RunBatch:
    """Return the worker's message (RunBatch) that encodes texts, given as token ids, to mean-pooled vectors."""
    lengths = np.array([len(row) for row in ids], "<i4").tobytes()
    joined = np.concatenate(ids).astype("<i4").tobytes()
    return RunBatch(str(number), model, "encode", lengths, joined, (Group(0, len(ids)),), pooling="mean")


def vectors(reply: object) -> np.ndarray:
    """Return the vectors of a reply, float32 [texts, width]. Raise TypeError if a text has no vector."""
    if not isinstance(reply, BatchDone) or not all(isinstance(outcome, Ok) for outcome in reply.outcomes):
        raise TypeError(f"the engine refused a batch or a text: {reply}")
    return np.frombuffer(reply.block, "<f4").reshape(len(reply.outcomes), -1)


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Return random token ids for texts of these lengths, each int32 [length]."""
    generator = np.random.default_rng(seed)
    return [generator.choice(np.array(LETTERS, np.int32), length) for length in lengths]


def text_of(ids: np.ndarray) -> str:
    """Return the text whose token ids are `ids`."""
    return "".join(TOKENS[number] for number in ids)


def mixed_lengths(count: int) -> list[int]:
    """Return `count` log-normal text lengths with a mean of about 87 tokens."""
    drawn = np.random.default_rng(3).lognormal(4.1, 0.82, count)
    return [int(length) for length in np.clip(drawn, 2, 254)]


def forward_of(backbone: Backbone, lengths: Sequence[int]) -> Callable[[], Any]:
    """Return a function that runs the forward pass without a CUDA graph. Its inputs are already on the device. Call it
    in torch's inference mode.
    """
    ids = np.concatenate(random_ids(lengths))
    packed = backbone.pack(Items(np.array(lengths), ids), np.arange(len(lengths)))
    model, inputs = backbone._model, {}

    def noting(**named: Any) -> Any:
        inputs.update(named)
        return model(**named)

    backbone._model = noting
    try:
        backbone._forward_eager(packed)
    finally:
        backbone._model = model
    return lambda: model(**inputs)


def compile_layers(backbone: Backbone) -> None:
    """Let torch compile the layers of a BERT at their next call, with one graph for all layers."""
    for layer in backbone._model.encoder.layer:
        layer.compile(backend="eager" if REHEARSAL else "inductor", dynamic=True)


def synchronize() -> None:
    """Wait until the GPU has run all queued kernels; return at once on a CPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def seconds_of(run: Callable[[], object], *, least: int = 3, budget_s: float = 2.0) -> float:
    """Return the median seconds of a run. Repeat the run at least `least` times, and until all runs together have taken
    `budget_s` seconds. The caller must warm up before.
    """
    times: list[float] = []
    while len(times) < least or (sum(times) < budget_s and not REHEARSAL):
        synchronize()
        started_s = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def used_mib() -> float:
    """Return the device memory in MiB that all processes use; on a GPU this is NVML's figure."""
    return devices.memory(DEVICE).used_bytes / MIB


@contextlib.contextmanager
def utilisation() -> Iterator[list[float]]:
    """Yield a list to which a thread adds NVML's utilisation in percent, every 0.1 s while the block runs."""
    probe, ended, samples = devices.UtilisationProbe(DEVICE), threading.Event(), list[float]()

    def sample() -> None:
        while not ended.wait(0.1):
            if (percent := probe.percent()) is not None:
                samples.append(percent)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True)
class KernelProfile:
    """Kernels of a run. `rows`: (name, calls, microseconds), most time first. `span_us`: from the start of the first
    kernel to the end of the last. `idle_share`: part of this span without a kernel. `gaps_us`: pauses between kernels.
    """

    rows: list[tuple[str, int, float]]
    span_us: float
    idle_share: float
    gaps_us: list[float]


def profiled(run: Callable[[], object]) -> KernelProfile:
    """Call `run` once and profile its kernels; in a rehearsal, its CPU operators. The caller must warm up before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    device_type = DeviceType.CPU
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        device_type = DeviceType.CUDA
    with torch.profiler.profile(activities=activities) as profile:
        run()
        synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == device_type
    )
    if not spans:
        raise RuntimeError("the profiler recorded no kernel")
    calls, times = Counter[str](), Counter[str]()
    gaps, reached = [], spans[0][0]
    for start, end, name in spans:
        calls[name] += 1
        times[name] += end - start
        if start > reached:
            gaps.append(start - reached)
        reached = max(reached, end)
    span = reached - spans[0][0]
    rows = [(name, calls[name], float(duration)) for name, duration in times.most_common()]
    return KernelProfile(rows, span, sum(gaps) / span if span else 0.0, gaps)
