"""Formats of a job's input, which follow from the names of the objects."""

from __future__ import annotations

from sie_contracts.api.jobs import InputFormat

SUFFIXES: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), "images"),
}
# name of an output's manifest; a job whose input is the output of another job skips this object
MANIFEST = "manifest.json"
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".snappy", ".zip", ".tar", ".tgz")


def format_of(name: str) -> InputFormat | None:
    base = name.rpartition("/")[2].lower()
    return SUFFIXES.get(base[base.rfind(".") :]) if "." in base else None


def is_packed(name: str) -> bool:
    """Return whether `name` is the name of a compressed file or an archive, which jobs cannot read."""
    return name.lower().endswith(_PACKED)


def is_hidden(name: str) -> bool:
    """Return whether jobs skip the object `name`: a manifest, or an object whose name has a segment that is empty or
    begins with `.` or `_`, such as the marker file _SUCCESS of other programs.
    """
    segments = name.split("/")
    return any(not segment or segment[0] in "._" for segment in segments) or segments[-1] == MANIFEST
