"""The folder that holds the files of a model: a path, the local cache, an installed package, then the hub.

    weights.path ─► weights.hub in the local cache ─► weights.package ─► weights.hub over the network (SIE_HF_FALLBACK)

The first that is named and present wins. Nothing but files is read here: a package is located, never imported.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from sie_adapter.failure import load_failed
from sie_contracts.catalogue import ModelEntry, Weights

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


@dataclass(frozen=True)
class WeightSources:
    """Where this process looks. `cache_folder` is laid out as HF_HOME: snapshots are under `hub`."""

    cache_folder: Path
    may_download: bool

    def folder(self, entry: ModelEntry) -> Path:
        """The folder of `entry`, downloaded if need be. Raises ModelLoadFailed, which names what was looked at and what would help."""
        weights = entry.weights
        looked: list[str] = []
        if weights.path:
            if _is_model(folder := Path(weights.path).expanduser()):
                return folder
            looked.append(f"weights.path {weights.path} holds no config.json and safetensors")
        if weights.hub:
            if (cached := self._snapshot(weights)) is not None:
                return cached
            looked.append(f"{weights.hub}@{weights.revision} is not in the local cache {self.cache_folder} (SIE_LOCAL_CACHE)")
        if weights.package:
            if (packaged := package_folder(weights.package)) is not None:
                return packaged
            looked.append(f"the package {weights.package} is not installed or carries no model")
        if weights.hub and self.may_download:
            return self._download(entry)
        if weights.hub:
            looked.append("downloads are off (SIE_HF_FALLBACK)")
        raise load_failed("NOT_FOUND", f"no weights for {entry.id}: {'; '.join(looked)}")

    def _snapshot(self, weights: Weights) -> Path | None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            found = snapshot_download(weights.hub, revision=weights.revision, cache_dir=self.cache_folder / "hub", local_files_only=True)
        except (LocalEntryNotFoundError, HfHubHTTPError):
            return None
        return Path(found) if _is_model(Path(found)) else None

    def _download(self, entry: ModelEntry) -> Path:
        import httpx
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )  # fmt: skip

        weights, what = entry.weights, f"{entry.weights.hub}@{entry.weights.revision}"
        patterns = [*_FILES, *(("*.py",) if entry.load.trust_remote_code else ())]
        try:
            found = snapshot_download(
                weights.hub, revision=weights.revision, cache_dir=self.cache_folder / "hub", allow_patterns=patterns,
                ignore_patterns=["onnx/*", "openvino/*"],
            )  # fmt: skip
        except GatedRepoError as error:
            raise load_failed("GATED", f"{what} is gated: accept its licence and set HF_TOKEN") from error
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise load_failed("NOT_FOUND", f"{what} does not exist on the hub, or is private (HF_TOKEN)") from error
        except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError) as error:
            raise load_failed("NETWORK", f"{what} could not be downloaded: {type(error).__name__}") from error
        if not _is_model(Path(found)):
            raise load_failed("INCOMPATIBLE", f"{what} holds no config.json and safetensors")
        return Path(found)


def package_folder(package: str) -> Path | None:
    """The folder of an installed distribution that holds config.json beside safetensors; None if there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    folders = (Path(str(file.locate())).parent for file in files if file.name == "config.json")
    return next((folder for folder in folders if _is_model(folder)), None)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
