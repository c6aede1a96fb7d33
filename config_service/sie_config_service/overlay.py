"""Packaged catalogue, and an operator's folder whose entries replace packaged ones. A changed folder is read again.

    packaged models, bundles ──┐
    SIE_MODELS_DIR/**/*.yaml ──┴──► documents, checked ──► SIE_MODEL_FILTER ──► Folders

Files below `bundles/` of the folder are bundles; all other files are models and aliases. If one file is invalid, all
files are refused; the error names the file, field and line. Hidden files and folders are skipped, and links to folders
are not followed (a mounted ConfigMap has both).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from sie_config_service.aliases import seeded
from sie_config_service.documents import checked, checked_bundle, read
from sie_contracts.errors import ValidationFailed, faulty
from sie_contracts.models.aliases import Alias
from sie_contracts.models.bundles import DEFAULT, BundleEntry, lacking, serving
from sie_contracts.models.catalogue import packaged_folder
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.trust import USUAL, Allowed, Trust
from sie_contracts.names import NameIndex
from sie_contracts.settings import SettingError, Settings
from sie_runtime.feed import packaged_models, read_bundles
from sie_runtime.http.routes import YAML
from sie_store.models_bucket import BucketFolder
from sie_store.models_folder import MAX_FILE_BYTES, SUFFIXES, examined, in_use

BUNDLES = "bundles"
MAX_TOLD = 20
_logger = logging.getLogger("sie.config")
# group of entry points under which other distributions register families (code for one model architecture)
PLUG_INS = "sie.adapters"

Signature = Mapping[str, tuple[int, int, int]]
"""State of each file by its path in the folder: (time of the last change, bytes, inode or, in an object store, tag)."""


@dataclass(frozen=True)
class Folders:
    """Contents of the folders. `models`: id -> (entry, "packaged" or "overlay"). `files`: id -> path in the overlay."""

    models: Mapping[str, tuple[ModelEntry | Alias, str]]
    bundles: Mapping[str, BundleEntry]
    files: Mapping[str, str] = field(default_factory=dict)


class Overlay:
    """Reader of the folder or bucket of SIE_MODELS_DIR. A file that was accepted is parsed again only after it has
    changed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._allowed = Allowed(settings.allow_remote_code, settings.model_paths, settings.models_dir)
        self.name = settings.models_dir or USUAL
        self.is_remote = self.name.startswith(("s3://", "gs://"))
        self._bucket = BucketFolder(self.name, SUFFIXES) if self.is_remote else None
        self._cached: dict[str, tuple[tuple[int, int, int], Any]] = {}
        self.last: Folders | None = None  # contents at the last read without an error

    def describe(self) -> str:
        """Return a line about the folder. Log a warning if another user may write to it. Raises SettingError,
        OSError.
        """
        if warning := examined(self._allowed):
            _logger.warning("%s", warning)
        folder = in_use(self._allowed)
        return (
            f"the models are those of the package and of {folder}"
            if folder
            else f"the models are those of the package: there is no {self.name}"
        )

    def trust(self) -> Trust:
        """Return the rules about code and paths in entries written over HTTP, as of the last read of the folder."""
        return Trust(self._allowed, read_bundles(packaged_folder() / "bundles").values(), self._entries)

    def _entries(self) -> list[ModelEntry]:
        own = (document for _, document in self._cached.values())
        return [*packaged_models().values(), *(document for document in own if isinstance(document, ModelEntry))]

    def read_signature(self) -> Signature:
        """Return the current state of each file: its time, size, and inode or tag. Raises OSError, and SettingError if
        the configured folder does not exist or the store fails.
        """
        if self._bucket is not None:
            return self._bucket.list_files()
        root = Path(self.name).expanduser()
        if not root.is_dir():
            if self._settings.models_dir:
                raise SettingError("SIE_MODELS_DIR", f"{self.name} is not a folder: make it, or name another one")
            return {}
        signature: dict[str, tuple[int, int, int]] = {}
        waiting = [""]
        while waiting:
            place = waiting.pop()
            with os.scandir(root / place) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{place}{entry.name}/")
                    elif entry.name.endswith(SUFFIXES) and entry.is_file():
                        stat = entry.stat()
                        signature[place + entry.name] = stat.st_mtime_ns, stat.st_size, stat.st_ino
        return signature

    def folders(self) -> Folders:
        """Read and check all files. Raises SettingError, OSError, ValidationFailed with file, field and line. For an
        alias whose targets do not fit, ValidationFailed names only the alias.
        """
        models: dict[str, tuple[ModelEntry | Alias, str]] = {
            model: (entry, "packaged") for model, entry in packaged_models().items()
        }
        bundles = dict(read_bundles(packaged_folder() / "bundles"))
        bundles[DEFAULT] = _with_plug_ins(bundles[DEFAULT])
        files: dict[str, str] = {}
        of_bundles: dict[str, str] = {}
        for path, document in sorted(self._documents().items()):
            place = of_bundles if isinstance(document, BundleEntry) else files
            if (twin := place.get(document.id)) is not None:
                raise _in_file(faulty("$.id", f"{document.id} is in {twin} too: remove one of the two"), path)
            place[document.id] = path
            if isinstance(document, BundleEntry):
                bundles[document.id] = document
            else:
                models[document.id] = document, "overlay"
        for model, (entry, _) in models.items():
            if isinstance(entry, ModelEntry) and not serving(bundles, entry.family, entry.bundle):
                loc, why = lacking(bundles, entry.family, entry.bundle)
                path = files.get(model, model)
                raise _in_file(faulty(loc, why, self._line(path, loc)), path)
        filtered = _filtered(models, self._settings.model_filter)
        seeded({model: entry for model, (entry, _) in filtered.items()})
        self.last = Folders(filtered, bundles, files)
        return self.last

    def _line(self, path: str, loc: str) -> int | None:
        file = Path(self.name).expanduser() / path
        return read(file.read_bytes(), YAML).line(loc) if file.is_file() else None

    def _documents(self) -> dict[str, ModelEntry | Alias | BundleEntry]:
        signature = self.read_signature()
        cached = {path: remembered for path, remembered in self._cached.items() if signature.get(path) == remembered[0]}
        bodies = self._bodies({path: size for path, (_, size, _) in signature.items() if path not in cached})
        self._cached = cached | {path: (signature[path], _document(path, body)) for path, body in bodies.items()}
        return {path: document for path, (_, document) in self._cached.items()}

    def _bodies(self, paths: Collection[str]) -> dict[str, bytes]:
        """Read these files. From a bucket, read at most MAX_FILE_BYTES + 1 bytes, enough to refuse a larger file."""
        if self._bucket is not None:
            return self._bucket.read(paths, MAX_FILE_BYTES + 1)
        root = Path(self.name).expanduser()
        return {path: (root / path).read_bytes() for path in paths}


def _document(path: str, body: bytes) -> ModelEntry | Alias | BundleEntry:
    try:
        if len(body) > MAX_FILE_BYTES:
            raise faulty("$", f"expected at most {MAX_FILE_BYTES} bytes, got {len(body)}")
        document = read(body, YAML)
        is_bundle = PurePosixPath(path).parts[0] == BUNDLES
        return checked_bundle(document) if is_bundle else checked(document.value, document)
    except ValidationFailed as error:
        raise _in_file(error, path) from None


def _in_file(error: ValidationFailed, path: str) -> ValidationFailed:
    return ValidationFailed(f"{path}: {error.message}", param=error.param, extras={**error.extras, "file": path})


def _with_plug_ins(bundle: BundleEntry) -> BundleEntry:
    """Add the model families of other installed distributions to the packaged bundle: with `sie serve`, the workers run
    in the same Python environment and can import these families.
    """
    plugged_in = {point.name for point in metadata.entry_points(group=PLUG_INS)} - set(bundle.families)
    return (
        msgspec.structs.replace(bundle, families=(*bundle.families, *sorted(plugged_in))) if bundle.families else bundle
    )


def _filtered(
    models: dict[str, tuple[ModelEntry | Alias, str]], names: tuple[str, ...] | None
) -> dict[str, tuple[ModelEntry | Alias, str]]:
    if names is None:
        return models
    unknown = [name for name in names if name not in models]
    if unknown:
        like = NameIndex(models).near(unknown[0])
        fix = f"did you mean {' or '.join(like)}?" if like else f"there are {', '.join(sorted(models)[:MAX_TOLD])}"
        raise SettingError(
            "SIE_MODEL_FILTER", f"neither the packaged models nor SIE_MODELS_DIR has {', '.join(unknown)}; {fix}"
        )
    return {model: entry for model, entry in models.items() if model in names}
