"""A model folder of a stranger: `sie models inspect` refuses each broken file in one line that names the file, or
prints an entry.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of
from selection import long_but

from sie_cli.main import main
from sie_contracts.models.entries import parse_entry
from sie_store.folder_files import stated_licence

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


USUAL_VALUES: tuple[Any, ...] = (-1, "x", {"a": None})


VALUES: tuple[Any, ...] = (None, -1, 0, 10**12, 1e308, "x", [], {}, True, float("nan"), ["a", 1], {"a": None})


def mutations(data: bytes, values: tuple[Any, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the document with each value in each field, and without the field."""
    document = json.loads(data)
    places = list(enumerate(document)) if isinstance(document, list) else [(None, document)]
    for number, fields in places:
        for name in fields:
            for value in (*values, ...):
                changed = {key: field_value for key, field_value in fields.items() if key != name}
                if value is not ...:
                    changed[name] = value
                whole = changed if number is None else [*document[:number], changed, *document[number + 1 :]]
                yield f"{number} {name}: {value!r}", json.dumps(whole).encode()


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


# files with many fields: each takes 10 s or more
SLOW = ("config.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json")


@pytest.mark.parametrize(
    ("file", "values"),
    long_but(
        [(file, values) for values in (USUAL_VALUES, VALUES) for file in CONFIGURATIONS],
        [(file, USUAL_VALUES) for file in CONFIGURATIONS if file not in SLOW],
    ),
)
def test_a_field_of_another_form_is_refused_with_its_file_or_means_nothing(
    good: Path, file: str, values: tuple[Any, ...], tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "model")
    count = 0
    for case, content in mutations((folder / file).read_bytes(), values):
        (folder / file).write_bytes(content)
        outcome(folder, file, case)
        count += 1
    assert count


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: mit\n---", "mit"),
        ("---\r\nlicense: mit\r\n--- \r\ntext", "mit"),
        ("---\ntags: [a---b]\nlicense_name: own\nlicense: other\n---\n", "own"),
        ("# Model\n---\nlicense: mit\n---\n", ""),
        ("---\nlicense: [\n---\n", ""),
        ("---\n---\n", ""),
    ],
)
def test_the_licence_is_that_of_the_front_matter(tmp_path: Path, card: str, licence: str) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    assert stated_licence(tmp_path) == licence
