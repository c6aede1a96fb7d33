"""Decoding of sound files to the features that a model reads, with libsndfile and soxr. Only the media worker processes
import this module, because decoders are C code that reads the data of clients.

    first bytes ──► header ──► limits ──► decode ──► one channel ──► model's rate ──► model's length ──► features

FORMATS has the supported formats. A sound is resampled as in `librosa.load` (soxr, high quality). The features are
those of transformers' feature extractors, computed without torch. For a sound that fits into the model's window, the
features are equal bit for bit. Where an extractor reads a random part of a longer sound, this module reads the middle.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from sie_contracts.errors import InvalidInput
from sie_contracts.media.media import fault
from sie_contracts.media.sounds import MAX_SECONDS, Levels, Shape, SoundHeader, SoundRecipe, check

# (test of a file's first bytes, names of this format in libsndfile)
_MAGIC: tuple[tuple[Callable[[bytes], bool], frozenset[str]], ...] = (
    (lambda head: head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE", frozenset({"WAV", "WAVEX", "RF64"})),
    (lambda head: head.startswith(b"fLaC"), frozenset({"FLAC"})),
    (lambda head: head.startswith(b"OggS"), frozenset({"OGG"})),
    (lambda head: head.startswith(b"ID3") or (head[:1] == b"\xff" and head[1:2] >= b"\xe0"), frozenset({"MP3"})),
)
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
_UNKNOWN_LENGTH = 1 << 62  # samples per channel; libsndfile reports this number or more if the length is unknown
_BLOCK_FRAMES = 4096  # number of frames of a spectrogram that are transformed at a time, which takes 50 MB
_LEAST_POWER = 1e-10
_ADDED_POWER = 2.0**-24  # added to powers before the natural logarithm, because 0 has no logarithm
_RANGE = 8.0  # dynamic range in powers of ten: a level is at least the loudest level less this range

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Spectrograms(NamedTuple):
    """Features of a sound, float32 [views, frames, bins]. `seconds`: length of the file."""

    values: Float32
    seconds: float

    @property
    def shape(self) -> Shape:
        return Shape(*self.values.shape)

    def digest(self) -> bytes:
        digest = hashlib.sha256(b"%d x %d x %d\n" % self.shape)
        digest.update(self.values.tobytes())
        return digest.digest()


def prepare(data: bytes, recipe: SoundRecipe, from_s: float | None = None) -> Spectrograms:
    """Return the features of a sound file, or of its part from the second `from_s` on, at most MAX_SECONDS seconds.
    Raises InvalidInput with the reason "invalid_media"; its message begins with "too_large" or "undecodable".
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # `isfinite` below checks the results
            samples, seconds = _decoded(data, recipe.rate, from_s)
            values = features(samples, recipe)
        if not np.isfinite(values).all():
            raise fault("undecodable", "the sound file has samples that are too large")
        return Spectrograms(values, seconds)
    except InvalidInput:
        raise
    except MemoryError as error:
        raise fault("too_large", "decoding the sound takes more memory than a media worker has") from error
    except Exception as error:  # decoders raise exceptions of any class for a damaged file
        raise fault("undecodable", "the sound file is damaged or incomplete") from error


def _decoded(data: bytes, rate: int, from_s: float | None) -> tuple[Float32, float]:
    """Return the samples as one channel at this rate, and the file's length in seconds. If `from_s` is set, the samples
    begin `from_s` seconds after the start of the file and cover at most MAX_SECONDS.
    """
    if not data:
        raise fault("undecodable", "the sound file is empty")
    kinds = next((kinds for is_of, kinds in _MAGIC if is_of(data[:16])), None)
    if kinds is None:
        raise fault("undecodable", f"the first bytes are of no supported sound format ({', '.join(FORMATS)})")
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if file.format not in kinds:  # the first bytes may be an ID3 tag, which can stand before any format
            raise fault("undecodable", "the sound file is of another format than its first bytes say")
        if file.frames >= _UNKNOWN_LENGTH:
            raise fault("undecodable", "the header of the sound file does not say how long the sound is")
        header = SoundHeader(file.frames, file.samplerate, file.channels)
        check(header, from_s)
        first = round((from_s or 0.0) * header.rate)
        most = -1 if from_s is None else MAX_SECONDS * header.rate
        if first:
            file.seek(first)
        channels: Float32 = file.read(most, dtype="float32", always_2d=True)
    own = channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1)
    if not np.isfinite(own).all():
        raise fault("undecodable", "the sound file has samples that are no finite numbers")
    samples = own if header.rate == rate else soxr.resample(own, header.rate, rate, quality="HQ")
    if not len(samples):
        raise fault("undecodable", "the sound file holds no samples")
    # the file may be shorter than its header says, so if its end was read, the length is the number of samples
    is_cut = len(channels) == most
    return samples, header.seconds if is_cut else (first + len(channels)) / header.rate


def features(samples: Float32, recipe: SoundRecipe) -> Float32:
    """Return the features of one channel at the recipe's rate, float32 [views, frames, bins]. Source: transformers,
    ClapFeatureExtractor, ParakeetFeatureExtractor and WhisperFeatureExtractor.
    """
    if recipe.filling == "none" and len(samples) < 2 * recipe.hop:
        raise fault("undecodable", f"the sound has {len(samples)} samples, the model needs {2 * recipe.hop} or more")
    if recipe.whole and (recipe.filling == "none" or len(samples) > recipe.window):
        return _spectrogram(samples, recipe)[None]
    if len(samples) <= recipe.window:
        whole = _spectrogram(_filled(samples, recipe), recipe)
        return np.stack([whole] * recipe.shape.views)
    if not recipe.fused:
        start = (len(samples) - recipe.window) // 2
        return _spectrogram(samples[start : start + recipe.window], recipe)[None]
    return _views(_spectrogram(samples, recipe), recipe.shape.frames)


def _filled(samples: Float32, recipe: SoundRecipe) -> Float32:
    """Extend a sound to the length of the model's window, by repeating it or by silence, as the recipe says."""
    times = recipe.window // len(samples)
    if recipe.filling == "repeat" and len(samples) < recipe.window:
        return np.tile(samples, times + 1)[: recipe.window]
    if recipe.filling == "repeatpad":
        samples = np.tile(samples, times)
    return np.pad(samples, (0, recipe.window - len(samples)))


def _views(whole: Float32, frames: int) -> Float32:
    """Return four views of a long sound: the whole sound shrunk to `frames` frames, and three parts of this length,
    from its beginning, middle and end. The possible starts of a part are divided into three equal ranges, and each part
    begins at the middle of one range.
    """
    if len(whole) == frames:
        return np.stack([whole] * 4)
    thirds = np.array_split(np.arange(len(whole) - frames + 1), 3)
    starts = [int(third[len(third) // 2]) if len(third) else 0 for third in thirds]
    return np.stack([_shrunk(whole, frames), *(whole[start : start + frames] for start in starts)])


def _shrunk(whole: Float32, frames: int) -> Float32:
    """Shrink a spectrogram to `frames` frames by interpolation between the two nearest frames. Source: torch, bilinear
    interpolation without aligned corners; the results are equal within 1e-5.
    """
    scale = np.float32(len(whole)) / np.float32(frames)
    places = np.maximum((np.arange(frames, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    before = np.minimum(places.astype(np.int64), len(whole) - 1)
    after = np.minimum(before + 1, len(whole) - 1)
    share = (places - before.astype(np.float32))[:, None]
    shrunk: Float32 = (1 - share) * whole[before] + share * whole[after]
    return shrunk


def _spectrogram(samples: Float32, recipe: SoundRecipe) -> Float32:
    """Return the level in each frequency band, [frames, bins]. Source: transformers, audio_utils.spectrogram, which is
    slower, as it computes one frame at a time.
    """
    half = recipe.fft // 2
    if recipe.emphasis:
        samples = np.append(samples[:1], samples[1:] - np.float32(recipe.emphasis) * samples[:-1])
    mode: Literal["constant", "reflect"] = "constant" if recipe.levels == "natural" else "reflect"
    padded = np.pad(samples, (half, half), mode=mode).astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, recipe.fft)[:: recipe.hop]
    shape, bands = _shape(recipe), _bands(recipe)
    spectrogram = np.empty((len(frames), recipe.bins), np.float32)
    for start in range(0, len(frames), _BLOCK_FRAMES):
        spectrum = np.fft.rfft(frames[start : start + _BLOCK_FRAMES] * shape).astype(np.complex64)
        power = np.abs(spectrum, dtype=np.float64) ** 2.0
        spectrogram[start : start + _BLOCK_FRAMES] = _LEVELS[recipe.levels](np.dot(bands.T, power.T)).T
    if recipe.levels == "decibels":
        return spectrogram
    spectrogram = spectrogram[: len(samples) // recipe.hop]
    if recipe.levels == "natural":
        return spectrogram
    result: Float32 = (np.maximum(spectrogram, spectrogram.max() - _RANGE) + 4.0) / 4.0
    return result


_LEVELS: Mapping[Levels, Callable[[Float64], Float64]] = {
    "decibels": lambda powers: 10.0 * np.log10(np.maximum(_LEAST_POWER, powers)),
    "relative": lambda powers: np.log10(np.maximum(_LEAST_POWER, powers)),
    "natural": lambda powers: np.log(powers + _ADDED_POWER),
}


def _shape(recipe: SoundRecipe) -> Float64:
    """Return the window function: the weight of each sample of a frame, [samples]."""
    if not recipe.span:
        return _hann(recipe.fft)
    before = (recipe.fft - recipe.span) // 2
    return np.pad(np.hanning(recipe.span), (before, recipe.fft - recipe.span - before))


@functools.cache
def _hann(length: int) -> Float64:
    return np.hanning(length + 1)[:-1]


@functools.lru_cache(maxsize=16)
def _bands(recipe: SoundRecipe) -> Float64:
    """Return the weight of each frequency in each mel band, [frequencies, bands]. Source: transformers,
    audio_utils.mel_filter_bank, after librosa and torchaudio.
    """
    to_mel, to_hertz = _SCALES[recipe.scale]
    low, high = (to_mel(np.array([edge], np.float64))[0] for edge in (recipe.low, recipe.high))
    centres = to_hertz(np.linspace(low, high, recipe.bins + 2))
    frequencies = np.linspace(0, recipe.rate // 2, recipe.fft // 2 + 1)
    widths = np.diff(centres)
    slopes = centres[None] - frequencies[:, None]
    bands = np.maximum(np.zeros(1), np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    if recipe.scale == "slaney":
        bands *= (2.0 / (centres[2:] - centres[:-2]))[None]
    result: Float64 = bands
    return result


def _htk_to_mel(hertz: Float64) -> Any:
    return 2595.0 * np.log10(1.0 + (hertz / 700.0))


def _htk_to_hertz(mels: Float64) -> Any:
    return 700.0 * (np.power(10, mels / 2595.0) - 1.0)


def _slaney_to_mel(hertz: Float64) -> Any:
    """Convert hertz to mels of the Slaney scale: linear up to 1,000 Hz, logarithmic above."""
    mels = 3.0 * hertz / 200.0
    above = hertz >= 1000.0
    mels[above] = 15.0 + np.log(hertz[above] / 1000.0) * (27.0 / np.log(6.4))
    return mels


def _slaney_to_hertz(mels: Float64) -> Any:
    hertz = 200.0 * mels / 3.0
    above = mels >= 15.0
    hertz[above] = 1000.0 * np.exp((np.log(6.4) / 27.0) * (mels[above] - 15.0))
    return hertz


_SCALES = {"htk": (_htk_to_mel, _htk_to_hertz), "slaney": (_slaney_to_mel, _slaney_to_hertz)}
