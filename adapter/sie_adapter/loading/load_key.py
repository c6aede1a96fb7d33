"""Key of a load: a digest of everything from which the load of a text model computes numbers. Two loads with equal keys
may share certificates, and files that were computed from the weights (`derived`).

    files of the model ─┐
    catalogue entry, precision, attention ─┤
    versions of libraries, code of the adapter and its engines ─┼──► key
    processor or GPU ─┘
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

import sie_contracts
from sie_adapter.engine import device as devices
from sie_adapter.engine import engines
from sie_adapter.engine.device import Compute
from sie_adapter.loading.weight_files import OTHER_FORMATS
from sie_contracts.models.catalogue import Resolved
from sie_store.weights.derived import digest

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
# fields of an entry that do not change numbers, so that models with the same weights share files
_APART = frozenset({"id", "weights", "profiles", "description", "license", "download_bytes"})
_MAX_DIGESTS = 10_000
_PROCESSOR = ("model name", "flags", "Features", "CPU part")  # lines of /proc/cpuinfo


class LoadKeys:
    """Computes keys, and reads the files of a model again only if their size or time of modification has changed. If
    the load keeps no files, equal files are those of equal path, size and time, and are not read.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int, int], str] = {}

    def key_of(
        self, folder: Path, golden: Iterable[Path], resolved: Resolved, compute: Compute, *, is_kept: bool
    ) -> str:
        """Return the key. `golden`: files outside `folder` with expected vectors. `is_kept`: whether the load keeps
        files. Raises OSError.
        """
        own = [path for path in sorted(folder.rglob("*")) if _counts(path.relative_to(folder).parts) and path.is_file()]
        entry = {name: value for name, value in msgspec.structs.asdict(resolved.entry).items() if name not in _APART}
        facts = [
            [(str(path.relative_to(folder)), self._content(path, is_kept)) for path in own],
            [self._content(path, is_kept) for path in golden],
            [entry, resolved.entry.weights.digests, msgspec.structs.replace(resolved.load, engine=None)],
            [compute.precision, compute.backend],
            _program(),
            _machine(compute.device),
        ]
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]

    def _content(self, path: Path, is_kept: bool) -> object:
        status = path.stat()
        facts = str(path), status.st_size, status.st_mtime_ns
        if not is_kept:
            return facts
        if facts not in self._digests:
            if len(self._digests) >= _MAX_DIGESTS:
                self._digests.clear()
            self._digests[facts] = digest(path)
        return self._digests[facts]


def _counts(parts: tuple[str, ...]) -> bool:
    """Return whether a load may read the file with this path. Hidden folders are those of git and the hub's client."""
    return parts[0] not in OTHER_FORMATS and not any(part.startswith(".") for part in parts)


@functools.cache
def _program() -> list[str]:
    """Return the versions of libraries, and size and time of each module of the adapter, of the packages that it uses
    and of its engines, which in a checkout change without a new version.
    """
    rules = engines.rules().values()
    libraries = [*_LIBRARIES, *sorted(rule.package for rule in rules if rule.package)]
    versions = [f"{name} {_version(name)}" for name in libraries]
    packages = {
        "sie_adapter",
        "sie_contracts",
        "sie_store",
        *(rule.load.__module__.partition(".")[0] for rule in rules if rule.load is not None),
    }
    modules: list[Path] = []
    for spec in filter(None, map(importlib.util.find_spec, sorted(packages))):
        if (places := spec.submodule_search_locations) is None:
            modules.append(Path(spec.origin or ""))
        else:
            modules += [path for place in places for path in Path(place).rglob("*.py")]
    facts = [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(modules)]
    return [sie_contracts.__version__, *versions, *facts]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _machine(device: torch.device) -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else [platform.processor()]
    processor = sorted({line for line in lines if line.startswith(_PROCESSOR)})
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), devices.label(device), *processor]
