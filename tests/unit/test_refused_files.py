"""Model folders whose tokenizer or weights cannot be right are refused by `inspect`, `add` and a load alike. Each
refusal says what to do.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from parity import gliner_checkpoints, heads_checkpoints
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of
from parity.score_checkpoints import build_head
from safetensors.torch import load_file, save_file
from selection import long_but
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from sie_adapter.loading.inspection import inspect
from sie_adapter.loading.loading import Loader
from sie_adapter.loading.weight_files import check_weights, holds_nan
from sie_cli.main import main
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.settings import Settings
from sie_store.weights.sources import WeightSources

WEIGHTS = "model.safetensors"
COPY = "copy tokenizer.json and tokenizer_config.json from the repository that the weights come from"


def dense(folder: Path) -> Path:
    return add_modules(build(folder, ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))


def cross(folder: Path) -> Path:
    return build_head(folder, "xlm-roberta", AutoModelForSequenceClassification)


def late(folder: Path) -> Path:
    return heads_checkpoints.stanford(folder, 24, {"query_maxlen": 24, "doc_maxlen": 90, "query_token_id": "[unused1]"})


def sparse(folder: Path) -> Path:
    return heads_checkpoints.splade(folder, heads_checkpoints.masked(folder.with_name("masked"), "bert"))


KINDS: dict[str, Callable[[Path], Path]] = {
    "dense": dense,
    "cross": cross,
    "late": late,
    "sparse": sparse,
    "gliner": gliner_checkpoints.gliner_folder,
    "gliner2": gliner_checkpoints.gliner2_folder,
    "gliclass": gliner_checkpoints.gliclass_folder,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Return a function that gives the model folder of a kind and its entry. Each is made once."""
    root = tmp_path_factory.mktemp("good")
    cache: dict[str, tuple[Path, dict[str, Any]]] = {}

    def made(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in cache:
            folder = KINDS[kind](root / kind)
            cache[kind] = folder, inspect(folder, f"test/{kind}", {"path": str(folder)}).entry
        return cache[kind]

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


CASES = [
    *(
        (kind, without_tokenizer, ["has no tokenizer", COPY])
        for kind in ("dense", "cross", "late", "sparse", "gliner2", "gliclass")
    ),
    ("gliner", with_its_configuration_alone, ["has no tokenizer", COPY]),
    ("dense", with_its_configuration_alone, ["has no tokenizer", COPY]),
    ("dense", empty, ["tokenizer", COPY]),
    ("dense", of_unreal_words, ["reads plain sentences", "as unknown tokens", COPY]),
    *(
        (kind, larger, ["its tokenizer has ids up to", "resize_token_embeddings"])
        for kind in ("dense", "cross", "gliner", "gliner2", "gliclass")
    ),
    ("dense", lacking("[UNK]"), ["has no [UNK], which the model needs", COPY]),
    ("dense", lacking("[CLS]", "[SEP]"), ["has no token with the id", "which the model needs", COPY]),
    ("cross", without_markers, ["puts no special token before a text", COPY]),
    *((kind, cut_off, [WEIGHTS, "is cut off or damaged: it has", "download it again"]) for kind in ("dense", "gliner")),
    ("cross", cut_off_in_the_header, [WEIGHTS, "is cut off or damaged: it has 100 bytes", "download it again"]),
    *(
        (kind, with_nan, [WEIGHTS, "contains NaN in 1 of its tensors"])
        for kind in ("dense", "sparse", "gliner", "gliner2", "gliclass")
    ),
    *((kind, without_a_tensor, ["1 missing"]) for kind in ("dense", "cross", "gliner", "gliner2", "gliclass")),
    ("dense", quantised(torch.int8), [WEIGHTS, "in int8, and config.json has no quantization_config"]),
    (
        "cross",
        quantised(torch.float8_e4m3fn),
        [WEIGHTS, "in float8_e4m3fn, and config.json has no quantization_config"],
    ),
    ("dense", without_a_part, ["names 1 files that the folder lacks: model-00002-of-00002.safetensors"]),
]


# one kind of model for each fault
USUAL = [case for number, case in enumerate(CASES) if case[1] not in [spoil for _, spoil, _ in CASES[:number]]]


@pytest.mark.parametrize(
    ("kind", "spoil", "texts"), long_but(CASES, USUAL), ids=[f"{kind} {spoil.__name__}" for kind, spoil, _ in CASES]
)
def test_a_folder_that_cannot_be_right_is_refused_everywhere(
    kind: str,
    spoil: Callable[[Path], None],
    texts: list[str],
    good: Callable[[str], tuple[Path, dict[str, Any]]],
    tmp_path: Path,
) -> None:
    source, entry = good(kind)
    folder = shutil.copytree(source, tmp_path / "model")
    spoil(folder)
    for refusal in refusals(folder, entry, tmp_path / "models"):
        assert all(text in refusal for text in texts), refusal


def test_weights_that_change_after_a_load_are_checked_again(
    good: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    source, entry = good("dense")
    folder = shutil.copytree(source, tmp_path / "model")
    loader = Loader(
        torch.device("cpu"), WeightSources(Path("/nowhere"), False), Settings(default_compute_precision="float32")
    )
    parsed = parse_entry({**entry, "weights": {"path": str(folder)}})
    resolved = Catalogue.resolve_profile(parsed, "default", parsed.id)
    loader.load(resolved)
    torch.save({"weight": torch.tensor([[1.0, float("nan")]])}, folder / "sparse_linear.pt")
    with pytest.raises(ModelLoadFailed, match=r"sparse_linear\.pt contains NaN"):
        loader.load(resolved)


def test_a_file_shorter_than_its_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadFailed, match="its header alone needs"):
            check_weights(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_nan_is_seen_in_every_float(name: str) -> None:
    values = torch.tensor([[1.0, 2.0]]).to(getattr(torch, name))
    assert not holds_nan(values)
    assert holds_nan(torch.tensor([[1.0, float("nan")]]).to(getattr(torch, name)))
    assert not holds_nan(torch.tensor([1, 2]))


def added(file: Path, models: Path) -> str:
    done = CliRunner().invoke(
        main, ["models", "add", str(file), "--models-dir", str(models)], env={"SIE_HF_FALLBACK": "false"}
    )
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_an_entry_whose_weights_are_elsewhere_is_added_and_says_that_a_load_checks_them(
    good: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, entry = good("dense")
    for number, weights in enumerate(
        ({"hub": "org/absent", "revision": "a" * 40}, {"path": str(tmp_path / "absent")}, entry["weights"])
    ):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump({**entry, "id": f"test/{number}", "weights": weights}))
        output = added(file, tmp_path / "models")
        assert (tmp_path / f"models/test/{number}.yaml").is_file()
        assert (f"checked the files in {folder}" in output) == (number == 2)
        assert ("a worker checks them when it loads the model" in output) == (number != 2)


def test_an_entry_with_the_digest_of_another_file_is_not_added(
    good: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, entry = good("dense")
    file = tmp_path / "entry.yaml"
    file.write_text(yaml.safe_dump({**entry, "weights": {"path": str(folder), "digests": {WEIGHTS: "0" * 64}}}))
    done = CliRunner().invoke(main, ["models", "add", str(file), "--models-dir", str(tmp_path / "models")])
    assert done.exit_code == 1
    assert f"{WEIGHTS} has the SHA-256" in " ".join(done.output.split())
    assert not (tmp_path / "models").exists()


def test_special_tokens_that_the_weights_have_no_row_for_are_read_as_text(
    good: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """Published models have such tokens, for images for instance. A text that holds one is no fault of its client."""
    source, entry = good("dense")
    folder = shutil.copytree(source, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    assert inspect(folder, "test/dense", {"path": str(folder)}).entry["outputs"] == entry["outputs"]
    model = load(parse_entry({**entry, "weights": {"path": str(folder)}}))
    served = Tokenizer.from_buffer(model.tokenizer)
    ids = served.encode("the <image> runs").ids
    assert max(ids) < model.vocabulary
    assert ids == Tokenizer.from_file(str(source / "tokenizer.json")).encode("the <image> runs").ids


def test_a_vocabulary_of_one_script_or_smaller_than_the_table_is_good(tmp_path: Path) -> None:
    """Many published models have a vocabulary of English alone, or a padded table."""
    folder = add_modules(
        build(tmp_path / "padded", ARCHITECTURES["bert"], vocab_size=4096), modules_of(ARCHITECTURES["bert"])
    )
    entry = inspect(folder, "test/padded", {"path": str(folder)}).entry
    model = load(parse_entry(entry))
    served = Tokenizer.from_buffer(model.tokenizer)
    assert served.get_vocab_size() < model.vocabulary == 4096
    assert set(served.encode("河流", add_special_tokens=False).tokens) == {"[UNK]"}
