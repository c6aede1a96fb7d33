"""Checks whether the cache has all files of a snapshot that SIE did not download. Any version of the hub's own client
may have downloaded the snapshot, or a person may have copied it.

    is_listed_whole   compare the files with the listing that the hub's client keeps of a commit (trees/COMMIT.json):
                      each file must exist with its size
    contradiction     without a listing: check whether the files refer to missing files, or are cut off
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_store.folder_files import MAX_TEXT
from sie_store.weights.headers import DamagedFile, stored_tensors
from sie_store.weights.selection import Wanted

# module types of sentence-transformers that have no files, so their folders may be missing
_NO_FILES = ("Normalize",)


def is_listed_whole(cache: Path, repository: str, folder: Path, select: Wanted) -> bool:
    """Return whether the snapshot in `folder` has every listed file that `select` accepts, each with the listed size.
    Return False if the hub's client has stored no listing. `cache` is the folder `hub` of HF_HOME.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        listing = get_cached_repo_tree(repository, revision=folder.name, cache_dir=cache)
    # the hub's client raises AttributeError, TypeError or RecursionError for a file that is not a listing
    except (CachedRepoTreeNotFoundError, OSError, AttributeError, TypeError, RecursionError):
        return False
    files = [file for file in listing if select(file.path)]
    return bool(files) and all(_size(folder / file.path) == file.size for file in files)


def contradiction(folder: Path) -> str:
    """Return why the snapshot in `folder`, which has no listing, is incomplete; empty if no fault is found."""
    if not folder.is_dir():
        return "its folder is missing"
    if any((folder.parents[1] / "blobs").glob("*.incomplete")):
        return "blobs of its repository are marked as incomplete"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not path.exists():
            return f"{name} is a link to a missing file"
        if path.suffix == ".safetensors" and (wrong := _wrong_with(path)):
            return f"{name} {wrong}"
        if path.suffix == ".json" and path.is_file():
            try:
                stored = msgspec.json.decode(path.read_bytes())
            except OSError as error:
                return f"{name} cannot be read: {type(error).__name__}"
            except UNDECODABLE as error:
                return f"{name} is not JSON: {type(error).__name__}"
            if missing := _missing(path, stored):
                return f"{name} names {missing[:MAX_TEXT]}, which is missing"
    return ""


def _missing(path: Path, stored: object) -> str:
    """Return the first missing file or folder that the JSON file `path` names; empty if all exist. `stored`: value in
    this file. Only an index of safetensors files and `modules.json` name files.
    """
    named: list[str] = []
    if (
        path.name.endswith(".safetensors.index.json")
        and isinstance(stored, dict)
        and isinstance(stored.get("weight_map"), dict)
    ):
        named = sorted(set(map(str, stored["weight_map"].values())))
    elif path.name == "modules.json" and isinstance(stored, list):
        with_files = [
            module for module in stored if isinstance(module, dict) and not str(module.get("type")).endswith(_NO_FILES)
        ]
        named = [str(module.get("path") or ".") for module in with_files]
    # Path.exists would raise OSError for a name that is too long for the disk
    return next((name for name in named if not os.path.exists(path.parent / name)), "")


def _wrong_with(path: Path) -> str:
    """Return the fault of a safetensors file; empty if it is complete."""
    try:
        stored_tensors(path)
    except DamagedFile as error:
        return f"is not whole: {error}"
    except OSError as error:
        return f"cannot be read: {type(error).__name__}"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1
