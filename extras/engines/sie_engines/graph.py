"""A text model as a graph that OpenVINO compiles for this CPU: ids of texts of similar length ──► states.

stock transformers model ──TorchScript──► OpenVINO's front end for PyTorch ──► compiled, with a stream per thread

The graph is faster than torch's packed path, because the weights are stored in the blocked order that the kernels read,
and no Python runs within a pass: one text of 8 tokens takes about half of torch's time. A batch runs in groups of
texts of similar length (bench/results/engine.md).
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

from sie_adapter.engine.device import Compute
from sie_adapter.engine.device_threads import is_alone
from sie_adapter.engine.engines import GRAPH, EngineFacts, EngineLoad, NotServed, Rule, reads_more
from sie_adapter.loading.checkpoint import construction
from sie_adapter.memory.device_errors import GraphLost, is_out_of_memory
from sie_adapter.packed.packing import Int64, PackedBatch, Padded, missing, padded

# limit for the tokens of a group of several texts: a larger group needs more memory and is not faster per token
GROUP_TOKENS = 1024
# fixed cost of a pass, expressed in tokens: reading all weights takes as long as computing this number of tokens
PASS_TOKENS = 64
# (length, step) in tokens: a text of up to this length is padded to a multiple of the step; the last step is also used
# for longer texts
_STEPS = ((32, 8), (256, 16), (512, 32), (2048, 128))
# (rows, step): a group of up to this number of rows is filled with empty rows to a multiple of the step
_ROW_STEPS = ((8, 1), (16, 2), (32, 4), (64, 8), (128, 16))
_ROWS = sorted({rows + missing(rows, _ROW_STEPS) for rows in range(1, GROUP_TOKENS // 8 + 1)})
# Number of shapes whose kernels each device thread caches. With OpenVINO's default of 5,000, memory grows for hours.
# With 100 shapes, a mix of lengths is as fast as with 300 shapes; with 50 shapes 5 % slower (bench/results/memory.md).
_KEPT_KERNELS = 100
# Threads for a short batch (at most _TOKENS_ALONE tokens) while no other device thread runs: two threads nearly halve
# the time of a short text. Another running device thread could share a core with one of the two threads, and the batch
# would wait for that slower thread (bench/results/engine.md).
_THREADS_ALONE = 2
_TOKENS_ALONE = 256
# lengths in tokens of a single text that has a graph of fixed shape. A pass with this graph saves a fifth of the time,
# because OpenVINO need not compute the shape of each node. Each length adds 8 MB to the graphs of MiniLM, although they
# share their weights (bench/results/engine.md).
_FIXED_LENGTHS = (8, 16)
# tokens of each example text of the trace: more than ModernBERT's local window, because ModernBERT masks only
# texts that are longer than the window
_EXAMPLE_TOKENS = 300
_ATTENTION = "sie_graph"  # name under which transformers has the attention of a trace
_XML, _COMPRESSED = "graph.xml", "compressed"  # the graph; the number of its weights in 8 bits
_TYPES = "token_type_ids"
_ALL = slice(None)  # all states of a batch
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


# Bytes of float32 weights up to which a graph is compiled twice: once for batches that run at the same time, each on
# one core, and once for a batch that runs alone, on several cores. For a larger model, a faster answer to a single
# request does not justify the memory of the second copy.
TWICE_BYTES = 256 << 20


class NoGraph(NotServed):
    """Raised if OpenVINO cannot convert or run this model."""


class _StackedInputs(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    def __init__(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(**{name: inputs[place] for place, name in enumerate(self.names)})[0]


class Graph:
    """Model compiled to a graph, which computes the states of its last layer. Several threads may call `run` at once.
    `memory_bytes`: bytes of the compiled weights, in all copies.
    """

    attention = "sdpa"

    def __init__(self, model: PreTrainedModel, compute: Compute, lanes: int, filler: int, max_tokens: int) -> None:
        """Compile `model`, which is on the CPU and is not changed. `lanes`: the number of device threads. `filler`: the
        token id for padding. `max_tokens`: the number of tokens of the longest text. Raises NoGraph, or an
        out-of-memory error.
        """
        self._dtype = compute.dtype
        self._filler = filler
        self._max_tokens = max_tokens
        self._names = _names_of(model)
        self._max_filling = most_filling(model.config)
        self._alone: _Compiled | None = None
        try:
            if not self._compile_kept(model, compute, lanes):
                with _new_files(model, self._names, compute, min(_EXAMPLE_TOKENS, max_tokens)) as folder:
                    self._compile(folder, model, compute, lanes)
        except (RuntimeError, OSError) as error:
            raise _no_graph("OpenVINO could not compile its graph", error) from error

    def _compile_kept(self, model: PreTrainedModel, compute: Compute, lanes: int) -> bool:
        """Compile the graph that an earlier load has kept. Return False if there is none. Another process may remove it
        at any time, also while this method reads it.
        """
        if (folder := compute.derived.find(GRAPH)) is None:
            return False
        try:
            self._compile(folder, model, compute, lanes)
        except (RuntimeError, OSError) as error:
            if is_out_of_memory(error):
                raise
            compute.derived.discard(GRAPH)
            return False
        return True

    def _compile(self, folder: Path, model: PreTrainedModel, compute: Compute, lanes: int) -> None:
        """Compile the graph in `folder`. OpenVINO copies the weights in the layout of its kernels, but also keeps the
        float32 weights. It maps the float32 weights from a file, so that the system can reclaim their pages if memory
        is short, and copies of a model share them.
        """
        dtype = compute.dtype
        options = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
            "CPU_RUNTIME_CACHE_CAPACITY": _KEPT_KERNELS,
            # OpenVINO would pin the first stream of each model to the same core: batches of two models that run at the
            # same time would share this core, and the other core would be idle
            "ENABLE_CPU_PINNING": False,
        }
        weights = sum(parameter.numel() for parameter in model.parameters())
        is_twice = lanes >= _THREADS_ALONE and is_compiled_twice(4 * weights)
        copy_bytes = weights * dtype.itemsize - int((folder / _COMPRESSED).read_text()) * (dtype.itemsize - 1)
        graph = _runtime().Core().read_model(folder / _XML)
        self._of_lanes = _Compiled(graph, options, lanes, lanes)
        if is_twice:
            is_avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
            if is_avx2 and dtype == torch.float32 and not compute.int8:
                _write_out_gelu(graph)
            self._alone = _Compiled(_with_fixed_lengths(graph, self._max_tokens), options, 1, _THREADS_ALONE)
        self.memory_bytes: int = copy_bytes * (2 if is_twice else 1)

    def run(self, packed: PackedBatch) -> Tensor:
        """Return hidden states, [tokens, width], in packed order."""
        if self._alone is not None and len(packed.ids) <= _TOKENS_ALONE and is_alone():
            return self._run(packed, self._alone)
        return self._run(packed, self._of_lanes)

    def trials(self, packed: PackedBatch) -> Iterator[tuple[Tensor, slice]]:
        """Run the batch on each compiled graph, and yield the states of each. The second graph runs the batch also text
        by text.
        """
        yield self._run(packed, self._of_lanes), _ALL
        if self._alone is not None:
            yield self._run(packed, self._alone), _ALL
            columns = [filled_length(length, self._max_tokens, self._max_filling) for length in packed.lengths.tolist()]
            rows = [RowGroup(row, row + 1, 1, length) for row, length in enumerate(columns)]
            yield self._run_groups(packed, self._alone, rows), _ALL

    def close(self) -> None:
        """Free the compiled graphs."""
        del self._of_lanes
        self._alone = None

    def _run(self, packed: PackedBatch, compiled: _Compiled) -> Tensor:
        if len(packed.order) == 1:
            return self._run_single(packed, compiled)
        return self._run_groups(packed, compiled, groups(packed.lengths, self._max_tokens, self._max_filling))

    def _run_groups(self, packed: PackedBatch, compiled: _Compiled, row_groups: list[RowGroup]) -> Tensor:
        states: Tensor | None = None
        for group in row_groups:
            part = padded(packed, group.start, group.stop, group.columns, self._filler, rows=group.rows)
            hidden = compiled.infer(self._inputs(part))
            if states is None:
                states = torch.empty((len(packed.ids), hidden.shape[-1]), dtype=self._dtype)
            states[part.tokens] = torch.from_numpy(hidden[part.real])
        assert states is not None
        return states

    def _run_single(self, packed: PackedBatch, compiled: _Compiled) -> Tensor:
        """Run a single sequence like `_run`, but with less Python code. This saves 3 % of the time of a short text."""
        length = len(packed.ids)
        columns = filled_length(length, self._max_tokens, self._max_filling)
        packed.filled(columns - length)
        inputs = np.zeros((len(self._names), 1, columns), np.int32)
        inputs[0, 0, :length] = packed.ids
        inputs[0, 0, length:] = self._filler
        inputs[1, 0, : length if packed.visible is None else packed.visible[0]] = 1
        if packed.types is not None and _TYPES in self._names:
            inputs[2, 0, :length] = packed.types
        return torch.from_numpy(compiled.infer(inputs)[0, :length].copy()).to(self._dtype)

    def _inputs(self, part: Padded) -> NDArray[np.int32]:
        """Return the inputs of the graph in one array, int32 [names, rows, columns]. OpenVINO does not copy it."""
        inputs = np.zeros((len(self._names), *part.ids.shape), np.int32)
        inputs[0], inputs[1] = part.ids, part.attended
        if part.types is not None and _TYPES in self._names:
            inputs[2] = part.types
        return inputs


@contextmanager
def _new_files(model: PreTrainedModel, names: tuple[str, ...], compute: Compute, tokens: int) -> Iterator[Path]:
    """Yield a folder with the graph of `model`, traced with texts of `tokens` tokens. Later loads find it. Raises
    NoGraph, OSError, or an out-of-memory error.
    """
    with compute.derived.writing(GRAPH) as folder:
        with _traceable(model):
            converted = _converted(_StackedInputs(model, names), tokens)
            (folder / _COMPRESSED).write_text(str(compress(converted) if compute.int8 else 0))
            _runtime().save_model(converted, folder / _XML, compress_to_fp16=False)
            del converted
        yield folder


class _Compiled:
    """Model that OpenVINO compiled for `streams` concurrent calls of `infer`, with `threads` threads in total."""

    def __init__(self, graph: Any, options: Mapping[str, Any], streams: int, threads: int) -> None:
        more = {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads}
        runtime = _runtime()
        self._tensor = runtime.Tensor
        self._compiled = runtime.Core().compile_model(graph, "CPU", {**options, **more})
        self._of_thread = threading.local()

    def infer(self, inputs: NDArray[np.int32]) -> NDArray[Any]:
        """Return states, [rows, columns, width]. The array is valid until the calling thread calls `infer` again."""
        request = getattr(self._of_thread, "request", None)
        if request is None:
            request = self._of_thread.request = self._compiled.create_infer_request()
        # not `infer(inputs)`, which is slower because it runs more Python code
        request.set_input_tensor(self._tensor(inputs, shared_memory=True))
        try:
            request.infer(share_outputs=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise GraphLost("OpenVINO had no memory for a pass") from error
        return cast("NDArray[Any]", request.get_output_tensor(0).data)


class RowGroup(NamedTuple):
    """Sequences that run together, from `start` to before `stop`, padded to `rows` rows of `columns` tokens."""

    start: int
    stop: int
    rows: int
    columns: int


def groups(lengths: Int64, max_tokens: int, max_filling: int = sys.maxsize) -> list[RowGroup]:
    """Split sequences, which are sorted by length, into groups with the shortest estimated total time. The estimate for
    a group, in tokens, is rows times columns, plus PASS_TOKENS.

    Padding rounds rows and columns up to few different numbers, so that OpenVINO compiles kernels for few shapes. The
    padded length of a sequence is at most `max_tokens`, and at most `max_filling` tokens more than its length.
    """
    own = lengths.tolist()
    columns = [filled_length(length, max_tokens, max_filling) for length in own]
    least = [0]  # least[n]: shortest total time of the first n sequences
    # starts[n - 1]: first sequence of the last group, in the fastest grouping of the first n sequences
    starts: list[int] = []
    first = 0  # first sequence that may share a group with sequence stop - 1
    for stop, width in enumerate(columns, 1):
        while width - own[first] > max_filling:
            first += 1
        start = chosen = stop - 1
        time = least[start] + width
        for rows in _ROWS[1:]:
            if start == first or rows * width > GROUP_TOKENS:
                break
            start = max(first, stop - rows)
            if least[start] + rows * width < time:
                time, chosen = least[start] + rows * width, start
        least.append(time + PASS_TOKENS)
        starts.append(chosen)
    groups: list[RowGroup] = []
    stop = len(columns)
    while stop:
        start = starts[stop - 1]
        count = stop - start
        groups.append(RowGroup(start, stop, count + missing(count, _ROW_STEPS), columns[stop - 1]))
        stop = start
    return groups[::-1]


def filled_length(length: int, max_tokens: int, max_filling: int = sys.maxsize) -> int:
    """Return the length to which a text is padded: one of a few lengths, because OpenVINO caches kernels for each
    shape. If the padding would exceed `max_filling` tokens, return `length`.
    """
    filled = min(length + missing(length, _STEPS), max_tokens)
    return max(length, filled) if filled - length <= max_filling else length


def has_windows(config: PretrainedConfig) -> bool:
    """Return whether a layer of the model limits the attention of each token to a window of tokens."""
    kinds = getattr(config, "layer_types", None) or ()
    return bool(getattr(config, "sliding_window", None)) or any(kind != "full_attention" for kind in kinds)


def most_filling(config: PretrainedConfig) -> int:
    """Return the largest number of padding tokens of a text. If no token of the text is in the attention window of a
    padding token, the state of the padding token becomes NaN, which corrupts the text's states.
    """
    if not has_windows(config):
        return sys.maxsize
    window = int(getattr(config, "sliding_window", None) or 0)
    # In some model classes, `sliding_window` counts the keys on one side of a token, in other classes the keys on both
    # sides. Half of the number, minus 1 for the token itself, is safe for all classes.
    return max(0, window // 2 - 1)


def _names_of(model: PreTrainedModel) -> tuple[str, ...]:
    parameters = inspect.signature(model.forward).parameters
    has_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1 and _TYPES in parameters
    return ("input_ids", "attention_mask", *((_TYPES,) if has_types else ()))


def _runtime() -> Any:
    # None makes `import openvino_telemetry` fail: openvino would use this package to send a usage event to its vendor
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@contextmanager
def _traceable(model: PreTrainedModel) -> Iterator[None]:
    """Prepare the model for a trace. Its weights become float32, because the front end builds a wrong graph from 16-bit
    weights. Its loss function is set to None, because transformers warns if a trace reads an unset loss function. Its
    attention masks become those of `_mask`.
    """
    before = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    attention = model.config._attn_implementation
    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(_ATTENTION, _mask)
    model.float()
    model.loss_function = None
    try:
        if attention == "sdpa":
            model.set_attn_implementation(_ATTENTION)
        yield
    finally:
        if attention == "sdpa":
            model.set_attn_implementation(attention)
        del model._loss_function
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.data = tensor.data.to(before[name])


def _mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return the mask of an attention, bool. If only padding is hidden, its shape is [rows, 1, 1, columns]. For this,
    transformers would compute a mask for each query, in 22 nodes of the graph.
    """
    if mask_function is bidirectional_mask_function and attention_mask is not None:
        return attention_mask[:, None, None]
    return cast("Tensor | None", sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options))


def _drop_unchanging_reshapes(graph: Any, inputs: int, tokens: int) -> None:
    """Remove reshapes that do not change the shape. transformers reshapes the result of each attention in this way, and
    OpenVINO would run the reshape, and the transposition after it.
    """

    def unchanging(rows: int, columns: int) -> dict[str, Any]:
        graph.reshape(_runtime().PartialShape([inputs, rows, columns]))  # this replaces some nodes
        return {
            node.get_name(): node
            for node in graph.get_ops()
            if node.get_type_name() == "Reshape"
            and (shape := node.get_output_partial_shape(0)).is_static
            and shape == node.get_input_partial_shape(0)
        }

    # two shapes of inputs, because a reshape may keep one of them by chance
    names = unchanging(2, tokens).keys()
    for name, node in unchanging(3, (tokens + 1) // 2).items():
        if name in names:
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(node.input_value(0))


def _write_out_gelu(graph: Any) -> None:
    """Replace each GELU by its formula, x / 2 + x / 2 erf(x / sqrt(2)). OpenVINO has two kernels for products in
    float32 on AVX2. It fuses a GELU into the product before it, but only the slower kernel can compute a fused GELU. A
    short text takes 0.9 of the time without the fusion. A large batch takes 0.97, but needs twice the memory for the
    widest states of each layer (bench/results/engine.md), so only the graph for short batches has no fusion.
    """
    from openvino import opset13

    for gelu in [node for node in graph.get_ops() if node.get_type_name() == "Gelu"]:
        if gelu.get_attributes().get("approximation_mode") != "ERF":
            continue
        states = gelu.input_value(0)
        half = opset13.multiply(states, np.float32(0.5))
        error_function = opset13.erf(opset13.multiply(states, np.float32(0.5**0.5)))
        formula = opset13.add(half, opset13.multiply(half, error_function))
        for reader in gelu.output(0).get_target_inputs():
            reader.replace_source_output(formula.output(0))


def _with_fixed_lengths(graph: Any, max_tokens: int) -> Any:
    """Return a graph that runs a single text of _FIXED_LENGTHS tokens on a copy of `graph` with this fixed shape, and
    every other batch on `graph`. OpenVINO compiles the weights once. `max_tokens`: the longest text of the model.
    """
    from openvino import opset13

    runtime = _runtime()
    inputs = graph.inputs[0].partial_shape[0].get_length()
    whole = graph
    for length in _FIXED_LENGTHS:
        if length > max_tokens:
            break
        shape = opset13.constant([inputs, 1, length], np.int64)
        fixed = graph.clone()
        fixed.reshape(runtime.PartialShape([inputs, 1, length]))
        # `If` gives the parameters of its bodies the shape of its own input, which is not fixed; a reshape fixes it
        parameter = fixed.get_parameters()[0]
        readers = parameter.output(0).get_target_inputs()
        reshaped = opset13.reshape(parameter, shape, False)
        for reader in readers:
            reader.replace_source_output(reshaped.output(0))
        batch = opset13.parameter([inputs, -1, -1], np.int32)
        is_fixed = opset13.reduce_logical_and(opset13.equal(opset13.shape_of(batch), shape), 0)
        choice = opset13.if_op(is_fixed.output(0))
        choice.set_then_body(fixed)
        choice.set_else_body(whole)
        choice.set_input(batch.output(0), parameter, whole.get_parameters()[0])
        states = choice.set_output(fixed.get_results()[0], whole.get_results()[0])
        whole = runtime.Model([opset13.result(states)], [batch])
    return whole


def compress(graph: Any) -> int:
    """Compress the weights of the graph's linear layers to 8 bits, with a scale for each output feature. Return the
    number of these weights. Activations keep their precision: calibrated activations in 8 bits lower the cosine of
    MiniLM's vectors to 0.97, and no other recipe is exact and fast enough (bench/results/int8.md).
    """
    from openvino import opset13

    count = 0
    for product in [node for node in graph.get_ordered_ops() if node.get_type_name() == "MatMul"]:
        source = product.input_value(1).get_node()
        if source.get_type_name() != "Constant" or len(source.shape) != 2:
            continue
        weight = source.data
        # the axis of the weight that has the layer's input features
        axis = 1 if product.get_attributes()["transpose_b"] else 0
        scale = np.maximum(np.abs(weight).max(axis, keepdims=True) / 127, np.finfo(np.float32).tiny).astype(np.float32)
        quantized = opset13.constant(np.rint(weight / scale).astype(np.int8))
        whole = opset13.multiply(opset13.convert(quantized, "f32"), opset13.constant(scale))
        product.input(1).replace_source_output(whole.output(0))
        count += weight.size
    return count


def _converted(states: _StackedInputs, tokens: int) -> Any:
    """Convert the model, traced with two texts of `tokens` tokens, to a graph for any batch. Raises NoGraph, or an
    out-of-memory error.
    """
    runtime = _runtime()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    example = torch.ones((len(states.names), 2, tokens), dtype=torch.int32)
    example[2:] = 0  # token types
    failures = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, runtime.frontend.OpConversionFailure)
    try:
        # `construction` holds a lock, because this code changes two objects that are global to the process: the warning
        # filters, and torch's map of modules, which the trace changes
        with construction(), warnings.catch_warnings(), torch.inference_mode(False):
            # Warnings about the trace, and torch's check by a second trace, are switched off: the backbone later
            # compares the states of the graph with those of the model.
            warnings.simplefilter("ignore")
            decoder = TorchScriptPythonDecoder(states, example_input=example, trace_kwargs={"check_trace": False})
            end = FrontEndManager().load_by_framework("pytorch")
            converted = end.convert(end.load(decoder))
            _drop_unchanging_reshapes(converted, len(states.names), tokens)
    except failures as error:
        raise _no_graph("it cannot convert the model", error) from error
    finally:
        _discard_traced_types()
    converted.reshape(runtime.PartialShape([len(states.names), -1, -1]))
    return converted


def _discard_traced_types() -> None:
    """Discard the types that torch registered for the modules of a trace. Without this, the types of each load would
    need 1 MB for each layer until the process ends. torch has no public function for this. Functions of
    `torch.jit.script` stay. Scripted modules would lose their methods, but no model here has a scripted module.
    """
    with construction():
        torch._C._jit_clear_class_registry()
        torch.jit._recursive.concrete_type_store.type_store.clear()
        torch.jit._recursive.concrete_type_store.methods_compiled.clear()
        torch.jit._state._clear_class_state()


def _no_graph(cause: str, error: Exception) -> Exception:
    """Return `error` if memory ran out, because another attempt may succeed; else return a NoGraph."""
    if is_out_of_memory(error):
        return error
    text = " ".join(str(error).split())
    return NoGraph(f"{cause}: {type(error).__name__}: {text[:300]}")


def is_compiled_twice(weight_bytes: int) -> bool:
    return weight_bytes <= TWICE_BYTES


def _bytes_of_graphs(weight_bytes: int) -> int:
    # copies of the weights: one in torch, and one for each compiled graph
    return (3 if is_compiled_twice(weight_bytes) else 2) * weight_bytes


def _openvino(facts: EngineFacts) -> str:
    if facts.device != "cpu":
        return f"the device is {facts.device}, not cpu"
    if more := reads_more(facts):
        return more
    if facts.hides_tokens and has_windows(facts.config):
        return "some tokens of its queries are not attended to, and its layers attend to windows"
    if facts.attention == "eager":
        return "SIE_ATTENTION_BACKEND asks for eager attention"
    if facts.lora:
        return "its entry has a LoRA, which runs on torch"
    if facts.is_limited:
        return "RLIMIT_DATA limits this process, and OpenVINO's cache of shapes has no limit in bytes"
    return ""


def _load(request: EngineLoad) -> Graph:
    return Graph(request.model, request.compute, request.lanes, request.filler, request.max_tokens)


RULE = Rule(
    "on a CPU it is the fastest for one text",  # bench/results/engine.md
    "openvino",
    _openvino,
    held_bytes=_bytes_of_graphs,
    load=_load,
    states="the states of the graph",
    has_own_threads=True,
)
