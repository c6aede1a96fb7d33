"""Generated sound files of every kind. Their tones glide, so a wrong rate or a wrong part of a sound is another
sound.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE = 48_000


def tone(seconds: float, *, rate: int = RATE, seed: int = 0, channels: int = 1) -> NDArray[np.float32]:
    """Return a rising tone with overtones and noise, [samples], or [samples, channels] of different loudness."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    base = 200 + 60 * (seed % 7)
    phase = 2 * np.pi * (base * times + 40 * times**2)
    sound = sum(0.3 / part * np.sin(part * phase) for part in (1, 2, 5)) + rng.normal(0, 0.01, len(times))
    samples = np.asarray(sound, np.float32)
    return samples if channels == 1 else np.stack([samples / (1 + channel) for channel in range(channels)], 1)


def encoded(sound: NDArray[np.float32], kind: str = "WAV", *, rate: int = RATE, subtype: str | None = None) -> bytes:
    """Return a file of a sound. It is written in pieces, because the encoder of Ogg takes no long ones."""
    sink = io.BytesIO()
    channels = 1 if sound.ndim == 1 else sound.shape[1]
    with soundfile.SoundFile(sink, "w", rate, channels, subtype, format=kind) as file:
        for start in range(0, len(sound), 1 << 14):
            file.write(sound[start : start + (1 << 14)])
    return sink.getvalue()


def replaced(data: bytes, place: int, value: bytes) -> bytes:
    return data[:place] + value + data[place + len(value) :]


def claiming(samples: int, **options: Any) -> bytes:
    """Return a FLAC file whose header claims so many samples."""
    data = encoded(tone(0.1, **options), "FLAC", rate=options.get("rate", RATE))
    most = (samples & ((1 << 36) - 1)).to_bytes(5, "big")
    return replaced(data, 21, bytes([data[21] & 0xF0 | most[0]]) + most[1:])
