"""Readers of sounds: they write the speech in a recording.

one recording each ──► prompts ──► the loop of `reading`, window by window ──► written text ──► results
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sie_adapter.engine.device import Compute
from sie_adapter.readers.parakeet import ParakeetReader
from sie_adapter.readers.whisper import WhisperReader
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible
from sie_store.folder_files import read_json

_Reader = type[WhisperReader] | type[ParakeetReader]
_READERS: Mapping[str, _Reader] = {"whisper": WhisperReader, "parakeet_tdt": ParakeetReader}


class SoundReader:
    """Family of the readers of sounds. Its constructor returns the reader of the model's class."""

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        return _reader(folder, entry).fault_of_files(folder, entry)

    def __new__(  # type: ignore[misc]  # the readers have no common base
        cls, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute
    ) -> WhisperReader | ParakeetReader:
        return _reader(folder, entry)(folder, entry, load, compute)


def _reader(folder: Path, entry: ModelEntry) -> _Reader:
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if model_type not in _READERS:
        raise incompatible(f"{entry.id}: model_type is {model_type}, a sound-reader is {' or '.join(_READERS)}")
    return _READERS[model_type]
