"""Environment variables of each process of `sie serve`. A secret of SIE, of the Hugging Face Hub or of a cloud reaches
only the processes that need it.

settings                 the components that read them
HF_TOKEN and the like    adapters, which ask the hub for weights
AWS_, GOOGLE_, AZURE_    processes with a setting that names a bucket
other variables          all processes except the broker, which gets only those in _BROKER
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sie_contracts.settings import BY_NAME, ROWS, Settings

HUB = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGINGFACE_TOKEN"})
CLOUD = ("AWS_", "GOOGLE_", "AZURE_")
_BROKER = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "GOMAXPROCS", "GOMEMLIMIT", "GOGC")
_BUCKETS = ("s3://", "gs://", "az://")


def of_components(components: Collection[str], environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return the environment for a process that runs these components (gateway, config, sidecar, adapter)."""
    own = [row for row in ROWS if not set(components).isdisjoint(row.components)]
    opens_bucket = any(_names_bucket(getattr(settings, row.field)) for row in own)

    def is_theirs(name: str) -> bool:
        if name in BY_NAME:
            return BY_NAME[name] in own
        if name in HUB:
            return "adapter" in components
        return opens_bucket or not name.startswith(CLOUD)

    return {name: value for name, value in environ.items() if is_theirs(name)}


def _names_bucket(value: Any) -> bool:
    return str(value).startswith(_BUCKETS) if not isinstance(value, tuple) else any(map(_names_bucket, value))


def of_broker(environ: Mapping[str, str], passwords: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for nats-server: its passwords and some system variables, but no setting of SIE."""
    # GOGC: collect garbage when the heap has grown by half, not by all of its size; this saves a tenth of the memory
    return {"GOGC": "50"} | {name: environ[name] for name in _BROKER if name in environ} | dict(passwords)
