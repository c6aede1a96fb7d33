"""Readers of sounds: models that transcribe the speech in a recording.

the recording of each input ──► prompts ──► the loop of `reading`, window by window ──► written text ──► results
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sie_adapter.engine.device import Compute
from sie_adapter.loading.checkpoint import class_of
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_models_readers.parakeet import ParakeetReader
from sie_models_readers.whisper import WhisperReader

_Reader = type[WhisperReader] | type[ParakeetReader]
_READERS: Mapping[str, _Reader] = {"whisper": WhisperReader, "parakeet_tdt": ParakeetReader}


class SoundReader:
    """Family of the readers of sounds. The constructor returns a WhisperReader or a ParakeetReader."""

    @staticmethod
    def fault_of_files(folder: Path, entry: ModelEntry) -> str:
        return class_of(folder, entry, _READERS).fault_of_files(folder, entry)

    def __new__(  # type: ignore[misc]  # the readers have no common base
        cls, folder: Path, entry: ModelEntry, load: LoadOptions, compute: Compute
    ) -> WhisperReader | ParakeetReader:
        return class_of(folder, entry, _READERS)(folder, entry, load, compute)
