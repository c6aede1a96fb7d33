"""Trend lines of `sie top`: of the frames that it has seen, and of the last hour as a gateway tells it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from sie_cli.display import counted, printable

if TYPE_CHECKING:
    from rich.text import Text

TREND = 60  # frames, or minutes
_LEAST_TREND = 10  # cells of a trend line: fewer say nothing
_STEPS = "▁▂▃▄▅▆▇█"


class TrendStep(msgspec.Struct, frozen=True):
    """Step of a gateway's history over some seconds. `p50_ms`, `p99_ms`: by stage."""

    at: int
    requests: int
    errors: dict[str, int] = {}
    p50_ms: list[float] = []
    p99_ms: list[float] = []


class HistoryTrend(msgspec.Struct, frozen=True):
    """Traffic that a gateway answered over the last hour, as `/v1/history` reports it. Steps without requests are left
    out.
    """

    now: float
    step_s: int
    stages: list[str]
    steps: list[TrendStep]


def of_frames(trend: Iterable[tuple[float, int | None]], width: int) -> list[Text]:
    """One line with a trend line of each figure, the newest frame at the right end. None before there are two frames,
    and none where there is no room.
    """
    from rich.text import Text

    steps = list(trend)
    if len(steps) < 2:
        return []
    parts: list[tuple[str, list[float | None]]] = [("req/s ", [rate for rate, _ in steps])]
    if any(count is not None for _, count in steps):
        parts.append(("queued ", [count for _, count in steps]))
    words = sum(len(name) + len(_most(values)) for name, values in parts) + 2 * (len(parts) - 1)
    cells = min(TREND, (width - words) // len(parts))
    if cells < _LEAST_TREND:
        return []
    line = Text(no_wrap=True, overflow="ellipsis")
    for number, (name, values) in enumerate(parts):
        line.append("  " if number else "").append(name, "bright_black")
        line.append(spark(values[-cells:]), "cyan").append(_most(values[-cells:]), "bright_black")
    return [line]


def of_past(past: HistoryTrend, width: int) -> tuple[list[tuple[str, str]], list[Text]]:
    """Latency and errors of the last hour as words with their styles, and a trend line of latency, the newest minute at
    the right end. Nothing where nothing was answered.
    """
    from rich.text import Text

    if not past.steps or "total_time" not in past.stages:
        return [], []
    total = past.stages.index("total_time")
    ran = [step for step in past.steps if len(step.p99_ms) > total]
    errors: Counter[str] = Counter()
    for step in past.steps:
        errors.update(step.errors)
    parts: list[tuple[str, str]] = []
    if ran:
        last = ran[-1]
        parts.append((f"latency p50 {_ms(last.p50_ms[total])}  p99 {_ms(last.p99_ms[total])}", ""))
    named = ", ".join(f"{printable(code)} {count:,}" for code, count in errors.most_common(3))
    parts.append(
        (f"{counted(errors.total(), 'error')} in an hour" + (f": {named}" if named else ""), "red" if errors else "")
    )
    lines: list[Text] = []
    p99_ms = {step.at: step.p99_ms[total] for step in ran}
    newest = int(past.now // past.step_s) * past.step_s
    room = width - len("p99  max 999.9 s")
    cells = min(TREND, 1 + (newest - past.steps[0].at) // past.step_s, room)
    if ran and cells >= 2:
        values = [p99_ms.get(newest - past.step_s * back) for back in reversed(range(cells))]
        most = max((value for value in values if value is not None), default=0.0)
        line = Text("p99 ", "bright_black", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(spark(values), "cyan").append(f" max {_ms(most)}", "bright_black"))
    return parts, lines


def _ms(value: float) -> str:
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _most(values: Iterable[float | None]) -> str:
    """The largest, which a trend line's highest step stands for."""
    most = max((value for value in values if value is not None), default=0)
    return f" max {most:,}" if isinstance(most, int) else f" max {most:,.1f}"


def spark(values: Iterable[float | None]) -> str:
    """A character for each value, from 0 to the largest; a blank where a value is not known."""
    samples = list(values)
    most = max((value for value in samples if value is not None), default=0.0) or 1.0
    top = len(_STEPS) - 1
    return "".join(" " if value is None else _STEPS[min(top, math.ceil(value / most * top))] for value in samples)
