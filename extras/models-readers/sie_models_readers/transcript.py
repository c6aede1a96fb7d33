"""Token ids of Whisper (arXiv 2212.04356): its prompt, the segments of a window, and the frame at which the next window
begins. This module does no I/O.

    language, task ──► PromptStart: <|startoftranscript|><|en|><|transcribe|> ──► tokens of a window of 30 s
    <|0.00|> words <|2.40|><|2.40|> words <|4.80|><|4.80|> .. ──► segments, begin of the next window

Times are in steps of 20 ms, frames are 10 ms long. Source: transformers, WhisperGenerationMixin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import GenerationConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from sie_contracts.errors import InvalidInput

STEP_S = 0.02  # seconds from one time stamp to the next
_FRAME_S = 0.01
FRAMES_PER_STEP = 2
TASKS = ("transcribe", "translate")


class PromptStart(NamedTuple):
    """First tokens of a prompt. `ids`: their ids. If the model must recognise the language, `ids` has the placeholder
    -1, which the id of the language's token replaces later, and `place` is the index of this placeholder; else `place`
    is -1.
    """

    ids: list[int]
    place: int = -1


@dataclass(frozen=True)
class PromptTokens:
    """Tokens of which the prompts of a checkpoint consist. `languages`, `tasks`: names with the ids of their tokens.
    `language`, `task`: the defaults. `forced`: the ids after the first token if neither the request nor the defaults
    name a language or a task. The language that the model recognises replaces a None in `forced`.
    """

    first: int
    without_times: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    forced: tuple[int | None, ...]
    language: str = ""
    task: str = ""
    is_multilingual: bool = True

    @classmethod
    def from_config(cls, config: GenerationConfig, model: Any) -> PromptTokens:
        """Read the tokens from a generation configuration. `model`: the configuration of the model, which has some of
        these values in older checkpoints. Raises AttributeError for a checkpoint without a token for time stamps.
        """
        forced = getattr(config, "forced_decoder_ids", None) or getattr(model, "forced_decoder_ids", None) or ()
        in_turn = tuple(number for place, (at, number) in enumerate(forced, 1) if at == place)
        return cls(
            config.decoder_start_token_id,
            config.no_timestamps_token_id,
            {name.strip("<|>"): number for name, number in (getattr(config, "lang_to_id", None) or {}).items()},
            getattr(config, "task_to_id", None) or {},
            in_turn,
            getattr(config, "language", None) or "",
            getattr(config, "task", None) or "",
            getattr(config, "is_multilingual", True),
        )

    @property
    def times(self) -> int:
        """Return the id of the time stamp 0.00. The ids of later time stamps follow."""
        return self.without_times + 1

    def start(self, language: str, task: str) -> PromptStart:
        """Return the first tokens of the prompt for a sound. For an empty language, the checkpoint's default is used;
        without a default, the model recognises the language. For an empty task, the default is used; without a default,
        `transcribe`. Raises InvalidInput for a language or task that the checkpoint does not have, and for any language
        or task if the checkpoint is not multilingual.
        """
        if not self.is_multilingual and (language or task):
            name = "language" if language else "task"
            raise InvalidInput(f"{name}: the model has one language and one task; omit {name}", reason=name, param=name)
        language, task = language or self.language, task or self.task
        ids: list[int | None] = [self.first]
        if not (language or task):
            ids += self.forced
        if language:
            ids[1:2] = [self._language(language)]
        elif self.languages and (len(ids) == 1 or ids[1] is None):
            ids[1:2] = [None]
        elif len(ids) > 1 and ids[1] is None:
            del ids[1]
        if task:
            ids.append(self._task(task))
        elif language and self.tasks and not set(self.tasks.values()) & set(ids):
            ids.append(self._task(TASKS[0]))
        if ids[-1] == self.without_times:
            ids.pop()
        place = ids.index(None) if None in ids else -1
        return PromptStart([-1 if number is None else number for number in ids], place)

    def _language(self, name: str) -> int:
        code = name.lower().strip("<|>")
        code = TO_LANGUAGE_CODE.get(code, code)
        if code not in self.languages:
            listed = ", ".join(sorted(self.languages)) or "none"
            raise InvalidInput(f"language: the model supports {listed}", reason="language", param="language")
        return self.languages[code]

    def _task(self, name: str) -> int:
        if name not in TASKS or name not in self.tasks:
            listed = ", ".join(task for task in TASKS if task in self.tasks) or "none"
            raise InvalidInput(f"task: the model supports {listed}", reason="task", param="task")
        return self.tasks[name]


class TranscriptSegment(NamedTuple):
    """Segment of a transcript: its begin and end in seconds of the sound, and its tokens, with the time stamps."""

    start_s: float
    end_s: float
    ids: Sequence[int]


def segments(written: Sequence[int], times: int, seek: int, frames: int) -> tuple[list[TranscriptSegment], int]:
    """Return the segments of a window, and the number of frames after which the next window begins. The window begins
    at frame `seek` of a sound and has `frames` frames. `written`: the tokens that the model wrote for the window,
    without the end token. `times`: the id of the time stamp 0.00.

    Two consecutive time stamps end a segment and begin the next one; without such a pair, all tokens are one segment.
    If the tokens end with a single time stamp, the last segment is whole. Otherwise the end of the window cuts the
    segment after the last pair. This cut segment is dropped, and the next window begins where the cut segment begins.
    """
    is_time = [number >= times for number in written]
    ends = [place + 1 for place in range(len(written) - 1) if is_time[place] and is_time[place + 1]]
    offset_s = seek * STEP_S / FRAMES_PER_STEP
    if not ends:
        return [TranscriptSegment(offset_s, offset_s + _last(written, times, frames) * STEP_S, written)], frames
    is_whole = is_time[-2:] == [False, True]
    if is_whole:
        ends.append(len(written))
    complete, first = [], 0
    for end in ends:
        part = written[first:end]
        start_s, end_s = (offset_s + (stamp - times) * STEP_S for stamp in (part[0], part[-1]))
        complete.append(TranscriptSegment(start_s, end_s, part))
        first = end
    if is_whole:
        return complete, frames
    *earlier, last = complete
    stamp = written[first]  # start of the segment that the end of the window cuts
    return [*earlier, last._replace(ids=[*last.ids, stamp])], (written[first - 1] - times) * FRAMES_PER_STEP


def _last(written: Sequence[int], times: int, frames: int) -> float:
    """Return the time at which the text of a window ends, in steps of 20 ms, if the window has no two consecutive time
    stamps. This is the last time stamp; without a time stamp above 0, it is the end of the window.
    """
    stamps = [number for number in written if number >= times]
    if stamps and stamps[-1] != times:
        return stamps[-1] - times
    # rounded in the same way as in transformers
    return int(np.float32(frames) * np.float32(_FRAME_S) / np.float32(STEP_S))
