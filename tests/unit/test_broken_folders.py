"""A model folder of a stranger: `sie models inspect` refuses each broken file in one line that names the file, or
prints an entry.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of

from sie_cli.main import main
from sie_contracts.models.entries import parse_entry

WHOLE = {
    "empty": b"",
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "not UTF-8": b'{"a":"\xff\xfe"}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "deep map": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "long number": b'{"a":' + b"9" * 10_000 + b"}",
}
CONFIGURATIONS = (
    "config.json",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer_config.json",
)


class Command:
    """Object that creates the file `unpickled` in a folder when it is unpickled, which must not happen."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "unpickled"

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "mine"
    return add_modules(build(folder, ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))


def inspected(folder: Path) -> Any:
    return CliRunner().invoke(main, ["models", "inspect", str(folder)], env={"SIE_HF_FALLBACK": "false"})


def outcome(folder: Path, file: str, case: str) -> bool:
    """Return whether the folder was refused, in one line with the name of the file. Otherwise there is an entry."""
    done = inspected(folder)
    assert done.exception is None or isinstance(done.exception, SystemExit), (file, case, repr(done.exception))
    if done.exit_code == 0:
        parse_entry(yaml.safe_load(done.stdout))
        return False
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: "), (file, case, line)
    assert Path(file).name in line, (file, case, line)
    return True


@pytest.mark.parametrize("file", CONFIGURATIONS)
def test_a_file_that_is_none_is_named(good: Path, file: str, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    data, broken = (folder / file).read_bytes(), folder / file
    refused = 0
    for case, content in (*WHOLE.items(), ("half", data[: len(data) // 2])):
        broken.write_bytes(content)
        refused += outcome(folder, file, case)
    broken.unlink()
    broken.mkdir()
    refused += outcome(folder, file, "a folder")
    broken.rmdir()
    broken.symlink_to(broken)
    refused += outcome(folder, file, "a loop")
    assert refused >= len(WHOLE) + 1  # an empty list of modules is valid


def cut(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return file.name


def long_header(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])
    return file.name


def pickled_heads(folder: Path) -> str:
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (folder / name).write_bytes(pickle.dumps(Command(folder)))
    return "_linear.pt"


def pickled_colbert_head(folder: Path) -> str:
    """The sparse head beside it is valid."""
    torch.save({"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}, folder / "sparse_linear.pt")
    (folder / "colbert_linear.pt").write_bytes(pickle.dumps(Command(folder)))
    return "colbert_linear.pt"


def negative_vocabulary(folder: Path) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "vocab_size": -5}))
    return file.name


def weights_folder(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return "model.safetensors"


def no_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_bytes(b"{}")
    return "tokenizer"


@pytest.mark.parametrize(
    "spoil", [cut, long_header, pickled_heads, pickled_colbert_head, negative_vocabulary, weights_folder, no_tokenizer]
)
def test_weights_and_tokenizers_of_strangers_are_named(
    spoil: Callable[[Path], str], good: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    name = spoil(folder)
    assert outcome(folder, name, spoil.__name__)
    assert not (folder / "unpickled").exists()
