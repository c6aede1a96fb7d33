"""Recipe of a model for sounds, from the file to the model's values: `SoundRecipe` travels from the adapter to the
sidecar. Pure: nothing here opens a file.

    header ──► check ──► decode ──► one channel ──► the model's rate ──► its length ──► mel spectrogram

The numbers are those of the feature extractors of transformers 5.23. Where a library takes a part of a long sound at
random, the middle of what it may take is taken here: one sound has one result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sie_contracts.media.media import fault

MAX_SECONDS = 600
MAX_SAMPLES = 64_000_000  # of all channels of a file
RATES = (1_000, 384_000)  # of files, in Hz
MAX_FEATURE_BYTES = 64 << 20  # of what is made of one sound

Filling = Literal["repeatpad", "repeat", "pad"]
Scale = Literal["htk", "slaney"]
Levels = Literal["decibels", "relative"]


class Shape(NamedTuple):
    """Shape of the features of a sound: pictures of the spectrum, frames of each, bins of each frame."""

    views: int
    frames: int
    bins: int


class SoundHeader(NamedTuple):
    """Header of a sound file: `frames` samples of each channel, `rate` of them a second."""

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class SoundRecipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """Preparation of a sound of one channel. The model reads `window` samples, `rate` of them a second, as a
    spectrogram with a frame for each `hop` samples, each of `fft` of them, in `bins` bands from `low` to `high` Hz.

    `filling`: a shorter sound is repeated as often as it fits whole and then padded with silence, repeated to the full
    length, or padded. Of a longer one the middle is read; with `whole`, all of it, window after window; with
    `fused`, four views: the whole of it, shrunk, and a part of each third. `fused` gives a shorter sound four times.
    `scale`: of the bands, those of slaney have one area. `levels`: powers in decibels, or relative to the loudest of
    the sound: powers of ten, 8 at most below it, plus 4, divided by 4, without the frame after the last sample.
    `chunk`: so many samples cost as much as a token.
    """

    rate: int
    window: int
    fft: int
    hop: int
    bins: int
    chunk: int
    low: float = 0.0
    high: float = 0.0
    scale: Scale = "slaney"
    filling: Filling = "repeatpad"
    fused: bool = False
    levels: Levels = "decibels"
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("rate", "window", "fft", "hop", "bins", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"a recipe of sounds needs {name}, at least 1")
        if not 0 <= self.low < self.high:
            raise ValueError(f"the bands reach from {self.low:g} to {self.high:g} Hz")
        if self.window < self.fft:
            raise ValueError(f"the window has {self.window} samples, a frame {self.fft}")
        if (size := 4 * math.prod(self._largest)) > MAX_FEATURE_BYTES:
            raise ValueError(f"the features would have {size} bytes, at most {MAX_FEATURE_BYTES}")

    @property
    def tokens(self) -> int:
        """Cost of a sound that is no longer than the window: the samples that the model reads, in chunks."""
        return -(-self.window // self.chunk)

    @property
    def shape(self) -> Shape:
        """Shape of the features of a sound that is no longer than the window."""
        return self._shape_of(self.window)

    @property
    def _largest(self) -> Shape:
        return self._shape_of(max(self.window, MAX_SECONDS * self.rate) if self.whole else self.window)

    def _shape_of(self, samples: int) -> Shape:
        return Shape(4 if self.fused else 1, samples // self.hop + (self.levels == "decibels"), self.bins)

    def can_make(self, shape: Shape) -> bool:
        """Whether there is a sound whose features have this shape."""
        shortest, longest = self.shape, self._largest
        is_alike = shape._replace(frames=shortest.frames) == shortest
        return is_alike and shortest.frames <= shape.frames <= longest.frames

    def cost(self, shape: Shape) -> int:
        """Compute the cost of a sound with features of this shape, in tokens."""
        return -(-shape.frames * self.hop // self.chunk) if self.whole else self.tokens


def check(header: SoundHeader) -> None:
    """Raises the fault of a sound that is longer than is read, which is known from its header."""
    frames, rate, channels = header
    if not RATES[0] <= rate <= RATES[1]:
        raise fault("undecodable", f"the sound has {rate} samples a second, {RATES[0]} to {RATES[1]} are read")
    if min(frames, channels) < 1:
        raise fault("undecodable", "the sound file holds no samples")
    if header.seconds > MAX_SECONDS:
        raise fault("too_large", f"the sound lasts {header.seconds:.1f} s, at most {MAX_SECONDS} s are read")
    if frames * channels > MAX_SAMPLES:
        raise fault(
            "too_large", f"the sound has {frames * channels} samples in {channels} channels, at most {MAX_SAMPLES}"
        )


class UnknownExtractor(ValueError):
    """A preprocessor_config.json asks for what no recipe does; the message says what."""


_CLAP: Mapping[str, Any] = {
    "feature_size": 64,
    "sampling_rate": 48_000,
    "hop_length": 480,
    "max_length_s": 10,
    "fft_window_size": 1024,
    "frequency_min": 0,
    "frequency_max": 14_000,
    "truncation": "fusion",
    "padding": "repeatpad",
}
FUSED_BINS = 64  # to which the library shrinks the whole of a long sound, whatever the number of bands


def from_extractor(config: Mapping[str, Any], *, positions: int) -> SoundRecipe:
    """The recipe of a checkpoint's preprocessor_config.json for a model that makes so many positions of what it reads.
    Raises UnknownExtractor.
    """
    name = str(config.get("feature_extractor_type") or "not named")
    if name not in _EXTRACTORS:
        raise UnknownExtractor(f"the feature extractor is {name}, known are {', '.join(_EXTRACTORS)}")
    try:
        return _EXTRACTORS[name](config, positions)
    except UnknownExtractor:
        raise
    except ValueError as error:
        raise UnknownExtractor(str(error)) from error


def _clap(config: Mapping[str, Any], positions: int) -> SoundRecipe:
    settings = {**_CLAP, **{key: value for key, value in config.items() if value is not None}}
    if settings["truncation"] not in ("fusion", "rand_trunc") or settings["padding"] not in (
        "repeatpad",
        "repeat",
        "pad",
    ):
        raise UnknownExtractor(f"truncation is {settings['truncation']} and padding {settings['padding']}")
    fused = settings["truncation"] == "fusion"
    if fused and settings["feature_size"] != FUSED_BINS:
        raise UnknownExtractor(f"feature_size is {settings['feature_size']}, fused features have {FUSED_BINS}")
    window = settings["max_length_s"] * settings["sampling_rate"]
    return SoundRecipe(
        rate=settings["sampling_rate"],
        window=window,
        fft=settings["fft_window_size"],
        hop=settings["hop_length"],
        bins=settings["feature_size"],
        chunk=max(1, window // positions),
        low=settings["frequency_min"],
        high=settings["frequency_max"],
        scale="htk" if fused else "slaney",
        filling=settings["padding"],
        fused=fused,
    )


_WHISPER = {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
_WHISPER_FIXED = {"dither": 0, "padding_value": 0, "padding_side": "right"}
_WHISPER_HIGH = 8000.0


def _whisper(config: Mapping[str, Any], positions: int) -> SoundRecipe:
    """Source: transformers, WhisperFeatureExtractor. It gives all frames of a sound that is longer than the window if
    it is told not to cut it.
    """
    settings = {**_WHISPER, **_WHISPER_FIXED, **{key: value for key, value in config.items() if value is not None}}
    if changed := [name for name, value in _WHISPER_FIXED.items() if settings[name] != value]:
        raise UnknownExtractor(f"{changed[0]} is {settings[changed[0]]}, known is {_WHISPER_FIXED[changed[0]]}")
    window = settings["chunk_length"] * settings["sampling_rate"]
    return SoundRecipe(
        rate=settings["sampling_rate"],
        window=window,
        fft=settings["n_fft"],
        hop=settings["hop_length"],
        bins=settings["feature_size"],
        chunk=max(1, window // positions),
        high=_WHISPER_HIGH,
        filling="pad",
        levels="relative",
        whole=True,
    )


_EXTRACTORS = {"ClapFeatureExtractor": _clap, "WhisperFeatureExtractor": _whisper}
