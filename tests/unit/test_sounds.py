"""Features of the bytes of a sound file: they are those of the library's feature extractor."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray
from sound_files import RATE, claiming, encoded, replaced, tone

from sie_contracts.errors import InvalidInput
from sie_contracts.media import sounds as recipes
from sie_contracts.media.sounds import SoundHeader, SoundRecipe, UnknownExtractor, check, from_extractor
from sie_sidecar.prepare import sounds

CLAP: dict[str, Any] = {"feature_extractor_type": "ClapFeatureExtractor", "max_length_s": 1}
POSITIONS = 64
WHISPER: dict[str, Any] = {"feature_extractor_type": "WhisperFeatureExtractor"}
WINDOWS = from_extractor({**WHISPER, "chunk_length": 2}, positions=100)
PLAIN = from_extractor({**CLAP, "truncation": "rand_trunc"}, positions=POSITIONS)
FUSED = from_extractor({**CLAP, "truncation": "fusion"}, positions=POSITIONS)


def decoded(data: bytes) -> NDArray[np.float32]:
    return sounds._decoded(data, RATE, None)[0]


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        sounds.prepare(data, PLAIN)
    assert caught.value.reason == "invalid_media"
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "subtype", "gap"),
    [
        ("WAV", "PCM_16", 4e-5),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_U8", 0.01),
        ("WAV", "FLOAT", 0.0),
        ("WAV", "ULAW", 0.03),
        ("WAVEX", "PCM_16", 4e-5),
        ("RF64", "PCM_16", 4e-5),
        ("FLAC", "PCM_16", 4e-5),
        ("FLAC", "PCM_24", 1e-6),
        ("OGG", "VORBIS", 0.2),
        ("OGG", "OPUS", 0.2),
        ("MP3", "MPEG_LAYER_III", 0.2),
    ],
)
def test_each_format_gives_its_samples(kind: str, subtype: str, gap: float) -> None:
    sound = tone(0.5)
    samples = decoded(encoded(sound, kind, subtype=subtype))
    assert samples.dtype == np.float32
    assert np.abs(samples[:20_000] - sound[:20_000]).max() <= gap


def test_channels_become_their_mean_and_another_rate_the_models() -> None:
    """The order is that of librosa.load: first the mean, then soxr at high quality."""
    sound = tone(0.5, rate=44_100, channels=3)
    samples = decoded(encoded(sound, subtype="FLOAT", rate=44_100))
    assert np.array_equal(samples, soxr.resample(sound.mean(1), 44_100, RATE, quality="HQ"))
    assert len(samples) == 24_000


@pytest.mark.parametrize(
    ("recipe", "seconds"),
    [
        *((PLAIN, seconds) for seconds in (0.01, 0.3, 0.51, 1.0, 1.7)),
        *((FUSED, seconds) for seconds in (0.3, 1.0, 1.005, 1.02, 2.3)),
    ],
)
def test_features_are_the_librarys(recipe: SoundRecipe, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits are equal, except for the shrunk view of a long sound. Its random choice is always the middle."""
    from transformers import ClapFeatureExtractor

    library = ClapFeatureExtractor(max_length_s=1, truncation="fusion" if recipe.fused else "rand_trunc")
    monkeypatch.setattr(np.random, "randint", lambda low, high: (low + high - 1) // 2)
    monkeypatch.setattr(np.random, "choice", lambda own: own[len(own) // 2])
    sound = tone(seconds, seed=int(100 * seconds))
    expected = np.asarray(library(sound, sampling_rate=RATE, return_tensors="np").input_features[0])
    features = sounds.features(sound, recipe)
    assert features.shape == expected.shape == recipe.shape
    exact = slice(1, None) if recipe.fused and seconds > 1.01 else slice(None)
    assert np.array_equal(features[exact], expected[exact])
    assert np.abs(features - expected).max() <= 1e-4


@pytest.mark.parametrize("seconds", [0.01, 0.7, 2.0, 2.005, 5.3])
def test_all_of_a_sound_becomes_the_features_of_whisper(seconds: float) -> None:
    """All bits are those of the library without torch. With torch, which is less exact, the library gives the same
    within 1e-4.
    """
    from transformers import WhisperFeatureExtractor

    library = WhisperFeatureExtractor(chunk_length=2)
    sound = tone(seconds, rate=16_000, seed=int(100 * seconds))
    whole = {"truncation": False, "padding": "longest"} if seconds > 2 else {}
    torched = np.asarray(library(sound, sampling_rate=16_000, return_tensors="np", **whole).input_features[0])
    padded = np.pad(sound, (0, max(0, 32_000 - len(sound))))
    features = sounds.features(sound, WINDOWS)
    assert np.array_equal(features[0].T, library._np_extract_fbank_features(padded[None], "cpu")[0])
    assert np.abs(features[0].T - torched).max() <= 1e-4
    assert WINDOWS.can_make(recipes.Shape(*features.shape))
    assert WINDOWS.cost(recipes.Shape(*features.shape)) == -(-(len(padded) // 160) * 160 // 320)


def test_a_long_sound_is_transformed_in_blocks_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = tone(3.1)
    whole = sounds.features(sound, FUSED)
    monkeypatch.setattr(sounds, "_BLOCK_FRAMES", 37)
    assert np.abs(sounds.features(sound, FUSED) - whole).max() <= 1e-4


# what is refused

GOOD = encoded(tone(0.2))
FLAC = encoded(tone(0.2), "FLAC")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "undecodable: the sound file is empty"),
        (b"hello world, this is no sound", "of no supported sound format (WAV, FLAC, OGG, MP3)"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "of no supported sound format"),
        (GOOD[:30], "undecodable: the sound file is damaged or incomplete"),
        (FLAC[: len(FLAC) // 2], "undecodable: the sound file is damaged or incomplete"),
        (encoded(np.zeros(0, np.float32)), "undecodable: the sound file holds no samples"),
        (encoded(np.full(99, np.nan, np.float32), subtype="FLOAT"), "no finite numbers"),
        (encoded(np.full(RATE, 3e38, np.float32), subtype="FLOAT"), "undecodable: the sound file has samples that are"),
        (encoded(tone(0.1, rate=900), rate=900), "900 samples a second, expected 1000 to 384000 Hz"),
        (claiming(RATE * 601), "too_large: the sound lasts 601.0 s, at most 600 s are read"),
        (
            claiming(RATE * 500, channels=3),
            "too_large: the sound has 72000000 samples in 3 channels, at most 64000000 are read",
        ),
        (claiming(0), "does not say how long the sound is"),
        (b"ID3\x04\0\0\0\0\0\x0a" + bytes(10) + FLAC, "undecodable: "),
    ],
    ids=range(13),
)
def test_what_is_no_sound_that_is_read_says_why(data: bytes, message: str) -> None:
    assert message in refusal(data)


def test_a_wav_file_that_was_cut_or_streamed_is_read_as_far_as_it_goes() -> None:
    """The header says 4 GB, or more bytes than the file has."""
    size = GOOD.index(b"data") + 4
    streamed = replaced(replaced(GOOD, 4, b"\xff" * 4), size, b"\xff" * 4)
    assert np.array_equal(decoded(streamed), decoded(GOOD))
    assert len(decoded(GOOD[:-4000])) == len(decoded(GOOD)) - 2000


def test_damaged_files_are_refused_or_read_and_never_raise_anything_else() -> None:
    chance = random.Random(3)
    seeds = [encoded(tone(0.05), kind) for kind in ("WAV", "FLAC")]
    outcomes = set()
    for _ in range(150):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            features = sounds.prepare(bytes(data), PLAIN)
            assert features.shape == PLAIN.shape
            assert np.isfinite(features.values).all()
            outcomes.add("read")
        except InvalidInput as error:
            outcomes.add(error.message.partition(":")[0])
    assert {"read", "undecodable"} <= outcomes <= {"read", "undecodable", "too_large"}


# recipes


def test_a_sound_costs_the_samples_that_are_read_of_it_in_chunks() -> None:
    assert (PLAIN.window, PLAIN.chunk, PLAIN.tokens) == (48_000, 750, 64)
    published = from_extractor({"feature_extractor_type": "ClapFeatureExtractor"}, positions=64)
    assert (published.tokens, published.shape) == (64, (4, 1001, 64))
    assert SoundRecipe(16_000, 16_000, 400, 160, 80, 15_000, high=8000.0).tokens == 2
    shapes = [recipes.Shape(1, frames, 80) for frames in (3000, 60_000, 2999, 60_001)]
    whisper = from_extractor(WHISPER, positions=1500)
    assert [whisper.cost(shape) for shape in shapes[:2]] == [1500, 30_000]
    assert [whisper.can_make(shape) for shape in shapes] == [True, True, False, False]
    assert not whisper.can_make(recipes.Shape(1, 3000, 81))
    assert [PLAIN.can_make(recipes.Shape(1, frames, 64)) for frames in (100, 101, 102)] == [False, True, False]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "the feature extractor is not named"),
        ({"feature_extractor_type": "ASTFeatureExtractor"}, "is ASTFeatureExtractor, known are Clap"),
        ({**WHISPER, "dither": 0.1}, "dither is 0.1, supported is 0"),
        ({**WHISPER, "feature_size": 8000}, "the features would have"),
        ({**CLAP, "truncation": "cut"}, "truncation is cut"),
        ({**CLAP, "padding": "mirror"}, "padding mirror"),
        ({**CLAP, "feature_size": 80}, "feature_size is 80, expected 64 for truncation fusion"),
        ({**CLAP, "frequency_max": 0}, "the bands reach from 0 to 0 Hz"),
        ({**CLAP, "hop_length": 0}, "needs hop of at least 1"),
        ({**CLAP, "max_length_s": 3600}, "the features would have"),
        ({**WHISPER, "hop_length": "160"}, "not supported between"),
        ({**WHISPER, "n_fft": 400.5}, "got `float`"),
    ],
    ids=range(12),
)
def test_an_extractor_that_no_recipe_does_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownExtractor, match=message):
        from_extractor(config, positions=POSITIONS)


HOURS = 2.5  # seconds of `long`, whose parts have 1 s


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> NDArray[np.float32]:
    """A sound of several parts."""
    monkeypatch.setattr(sounds, "MAX_SECONDS", 1)
    return tone(HOURS, rate=RATE)


@pytest.mark.parametrize(("kind", "gap"), [("WAV", 0.0), ("FLAC", 0.0), ("OGG", 0.01), ("MP3", 0.2)])
@pytest.mark.parametrize(("from_s", "length_s"), [(0.0, 1.0), (0.75, 1.0), (1.5, 1.0), (1.75, 0.75), (2.25, 0.25)])
def test_a_part_has_the_samples_of_its_place_and_tells_the_length_of_the_whole(
    long: NDArray[np.float32], kind: str, gap: float, from_s: float, length_s: float
) -> None:
    data = encoded(long, kind, rate=RATE)
    whole = decoded(data)
    samples, seconds = sounds._decoded(data, RATE, from_s)
    assert abs(seconds - len(whole) / RATE) <= 0.001
    first = round(from_s * RATE)
    expected = whole[first : first + round(length_s * RATE)]
    assert abs(len(samples) - len(expected)) <= (0 if kind in ("WAV", "FLAC") else 0.1 * RATE)
    count = min(len(samples), len(expected))
    assert np.abs(samples[:count] - expected[:count]).max() <= gap


def test_the_features_of_a_part_are_those_of_its_samples(long: NDArray[np.float32]) -> None:
    data = encoded(long, subtype="FLOAT", rate=RATE)
    recipe = from_extractor({**WHISPER, "sampling_rate": RATE, "chunk_length": 1}, positions=50)
    part = sounds.prepare(data, recipe, 0.5)
    assert np.array_equal(part.values, sounds.features(long[RATE // 2 : RATE // 2 + RATE], recipe))
    assert part.seconds == HOURS


def test_a_sound_that_is_read_in_parts_may_be_longer_but_has_limits_too() -> None:
    long = SoundHeader(3 * 3600 * 44_100, 44_100, 2)
    check(long, 0.0)
    check(long, 10_700.0)
    with pytest.raises(InvalidInput, match=r"too_large: the sound lasts 10800\.0 s, at most 600 s are read"):
        check(long)
    with pytest.raises(InvalidInput, match=r"too_large: the sound lasts 14401\.0 s, at most 14400 s are read"):
        check(SoundHeader(14_401 * 8000, 8000, 1), 0.0)
    with pytest.raises(InvalidInput, match="the part to read begins at"):
        check(long, 10_800.0)
    with pytest.raises(InvalidInput, match="too_large: the sound has 115200000 samples in 2 channels"):
        check(SoundHeader(700 * 96_000, 96_000, 2), 0.0)
