"""Reader of a sentence-transformers folder, by the rules of that library.

    modules.json ──► stock classes, in order ──► settings of each file ──► Modules

`FIELDS` lists the accepted modules and their accepted settings. A load refuses any other setting and names it. A
setting that a newer version of the library adds is therefore never ignored silently.

Source: sentence-transformers 6.2 (base/model.py, base/modules, sentence_transformer/modules, sparse_encoder/modules).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from sie_adapter.heads.token_pooling import TokenPooling, token_pooling_of
from sie_adapter.loading.checkpoint import linear, tensor
from sie_contracts.models.entries import MAX_POOLINGS, POOLINGS, poolings
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_store.entry_faults import MODEL_FILE, POOLING_NAMES, pooling_name
from sie_store.folder_files import TRANSFORMER_FILES, read_json, read_value, reading

# class name of a module -> accepted settings of its file (config.json, or one of TRANSFORMER_FILES). This adapter reads
# each of these settings, except settings that do not change results. A load refuses a value that this adapter does not
# support.
FIELDS: Mapping[str, frozenset[str]] = {
    "Transformer": frozenset(
        {
            "transformer_task",
            "modality_config",
            "module_output_name",
            "processing_kwargs",
            "unpad_inputs",
            "query_length",
            "document_length",
            "query_expansion",
            "max_seq_length",
            "do_lower_case",
            "tokenizer_name_or_path",
            "model_kwargs",
            "model_args",
            "processor_kwargs",
            "tokenizer_args",
            "config_kwargs",
            "config_args",
        }
    ),
    "Pooling": frozenset({"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt"}),
    "Dense": frozenset(
        {
            "in_features",
            "out_features",
            "bias",
            "activation_function",
            "module_input_name",
            "module_output_name",
            "use_residual",
        }
    ),
    "Normalize": frozenset({"module_input_name", "module_output_name"}),
    "Dropout": frozenset({"dropout"}),
    "LayerNorm": frozenset({"dimension"}),
    "HierarchicalTokenPooling": frozenset({"pool_factor", "num_protected_tokens", "normalize_embeddings", "tasks"}),
    "SpladePooling": frozenset(
        {"pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size"}
    ),
    "MultiVectorMask": frozenset({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"}),
    "LogitScore": frozenset({"true_token_id", "false_token_id", "module_input_name"}),
}
_STOCK = ("sentence_transformers.", "pylate.")
_BACKBONES = ("MLMTransformer", "Transformer")
_POOLERS = ("Pooling", "SpladePooling", "LogitScore")  # modules that turn a text into one vector or score
_LATE = ("MultiVectorMask", "HierarchicalTokenPooling")
_LATE_LENGTHS = ("query_length", "document_length", "query_expansion")
STATIC = "StaticEmbedding"
_OF_TOKENS = frozenset({"Pooling", "SpladePooling", "MultiVectorMask", "HierarchicalTokenPooling", "LogitScore"})
# Arguments of from_pretrained that this adapter ignores. They say how to read and place the weights, how to compute
# attention, and which precision to use; here the catalogue entry decides the precision.
_PLACING = frozenset(
    {"attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype", "use_safetensors"}
)
_NOT_READ = frozenset({"use_cache", "use_fast", "trust_remote_code"})  # further ignored arguments of from_pretrained
_OUTPUTS = {  # task of a Transformer module -> the model's output, and the key of this output for the next module
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
# elementwise activations of torch without weights
_ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity),
        *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
        *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
    )
}
_TOKENS, _VECTOR = "token_embeddings", "sentence_embedding"


@dataclass(frozen=True)
class TransformerSettings:
    """Settings of a Transformer module. `file`: the name of the settings file. `raw`: its contents. `max_tokens`: the
    limit in the file, 0 without a limit. `tokenizer`: arguments of the tokenizer's from_pretrained. `messages`: whether
    the tokenizer inserts texts into its chat template; `chat_options` are arguments of this template.
    """

    file: str = ""
    task: str = ""
    max_tokens: int = 0
    lowercases: bool = False
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    messages: bool = False
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """Modules that modules.json lists in addition to a transformer. `token_layers` apply to token states before
    pooling, `layers` to pooled vectors. Late interaction has no pooling: its `layers` apply to token states.

    `root`: the folder of modules.json. `folder`: the folder of the transformer and its tokenizer. `query_weights`:
    float32 [ids], the weight of each token id in a query; None if queries need a forward pass. `query_folder`: the
    folder with the tokenizer of queries. `normalizes`: whether output vectors are scaled to length 1, by a last
    Normalize module or by the setting `normalize` of a model2vec folder.
    """

    root: Path
    folder: Path
    query_weights: Tensor | None = None
    query_folder: Path | None = None
    kinds: tuple[str, ...] = ()
    pooling: str = ""
    layers: tuple[nn.Module, ...] = ()
    token_layers: tuple[nn.Module, ...] = ()
    normalizes: bool = False
    max_entries: int = 0  # largest number of entries of a sparse vector; 0: no limit
    transformer: TransformerSettings = TransformerSettings()
    # class name of a module -> contents of its config.json; the transformer is left out
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_pooling: TokenPooling | None = None  # settings by which similar token vectors of a text are merged

    def width(self, hidden: int) -> int:
        return pooled_width(self.token_layers, self.pooling, self.layers, hidden)


def states_width(config: PretrainedConfig) -> int:
    """Return the width of the states of a transformer's last layer."""
    # OPT may project its states to another width at the end
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def output_width(layers: Iterable[nn.Module], hidden: int) -> int:
    """Return the width of the vectors that `layers` compute from vectors of width `hidden`. Raises ModelLoadFailed
    INCOMPATIBLE for a layer that reads vectors of another width than it gets.
    """
    width = int(hidden)
    for layer in layers:
        linear = layer.linear if isinstance(layer, Projection) else layer
        if isinstance(linear, nn.Linear):
            kind = "Dense" if isinstance(layer, Projection) else "linear layer"
            reads = linear.in_features
        else:
            kind, reads = "LayerNorm", layer.normalized_shape[0] if isinstance(layer, nn.LayerNorm) else width
        if reads != width:
            raise incompatible(f"a {kind} of the model reads vectors of {reads} numbers, but gets {width} numbers")
        if isinstance(linear, nn.Linear):
            width = linear.out_features
        elif isinstance(layer, Truncation):
            width = min(width, layer.out_features)
    return width


def pooled_width(token_layers: Iterable[nn.Module], pooling: str, layers: Iterable[nn.Module], hidden: int) -> int:
    """Return the width of the vectors that `token_layers`, then `pooling`, then `layers` compute from token states of
    width `hidden`. An empty `pooling` does not change the width.
    """
    return output_width(layers, output_width(token_layers, hidden) * len(pooling.split("+")))


class Projection(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Dense module of modules.json: activation(W x + b), with a residual if config.json has use_residual. float32 [..,
    in] -> [.., out]. Source: sentence-transformers' and PyLate's Dense.
    """

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, residual: nn.Linear | None = None, *, adds_input: bool = False
    ) -> None:
        super().__init__()
        self.linear, self.activation, self.residual, self.adds_input = linear, activation, residual, adds_input
        self.out_features = linear.out_features

    def forward(self, states: Tensor) -> Tensor:
        projected = self.activation(self.linear(states))
        if self.residual is not None:
            return projected + self.residual(states)
        return projected + states if self.adds_input else projected


class Normalization(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Normalize module of modules.json: scales each row to length 1. float32 [.., width], same shape."""

    def forward(self, states: Tensor) -> Tensor:
        return functional.normalize(states, p=2, dim=-1)


class Truncation(nn.Module):  # type: ignore[misc]  # the type checker skips torch
    """Truncation to the first `out_features` numbers (truncate_dim). float32 [.., width] -> [.., out_features]."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, states: Tensor) -> Tensor:
        return states[..., : self.out_features]


def read_modules(folder: Path) -> Modules:
    """Return the modules that modules.json in `folder` lists. Without this file, return only the transformer. Raises
    ModelLoadFailed: INCOMPATIBLE for a class, an order or a setting that this adapter does not support, for a module
    outside of `folder`, for a Dense or a LayerNorm without weights, and for a Router without token weights for queries;
    NOT_FOUND for a Pooling without its config.json.
    """
    entries = read_value(folder / "modules.json")
    if entries is None and is_model2vec(folder):
        normalizes = bool(read_json(folder / "config.json").get("normalize"))
        return Modules(folder, folder, normalizes=normalizes)
    if entries is None:
        return Modules(folder, folder, transformer=read_transformer(folder))
    listed = _listed(folder, entries)
    query_weights = query_folder = None
    if [kind for kind, _ in listed] == ["Router"]:
        listed, query_folder = _routes(listed[0][1])
        query_weights = tensor(query_folder, "weight")
        if query_weights is None:
            remedy = f": {conversion(query_folder)}" if (query_folder / "pytorch_model.bin").is_file() else ""
            raise incompatible(f"{query_folder.name}: model.safetensors with the weights of queries is missing{remedy}")
    kinds = tuple(kind for kind, _ in listed)
    if not kinds or kinds[0] not in (*_BACKBONES, STATIC):
        raise incompatible(
            f"modules.json begins with {kinds[0] if kinds else 'nothing'}, expected a Transformer or a {STATIC}"
        )
    folder_of_transformer = listed[0][1]
    # a static model has no transformer: its first module already returns one vector for each text
    is_static = kinds[0] == STATIC
    transformer = TransformerSettings() if is_static else read_transformer(folder_of_transformer)
    settings: dict[str, dict[str, Any]] = {}
    # layers of modules.json as (class name, feature that the layer changes, layer)
    steps: list[tuple[str, str, nn.Module]] = []
    pooled_at: int | None = 0 if is_static else None
    clustered_at: int | None = None
    pooling = ""
    token_pooling: TokenPooling | None = None
    for kind, place in listed[1:]:
        if kind not in FIELDS or kind in _BACKBONES or (is_static and kind in _OF_TOKENS):
            raise incompatible(f"modules.json lists a {kind}, which this adapter does not run")
        if kind in settings and kind not in ("Dense", "Normalize", "Dropout", "LayerNorm"):
            raise incompatible(f"modules.json lists {kind} twice")
        config = settings[kind] = _module_config(kind, place)
        if kind == "Pooling":
            with reading(place / "config.json"):
                pooling, pooled_at = _pooling(place, config), len(steps)
        elif kind == "Dense":
            with reading(place / "config.json"):
                default = _VECTOR if "Pooling" in kinds or is_static else _TOKENS
                steps.append((kind, _feature(kind, place, config, default), _dense(place, config)))
        elif kind == "LayerNorm":
            with reading(place / "config.json"):
                steps.append((kind, _VECTOR, _layer_norm(place, config)))
        elif kind == "HierarchicalTokenPooling":
            with reading(place / "config.json"):
                token_pooling, clustered_at = token_pooling_of(config), len(steps)
        elif kind == "MultiVectorMask" and clustered_at is not None:
            raise incompatible("modules.json lists a MultiVectorMask after the HierarchicalTokenPooling")
        elif kind == "Normalize":
            steps.append((kind, _feature(kind, place, config, _VECTOR), Normalization()))
        elif kind == "Dropout" and not (is_static or settings.keys() & {"Pooling", "SpladePooling"}):
            raise incompatible("modules.json has a Dropout without a Pooling before it")
        elif kind == "SpladePooling":
            _check_splade(config)
            if kinds[0] != "MLMTransformer" and transformer.task != "fill-mask":
                raise incompatible(
                    f"SpladePooling needs a Transformer of the task fill-mask, got {transformer.task or 'no task'}"
                )
        elif kind == "LogitScore" and config.get("module_input_name", "causal_logits") != "causal_logits":
            raise incompatible(f"LogitScore reads {config['module_input_name']}, expected causal_logits")
    model = read_json(folder / MODEL_FILE)
    _check_output(kinds, [kind for kind, _, _ in steps], transformer, model)
    _check_steps(steps, pooled_at, clustered_at)
    if (width := model.get("truncate_dim")) and pooled_at is not None:
        steps.append(("Truncation", _VECTOR, Truncation(width)))
    max_entries = model.get("max_active_dims") or 0
    normalizes = bool(steps) and steps[-1][0] == "Normalize" and pooled_at != len(steps)
    first = 0 if pooled_at is None else pooled_at
    modules = [module for _, _, module in steps]
    if clustered_at is not None:  # a Normalize module after the token pooling scales the pooled vectors
        normalizes = clustered_at < len(steps)
        layers = modules[:clustered_at]
    else:
        layers = modules[first : len(modules) - normalizes]
    return Modules(
        folder,
        folder_of_transformer,
        query_weights,
        query_folder,
        kinds,
        pooling,
        tuple(layers),
        tuple(modules[:first]),
        normalizes,
        max_entries,
        transformer,
        settings,
        token_pooling,
    )


def is_model2vec(folder: Path) -> bool:
    """Return whether the package model2vec saved the folder, and the folder has no modules.json."""
    config = read_json(folder / "config.json")
    is_named = config.get("model_type") == "model2vec" or "StaticModel" in (config.get("architectures") or ())
    return is_named and not (folder / "modules.json").is_file()


def _listed(folder: Path, entries: list[dict[str, str]]) -> list[tuple[str, Path]]:
    return [(_stock_kind(entry["type"]), _inside(folder, entry["path"])) for entry in entries]


def _inside(folder: Path, path: str) -> Path:
    """Return the folder of a module. Raises ModelLoadFailed if it is outside of the model folder."""
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise incompatible(f"the model names the module {path}, which is outside of its folder")
    return place


def _stock_kind(name: str) -> str:
    """Return the class name of a module of sentence-transformers or PyLate. Raise ModelLoadFailed for any other class,
    because a load would have to run code of the model's repository.
    """
    if not name.startswith(_STOCK):
        raise incompatible(
            f"modules.json lists {name}, which is no class of sentence-transformers or PyLate: it runs only if "
            "load.trust_remote_code is allowed and an adapter package of yours has a family for it"
        )
    return name.rpartition(".")[2]


def _module_config(kind: str, place: Path) -> dict[str, Any]:
    config = read_json(place / "config.json")
    if kind == "Pooling" and not config:
        raise load_failed(
            "NOT_FOUND", f"modules.json lists {place.name}, which has no config.json: copy that folder too"
        )
    fields = FIELDS[kind] | (POOLING_NAMES.keys() if kind == "Pooling" else frozenset())
    if unknown := sorted(config.keys() - fields):
        raise incompatible(f"{place.name}/config.json has the setting {unknown[0]}, which this adapter does not read")
    return config


def _feature(kind: str, place: Path, config: Mapping[str, Any], default: str) -> str:
    """Return the name of the feature (for example sentence_embedding) that a Dense or a Normalize module changes."""
    name = config.get("module_input_name") or default
    result = config.get("module_output_name") or name
    if name not in (_TOKENS, _VECTOR) or result != name:
        raise incompatible(f"{place.name}: a {kind} maps {name} to {result}, expected {_TOKENS} or {_VECTOR} for both")
    return str(name)


def _check_output(
    kinds: tuple[str, ...], layers: list[str], transformer: TransformerSettings, model: Mapping[str, Any]
) -> None:
    """Refuse modules and settings of more than one kind of model (dense, sparse, late interaction, LogitScore)."""
    poolers = [kind for kind in kinds if kind in _POOLERS]
    late = [kind for kind in kinds if kind in _LATE]
    if len(poolers) > 1 or (poolers and late):
        raise incompatible(f"modules.json lists {', '.join([*poolers, *late])}: no family runs these modules together")
    if layers and poolers and poolers != ["Pooling"]:
        raise incompatible(f"modules.json lists a {layers[0]} beside the {poolers[0]}, which this adapter does not run")
    if poolers and (lengths := [name for name in _LATE_LENGTHS if transformer.raw.get(name)]):
        raise incompatible(f"{transformer.file} has {lengths[0]}, which is read only in models of late interaction")
    if model.get("max_active_dims") and "SpladePooling" not in kinds:
        raise incompatible(f"{MODEL_FILE} has max_active_dims, and modules.json lists no SpladePooling")


def _check_steps(steps: list[tuple[str, str, nn.Module]], pooled_at: int | None, clustered_at: int | None) -> None:
    """Refuse modules other than Normalize after a HierarchicalTokenPooling. Refuse a layer for token states after the
    Pooling, and a layer for text vectors before the Pooling: sentence-transformers fails on such a layer, or the layer
    has no effect.
    """
    if clustered_at is not None and (
        pooled_at is not None or any(kind != "Normalize" for kind, _, _ in steps[clustered_at:])
    ):
        raise incompatible("modules.json has another module than Normalize after the HierarchicalTokenPooling")
    if pooled_at is None:
        if unfit := [kind for kind, feature, _ in steps if feature == _VECTOR]:
            raise incompatible(f"modules.json has a {unfit[0]} that changes {_VECTOR} without a Pooling before it")
        return
    for number, (kind, feature, _) in enumerate(steps):
        if feature != (_TOKENS if number < pooled_at else _VECTOR):
            side = "before" if number < pooled_at else "after"
            raise incompatible(
                f"modules.json has a {kind} {side} the Pooling; it changes {feature}, which has no effect on vectors"
            )


def read_transformer(folder: Path) -> TransformerSettings:
    """Return the settings of the Transformer module in `folder`. Ignore settings that change only speed or precision.
    Raises ModelLoadFailed INCOMPATIBLE for any other setting that this adapter does not support.
    """
    name, raw = next(((name, raw) for name in TRANSFORMER_FILES if (raw := read_json(folder / name))), ("", {}))
    if unknown := sorted(raw.keys() - FIELDS["Transformer"]):
        raise incompatible(f"{name} has the setting {unknown[0]}, which this adapter does not read")
    arguments = {
        kind: {**(raw.get(older) or {}), **(raw.get(kind) or {})}
        for kind, older in (
            ("model_kwargs", "model_args"),
            ("processor_kwargs", "tokenizer_args"),
            ("config_kwargs", "config_args"),
        )
    }
    for kind, allowed in (("model_kwargs", _PLACING | _NOT_READ), ("config_kwargs", _NOT_READ)):
        if unread := sorted(arguments[kind].keys() - allowed):
            raise incompatible(f"{name}: {kind} has {unread[0]}, which this adapter does not pass on")
    processing = raw.get("processing_kwargs") or {}
    if kinds := ", ".join(sorted(kind for kind, options in processing.items() if options and kind != "chat_template")):
        raise incompatible(f"{name} has processing_kwargs of {kinds}, which this adapter does not pass on")
    if raw.get("tokenizer_name_or_path"):
        raise incompatible(f"{name} names the tokenizer of another repository: {raw['tokenizer_name_or_path']}")
    task = raw.get("transformer_task") or ("feature-extraction" if raw else "")
    tokenizer = {key: value for key, value in arguments["processor_kwargs"].items() if key not in _NOT_READ}
    limit = tokenizer.pop("model_max_length", None) or raw.get("max_seq_length") or 0
    return TransformerSettings(
        file=name,
        task=task,
        max_tokens=int(limit),
        lowercases=bool(raw.get("do_lower_case")),
        tokenizer=tokenizer,
        messages=_reads_messages(name, task, raw),
        chat_options=processing.get("chat_template") or {},
        raw=raw,
    )


def _reads_messages(name: str, task: str, raw: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer inserts texts into its chat template; False without modality_config. Raises
    ModelLoadFailed INCOMPATIBLE if the model has a modality_config, and its task or its output is not supported.
    """
    config = raw.get("modality_config")
    if not config:
        return False
    if task not in _OUTPUTS:
        raise incompatible(f"{name}: transformer_task is {task}, expected one of {', '.join(_OUTPUTS)}")
    output, feature = _OUTPUTS[task]
    text = config.get("message") or config.get("text")
    if text is None or (text.get("method"), text.get("method_output_name")) != ("forward", output):
        raise incompatible(f"{name}: for texts, modality_config must name the method forward and its output {output}")
    if raw.get("module_output_name", feature) != feature:
        raise incompatible(f"{name}: module_output_name is {raw['module_output_name']}, expected {feature}")
    return "message" in config


def _routes(folder: Path) -> tuple[list[tuple[str, Path]], Path]:
    """Return the modules for documents, and the folder with the token weights for queries. Accept only a Router with a
    SparseStaticEmbedding for queries, and with a masked LM and a SpladePooling for documents.
    """
    router = read_json(folder / "router_config.json")
    kinds = {module: _stock_kind(name) for module, name in router.get("types", {}).items()}
    structure = router.get("structure", {})
    routes = {route: [kinds[module] for module in modules] for route, modules in structure.items()}
    documents = routes.get("document") or [""]
    expected = {"query": ["SparseStaticEmbedding"], "document": [documents[0], "SpladePooling"]}
    if routes != expected or documents[0] not in _BACKBONES or router.get("parameters", {}).get("route_mappings"):
        listed = "; ".join(f"{route}: {', '.join(names)}" for route, names in routes.items())
        raise incompatible(
            f"modules.json lists a Router of {listed}; expected query: SparseStaticEmbedding; document: a masked LM, "
            "SpladePooling",
        )
    query_folder = _inside(folder, structure["query"][0])
    return [(kinds[module], _inside(folder, module)) for module in structure["document"]], query_folder


def _pooling(place: Path, config: Mapping[str, Any]) -> str:
    pooling = pooling_name(config)
    if poolings(pooling) is None:
        raise incompatible(
            f"{place.name}/config.json: the pooling of the model is {pooling}, expected one of {', '.join(POOLINGS)}, "
            f"or at most {MAX_POOLINGS} of them joined"
        )
    if config.get("include_prompt") is False:
        raise incompatible(
            f"{place.name}/config.json: the pooling leaves out the prompt (include_prompt), which is not supported"
        )
    return pooling


def _layer_norm(folder: Path, config: Mapping[str, Any]) -> nn.LayerNorm:
    weight, bias = tensor(folder, "norm.weight"), tensor(folder, "norm.bias")
    if weight is None or bias is None or not weight.shape == bias.shape == (config.get("dimension"),):
        raise incompatible(f"{folder.name}: its weights are missing or do not have the shape in its config.json")
    layer = nn.LayerNorm(len(weight))
    layer.load_state_dict({"weight": weight.float(), "bias": bias.float()})
    return layer.requires_grad_(False)


def _check_splade(config: Mapping[str, Any]) -> None:
    if (strategy := config.get("pooling_strategy", "max")) not in ("max", "sum"):
        raise incompatible(f"SpladePooling has the strategy {strategy}, expected max or sum")
    if (activation := config.get("activation_function", "relu")) not in ("relu", "log1p_relu"):
        raise incompatible(f"SpladePooling has the activation {activation}, expected relu or log1p_relu")


def _dense(folder: Path, config: Mapping[str, Any]) -> Projection:
    # Tanh is the default of sentence-transformers' Dense
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.") or name not in _ACTIVATIONS:
        raise incompatible(
            f"{folder.name}/config.json: a Dense has the activation {activation}, expected one of "
            f"{', '.join(_ACTIVATIONS)} of torch"
        )
    weight, bias = tensor(folder, "linear.weight"), tensor(folder, "linear.bias")
    shape = (config.get("out_features"), config.get("in_features"))
    if weight is None and (folder / "pytorch_model.bin").is_file():
        raise incompatible(f"{folder.name} has pytorch_model.bin and no model.safetensors: {conversion(folder)}")
    if weight is None or tuple(weight.shape) != shape or (bias is None) == bool(config.get("bias", True)):
        raise incompatible(f"{folder.name}: its weights are missing or do not have the shape in its config.json")
    adds_input = bool(config.get("use_residual"))
    residual = tensor(folder, "residual.weight") if adds_input and shape[0] != shape[1] else None
    if adds_input and shape[0] != shape[1] and (residual is None or tuple(residual.shape) != shape):
        raise incompatible(
            f"{folder.name}: its residual weights are missing or do not have the shape of its other weights"
        )
    return Projection(
        linear(weight, bias),
        _ACTIVATIONS[name](),
        None if residual is None else linear(residual),
        adds_input=adds_input and residual is None,
    )


def conversion(folder: Path) -> str:
    """Return the command that converts pickled weights to safetensors without running code of the pickle."""
    return (
        'convert it with python -c "import torch; from safetensors.torch import save_file; '
        "w = torch.load('pytorch_model.bin', map_location='cpu', weights_only=True); "
        "save_file({n: t.clone().contiguous() for n, t in w.items()}, 'model.safetensors', {'format': 'pt'})\" "
        f"in {folder}"
    )
