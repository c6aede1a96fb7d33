"""Faults of model folders, and what `inspect`, `add` and a load say about a folder with one."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sie_adapter.loading.inspection import inspect
from sie_adapter.loading.loading import Loader
from sie_cli.main import main
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.settings import Settings
from sie_store.weights.sources import WeightSources

WEIGHTS = "model.safetensors"
COPY = "copy tokenizer.json and tokenizer_config.json from the repository that the weights come from"


Good = Callable[[str], tuple[Path, dict[str, Any]]]


def good_folders(root: Path, kinds: Mapping[str, Callable[[Path], Path]]) -> Good:
    """Return a function that gives the model folder of a kind and its entry. Each is made once, below `root`."""

    @functools.cache
    def made(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = kinds[kind](root / kind)
        return folder, inspect(folder, f"test/{kind}", {"path": str(folder)}).entry

    return made


# faults of a folder


def files_of_tokenizer(folder: Path) -> list[Path]:
    return [
        file for file in folder.iterdir() if "token" in file.name or file.name in ("vocab.txt", "added_tokens.json")
    ]


def without_tokenizer(folder: Path) -> None:
    for file in files_of_tokenizer(folder):
        file.unlink()


def with_its_configuration_alone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def replaced(folder: Path, tokens: list[str]) -> None:
    for file in files_of_tokenizer(folder):
        file.unlink()
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    roles = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)


SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def empty(folder: Path) -> None:
    replaced(folder, SPECIALS)


def of_unreal_words(folder: Path) -> None:
    replaced(folder, [*SPECIALS, *(f"token{number}" for number in range(40))])


def larger(folder: Path) -> None:
    """Add tokens without resizing the table of the weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new{number}" for number in range(5000)])
    tokenizer.save_pretrained(folder)


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    change(state)
    (folder / "tokenizer.json").write_text(json.dumps(state))


def without_markers(folder: Path) -> None:
    """Leave out the special tokens before a text and between two."""
    edited(folder, lambda state: state.update(post_processor=None))


def lacking(*tokens: str) -> Callable[[Path], None]:
    def without(folder: Path) -> None:
        def change(state: dict[str, Any]) -> None:
            state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in tokens]
            state["model"]["vocab"] = {
                token: number for token, number in state["model"]["vocab"].items() if token not in tokens
            }

        edited(folder, change)

    return without


def cut_off(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])


def cut_off_in_the_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def some_matrix(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(tensors) if tensors[name].ndim == 2 and "layer" in name)


def with_nan(folder: Path) -> None:
    """Change one number, in the row of one token: a sample that a load computes need not contain this token."""
    changed(folder, lambda tensors: tensors[some_matrix(tensors)].__setitem__((-1, -1), float("nan")))


def quantised(dtype: torch.dtype) -> Callable[[Path], None]:
    """Return a fault: a matrix has this dtype, and config.json has no quantization_config with its scale."""

    def without_scale(folder: Path) -> None:
        changed(folder, lambda tensors: tensors.update({some_matrix(tensors): tensors[some_matrix(tensors)].to(dtype)}))

    return without_scale


def without_a_tensor(folder: Path) -> None:
    changed(folder, lambda tensors: tensors.pop(some_matrix(tensors)))


def without_a_part(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(tensors, folder / names[0], {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: names[number % 2] for number, name in enumerate(tensors)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusals(folder: Path, entry: dict[str, Any], tmp_path: Path) -> list[str]:
    """Return the texts of `inspect`, of `add` for the folder and for an entry, and of a load; the last two use the
    entry of the good folder.
    """
    outputs = []
    named = {**entry, "weights": {"path": str(folder)}}
    file = tmp_path.with_name("entry.yaml")
    file.write_text(yaml.safe_dump(named))
    place = ["--models-dir", str(tmp_path)]
    for arguments in (["inspect", str(folder)], ["add", str(folder), *place], ["add", str(file), *place]):
        done = CliRunner().invoke(main, ["models", *arguments], env={"SIE_HF_FALLBACK": "false"})
        assert done.exit_code == 1, (arguments, done.output)
        assert "Traceback" not in done.output
        outputs.append(" ".join(done.output.split()))
    assert not list(tmp_path.glob("**/*.yaml"))
    with pytest.raises(ModelLoadFailed) as refused:
        load(parse_entry(named))
    return [*outputs, refused.value.message]


def load(entry: ModelEntry) -> Any:
    loader = Loader(
        torch.device("cpu"), WeightSources(Path("/nowhere"), False), Settings(default_compute_precision="float32")
    )
    return loader.load(Catalogue.resolve_profile(entry, "default", entry.id))


def refused_everywhere(
    spoil: Callable[[Path], None], texts: list[str], good: tuple[Path, dict[str, Any]], tmp: Path
) -> None:
    """Check that each refusal of a copy of a good folder with this fault has all texts."""
    source, entry = good
    folder = shutil.copytree(source, tmp / "model")
    spoil(folder)
    for refusal in refusals(folder, entry, tmp / "models"):
        assert all(text in refusal for text in texts), refusal
