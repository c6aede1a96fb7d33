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
_PROCESSOR = ("model name", "flags", "Features", "CPU part")  # lines of /proc/cpuinfo


class LoadKeys:
    """Computes keys, and reads the files of a model again only if their size or time of modification has changed."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, int, int], str] = {}

    def key_of(self, folder: Path, golden: Iterable[Path], resolved: Resolved, compute: Compute) -> str:
        """Return the key. `golden`: files outside `folder` with expected vectors. Raises OSError."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        own = [path for path in files if path.relative_to(folder).parts[0] not in OTHER_FORMATS]
        entry = {name: value for name, value in msgspec.structs.asdict(resolved.entry).items() if name not in _APART}
        facts = [
            [(str(path.relative_to(folder)), self._digest(path)) for path in own],
            [self._digest(path) for path in golden],
            [entry, resolved.entry.weights.digests, msgspec.structs.replace(resolved.load, engine=None)],
            [compute.precision, compute.backend],
            _program(),
            _machine(compute.device),
        ]
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]

    def _digest(self, path: Path) -> str:
        status = path.stat()
        facts = str(path), status.st_size, status.st_mtime_ns
        if facts not in self._digests:
            self._digests[facts] = digest(path)
        return self._digests[facts]


@functools.cache
def _program() -> list[str]:
    """Return the versions of libraries, and size and time of each module of the adapter and of its engines, which in a
    checkout change without a new version.
    """
    rules = engines.rules().values()
    libraries = [*_LIBRARIES, *sorted(rule.package for rule in rules if rule.package)]
    versions = [f"{name} {_version(name)}" for name in libraries]
    packages = {"sie_adapter", *(rule.load.__module__.partition(".")[0] for rule in rules if rule.load is not None)}
    modules = []
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            modules += [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in Path(place).rglob("*.py")]
    return [sie_contracts.__version__, *versions, *sorted(modules)]


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
