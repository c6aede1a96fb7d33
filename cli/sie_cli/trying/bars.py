"""Bars, heat maps and marked texts: what pictures of answers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sie_cli.display import printable

if TYPE_CHECKING:
    from rich.text import Text

BAR = 24  # cells
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COLOURS = ("green", "magenta", "cyan", "yellow", "blue", "red")
_COLD, _WARM = (24, 44, 92), (250, 204, 92)  # of a heat map


def bar(share: float, colour: str = "cyan", cells: int = BAR) -> Text:
    """A bar that fills this share of its cells. What is more than nothing is seen."""
    from rich.text import Text

    eighths = max(0, min(cells * 8, round(share * cells * 8)))
    if share > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + (_EIGHTHS[rest] if rest else ""), colour)


def shares(values: Sequence[float], least: float = 0.0, most: float | None = None) -> list[float]:
    """Compute the place of each value between the ends of its scale, as 0 to 1. A value beyond an end moves it."""
    low = min(least, *values) if values else least
    high = max(values, default=0.0) if most is None else max(most, *values)
    width = high - low
    return [(value - low) / width if width > 0 else 0.0 for value in values]


def heat(value: float) -> str:
    """The style of a cell whose value is from -1, or 0, to 1."""
    share = max(0.0, min(1.0, value))
    red, green, blue = (round(cold + (warm - cold) * share) for cold, warm in zip(_COLD, _WARM, strict=True))
    return f"{'black' if share > 0.45 else 'white'} on rgb({red},{green},{blue})"


@dataclass(frozen=True)
class LabelledSpan:
    """A part of a text, in code points."""

    start: int
    end: int
    label: str


def colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each label, by the order in which they come."""
    return {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(dict.fromkeys(labels))}


def marked(text: str, spans: Sequence[LabelledSpan], colour_of: dict[str, str], *, has_colours: bool) -> Text:
    """A text with its spans in the colours of their labels; where there are no colours, in brackets."""
    from rich.text import Text

    shown = printable(text, lines=True)
    if has_colours:
        styled = Text(shown)
        for span in spans:
            styled.stylize(f"black on {colour_of[span.label]}", span.start, span.end)
        return styled
    opened = [span.start for span in spans]
    closed = [span.end for span in spans]
    pieces = []
    for place in range(len(shown) + 1):
        pieces.append("]" * closed.count(place) + "[" * opened.count(place))
        pieces.append(shown[place : place + 1])
    return Text("".join(pieces))
