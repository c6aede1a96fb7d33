"""Settings of the engines of this package."""

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import PATH


@dataclass(frozen=True, kw_only=True, repr=False)
class SglangSettings:
    sglang_python: str | None = row(
        None,
        "adapter",
        PATH,
        "Path of the Python interpreter of an environment that has the package sglang. If set, decoder models that "
        "compute dense vectors run on SGLang: on a GPU, and on any device if their entry requests it.",
    )
