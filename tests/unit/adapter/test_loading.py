"""Loads and their refusals, and the properties of a loaded encoder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from text_rows import panicking
from tokenizers import Tokenizer, processors
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from unit.adapter import toys
from unit.adapter.states import states_one_by_one, states_packed
from unit.adapter.test_batch import message

from sie_adapter.engine.engine import BatchRun
from sie_adapter.loading.checkpoint import load_model
from sie_adapter.loading.loading import Loader
from sie_adapter.loading.modules import read_modules
from sie_adapter.loading.tokenizer import fault, load_tokenizer
from sie_adapter.packed.linear import block_linears
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import LoadOptions
from sie_contracts.settings import Settings
from sie_store.weights.sources import WeightSources


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save(tmp_path_factory.mktemp("models") / "toy", "bert")


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def resolved(folder: Path, **changes: Any) -> Resolved:
    return Catalogue.resolve_profile(toys.entry(folder, **changes), "default", "m")


def load_error(entry: Resolved) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as raised:
        Loader(
            torch.device("cpu"), WeightSources(Path("/nowhere"), False), Settings(default_compute_precision="float32")
        ).load(entry)
    return raised.value


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_the_architecture_fail_the_load(change: str, bert: Path, tmp_path: Path) -> None:
    """No weight is ever freshly initialised."""
    folder = copied(bert, tmp_path / "toy")
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.attention.self.query.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["head.weight"] = torch.zeros(2, 2)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    error = load_error(resolved(folder))
    assert error.extras["error_class"] == "INCOMPATIBLE"
    assert "query" in error.message or "head.weight" in error.message


def test_pickled_weights_are_not_read(bert: Path, tmp_path: Path) -> None:
    folder = copied(bert, tmp_path / "toy")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_error(resolved(folder)).extras["error_class"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_tokens": 301}, "300 positions"),
        ({"outputs": {"dense": 64}}, "32 wide"),
        ({"family": "ner"}, "no family ner"),
    ],
)
def test_an_entry_that_does_not_fit_the_model_fails_the_load(changes: dict[str, Any], text: str, bert: Path) -> None:
    error = load_error(resolved(bert, **changes))
    assert error.extras["error_class"] == "INCOMPATIBLE"
    assert text in error.message


# weights


def model_of(folder: Path, auto: Any = AutoModel, *, consumed: tuple[str, ...] = (), **options: Any) -> PreTrainedModel:
    return load_model(auto, folder, LoadOptions(**options), toys.compute(), consumed)


def without(folder: Path, target: Path, *names: str, **added: torch.Tensor) -> Path:
    """Return a copy of the model without the named tensors and with the added ones."""
    duplicate = copied(folder, target)
    tensors = load_file(duplicate / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name not in names}
    assert len(rest) == len(tensors) - len(names)
    save_file({**rest, **added}, duplicate / "model.safetensors", {"format": "pt"})
    return duplicate


@pytest.mark.parametrize(
    ("kind", "auto", "dropped"),
    [
        ("bert", AutoModelForSequenceClassification, "classifier.weight"),
        ("bert", AutoModelForMaskedLM, "cls.predictions.transform.LayerNorm.bias"),
        ("qwen3", AutoModelForCausalLM, "model.norm.weight"),
    ],
)
def test_a_head_that_lacks_a_tensor_fails_the_load(kind: str, auto: Any, dropped: str, tmp_path: Path) -> None:
    """A head with random weights would answer without an error."""
    folder = toys.save(tmp_path / "toy", kind, auto=auto)
    model_of(folder, auto)
    with pytest.raises(ModelLoadFailed, match=re.escape(dropped)) as raised:
        model_of(without(folder, tmp_path / "less", dropped), auto)
    assert raised.value.extras["error_class"] == "INCOMPATIBLE"


@pytest.mark.parametrize(
    ("kind", "auto"),
    [("bert", AutoModelForMaskedLM), ("electra", AutoModelForPreTraining), ("qwen2", AutoModelForCausalLM)],
)
def test_a_language_model_may_be_used_without_its_head(kind: str, auto: Any, tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", kind, auto=auto, tie_word_embeddings=False)
    whole, bare = model_of(folder, auto), model_of(folder)
    assert bare.base_model is bare
    states = whole.base_model.state_dict()
    for name, tensor in bare.state_dict().items():
        if not name.startswith("pooler"):
            assert torch.equal(tensor, states[name]), name


def test_a_classifier_is_not_a_language_head(tmp_path: Path) -> None:
    """The head of a language model may be left out, the head of a classifier may not."""
    folder = toys.save(tmp_path / "toy", "bert", auto=AutoModelForSequenceClassification)
    with pytest.raises(ModelLoadFailed, match=r"2 unexpected keys: classifier\.bias, classifier\.weight"):
        model_of(folder)


@pytest.mark.parametrize(("kind", "override"), [("qwen2", False), ("qwen2 bidirectional", True), ("llama", False)])
def test_an_entry_overrides_the_direction_of_attention(kind: str, override: bool, tmp_path: Path) -> None:
    """The direction decides whether the state of the first token depends on the last token. Both directions run
    packed.
    """
    folder = toys.save(tmp_path / "toy", kind)
    for options, causal in ((LoadOptions(), not override), (LoadOptions(causal=override), override)):
        encoder = toys.load(folder, options=options)
        assert encoder.attention == "sdpa"
        first, second = np.array([7, 8, 9], np.int32), np.array([7, 8, 10], np.int32)
        first_states, second_states = states_packed(encoder, [first, second])
        assert torch.allclose(first_states[0], second_states[0], atol=1e-6) == causal
        assert not torch.allclose(first_states[2], second_states[2], atol=1e-2)


# modules.json

MEAN = {"pooling_mode_mean_tokens": True}


def modules(folder: Path, *kinds: str, pooling: dict[str, Any] | None = None) -> Path:
    """Write a modules.json. Each module but the first has a folder that is named by its number and kind."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, kind in enumerate(kinds):
        path = f"{number}_{kind}" if number else ""
        (folder / path).mkdir(exist_ok=True)
        rows.append({"type": f"sentence_transformers.models.{kind}", "path": path})
        if kind == "Pooling":
            (folder / path / "config.json").write_text(json.dumps(pooling or MEAN))
    (folder / "modules.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": True}, "weighted"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "weightedmean"}, "weighted"),
    ],
)
def test_the_pooling_of_a_model_is_read_from_its_own_files(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    module_facts = read_modules(modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=config))
    assert (module_facts.pooling, module_facts.normalizes) == (expected, True)
    bare = read_modules(tmp_path / "none")
    assert (bare.pooling, bare.layers, bare.normalizes) == ("", (), False)


@pytest.mark.parametrize(
    ("kinds", "config", "text"),
    [
        (("Transformer", "Pooling", "LSTM"), MEAN, "lists a LSTM"),
        (("Transformer", "WeightedLayerPooling", "Pooling"), MEAN, "WeightedLayerPooling"),
        (("Transformer", "Pooling"), {"pooling_mode": "median"}, "is median"),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean"] * 7}, "at most 6"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
    ],
)
def test_a_module_that_would_be_left_out_fails_the_load(
    kinds: tuple[str, ...], config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadFailed, match=text):
        read_modules(modules(tmp_path, *kinds, pooling=config))


def dense(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    """Write a folder with the modules Transformer, Pooling and Dense."""
    modules(folder, "Transformer", "Pooling", "Dense")
    place = folder / "2_Dense"
    (place / "config.json").write_text(
        json.dumps({"in_features": 32, "out_features": 8, "bias": True, **LINEAR, **config})
    )
    save_file({name.replace("_", "."): tensor for name, tensor in tensors.items()}, place / "model.safetensors")
    return folder


LINEAR = {"activation_function": "torch.nn.modules.linear.Identity"}
WEIGHT, BIAS = torch.randn(8, 32, generator=torch.Generator().manual_seed(3)), torch.arange(8.0)


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ({}, {"linear_bias": BIAS}, lambda x: x @ WEIGHT.T + BIAS),
        ({"bias": False}, {}, lambda x: x @ WEIGHT.T),
        (
            {"activation_function": "torch.nn.modules.activation.Tanh"},
            {"linear_bias": BIAS},
            lambda x: torch.tanh(x @ WEIGHT.T + BIAS),
        ),
        (
            {"use_residual": True},
            {"linear_bias": BIAS, "residual_weight": WEIGHT.flip(0)},
            lambda x: x @ WEIGHT.T + BIAS + x @ WEIGHT.flip(0).T,
        ),
    ],
    ids=["plain", "without bias", "tanh", "residual"],
)
def test_a_dense_layer_is_part_of_the_model(
    config: Any, tensors: Any, expected: Any, bert: Path, tmp_path: Path
) -> None:
    """The vectors are the output of the Dense layer for the pooled states."""
    folder = dense(copied(bert, tmp_path / "toy"), config, linear_weight=WEIGHT, **tensors)
    encoder = toys.load(folder, outputs={"dense": 8})
    sequences = toys.random_ids([5, 17])
    pooled = torch.stack([states.mean(0) for states in states_one_by_one(bert, sequences)])
    batch = message([ids.tolist() for ids in sequences], pooling="")
    with torch.inference_mode():
        done = BatchRun(encoder, torch.device("cpu"), batch).run()
    got = np.frombuffer(done.block, "<f4").reshape(2, 8)
    np.testing.assert_allclose(got, expected(pooled).numpy(), atol=1e-5)
    with pytest.raises(ModelLoadFailed, match="8 wide"):
        toys.load(folder)


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({}, {"linear_weight": WEIGHT}, "missing"),
        ({"bias": False}, {"linear_weight": WEIGHT, "linear_bias": BIAS}, "missing"),
        ({}, {"linear_weight": WEIGHT[:4], "linear_bias": BIAS}, "shape"),
        ({}, {"other_weight": WEIGHT, "linear_bias": BIAS}, "missing"),
        ({"use_residual": True}, {"linear_weight": WEIGHT, "linear_bias": BIAS}, "residual"),
        (
            {"activation_function": "torch.nn.modules.activation.PReLU"},
            {"linear_weight": WEIGHT, "linear_bias": BIAS},
            "PReLU",
        ),
    ],
)
def test_a_dense_layer_that_is_not_whole_fails_the_load(config: Any, tensors: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=text):
        read_modules(dense(tmp_path, config, **tensors))


# tokenizers


def with_ends(folder: Path, template: str | None) -> Path:
    """Save the toy tokenizer with a template and the special tokens `w1` and `w2`. The end token is `w2`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    single = (template or "").removeprefix("bytes").strip()
    pair = f"{single} {single.replace('$A', '$B')}"
    steps = [processors.ByteLevel()] if template and template.startswith("bytes") else []
    if single:
        steps.append(processors.TemplateProcessing(single=single, pair=pair, special_tokens=[("w1", 1), ("w2", 2)]))
    if steps:
        tokenizer.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="w2").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "single", "pair"),
    [
        (None, [7, 8, 2], [7, 2, 8, 2]),
        ("w1 $A", [1, 7, 8, 2], [1, 7, 2, 1, 8, 2]),
        ("w1 $A w2", [1, 7, 8, 2], [1, 7, 2, 1, 8, 2]),
    ],
)
def test_an_end_token_is_added_where_the_entry_asks_for_it_and_never_twice(
    template: str | None, single: list[int], pair: list[int], bert: Path, tmp_path: Path
) -> None:
    folder = with_ends(copied(bert, tmp_path / "toy"), template)
    tokenizer = load_tokenizer(folder, LoadOptions(append_eos=True))
    assert tokenizer.encode("w7 w8").ids == single
    assert tokenizer.encode("w7", "w8").ids == pair
    assert tokenizer.encode("").ids[-1] == 2
    assert tokenizer.num_special_tokens_to_add(False) == len(single) - 2
    if not (template or "").endswith("w2"):
        assert load_tokenizer(folder, LoadOptions()).encode("w7 w8").ids == single[:-1]


# families


def installed(folder: Path, name: str, module: str, code: str) -> None:
    """Write a distribution with one module and one entry point, as an installer does."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sie.adapters]\n{name} = {module}:Family\n")


def test_a_family_whose_library_is_missing_names_it(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    installed(tmp_path, "lacking", "lacking_family", "import no_such_library\n")
    error = load_error(resolved(bert, family="lacking"))
    assert error.extras["error_class"] == "DEPENDENCY"
    assert "no_such_library" in error.message
    row = families.Family(implementation="lacking_family:lacking", extra="more")
    monkeypatch.setattr(families, "rows", lambda: {"of-a-package": row})
    assert "pip install 'sie-cluster[more]'" in load_error(resolved(bert, family="of-a-package")).message


def test_an_unproven_entry_loads_only_if_that_is_accepted(bert: Path) -> None:
    error = load_error(resolved(bert, unproven="its oracle is not at hand"))
    assert error.extras["error_class"] == "CERTIFICATE"
    assert "its oracle is not at hand" in error.message
    loader = Loader(
        torch.device("cpu"), WeightSources(Path("/nowhere"), False), Settings(default_compute_precision="float32")
    )
    loader.load(resolved(bert, unproven="so", load=LoadOptions(accept_unproven=True)))


# loaded encoders


DTYPES_OF_ONEDNN = [torch.float32, *((torch.bfloat16,) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ())]


@pytest.mark.parametrize("dtype", DTYPES_OF_ONEDNN)
def test_blocked_linears_are_as_exact_as_the_stock_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)).to(dtype)
    states = torch.randn(3, 70, 384).to(dtype)
    with torch.inference_mode():
        expected = model(states)
        assert block_linears(model) == 2
        error = (model(states) - expected).abs().max()
    assert error <= (1e-5 if dtype is torch.float32 else 2e-2)


def test_roberta_kinds_lose_the_positions_before_their_first(tmp_path: Path) -> None:
    folder = toys.save(tmp_path / "toy", "xlm-roberta")  # pad id 5: positions start at 6
    toys.load(folder, max_tokens=294)
    assert "294 positions" in load_error(resolved(folder, max_tokens=295)).message


def test_a_tokenizer_that_panics_on_the_texts_of_one_script_is_refused() -> None:
    assert "fails on a plain sentence" in fault(panicking(), 1000)


def test_a_post_processor_that_cannot_be_extended_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = copied(bert, tmp_path / "toy")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.BertProcessing(("w3", 3), ("w1", 1))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="w2").save_pretrained(folder)
    with pytest.raises(ModelLoadFailed, match="BertProcessing"):
        load_tokenizer(folder, LoadOptions(append_eos=True))
