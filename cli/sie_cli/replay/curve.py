"""Latency by percentile, as numbers and as an SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

COLOURS = ("#1b6ca8", "#c8553d", "#4c8c4a", "#8b5fbf", "#b8860b", "#555555")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 20, 30, 50
TICKS = (0, 50, 90, 99, 99.9)
NINES = 3.3  # length of the axis in nines (1 is 90 %, 2 is 99 %): 3.3 nines are 99.95 %
POINTS = 400


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of the sorted `values` that is at least as large as `percent` % of them."""
    return values[min(len(values), max(1, math.ceil(percent / 100 * len(values)))) - 1]


def svg(latencies_s: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG with a curve for each name. On the axis of percentiles, 90, 99 and 99.9 % are equally spaced."""
    curves = {name: sorted(values) for name, values in latencies_s.items()}
    step_ms, steps = _steps(max(values[-1] for values in curves.values()) * 1e3)

    def x_of(percent: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * -math.log10(1 - percent / 100) / NINES

    def y_of(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / (step_ms * steps)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">latency of requests, ms</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">percentile</text>',
    ]
    for number in range(steps + 1):
        y = y_of(number * step_ms)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step_ms:g}</text>')
    for tick in TICKS:
        x = x_of(tick)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour, y = COLOURS[number % len(COLOURS)], TOP + 16 + 18 * number
        percents = [100 * (1 - 10 ** (-NINES * point / POINTS)) for point in range(POINTS + 1)]
        line = " ".join(f"{x_of(percent):.1f},{y_of(percentile(values, percent) * 1e3):.1f}" for percent in percents)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        parts.append(f'<path d="M{LEFT + 12} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 42}" y="{y}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _steps(most: float) -> tuple[float, int]:
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.1, 0.2, 0.5, 1, 2) if most <= 8 * power * part)
    return step, max(1, math.ceil(most / step))
