"""Preparation of sounds for a model, from the file to features. The adapter sends a `SoundRecipe` to the sidecar. No
function here opens a file.

    header ──► check ──► decode ──► one channel ──► model's sample rate ──► model's length ──► mel spectrogram

The numbers are equal to those of the feature extractors of transformers 5.23, with one exception: where the library
reads a random part of a long sound, the recipe reads the middle, so that a sound always has the same result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sie_contracts.media.media import fault

MAX_SECONDS = 600  # longest sound, or part of a sound, that one request reads, in seconds
MAX_RECORDING_S = 14_400  # longest sound of which a request may read a part, in seconds
# maximum number of samples of a file, or of the part of a file that a request reads, summed over all channels
MAX_SAMPLES = 64_000_000
RATES = (1_000, 384_000)  # lowest and highest sample rate of a file, in Hz
MAX_FEATURE_BYTES = 64 << 20  # maximum number of bytes of the features of one sound

Filling = Literal["repeatpad", "repeat", "pad", "none"]
Scale = Literal["htk", "slaney"]
Levels = Literal["decibels", "relative", "natural"]


class Shape(NamedTuple):
    """Shape of the features of a sound: views of its spectrum, frames in each view, frequency bins in each frame."""

    views: int
    frames: int
    bins: int


class SoundHeader(NamedTuple):
    """Header of a sound file: `frames` samples of each channel, at `rate` samples per second."""

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


class SoundRecipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """Preparation of a sound with one channel. The model reads `window` samples, at `rate` samples per second, as a
    spectrogram. The spectrogram has one frame per `hop` samples. Each frame covers `fft` samples and has `bins`
    frequency bands from `low` to `high` Hz.

    `filling`: how a sound shorter than the window is filled up. `repeatpad`: repeat the sound as often as it fits
    completely, then add silence; `repeat`: repeat the sound up to the full length; `pad`: add silence only; `none`: do
    not fill up.

    The model reads only the middle of a sound that is longer than the window. With `whole`, it reads the whole sound.
    With `fused`, it gets four views of such a sound: the whole sound, shrunk, and one part of each third; the four
    views of a shorter sound are equal.

    `scale`: spacing of the bands; with `slaney`, bands have equal area. `levels`: one of three units of the powers.
    `decibels`: the log10 of a power, times 10. `relative`, as in Whisper: (max(x, largest x - 8) + 4) / 4, where x is
    the log10 of a power. `natural`, as in Parakeet: the natural logarithm of a power. Only with `decibels`, the
    spectrogram has one more frame at the end. `emphasis`: factor; this factor times the previous sample is subtracted
    from each sample. `span`: number of samples that are read in the middle of each frame (0: all). `chunk`: number of
    samples that cost as much as one token.
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
    emphasis: float = 0.0
    span: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.span <= self.fft:
            raise ValueError(f"span is {self.span} samples, expected 0 to the length of a frame, {self.fft}")
        for name in ("rate", "window", "fft", "hop", "bins", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"a sound recipe needs {name} of at least 1")
        if not 0 <= self.low < self.high:
            raise ValueError(f"the bands reach from {self.low:g} to {self.high:g} Hz, expected 0 <= low < high")
        if self.window < self.fft:
            raise ValueError(f"the window has {self.window} samples, expected at least {self.fft}, one frame")
        if (size := 4 * math.prod(self._largest)) > MAX_FEATURE_BYTES:
            raise ValueError(f"the features would have {size} bytes, expected at most {MAX_FEATURE_BYTES}")

    @property
    def tokens(self) -> int:
        """Return the cost of a sound of `window` samples, in tokens. A shorter sound has the same cost."""
        return -(-self.window // self.chunk)

    @property
    def shape(self) -> Shape:
        """Return the smallest shape that the features of a sound can have: the shape for `window` samples, because
        shorter sounds are filled up. With `filling: none`, return the shape for two frames, because the features of one
        frame have no variance.
        """
        return self._shape_of(2 * self.hop if self.filling == "none" else self.window)

    @property
    def _largest(self) -> Shape:
        return self._shape_of(max(self.window, MAX_SECONDS * self.rate) if self.whole else self.window)

    def _shape_of(self, samples: int) -> Shape:
        return Shape(4 if self.fused else 1, samples // self.hop + (self.levels == "decibels"), self.bins)

    def can_make(self, shape: Shape) -> bool:
        """Return whether this recipe can turn some sound into features of this shape."""
        shortest, longest = self.shape, self._largest
        is_alike = shape._replace(frames=shortest.frames) == shortest
        return is_alike and shortest.frames <= shape.frames <= longest.frames

    def cost(self, shape: Shape) -> int:
        return -(-shape.frames * self.hop // self.chunk) if self.whole else self.tokens


def check(header: SoundHeader, from_s: float | None = None) -> None:
    """Raise InvalidInput if a sound's header has a rate, length or number of channels outside the limits. With
    `from_s`, a request reads only the part that begins at this second, so the whole sound may last MAX_RECORDING_S.
    """
    frames, rate, channels = header
    if not RATES[0] <= rate <= RATES[1]:
        raise fault("undecodable", f"the sound has {rate} samples a second, expected {RATES[0]} to {RATES[1]} Hz")
    if min(frames, channels) < 1:
        raise fault("undecodable", "the sound file holds no samples")
    most_s = MAX_SECONDS if from_s is None else MAX_RECORDING_S
    if header.seconds > most_s:
        raise fault("too_large", f"the sound lasts {header.seconds:.1f} s, at most {most_s} s are read")
    samples = channels * (frames if from_s is None else min(frames, MAX_SECONDS * rate))
    if samples > MAX_SAMPLES:
        raise fault(
            "too_large", f"the sound has {samples} samples in {channels} channels, at most {MAX_SAMPLES} are read"
        )
    if from_s is not None and from_s >= header.seconds:
        raise fault("undecodable", f"the sound lasts {header.seconds:.1f} s, the part to read begins at {from_s:.1f} s")


class UnknownExtractor(ValueError):
    """Error for a preprocessor_config.json that no recipe can express. The message names the unsupported setting."""


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
# number of frequency bands of the shrunk view of the whole sound; in transformers, all models have the same number
FUSED_BINS = 64


def from_extractor(config: Mapping[str, Any], *, positions: int) -> SoundRecipe:
    """Return the recipe for a checkpoint's preprocessor_config.json. Raises UnknownExtractor.

    A sound costs about one token for each position that it takes in the model. `positions`: number of positions that a
    sound of the length of one window takes. For a model without a window (Parakeet), it is the number of frames of the
    spectrogram that become one position.
    """
    name = str(config.get("feature_extractor_type") or "not named")
    if name not in _EXTRACTORS:
        raise UnknownExtractor(f"the feature extractor is {name}, known are {', '.join(_EXTRACTORS)}")
    try:
        recipe = _EXTRACTORS[name](config, positions)
        # the sidecar accepts only integers in a recipe, but a file may have 30.0 in place of 30
        return msgspec.convert(msgspec.structs.asdict(recipe), SoundRecipe, strict=False)
    except (ValueError, TypeError) as error:
        raise UnknownExtractor(str(error)) from error


def _clap(config: Mapping[str, Any], positions: int) -> SoundRecipe:
    settings = {**_CLAP, **_fixed(config, {})}
    truncations, paddings = ("fusion", "rand_trunc"), ("repeatpad", "repeat", "pad")
    if settings["truncation"] not in truncations or settings["padding"] not in paddings:
        raise UnknownExtractor(f"not supported: truncation is {settings['truncation']}, padding {settings['padding']}")
    fused = settings["truncation"] == "fusion"
    if fused and settings["feature_size"] != FUSED_BINS:
        raise UnknownExtractor(
            f"feature_size is {settings['feature_size']}, expected {FUSED_BINS} for truncation fusion"
        )
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
_WHISPER_HIGH = 8000.0  # upper end of the highest frequency band, in Hz


def _whisper(config: Mapping[str, Any], positions: int) -> SoundRecipe:
    """Return the recipe of Whisper. A sound that is longer than the window is not truncated."""
    settings = {**_WHISPER, **_fixed(config, _WHISPER_FIXED)}
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


_PARAKEET = {
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
}
_PARAKEET_FIXED = {"padding_value": 0, "padding_side": "right"}


def _parakeet(config: Mapping[str, Any], positions: int) -> SoundRecipe:
    """Return the recipe of Parakeet. `positions`: number of frames of the spectrogram for one position of the model."""
    settings = {**_PARAKEET, **_fixed(config, _PARAKEET_FIXED)}
    return SoundRecipe(
        rate=settings["sampling_rate"],
        window=settings["n_fft"],
        fft=settings["n_fft"],
        hop=settings["hop_length"],
        bins=settings["feature_size"],
        chunk=positions * settings["hop_length"],
        high=settings["sampling_rate"] / 2,
        filling="none",
        levels="natural",
        whole=True,
        emphasis=settings["preemphasis"] if config.get("preemphasis", 0) is not None else 0.0,
        span=settings["win_length"],
    )


def _fixed(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` completed with `values`. Raises UnknownExtractor if a setting differs from that in `values`."""
    settings = {**values, **{key: value for key, value in config.items() if value is not None}}
    if changed := [name for name, value in values.items() if settings[name] != value]:
        raise UnknownExtractor(f"{changed[0]} is {settings[changed[0]]}, supported is {values[changed[0]]}")
    return settings


_EXTRACTORS = {
    "ClapFeatureExtractor": _clap,
    "ParakeetFeatureExtractor": _parakeet,
    "WhisperFeatureExtractor": _whisper,
}
