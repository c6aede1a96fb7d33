"""Prompt of Whisper, and the segments of its text."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from sie_contracts.errors import InvalidInput
from sie_models_readers.transcript import PromptTokens, _last, segments

TIMES = 100  # the id of 0.00


@pytest.mark.parametrize(
    ("written", "expected", "used"),
    [
        ([100, 1, 2], [(4.0, 4.8, [100, 1, 2])], 80),
        ([100, 1, 120], [(4.0, 4.4, [100, 1, 120])], 80),
        ([100, 1, 110, 110, 2, 3], [(4.0, 4.2, [100, 1, 110, 110])], 20),
        ([105, 1, 110, 112, 2, 120], [(4.1, 4.2, [105, 1, 110]), (4.24, 4.4, [112, 2, 120])], 80),
        ([100, 1, 110, 110, 2, 120, 120], [(4.0, 4.2, [100, 1, 110]), (4.2, 4.4, [110, 2, 120, 120])], 40),
    ],
    ids=["no time stamp", "one at the end", "cut off", "whole", "cut off behind a pair"],
)
def test_pairs_of_time_stamps_end_segments(
    written: list[int], expected: list[tuple[float, float, list[int]]], used: int
) -> None:
    """The window has 80 frames and begins at frame 400."""
    spans, moved = segments(written, TIMES, 400, 80)
    assert [(round(span.start_s, 9), round(span.end_s, 9), list(span.ids)) for span in spans] == expected
    assert moved == used


def test_the_end_of_a_window_is_rounded_as_the_library_rounds_it() -> None:
    frames = range(1, 3001)
    assert [_last([1], TIMES, frame) for frame in frames] == [
        int(torch.tensor(frame) * 0.01 / 0.02) for frame in frames
    ]


def told(**rules: object) -> PromptTokens:
    config = {"decoder_start_token_id": 10, "no_timestamps_token_id": 99, **rules}
    return PromptTokens.from_config(GenerationConfig(**config), object())


LANGUAGES, TASKS = {"<|en|>": 11, "<|de|>": 12}, {"transcribe": 20, "translate": 21}
MANY = {"lang_to_id": LANGUAGES, "task_to_id": TASKS, "is_multilingual": True}
FORCED = {**MANY, "forced_decoder_ids": [[1, None], [2, 20]]}


@pytest.mark.parametrize(
    ("rules", "choice", "expected"),
    [
        (FORCED, ("", ""), ([10, -1, 20], 1)),
        (FORCED, ("de", ""), ([10, 12, 20], -1)),
        (FORCED, ("German", "translate"), ([10, 12, 21], -1)),
        (FORCED, ("", "translate"), ([10, -1, 21], 1)),
        (MANY, ("", ""), ([10, -1], 1)),
        ({**MANY, "language": "<|en|>", "task": "translate"}, ("", ""), ([10, 11, 21], -1)),
        ({**MANY, "language": "<|en|>"}, ("de", ""), ([10, 12, 20], -1)),
        ({"is_multilingual": False, "forced_decoder_ids": [[1, 99]]}, ("", ""), ([10], -1)),
        ({"forced_decoder_ids": [[1, None], [2, 20]]}, ("", ""), ([10, 20], -1)),
    ],
    ids=range(9),
)
def test_a_prompt_is_what_the_checkpoint_and_the_request_say(
    rules: dict[str, object], choice: tuple[str, str], expected: tuple[list[int], int]
) -> None:
    assert tuple(told(**rules).start(*choice)) == expected


@pytest.mark.parametrize(
    ("rules", "choice", "message"),
    [
        (FORCED, ("xx", ""), "language: the model supports de, en"),
        (FORCED, ("", "sing"), "task: the model supports transcribe, translate"),
        ({}, ("en", ""), "language: the model supports none"),
        ({"is_multilingual": False}, ("", "transcribe"), "one language and one task"),
    ],
    ids=range(4),
)
def test_a_language_or_a_task_that_is_not_there_is_refused(
    rules: dict[str, object], choice: tuple[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        told(**rules).start(*choice)
