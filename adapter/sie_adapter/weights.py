"""The folder that holds the files of a model: a path, the local cache, an installed package, then the hub.

    weights.path ─► weights.hub in the local cache ─► weights.package ─► weights.hub over the network (SIE_HF_FALLBACK)

The first that is named and present wins. Nothing but files is read here: a package is located, never imported.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from sie_adapter.failure import load_failed, lora_failed
from sie_contracts.catalogue import ModelEntry, Weights
from sie_contracts.options import PARAMETERS

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "README.md", "artifact.metadata", "sparse_linear.pt", "colbert_linear.pt")
PICKLED = "pytorch_model.bin"  # read as tensors only, for the one family whose checkpoints have nothing else


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
            if _is_model(folder := Path(weights.path).expanduser(), entry):
                return folder
            looked.append(f"weights.path {weights.path} {_lacking(entry)}")
        if weights.hub:
            if (cached := self._snapshot(entry)) is not None:
                return cached
            others = ", ".join(folder.name for folder in self._snapshots(entry))
            holds = f", which has {others} of it" if others else ""
            looked.append(f"{_named(weights)} is not in the local cache {self.cache_folder} (SIE_LOCAL_CACHE){holds}")
        if weights.package:
            if (packaged := package_folder(weights.package)) is not None:
                return packaged
            looked.append(f"the package {weights.package} is not installed or carries no model")
        if weights.unpinned:
            looked.append(f"no commit of {weights.hub} is known to download: sie models add {weights.hub} --revision COMMIT pins one")
        elif weights.hub and self.may_download:
            return self._download(entry)
        elif weights.hub:
            looked.append("downloads are off (SIE_HF_FALLBACK)")
        raise load_failed("NOT_FOUND", f"no weights for {entry.id}: {'; '.join(looked)}")

    def lora_folder(self, name: str, entry: ModelEntry, models_dir: str | None) -> Path:
        """The folder of a LoRA: a path that the entry names or in `models_dir` (./models), else a hub repository `name` or `name@commit`.

        Raises LoraLoadFailed. Other paths are refused: the name may come from a client.
        """
        is_named = name in {entry.run.lora, *(profile.run.lora for profile in entry.profiles.values())}
        path = Path(name).expanduser() if is_named else Path(name)
        if path.is_absolute() or name.startswith("."):
            if not is_named and not path.resolve().is_relative_to(Path(models_dir or "models").resolve()):
                raise lora_failed(name, "a path must be named by the model's entry or lie in SIE_MODELS_DIR")
            return path
        repository, _, revision = name.partition("@")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        for local in (True, False) if self.may_download else (True,):
            try:
                found = snapshot_download(
                    repository, revision=revision or None, cache_dir=self.cache_folder / "hub", local_files_only=local,
                    allow_patterns=["adapter_config.json", "adapter_model.safetensors"],
                )  # fmt: skip
                return Path(found)
            except HFValidationError as error:
                raise lora_failed(name, "it is neither a folder nor the name of a hub repository") from error
            except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
                cause = error
        allowed = "" if self.may_download else "; downloads are off (SIE_HF_FALLBACK)"
        raise lora_failed(name, f"not in the local cache, {type(cause).__name__}{allowed}")

    def _snapshot(self, entry: ModelEntry) -> Path | None:
        """The snapshot of the pinned commit, or the only one that the cache has of a model without a pin."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        weights, cache = entry.weights, self.cache_folder / "hub"
        if weights.unpinned:
            return self._only_snapshot(entry)
        try:
            found = snapshot_download(weights.hub, revision=weights.revision, cache_dir=cache, local_files_only=True)
        except (LocalEntryNotFoundError, HfHubHTTPError):
            return None
        return Path(found) if _is_model(Path(found), entry) else None

    def _snapshots(self, entry: ModelEntry) -> list[Path]:
        """What the cache has of a model, of any commit, in the order of their names."""
        snapshots = self.cache_folder / "hub" / f"models--{entry.weights.hub.replace('/', '--')}" / "snapshots"
        return sorted(folder for folder in snapshots.glob("*") if _is_model(folder, entry))

    def _only_snapshot(self, entry: ModelEntry) -> Path | None:
        hub, found = entry.weights.hub, self._snapshots(entry)
        if len(found) > 1:
            commits = ", ".join(folder.name for folder in found)
            message = f"the cache has several snapshots of {hub}, {commits}: sie models add {hub} --revision COMMIT chooses one"
            raise load_failed("NOT_FOUND", f"no weights for {entry.id}: {message}")
        return found[0] if found else None

    def _download(self, entry: ModelEntry) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )  # fmt: skip

        # a broken connection, of whichever library the hub's client is built on
        http_error: type[Exception] = HfHubHTTPError.__bases__[0]
        weights, what = entry.weights, _named(entry.weights)
        patterns = [*FILES, *(("*.py",) if entry.load.trust_remote_code else ()), *((PICKLED,) if entry.family == "gliner" else ())]
        try:
            found = snapshot_download(
                weights.hub, revision=weights.revision, cache_dir=self.cache_folder / "hub",
                allow_patterns=patterns if entry.family in PARAMETERS else None, ignore_patterns=["onnx/*", "openvino/*"],
            )  # fmt: skip
        except GatedRepoError as error:
            raise load_failed("GATED", f"{what} is gated: accept its licence and set HF_TOKEN") from error
        except (RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise load_failed("NOT_FOUND", f"{what} does not exist on the hub, or is private (HF_TOKEN)") from error
        except (LocalEntryNotFoundError, http_error, ConnectionError, TimeoutError) as error:
            fix = "the network has to reach the hub (HF_ENDPOINT), or SIE_LOCAL_CACHE to hold the model"
            raise load_failed("NETWORK", f"{what} could not be downloaded: {type(error).__name__}; {fix}") from error
        if not _is_model(Path(found), entry):
            raise load_failed("INCOMPATIBLE", f"{what} {_lacking(entry)}")
        return Path(found)


def package_folder(package: str) -> Path | None:
    """The folder of an installed distribution that holds config.json beside safetensors; None if there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    folders = (Path(str(file.locate())).parent for file in files if file.name == "config.json")
    return next((folder for folder in folders if _has_safetensors(folder)), None)


def _is_model(folder: Path, entry: ModelEntry) -> bool:
    """Whether the folder has what every load of this family begins with. A family of somebody else's knows by itself."""
    if entry.family not in PARAMETERS:
        return folder.is_dir()
    if entry.family == "gliner":
        return (folder / "gliner_config.json").is_file() and (_has_safetensors(folder) or (folder / PICKLED).is_file())
    in_subfolder = (folder / "modules.json").is_file() and any(folder.glob("*/*.safetensors"))
    return in_subfolder or ((folder / "config.json").is_file() and _has_safetensors(folder))


def _has_safetensors(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _lacking(entry: ModelEntry) -> str:
    if entry.family not in PARAMETERS:
        return "is not a folder"
    return f"holds no {'gliner_config.json and weights' if entry.family == 'gliner' else 'config.json and safetensors'}"


def _named(weights: Weights) -> str:
    return f"{weights.hub}@{weights.revision}" if weights.revision else weights.hub
