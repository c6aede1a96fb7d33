"""Formats of inputs, by the names of objects."""

from __future__ import annotations

from sie_contracts.api.jobs import InputFormat

SUFFIXES: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), "images"),
}
MANIFEST = "manifest.json"  # of an output, which may be the input of another job
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy", ".zip", ".tar", ".tgz")


def format_of(name: str) -> InputFormat | None:
    """Return the format by the suffix of the name."""
    base = name.rpartition("/")[2].lower()
    return SUFFIXES.get(base[base.rfind(".") :]) if "." in base else None


def is_packed(name: str) -> bool:
    """Whether it is a compressed file or an archive, which no job reads."""
    return name.lower().endswith(_PACKED)


def is_hidden(name: str) -> bool:
    """Whether a name below a folder is not one of data: hidden ones, markers of other programs, folders, a manifest."""
    segments = name.split("/")
    return any(not segment or segment[0] in "._" for segment in segments) or segments[-1] == MANIFEST
