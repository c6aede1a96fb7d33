"""Inspection of a model folder: builds a catalogue entry from the files. The inspection checks the weight files, and
compares weights and tokenizer with the entry, but loads no model.

    files of the folder ──► family ──► outputs, limits, head, prompts ──► Inspection: entry, findings, assumptions

The entry has the digests of all files that influence results, so a later load refuses changed files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.quantizers import AutoHfQuantizer

from sie_adapter.families.static_embedding import MAX_TOKENS, read_table
from sie_adapter.families.text_model import check_pair_prompt, stored_activation
from sie_adapter.loading.chat_pairs import pair_pieces
from sie_adapter.loading.checkpoint import ENCODERS, construction, stored_rows
from sie_adapter.loading.comparison import compare_files, quiet
from sie_adapter.loading.described import described
from sie_adapter.loading.late_interaction import late_interaction
from sie_adapter.loading.modules import STATIC, Modules, conversion, is_model2vec, read_modules, states_width
from sie_adapter.loading.tokenizer import UNLIMITED, read_tokenizer, tokenizer_limit
from sie_contracts.models import families
from sie_contracts.models.entries import HeadOptions, ModelEntry, parse_entry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_store.entry_faults import MODEL_FILE, positions, truncates_start
from sie_store.folder_files import line_of, read_json, read_value, reading, stated_licence
from sie_store.weights import derived
from sie_store.weights.manifest import MANIFEST
from sie_store.weights.selection import FILES, PICKLED

# files that influence results: all files that a load downloads, except the model card
_DECIDING = tuple(pattern for pattern in FILES if pattern != "README.md")
# names that packages for entity extraction give to the subfolders with parts of a model
_PARTS_OF_PACKAGES = ("encoder_config", "encoder", "tokenizer")
_PARTS = ("text_config", "vlm_config")  # sections of config.json that may have their own dtype
# model_type prefixes of models whose states overflow in float16: Gemma (source: model card of EmbeddingGemma), and T5,
# which was trained in bfloat16. Rows of families have more.
_OVERFLOWING = ("gemma", *ENCODERS)
_INSTRUCTION = re.compile(r"(Instruct: )([^{}]+)(\nQuery: ?)")
# fields of config.json that only models with encoder and decoder have, such as T5
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_ENTAILS, _OPPOSES = ("entail",), ("contra", "not_entail")


@dataclass
class Inspection:
    """Result of an inspection. `entry`: the input of `parse_entry`. `findings`: facts, each with the name of its file.
    `assumed`: choices that no file states, and checks that were not possible.
    """

    entry: dict[str, Any]
    findings: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


def inspect(folder: Path, model: str, weights: Mapping[str, Any], current: ModelEntry | None = None) -> Inspection:
    """Return the entry of `model`, whose files are in `folder`. `weights`: the field weights of the entry.

    `current`: a catalogue entry for the same model. The new entry has the options of `current`, but new weights,
    digests, licence (if the model card has one) and, for files from the hub, download size. Raises ModelLoadFailed:
    NOT_FOUND for a folder without config.json, weights or tokenizer; INCOMPATIBLE for a model that no family here runs,
    for files that cannot be read, and for weights that are truncated, contain NaN or lack tensors; CERTIFICATE for a
    tokenizer that lacks tokens or does not fit the weights, and for static embeddings with another width than
    outputs.dense of `current`.
    """
    if not folder.is_dir():
        raise load_failed("NOT_FOUND", f"there is no folder {folder}")
    report = Inspection({"id": model, "description": "", "weights": dict(weights)})
    if current is not None:
        report.entry |= _choices(current, weights)
        report.findings.append(f"the catalogue has {current.id}: the new entry keeps its options, but not its weights")
    else:
        with reading(folder), quiet():
            _describe(folder, report)
    with reading(folder):
        report.assumed += compare_files(folder, parse_entry(report.entry))
    report.entry["weights"]["digests"] = digests(folder)
    # a folder from the hub has only the downloaded files and their manifest, so its size is the size of the download
    if "hub" in weights:
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
        report.entry["download_bytes"] = sum(path.stat().st_size for path in files)
    if licence := stated_licence(folder):
        report.entry["license"] = licence
    return report


def _describe(folder: Path, report: Inspection) -> None:
    raw = read_json(folder / "config.json")
    description = described(folder, raw)
    if is_model2vec(folder) or _begins_with_a_table(folder):
        _static(folder, report)
    elif description is not None:
        report.entry.update(description.entry)
        report.findings.extend(description.findings)
        report.assumed.extend(description.assumed)
    else:
        _transformer(folder, report)
    if reason := _needs_bfloat16(raw):
        report.entry.setdefault("load", {})["precision"] = "bfloat16"
        report.findings.append(f"precision bfloat16: {reason}")


def _needs_bfloat16(raw: Mapping[str, Any]) -> str:
    """Return the reason why a GPU should not use its default, float16, for this model; empty if there is none."""
    kinds = (*_OVERFLOWING, *(kind for row in families.rows().values() for kind in row.overflowing))
    if str(raw.get("model_type")).startswith(kinds):
        return f"states of {'Gemma' if raw['model_type'] not in ENCODERS else 'T5'} are too large for float16"
    parts = [raw, *(raw[name] for name in _PARTS if isinstance(raw.get(name), dict))]
    stored = {part.get("dtype") or part.get("torch_dtype") for part in parts}
    return "config.json says that its weights are stored in bfloat16" if "bfloat16" in stored else ""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256, in hex, of every file that influences results, by its path below `folder`."""
    places = [
        folder,
        *(folder / name for name in _PARTS_OF_PACKAGES),
        *(place for place in _module_folders(folder) if place != folder),
    ]
    patterns = (*_DECIDING, *(() if any(folder.glob("*.safetensors")) else (PICKLED,)))
    files = sorted({path for place in places for pattern in patterns for path in place.glob(pattern)})
    digests = {}
    for path in files:
        with reading(path):
            digests[path.relative_to(folder).as_posix()] = derived.digest(path)
    return digests


def _module_folders(folder: Path) -> list[Path]:
    names = [module["path"] for module in read_value(folder / "modules.json") or ()]
    names += read_json(folder / "router_config.json").get("types", {})
    return [folder / name for name in names if (folder / name).is_dir()]


def _choices(current: ModelEntry, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `current` without id and weights. Leave out the golden vectors if `weights` has another
    revision, because golden vectors are outputs of one revision.
    """
    fields: dict[str, Any] = msgspec.to_builtins(current)
    dropped = {"id", "weights", *(("golden",) if weights.get("revision") != current.weights.revision else ())}
    return {name: value for name, value in fields.items() if name not in dropped}


def _begins_with_a_table(folder: Path) -> bool:
    modules = read_value(folder / "modules.json")
    return bool(modules) and modules[0]["type"].rpartition(".")[2] == STATIC


def _static(folder: Path, report: Inspection) -> None:
    modules = read_modules(folder)
    width = modules.width(read_table(modules.folder).shape[1])
    kinds = f"modules.json lists {', '.join(modules.kinds)}" if modules.kinds else "model2vec, says config.json"
    report.findings.append(f"family static-embedding: {kinds}")
    report.findings.append(f"dense, {width} wide, {'normalised' if modules.normalizes else 'not normalised'}")
    report.entry |= {
        "description": "Static embeddings: the mean of stored vectors of tokens.",
        "family": "static-embedding",
        "outputs": {"dense": width},
        "max_tokens": MAX_TOKENS,
        "run": {"normalize": modules.normalizes},
    }
    if not modules.kinds and (limit := read_json(folder / "config.json").get("max_length", 512)) is not None:
        report.entry["max_tokens"] = int(limit)
        report.findings.append(f"max_tokens {limit}: max_length in config.json; without it, the default of model2vec")
    _prompts(folder, report)


def _transformer(folder: Path, report: Inspection) -> None:
    _refuse_other_folders(folder)
    modules = read_modules(folder)
    if (modules.folder / "adapter_config.json").is_file():
        raise incompatible(
            f"{modules.folder} has adapter_config.json beside config.json, and a load would ignore that LoRA: merge it "
            "into the weights, or move it to a folder that run.lora of a profile names",
        )
    with reading(modules.folder / "config.json"):
        config = _config(modules.folder)
        backbone = _empty_backbone(config)
    named = next(iter(config.architectures or ()), "")
    report.findings.append(f"architecture {named or config.model_type}: config.json")
    entry = report.entry
    entry["family"] = family = _family(config, modules, named)
    report.findings.append(
        f"family {family}: {'modules.json lists ' + ', '.join(modules.kinds) if modules.kinds else 'its architecture'}"
    )
    if family == "text-classifier":
        labels = ", ".join(str(label) for label in list(config.id2label.values())[:6])
        report.findings.append(f"{config.num_labels} classes, {labels}: config.json")
        report.assumed.append(
            "reads single texts: to score pairs by two labels, set family cross-encoder and head.activation softmax"
        )
    entry["outputs"] = (
        _outputs(folder, config, modules, backbone, report) if family == "text-encoder" else {_OUTPUT[family]: 0}
    )
    entry["description"] = f"{named or config.model_type}: {', '.join(entry['outputs'])}. Found by inspection."
    entry["max_tokens"] = _max_tokens(modules, config, report)
    _chat_pair(folder, modules, entry, report)
    if head := _head(folder, config, modules, entry, report):
        entry["head"] = head
    if load := _load(config, modules, report):
        entry["load"] = load
    if "dense" in entry["outputs"]:
        _pooling(modules, report, is_masked=named.endswith("ForMaskedLM"))
    # In a folder of sentence-transformers, a Normalize module says that token vectors are normalised. In older formats,
    # token vectors are always normalised.
    if "multivector" in entry["outputs"] and _is_of_rows(folder, modules):
        entry["run"] = {"normalize": modules.normalizes}
        report.findings.append(
            f"token vectors {'normalised' if modules.normalizes else 'as the modules return them'}: modules.json"
        )
    if family == "text-encoder":
        _prompts(folder, report)
    if truncates_start(modules.folder):
        entry.setdefault("run", {})["truncate"] = "START"
        report.findings.append("long texts lose their beginning: truncation_side of the tokenizer")


_OUTPUT = {
    "cross-encoder": "score",
    "decoder-reranker": "score",
    "zero-shot-classifier": "classifications",
    "text-classifier": "classifications",
    "token-classifier": "entities",
}


def _refuse_other_folders(folder: Path) -> None:
    present = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(present[:6]) + (", .." if len(present) > 6 else "") if present else "nothing"
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path", "another model")
        raise incompatible(f"{folder} is a LoRA of {base}: name it as run.lora of a profile of that model")
    if not ((folder / "config.json").is_file() or (folder / "modules.json").is_file()):
        raise load_failed(
            "NOT_FOUND", f"{folder} has no config.json, no modules.json and no file of a package; it has {listed}"
        )
    if not any(folder.rglob("*.safetensors")):
        pickled = next(iter(sorted(folder.rglob("pytorch_model.bin"))), None)
        remedy = f": {conversion(pickled.parent)}" if pickled is not None else f"; it has {listed}"
        raise load_failed("NOT_FOUND", f"{folder} has no *.safetensors{remedy}")


def _config(folder: Path) -> PretrainedConfig:
    raw = read_json(folder / "config.json")
    if not raw:
        raise load_failed(
            "NOT_FOUND",
            f"{folder} has no config.json, which a transformer needs. If the transformer is in another folder, "
            "name that folder in modules.json",
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        where = (
            f"; its code is remote: {', '.join(sorted(set(raw['auto_map'].values())))}" if raw.get("auto_map") else ""
        )
        message = (
            f"transformers has no class for model_type {raw.get('model_type')!r} of {folder / 'config.json'}{where}"
        )
        raise incompatible(message) from error
    has_decoder = getattr(config, "is_encoder_decoder", False) or any(hasattr(config, name) for name in _DECODER_LAYERS)
    if has_decoder and config.model_type not in ENCODERS:
        raise incompatible(f"{config.model_type} is an encoder-decoder model, which no family here runs")
    _check_quantisation(config)
    if getattr(config, "vision_config", None) is not None:
        raise incompatible(f"{config.model_type} reads images, and no family here runs it")
    return config


def _check_quantisation(config: PretrainedConfig) -> None:
    if (quantised := getattr(config, "quantization_config", None)) is None:
        return
    try:
        quantizer = AutoHfQuantizer.from_config(quantised, pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except Exception as error:  # transformers documents no exception for a missing package or device
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise incompatible(f"its weights are quantised by {method}, which cannot run here: {error}") from error


def _empty_backbone(config: PretrainedConfig) -> Any:
    """Return the backbone on the device `meta`, without weights, to read the sizes of its tables."""
    try:
        with construction(), torch.device("meta"):
            if config.model_type in ENCODERS:
                return getattr(transformers, ENCODERS[config.model_type])(config)
            return AutoModel.from_config(config)
    except ValueError as error:
        raise incompatible(
            f"config.json: transformers has no headless model for model_type {config.model_type!r}: {line_of(error)}"
        ) from error


def _family(config: PretrainedConfig, modules: Modules, named: str) -> str:
    if "LogitScore" in modules.kinds:
        return "decoder-reranker"
    if named.endswith("ForTokenClassification"):
        return "token-classifier"
    if named.endswith("ForSequenceClassification"):
        labels = [str(label).lower() for label in (config.id2label or {}).values()]
        if all(any(label.startswith(start) for label in labels) for start in (_ENTAILS, _OPPOSES)):
            return "zero-shot-classifier"
        return "cross-encoder" if config.num_labels == 1 else "text-classifier"
    if named.endswith("ForCausalLM") and not modules.kinds:
        message = f"{named} without modules.json is a language model, and no file says how it makes vectors"
        raise incompatible(
            f"{message}; a decoder that scores needs an entry with pair, head.yes_token and head.no_token"
        )
    return "text-encoder"


def _outputs(
    folder: Path, config: PretrainedConfig, modules: Modules, backbone: Any, report: Inspection
) -> dict[str, int]:
    vocabulary = backbone.get_input_embeddings().num_embeddings
    if (folder / "sparse_linear.pt").is_file() and (folder / "colbert_linear.pt").is_file():
        with reading(folder / "colbert_linear.pt"):
            rows = torch.load(folder / "colbert_linear.pt", map_location="meta", weights_only=True)["weight"].shape[0]
        report.findings.append("one pass computes dense, sparse and multivector: sparse_linear.pt, colbert_linear.pt")
        width = modules.width(states_width(config))
        return {"dense": width, "sparse": vocabulary, "multivector": rows, "score": 0}
    if "SpladePooling" in modules.kinds or (folder / "idf.json").is_file():
        report.findings.append(
            f"sparse, {vocabulary} ids: {'SpladePooling' if 'SpladePooling' in modules.kinds else 'idf.json'}"
        )
        return {"sparse": vocabulary}
    if not modules.kinds and (width := stored_rows(modules.folder, "linear.weight")):
        report.findings.append(f"multivector, {width} wide: linear.weight beside the transformer (Stanford's format)")
        return {"multivector": width}
    if "Pooling" not in modules.kinds and ("Dense" in modules.kinds or _is_of_rows(folder, modules)):
        width = modules.width(states_width(config))
        report.findings.append(f"multivector, {width} wide: modules.json has no Pooling")
        return {"multivector": width}
    if modules.kinds and "Pooling" not in modules.kinds:
        raise incompatible("modules.json lists no Pooling, so no file says how tokens become one vector")
    width = modules.width(states_width(config))
    report.findings.append(
        f"dense, {width} wide: {'its layers' if modules.layers or modules.token_layers else 'config.json'}"
    )
    return {"dense": width}


def _is_of_rows(folder: Path, modules: Modules) -> bool:
    """Return whether sentence-transformers saved the folder as a model of late interaction."""
    return read_json(folder / MODEL_FILE).get("model_type") == "MultiVectorEncoder" or bool(
        {"MultiVectorMask", "HierarchicalTokenPooling"} & set(modules.kinds)
    )


def _max_tokens(modules: Modules, config: PretrainedConfig, report: Inspection) -> int:
    names = ("model_type", "max_position_embeddings", "pad_token_id", "position_embedding_type")
    # getattr also finds a length that the configuration class stores under another name
    stored = {name: getattr(config, name, None) for name in names}
    limits: dict[str, int | None] = {"max_position_embeddings of config.json": positions(stored)}
    if modules.transformer.max_tokens:  # this limit replaces the tokenizer's limit, even if the tokenizer's is lower
        limits[f"max_seq_length or model_max_length of {modules.transformer.file}"] = modules.transformer.max_tokens
    else:
        limits["model_max_length of tokenizer_config.json"] = tokenizer_limit(modules.folder)
    bounds = {name: limit for name, limit in limits.items() if limit and limit < UNLIMITED}
    if not bounds:
        report.assumed.append("max_tokens is 512: no file has a limit")
        return 512
    name = min(bounds, key=bounds.__getitem__)
    report.findings.append(
        f"max_tokens {bounds[name]}: {name}, the least of {', '.join(str(limit) for limit in bounds.values())}"
    )
    return int(bounds[name])


def _head(
    folder: Path, config: PretrainedConfig, modules: Modules, entry: dict[str, Any], report: Inspection
) -> dict[str, Any]:
    if entry["family"] == "cross-encoder":
        if "pair" not in entry:
            check_pair_prompt(folder)
        activation = stored_activation(folder, config)
        report.findings.append(f"activation {activation}: as sentence-transformers decides")
        return {"activation": activation}
    if entry["family"] == "decoder-reranker":
        return _answer_head(folder, config, modules)
    if "sparse" in entry["outputs"] and "multivector" not in entry["outputs"]:
        twice = modules.settings.get("SpladePooling", {}).get("activation_function") == "log1p_relu"
        head: dict[str, Any] = {"sparse_activation": "log1p_log1p_relu" if twice else "log1p_relu"}
        if modules.query_weights is not None or (folder / "idf.json").is_file():
            report.findings.append(
                "queries need no forward pass, their tokens have stored weights: "
                + ("router_config.json" if modules.query_weights is not None else "idf.json")
            )
            head["query_encoder"] = "idf"
        return head
    return _late_head(modules, report) if set(entry["outputs"]) == {"multivector"} else {}


def _chat_pair(folder: Path, modules: Modules, entry: dict[str, Any], report: Inspection) -> None:
    """Set `pair` in the entry of a reranker that reads query and document in a chat template. Raise ModelLoadFailed
    for a model of another family that needs a chat template.
    """
    tokenizer = read_tokenizer(modules.folder, **modules.transformer.tokenizer)
    # without modules.json, sentence-transformers inserts the texts of a cross-encoder into its chat template
    is_bare = not modules.kinds and entry["family"] == "cross-encoder"
    if not (modules.transformer.messages or is_bare) or not getattr(tokenizer, "chat_template", None):
        return
    if entry["family"] not in ("cross-encoder", "decoder-reranker"):
        raise incompatible(f"its texts need a chat template, which family {entry['family']} does not use")
    model = read_json(folder / MODEL_FILE)
    instruction = (model.get("prompts") or {}).get(model.get("default_prompt_name")) or ""
    entry["pair"] = list(pair_pieces(tokenizer, modules.transformer.chat_options, instructed=bool(instruction)))
    if instruction:
        entry["prompts"] = {"default_instruction": instruction}
    report.findings.append("a query and a document become one text by the chat template of the folder")


def _answer_head(folder: Path, config: PretrainedConfig, modules: Modules) -> dict[str, Any]:
    """Return the head options of a LogitScore module: answer tokens, and how their logits become the score."""
    tokenizer = read_tokenizer(modules.folder, **modules.transformer.tokenizer)
    ids = modules.settings["LogitScore"]
    if ids.get("true_token_id") is None:
        raise incompatible("the config.json of the module LogitScore has no true_token_id")
    activation = stored_activation(folder, config)
    if ids.get("false_token_id") is None:
        yes = tokenizer.convert_ids_to_tokens(ids["true_token_id"])
        return {"yes_token": yes, "score": "sigmoid" if activation == "sigmoid" else "logit"}
    yes, no = tokenizer.convert_ids_to_tokens([ids["true_token_id"], ids["false_token_id"]])
    return {"yes_token": yes, "no_token": no, "score": "probability" if activation == "sigmoid" else "difference"}


def _late_head(modules: Modules, report: Inspection) -> dict[str, Any]:
    """Return the late-interaction options of the model's files as fields of an entry. Return an empty map if an entry
    has no fields for some of the options: a load then reads all options from the files.
    """
    is_stanford = not modules.kinds
    own = late_interaction(modules, HeadOptions(), is_stanford=is_stanford)
    markers = [repr(marker) if marker else "none" for marker in (own.query_marker, own.document_marker)]
    filled = f"queries padded to {own.expanded} tokens" if own.expanded else "queries not padded"
    report.findings.append(f"markers {markers[0]} of queries, {markers[1]} of documents; {filled}")
    head: dict[str, Any] = {
        "query_marker": own.query_marker or None,
        "document_marker": own.document_marker or None,
        "query_length": own.query_length or own.expanded or None,
        "document_length": own.document_length or None,
        "query_expansion": bool(own.expanded),
        "attend_expansion": own.attends,
        "skip_punctuation": bool(own.skipped),
    }
    head = {name: value for name, value in head.items() if value is not None}
    written = late_interaction(modules, HeadOptions(**head), is_stanford=is_stanford)
    length = head.get("query_length", 0)
    query_length = written.query_length or written.expanded
    if (written.skipped, written.expanded, query_length) == (own.skipped, own.expanded, length):
        return head
    report.findings.append(
        "an entry cannot express the lengths, expansion and skipped words, so a load reads them from the model's files"
    )
    return {}


def _load(config: PretrainedConfig, modules: Modules, report: Inspection) -> dict[str, Any]:
    raw = read_json(modules.folder / "config.json")
    load: dict[str, Any] = {}
    if raw.get("is_causal") is False:
        load["causal"] = False
        report.findings.append("attention in both directions: is_causal of config.json")
    if read_json(modules.folder / "tokenizer_config.json").get("add_eos_token") is True:
        load["append_eos"] = True
        report.findings.append("texts end with the end token: add_eos_token of tokenizer_config.json")
    if raw.get("auto_map"):
        report.assumed.append(
            f"the code in the model's repository is not run: transformers has its own class for {config.model_type}"
        )
    return load


def _pooling(modules: Modules, report: Inspection, *, is_masked: bool) -> None:
    pooling = modules.pooling or "mean"
    if modules.pooling:
        report.findings.append(
            f"pooling {pooling}, {'normalised' if modules.normalizes else 'not normalised'}: modules.json"
        )
    else:
        report.assumed.append("pooling mean, normalised: no modules.json says how tokens become one vector")
        if is_masked:
            report.assumed.append(
                "no sparse output: for a SPLADE model without modules.json, set outputs.sparse to its vocabulary's size"
            )
    report.entry["run"] = {"pooling": pooling, "normalize": modules.normalizes or not modules.pooling}


def _prompts(folder: Path, report: Inspection) -> None:
    model = read_json(folder / MODEL_FILE)
    stored = model.get("prompts") or {}
    default = model.get("default_prompt_name")
    if default is not None and default not in stored:
        raise incompatible(f"{MODEL_FILE}: default_prompt_name is {default!r}, but prompts has no such name")
    prompts = {}
    for side, prompt in stored.items():
        if not prompt:
            continue
        if side == "default_instruction" or "{text}" in prompt or "{instruction}" in prompt:
            raise incompatible(f"{MODEL_FILE}: the prompt {side} is {prompt!r}, which would be read as a template")
        prompts[side] = f"{prompt}{{text}}"
        if side in ("query", "document") and (taught := _INSTRUCTION.fullmatch(prompt)):
            prompts[side] = f"{taught[1]}{{instruction}}{taught[3]}{{text}}"
            prompts["default_instruction"] = taught[2]
    if prompts:
        report.entry["prompts"] = prompts
        names = ", ".join(name for name in prompts if name != "default_instruction")
        report.findings.append(f"prompts {names}: config_sentence_transformers.json")
    if stored.get(default):
        report.entry["default_prompt_name"] = default
    unused = [name for name in (default, "passage", "corpus") if stored.get(name) and name not in ("query", "document")]
    if unused and not stored.get("document"):
        report.assumed.append(
            f"documents get no prompt, as in encode_document of sentence-transformers: {unused[0]} applies to "
            f"a document only if a request names it as prompt_name, or the entry has it as prompts.document"
        )
