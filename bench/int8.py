"""Quantisation to 8 bits on a CPU: speed of each recipe (way to quantise and run the model) relative to bfloat16, and
its loss of quality.

    pip install onnx onnx-ir nncf torchao      # the product does not need them; onnxruntime and openvino are installed
    python bench/int8.py [--rounds 3] [--only NAME ...] [--out FILE]
    python bench/int8.py --larger              # a random BERT-base: speed only

All recipes run all-MiniLM-L6-v2 in this process on one core and one thread, in turns. Loads: texts of the mix
(log-normal lengths, mean about 87 tokens) and of 8 tokens, one at a time and in batches of 32 of similar length. A
speed-up is relative to the fastest row in bfloat16 of the same load.

    engine            the packed path of the product, in bfloat16; `graph`: the engine that its rules choose; `int8`:
                      `load.precision: int8`
    openvino          the graph of the model by OpenVINO; `w8`: weights compressed by NNCF; `a8 per group`: activations
                      quantised by OpenVINO at run time
    nncf 8/8          weights per output channel, activations with static ranges of the training sentences of STS-B;
                      `alpha`: SmoothQuant; `ends`: without the first and the last layer; `sensitive`: without the
                      layers whose quantisation, one layer at a time, changes the vectors most; `sensitive per
                      group`: these layers with activations in groups, as in `a8 per group`
    onnxruntime       dynamic per tensor or per channel of the weight, static, and `blocks`: MatMulNBits, weights and
                      activations in blocks of 128
    torch             the packed path with other linear layers: `per tensor`: torch's dynamic linear layer; `per token`:
                      a scale for each token and each output channel; `torchao`: the same by torchao

Quality: least and mean cosine to float32 vectors, over texts of the mix and the queries of the task stsb-retrieval, and
the loss of NDCG@10 on this task, as `sie eval` computes it. A further table has the time of the linear layers alone.
The quantised models stay in --folder for the next run. Recipes whose package is not installed are skipped.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import exported_to, ids_of, model_folder, texts_of
from report import Report, machine, parser_of
from torch import nn
from transformers import AutoModel, BertConfig, BertModel

from sie_adapter.engine.device import Compute
from sie_adapter.engine.engine import prepare_process
from sie_adapter.engine.engines import TORCH, Choice
from sie_adapter.packed.attention_backend import attention_facts, resolve_attention
from sie_adapter.packed.backbone import Backbone
from sie_adapter.packed.packing import Items
from sie_evals import outputs, quality, tasks
from sie_evals.packages import STSB_PACKAGE
from sie_evals.steps import EvalStep, EvalWork, ResultCache

BATCH = 32
MAX_TOKENS = 256
LEAST_COSINE, MOST_LOSS, LEAST_GAIN = 0.99, 0.005, 1.5
LEFT_ALONE = 6  # number of the 36 linear layers that `sensitive` leaves in bfloat16
CALIBRATION = 100  # number of single sentences, and also number of texts of six sentences, in `calibration`
Ids = Sequence[np.ndarray]
Embed = Callable[[Ids], np.ndarray]  # token ids of one batch -> vectors [texts, width]


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """A model to measure. `build(attention)` returns the model in float32. `folder`: folder with its exported and
    quantised files.
    """

    build: Callable[[str], Any]
    folder: Path

    @functools.cached_property
    def sensitive(self) -> list[str]:
        """Return the names of the LEFT_ALONE linear layers whose quantisation, one layer at a time, changes the vectors
        most.
        """
        model = self.build("eager")
        sample = calibration()[: CALIBRATION // 4]
        arrays = [torch.from_numpy(array) for array in filled(sample)]

        def vectors() -> torch.Tensor:
            states, mask = model(input_ids=arrays[0], attention_mask=arrays[1])[0], arrays[1][..., None]
            return (states * mask).sum(1) / mask.sum(1)

        right, errors = vectors(), {}
        for name, layer in linears(model):
            weight = layer.weight.data
            layer.weight.data = rounded(weight, weight.abs().amax(1, keepdim=True) / 127)
            hook = layer.register_forward_pre_hook(lambda _, inputs: rounded(inputs[0], inputs[0].abs().max() / 127))
            errors[name] = float((1 - torch.cosine_similarity(vectors(), right)).max())
            layer.weight.data = weight
            hook.remove()
        return sorted(errors, key=errors.__getitem__, reverse=True)[:LEFT_ALONE]

    @functools.cached_property
    def ends(self) -> list[str]:
        names = [name for name, _ in linears(self.build("eager"))]
        layer = [name.partition("layer.")[2].partition(".")[0] for name in names]
        return [name for name, own in zip(names, layer, strict=True) if own in (layer[0], layer[-1])]


Recipe = Callable[[MeasuredModel], Embed]


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).round() * scale


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return (name, layer) of the linear layers. The pooler is omitted, because its output is not used."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not name.startswith("pooler")
    ]


def minilm(attention: str) -> Any:
    return AutoModel.from_pretrained(model_folder(), attn_implementation=attention).eval().requires_grad_(False)


def bert_base(attention: str) -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(attn_implementation=attention)).eval().requires_grad_(False)


@functools.cache
def calibration() -> list[np.ndarray]:
    """Return token ids of sentences, and of texts of six sentences. They are from the training set of STS-B, which the
    task stsb-retrieval does not use.
    """
    files = importlib.metadata.files(STSB_PACKAGE) or ()
    (file,) = (Path(str(file.locate())) for file in files if file.name == "sts-train.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        sentences = [row[5] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
    drawn = np.random.default_rng(0).choice(sentences, (CALIBRATION, 7))
    return ids_of([str(row[0]) for row in drawn] + [" ".join(row[1:]) for row in drawn])


def filled(ids: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and mask of a batch, int64 [texts, longest text]."""
    shape = len(ids), max(map(len, ids))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, own in enumerate(ids):
        tokens[row, : len(own)], mask[row, : len(own)] = own, 1
    return tokens, mask


def padded(forward: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Embed:
    """Return a function from token ids to normalised mean-pooled vectors. `forward`: (ids, mask) -> hidden states."""

    def embed(ids: Ids) -> np.ndarray:
        tokens, mask = filled(ids)
        return outputs.unit((forward(tokens, mask) * mask[..., None]).sum(1))

    return embed


def packed(
    source: MeasuredModel,
    dtype: torch.dtype,
    change: Callable[[Any], Any] = lambda model: model,
    engine: Choice = TORCH,
    int8: bool = False,
) -> Embed:
    """Return a function that encodes on the packed path of the product. `change` replaces layers of the model first."""
    device = torch.device("cpu")
    facts = attention_facts(device, dtype)
    compute = Compute(device, dtype, *resolve_attention("auto", facts), facts, engine=engine, int8=int8)
    backbone = Backbone(change(source.build("sdpa").to(dtype)), compute, MAX_TOKENS)

    def embed(ids: Ids) -> np.ndarray:
        lengths = np.array([len(own) for own in ids], np.int64)
        laid = backbone.pack(Items(lengths, np.concatenate(ids)), np.arange(len(ids)))
        states = backbone.forward(laid).float().numpy()
        vectors = np.empty((len(ids), states.shape[1]), np.float32)
        vectors[laid.order] = np.add.reduceat(states, laid.bounds[:-1])
        return outputs.unit(vectors)

    return embed


class PerToken(nn.Module):
    """A linear layer in 8 bits, with one scale for each token of its input and each output channel of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.scales = weight.abs().amax(1) / 127
        quantised = (weight / self.scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = layer.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        # 126 instead of 127, because rounding to bfloat16 can enlarge a state beyond 127 steps
        scale = states.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 126
        product = self.product((states / scale).round_().add_(128).to(torch.uint8), states.dtype)
        return torch.addcmul(self.bias, product, scale)

    def product(self, quantised: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            quantised, 1.0, 128, self.weight, self.scales, self.zeros, None, 1.0, 0, dtype, "none", [], ""
        )


def per_token(model: Any) -> Any:
    for name, layer in linears(model):
        model.set_submodule(name, PerToken(layer))
    return model


def torchao(model: Any) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def per_tensor(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class ModelStates(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[0]


def graph_of(source: MeasuredModel) -> Path:
    """Return the path of the model's OpenVINO graph in float32. Convert the model if the file is missing."""
    import openvino

    path = source.folder / "float32.xml"
    if not path.exists():
        example = torch.ones((2, MAX_TOKENS), dtype=torch.int64)
        graph = openvino.convert_model(ModelStates(source.build("sdpa")), example_input=(example, example))
        graph.reshape({place: openvino.PartialShape([-1, -1]) for place in range(2)})
        openvino.save_model(graph, path, compress_to_fp16=False)
    return path


def openvino_of(name: str = "", change: Any = None, precision: str = "bf16", **options: Any) -> Recipe:
    """Return a recipe that runs the OpenVINO graph. If there is a `change`, the recipe runs the graph that
    `change(graph, source)` returns, stored in the file `name`.
    """

    def embed_of(source: MeasuredModel) -> Embed:
        import openvino

        path = graph_of(source)
        if change:
            before, path = path, source.folder / f"{name}.xml"
            if not path.exists():
                openvino.save_model(change(openvino.Core().read_model(before), source), path, compress_to_fp16=False)
        settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, **options}
        request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()

        def forward(*arrays: np.ndarray) -> np.ndarray:
            for place, array in enumerate(arrays):
                request.set_input_tensor(place, openvino.Tensor(array, shared_memory=True))
            request.infer()
            return np.asarray(request.get_output_tensor(0).data, np.float32)

        return padded(forward)

    return embed_of


def weights_in_8_bits(graph: Any, source: MeasuredModel) -> Any:
    import nncf

    return nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_SYM)


def both_in_8_bits(
    alpha: float, left_alone: Callable[[MeasuredModel], Sequence[str]] = lambda _: ()
) -> Callable[[Any, MeasuredModel], Any]:
    """Return a change for `openvino_of`: it quantises weights per channel, and activations by their ranges on the
    calibration texts. `alpha`: strength of SmoothQuant; -1 disables it. `left_alone` returns the names of layers that
    stay unquantised.
    """

    def change(graph: Any, source: MeasuredModel) -> Any:
        import nncf
        from nncf.quantization.advanced_parameters import (
            AdvancedQuantizationParameters,
            AdvancedSmoothQuantParameters,
            OverflowFix,
        )

        batches = [filled([ids]) for ids in calibration()]
        stay = [f"__module.model.{name}/aten::linear/MatMul" for name in left_alone(source)]
        return nncf.quantize(
            graph,
            nncf.Dataset(batches, list),
            subset_size=len(batches),
            model_type=nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(names=stay),
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.DISABLE,  # the fix against overflow is only for processors without VNNI
                smooth_quant_alphas=AdvancedSmoothQuantParameters(matmul=alpha),
            ),
        )

    return change


def mixed(graph: Any, source: MeasuredModel) -> Any:
    """Quantise the weights and activations of most layers like `both_in_8_bits`, but only the weights of the sensitive
    layers.
    """
    return weights_in_8_bits(both_in_8_bits(0.5, lambda source: source.sensitive)(graph, source), source)


def onnxruntime_of(name: str, change: Callable[[Path, Path], None]) -> Recipe:
    """Return a recipe that runs the exported ONNX model after a change. `change(from, to)` reads the exported file, and
    writes the changed file with the name `name`.
    """

    def embed_of(source: MeasuredModel) -> Embed:
        import onnxruntime

        path = source.folder / f"{name}.onnx"
        if not path.exists():
            change(exported_to(source.folder / "float32.onnx", lambda: source.build("eager")), path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return padded(lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0])

    return embed_of


def dynamic(before: Path, after: Path, *, per_channel: bool) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(before, after, op_types_to_quantize=["MatMul"], per_channel=per_channel)


def static(before: Path, after: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class CalibrationReader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter([filled([ids]) for ids in calibration()])

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else dict(zip(("input_ids", "attention_mask"), batch, strict=True))

    extra = {"MatMulConstBOnly": True}
    quantize_static(
        before, after, CalibrationReader(), op_types_to_quantize=["MatMul"], per_channel=True, extra_options=extra
    )


def blocks(before: Path, after: Path) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    # accuracy_level 4 allows the kernel to compute in 8 bits
    config = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True, accuracy_level=4, bits=8)
    quantiser = MatMulNBitsQuantizer(onnx.load(before), algo_config=config)
    quantiser.process()
    quantiser.model.save_model_to_file(str(after))


# option that quantises activations in groups; OpenVINO does this only with the precision float32
GROUPS = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}
REFERENCE = "openvino float32"
BASES = ("engine bfloat16", "engine bfloat16, graph", "openvino bfloat16")
GRAPH = Choice("openvino", "", "this benchmark")
RECIPES: dict[str, Recipe] = {
    REFERENCE: openvino_of(precision="f32"),
    "engine bfloat16": lambda source: packed(source, torch.bfloat16),
    "engine bfloat16, graph": lambda source: packed(source, torch.bfloat16, engine=GRAPH),
    "openvino bfloat16": openvino_of(),
    "engine int8, graph": lambda source: packed(source, torch.bfloat16, engine=GRAPH, int8=True),
    "openvino w8": openvino_of("w8", weights_in_8_bits),
    "openvino w8, a8 per group": openvino_of("w8", weights_in_8_bits, "f32", **GROUPS),
    "nncf 8/8": openvino_of("both", both_in_8_bits(-1)),
    "nncf 8/8, alpha 0.5": openvino_of("smooth50", both_in_8_bits(0.5)),
    "nncf 8/8, alpha 0.95": openvino_of("smooth95", both_in_8_bits(0.95)),
    "nncf 8/8, alpha 0.5, ends": openvino_of("ends", both_in_8_bits(0.5, lambda source: source.ends)),
    "nncf 8/8, alpha 0.5, sensitive": openvino_of("sensitive", both_in_8_bits(0.5, lambda source: source.sensitive)),
    "nncf 8/8, sensitive per group": openvino_of("mixed", mixed, "f32", **GROUPS),
    "onnxruntime dynamic, per tensor": onnxruntime_of("dynamic", functools.partial(dynamic, per_channel=False)),
    "onnxruntime dynamic, per channel": onnxruntime_of("channels", functools.partial(dynamic, per_channel=True)),
    "onnxruntime static": onnxruntime_of("static", static),
    "onnxruntime blocks": onnxruntime_of("blocks", blocks),
    "torch per tensor": lambda source: packed(source, torch.float32, per_tensor),
    "torch per token": lambda source: packed(source, torch.bfloat16, per_token),
    "torchao": lambda source: packed(source, torch.bfloat16, torchao),
}
PACKAGES = {"nncf": "nncf", "openvino w8": "nncf", "onnxruntime": "onnx", "torchao": "torchao"}


def is_available(name: str) -> bool:
    return all(importlib.util.find_spec(package) for prefix, package in PACKAGES.items() if name.startswith(prefix))


def in_batches(ids: Ids, size: int) -> list[Ids]:
    """Return batches of texts of similar length."""
    ordered = sorted(ids, key=len)
    return [ordered[start : start + size] for start in range(0, len(ids), size)]


def of_texts(embed: Embed, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors of texts, in the order of `texts`. Batches have texts of similar length."""
    ids = ids_of(texts)
    order = np.argsort([len(own) for own in ids], kind="stable")
    parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    rows = np.concatenate([embed([ids[place] for place in part]) for part in parts])
    return rows[np.argsort(order)]


class RecipeSource:
    """A recipe as a source of vectors for `sie eval`."""

    name, is_here, scores_pairs, main, identity, tokens = "recipe", True, False, outputs.DENSE, (), 0

    def __init__(self, embed: Embed) -> None:
        self._embed = embed

    def vectors(self, texts: Sequence[str], output: Any, *, is_query: bool) -> Sequence[Any]:
        return list(of_texts(self._embed, texts))


def ndcg(embed: Embed, task: tasks.Retrieval) -> float:
    work = EvalWork(ResultCache(Path(tempfile.gettempdir())), lambda _: None)
    return quality.measure(task, EvalStep(RecipeSource(embed), outputs.DENSE), work).scores["ndcg@10"]  # type: ignore[arg-type]


def losses(recipes: dict[str, Embed]) -> dict[str, tuple[float, float, float]]:
    """Return the least and the mean cosine to float32, and the loss of NDCG@10, of each recipe."""
    task = tasks.stsb_retrieval()
    texts = [*texts_of("mix", "")[:100], *task.queries.values()]
    right, best = of_texts(recipes[REFERENCE], texts), ndcg(recipes[REFERENCE], task)
    values = {}
    for name, embed in recipes.items():
        cosines = (of_texts(embed, texts) * right).sum(1)
        values[name] = float(cosines.min()), float(cosines.mean()), best - ndcg(embed, task)
        print(name, *values[name], file=sys.stderr, flush=True)
    return values


def speeds(recipes: dict[str, Embed], rounds: int, share: float) -> dict[tuple[str, str], float]:
    """Return the median texts a second by (recipe, load). `share`: part of the texts that is used."""
    mix, short = ids_of(texts_of("mix", "")), ids_of(texts_of("single", ""))
    loads = {
        "mix, 1": in_batches(mix[: int(32 * share)], 1),
        "mix, 32": in_batches(mix[: int(64 * share)], BATCH),
        "short, 1": in_batches(short[: int(80 * share)], 1),
        "short, 32": in_batches((3 * short)[: int(256 * share)], BATCH),
    }
    rates: dict[tuple[str, str], list[float]] = {}
    for load, batches in loads.items():
        for round_ in range(rounds + 1):
            for name, embed in recipes.items():
                began_s = time.process_time()
                for batch in batches:
                    embed(batch)
                if round_:  # the first round warms up
                    rate = sum(map(len, batches)) / (time.process_time() - began_s)
                    rates.setdefault((name, load), []).append(rate)
    return {key: statistics.median(own) for key, own in rates.items()}


def products(source: MeasuredModel, rows: int) -> tuple[float, float, float]:
    """Return the milliseconds of all linear layers for `rows` tokens, in three ways: in bfloat16 as on the packed path,
    in 8 bits without the quantisation of the input, and in 8 bits by `PerToken`.
    """
    from sie_adapter.packed.linear import BlockedLinear

    total = np.zeros(3)
    for _, layer in linears(source.build("eager")):
        states = torch.randn(rows, layer.in_features).bfloat16()
        quantised = torch.randint(1, 256, states.shape, dtype=torch.uint8)
        own = layer.to(torch.bfloat16)
        blocked, token = BlockedLinear(own), PerToken(own)
        runs: list[Callable[[], Any]] = [
            functools.partial(blocked, states),
            functools.partial(token.product, quantised, torch.bfloat16),
            functools.partial(token, states),
        ]
        times: list[list[float]] = [[], [], []]
        for _ in range(7):
            for run, spent in zip(runs, times, strict=True):
                began_s = time.process_time()
                run()
                spent.append(time.process_time() - began_s)
        total += [1e3 * statistics.median(spent) for spent in times]
    bfloat16, eight, by_token = total.tolist()
    return bfloat16, eight, by_token


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument(
        "--larger", action="store_true", help="measure the speed of a BERT-base with random weights, and no quality"
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "sie-bench-int8"))
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    prepare_process()
    source = MeasuredModel(
        *((bert_base, options.folder / "base") if options.larger else (minilm, options.folder / "minilm"))
    )
    source.folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in RECIPES if name in (REFERENCE, *BASES, *options.only) and is_available(name)]
    recipes = {name: RECIPES[name](source) for name in names}
    with torch.inference_mode():
        loss = {} if options.larger else losses(recipes)
        rates = speeds(recipes, options.rounds, 0.25 if options.larger else 1.0)
        alone = {rows: products(source, rows) for rows in (8, 87, 1024)}
    loads = list(dict.fromkeys(load for _, load in rates))
    base = {load: max(rates[name, load] for name in BASES) for load in loads}
    say = Report()
    say(f"# Weights and activations in 8 bits: {'a random BERT-base' if options.larger else 'all-MiniLM-L6-v2'}\n")
    say(
        f"One thread, {machine()}, torch {torch.__version__}; medians of {options.rounds} rounds in turns. In brackets:"
    )
    say("speed relative to the fastest row in bfloat16.\n")
    say("| recipe | cosine, least | mean | NDCG@10 loss | " + " | ".join(f"{load}, texts/s" for load in loads) + " |")
    say("|---" * (4 + len(loads)) + "|")
    for name in names:
        gains = {load: rates[name, load] / base[load] for load in loads}
        cells = [f"{rates[name, load]:.0f} ({gain:.2f})" for load, gain in gains.items()]
        least, mean, lost = loss.get(name, (float("nan"),) * 3)
        say(f"| {name} | {least:.4f} | {mean:.4f} | {lost:+.4f} | {' | '.join(cells)} |")
    reached = [
        f"{name} ({load})"
        for name in loss
        for load in loads
        if loss[name][0] >= LEAST_COSINE and loss[name][2] < MOST_LOSS and rates[name, load] >= LEAST_GAIN * base[load]
    ]
    say(
        f"\nRecipes with a cosine of at least {LEAST_COSINE}, a loss below {MOST_LOSS} and {LEAST_GAIN} times the rate "
        "in bfloat16: ",
    )
    say(f"{', '.join(reached) or 'none'}.\n")
    say("| linear layers alone, tokens | bfloat16, ms | 8 bits, ms | 8 bits with quantising per token, ms |")
    say("|---|---|---|---|")
    for rows, (bfloat16, eight, token) in alone.items():
        say(
            f"| {rows} | {bfloat16:.2f} | {eight:.2f} ({bfloat16 / eight:.2f}) | {token:.2f} ({bfloat16 / token:.2f}) |"
        )
    say.save(options.out)


if __name__ == "__main__":
    main()
