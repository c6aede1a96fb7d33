"""Entries in the operator's models folder. A worker reads them to decide whether it trusts an entry of the catalogue.
Unreadable files are skipped.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sie_contracts.errors import SIEError
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.models.entries import ModelEntry, parse_document
from sie_contracts.models.trust import Allowed, Trust, is_bucket
from sie_contracts.settings import SettingError
from sie_contracts.wire.ownership import distrusted, is_open
from sie_runtime.feed import packaged_models, read_bundles
from sie_store.models_bucket import BucketFolder

SUFFIXES = (".yaml", ".yml")
MAX_FILE_BYTES = 1 << 20
_logger = logging.getLogger("sie.trust")


def worker_trust(allowed: Allowed) -> Trust:
    """Return the rules by which a worker trusts an entry. An entry may claim to run code or to read a path. The worker
    trusts a claim if its settings allow it, or if a packaged entry or an entry in SIE_MODELS_DIR has the same claim. A
    check reads SIE_MODELS_DIR again if the settings do not allow a claim.
    """
    bundles = read_bundles(packaged_folder() / "bundles").values()
    return Trust(allowed, bundles, lambda: [*packaged_models().values(), *own_entries(allowed)])


def examined(allowed: Allowed) -> str:
    """Return a warning if the models folder belongs to another user; empty if the folder belongs to this user, or if
    SIE_MODEL_PATHS names it. Raises SettingError if every user may write to the folder, or if the folder is the default
    ./models and belongs to another user.
    """
    folder = Path(allowed.models).expanduser()
    trusted = {os.path.realpath(os.path.expanduser(folder_name)) for folder_name in allowed.paths or ()}
    if not folder.is_dir() or os.path.realpath(folder) in trusted or not (why := distrusted(folder)):
        return ""
    place = folder.absolute()
    if allowed.models_dir and not is_open(folder):
        return (
            f"{place} (SIE_MODELS_DIR): {why}, who decides which models are served and may run code on this machine; "
            f"to accept this, set SIE_MODEL_PATHS={place}"
        )
    used = "" if allowed.models_dir else ", which is used because it exists"
    raise SettingError(
        "SIE_MODELS_DIR",
        f"{place}{used}: {why}; make it yours and `chmod o-w` it, or accept it: SIE_MODEL_PATHS={place}",
    )


def place_of(allowed: Allowed) -> str:
    """Return the models folder as an absolute path, even if it does not exist, or the URL of its bucket."""
    return allowed.models if is_bucket(allowed.models) else str(Path(allowed.models).expanduser().absolute())


def in_use(allowed: Allowed) -> str:
    """Return the models folder or bucket like `place_of`; empty if the folder does not exist."""
    place = place_of(allowed)
    return place if is_bucket(place) or Path(place).is_dir() else ""


def own_entries(allowed: Allowed) -> Iterator[ModelEntry]:
    """Yield the readable entries of the models folder; none if `examined` refuses the folder."""
    from sie_contracts import yaml_text

    for path, body in _bodies(allowed).items():
        try:
            document = parse_document(yaml_text.load(body))
        except (SIEError, ValueError) as error:
            _logger.warning("%s cannot be read, so its entries are not trusted: %s", path, error)
            continue
        if isinstance(document, ModelEntry):
            yield document


def _bodies(allowed: Allowed) -> Mapping[str, bytes]:
    name = allowed.models
    try:
        if is_bucket(name):
            bucket = BucketFolder(name, SUFFIXES)
            paths = [path for path in bucket.list_files() if not path.startswith("bundles/")]
            return bucket.read(paths, MAX_FILE_BYTES)
        root = Path(name).expanduser()
        if not root.is_dir():
            return {}
        examined(allowed)
        return dict(_read(root))
    except (SettingError, OSError) as error:
        _logger.warning("the models folder cannot be read, so its entries are not trusted: %s", error)
        return {}


def _read(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each readable YAML file of a models folder, except files with more than MAX_FILE_BYTES,
    hidden files and folders, and the folder `bundles`.
    """
    for place, below, names in os.walk(root):
        below[:] = [
            name for name in below if not name.startswith(".") and not (Path(place) == root and name == "bundles")
        ]
        for name in names:
            file = Path(place, name)
            if name.startswith(".") or not name.endswith(SUFFIXES):
                continue
            try:
                if file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
                    yield str(file.relative_to(root)), file.read_bytes()
            except OSError as error:
                _logger.warning("%s cannot be read, so its entries are not trusted: %s", file, error.strerror)
