"""The report of a chaos run: figures from outcomes and faults, a verdict, a table and a plot. All functions are
pure.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.clients import Attempt, Outcome
from chaos.faults import Fault

AVAILABILITY = 0.99
MARGIN_S = 1.0  # around a fault, because a connection may break a moment before or after the recorded fault
Span = tuple[float, float]


@dataclass(frozen=True)
class Report:
    """A run. `lost` has the attempts that a gateway accepted and did not answer in time, although it was not struck."""

    begin_s: float
    end_s: float
    outcomes: Sequence[Outcome]
    faults: Sequence[Fault]
    leaderless: Sequence[Span]
    lost: Sequence[Attempt]
    duplicates: int

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "wrong"]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "failed"]

    @property
    def holds(self) -> bool:
        """Return True if the promise held. Availability is only stated."""
        return not (self.lost or self.duplicates or self.wrong or self.failed)

    def split(self) -> tuple[list[Outcome], list[Outcome]]:
        """Return the requests without a leader election meanwhile, and the others."""
        halves: tuple[list[Outcome], list[Outcome]] = ([], [])
        for outcome in self.outcomes:
            halves[_touches(self.leaderless, outcome.started_s, outcome.ended_s)].append(outcome)
        return halves


def _touches(spans: Sequence[Span], started_s: float, ended_s: float) -> bool:
    return any(started_s <= end_s and begin_s <= ended_s for begin_s, end_s in spans)


def judged(
    begin_s: float,
    end_s: float,
    outcomes: Sequence[Outcome],
    faults: Sequence[Fault],
    leaderless: Sequence[Span],
    duplicates: int,
) -> Report:
    """Build the report. An attempt is lost if it got a 504, which is a deadline that passed after acceptance, or no
    answer although its gateway was not struck.
    """
    deaths: dict[int, list[Span]] = {}
    for fault in faults:
        if fault.role == "gateway":
            span = fault.at_s - MARGIN_S, (fault.recovered_s or end_s) + MARGIN_S
            deaths.setdefault(int(fault.part.split()[-1]), []).append(span)
    lost = [
        attempt
        for outcome in outcomes
        for attempt in outcome.attempts
        if attempt.status == 504
        or (
            attempt.status == 0
            and attempt.failure != "refused"
            and not _touches(deaths.get(attempt.gateway, []), attempt.started_s, attempt.ended_s)
        )
    ]
    return Report(begin_s, end_s, outcomes, faults, leaderless, lost, duplicates)


def availability(outcomes: Sequence[Outcome]) -> float:
    """Return the share of requests that were right at the first attempt."""
    return sum(outcome.at_once for outcome in outcomes) / len(outcomes) if outcomes else 1.0


def table(report: Report) -> str:
    calm, shaken = report.split()
    leaderless_s = sum(end_s - begin_s for begin_s, end_s in report.leaderless)
    attempts = Counter(
        attempt.failure or str(attempt.status) if attempt.status != 200 else "200"
        for outcome in report.outcomes
        for attempt in outcome.attempts
    )
    times = sorted(outcome.ended_s - outcome.started_s for outcome in report.outcomes)
    lines = ["| | found | goal | |", "|---|---|---|---|"]

    def row(label: str, value: str, goal: str, met: bool) -> None:
        lines.append(f"| {label} | {value} | {goal} | {'met' if met else 'MISSED'} |")

    row("accepted and not answered by its deadline", str(len(report.lost)), "0", not report.lost)
    row("wrong answers", str(len(report.wrong)), "0", not report.wrong)
    row("answers that nobody had asked for, bytes", str(report.duplicates), "0", not report.duplicates)
    row("requests that failed with all retries", str(len(report.failed)), "0", not report.failed)
    share = availability(calm)
    goal = f">= {AVAILABILITY:.0%}"
    row(f"right at the first attempt, no election meanwhile ({len(calm)})", f"{share:.2%}", goal, share >= AVAILABILITY)
    lines.append(
        f"| right at the first attempt, during elections ({len(shaken)}) | {availability(shaken):.2%} | stated | |"
    )
    lines.append(
        f"| right at the first attempt, all ({len(report.outcomes)}) | {availability(report.outcomes):.2%} | stated | |"
    )
    whole_s = report.end_s - report.begin_s
    lines.append(f"\n{whole_s:.0f} s, {len(report.faults)} faults, {leaderless_s:.0f} s with a group without a leader.")
    lines.append(f"Attempts: {', '.join(f'{count} x {kind}' for kind, count in attempts.most_common())}.")
    if times:
        lines.append(
            f"Time to the right answer, retries included: p50 {times[len(times) // 2] * 1000:.0f} ms, "
            f"p99 {times[int(len(times) * 0.99)]:.1f} s, longest {times[-1]:.1f} s."
        )
    lines += [
        f"- {outcome.verdict}: {outcome.model} after {outcome.started_s - report.begin_s:.1f} s, {outcome.detail}"
        for outcome in [*report.wrong, *report.failed][:10]
    ]
    for attempt in report.lost[:10]:
        when = f"{attempt.started_s - report.begin_s:.1f} to {attempt.ended_s - report.begin_s:.1f} s"
        lines.append(f"- lost at gateway {attempt.gateway}: {when}, {attempt.status} {attempt.failure}")
    lines += ["\n| s | part | what | ready again after s |", "|---|---|---|---|"]
    for fault in report.faults:
        effect = {"freeze": f"frozen for {fault.frozen_s:.1f} s", "kill": "killed", "died": "ended by itself"}[
            fault.action
        ]
        ready = f"{fault.recovered_s - fault.at_s:.1f}" if fault.recovered_s else "never"
        lines.append(f"| {fault.at_s - report.begin_s:.0f} | {fault.part} | {effect} | {ready} |")
    return "\n".join(lines)


_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 1100, 170, 60, 30, 50
_COLOURS = {"broker": "#b5651d", "gateway": "#1f77b4", "sidecar": "#2ca02c", "adapter": "#9467bd", "config": "#7f7f7f"}


def plot(report: Report) -> str:
    """Return an SVG of right answers a second and of the longest time to an answer. Lines are faults, shaded spans have
    no leader.
    """
    seconds = max(1, int(report.end_s - report.begin_s))
    rates, waits = [0] * seconds, [0.0] * seconds
    for outcome in report.outcomes:
        second = int(outcome.ended_s - report.begin_s)
        if 0 <= second < seconds and outcome.verdict == "right":
            rates[second] += 1
            waits[second] = max(waits[second], outcome.ended_s - outcome.started_s)
    height = _TOP + 2 * (_HEIGHT + _GAP)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="12">'
        ),
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]

    def x(at_s: float) -> float:
        return _LEFT + (at_s - report.begin_s) / seconds * (_WIDTH - _LEFT - 20)

    bottom, foot = _TOP + 2 * _HEIGHT + _GAP, _TOP + 2 * _HEIGHT + _GAP + 18
    for begin_s, end_s in report.leaderless:
        width = max(1.0, x(end_s) - x(begin_s))
        parts.append(
            f'<rect x="{x(begin_s):.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}" fill="#fbe3c8"/>'
        )
    for fault in report.faults:
        at, dashes = x(fault.at_s), "none" if fault.action == "kill" else "4 3"
        line = (
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke="{_COLOURS[fault.role]}" '
            f'stroke-dasharray="{dashes}">'
        )
        parts.append(f"{line}<title>{html.escape(f'{fault.part} {fault.action}')}</title></line>")
    for number, (name, values) in enumerate(
        (("right answers a second", rates), ("longest time to an answer, s", waits))
    ):
        top, most = _TOP + number * (_HEIGHT + _GAP), max(max(values), 1e-9)
        middles = [x(report.begin_s + second + 0.5) for second in range(seconds)]
        points = " ".join(
            f"{at:.1f},{top + _HEIGHT * (1 - value / most):.1f}" for at, value in zip(middles, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="black" stroke-width="1.5"/>')
        parts.append(f'<text x="{_LEFT}" y="{top - 8}">{name}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.3g}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{top + _HEIGHT}" text-anchor="end">0</text>')
    marks = range(0, seconds + 1, max(1, round(seconds / 10)))
    parts += [
        f'<text x="{x(report.begin_s + second):.1f}" y="{foot}" text-anchor="middle">{second} s</text>'
        for second in marks
    ]
    for number, (role, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{_LEFT + 110 * number}" y="{height - 8}" fill="{colour}">{role}</text>')
    parts.append(
        f'<text x="{_LEFT + 560}" y="{height - 8}">solid: killed, dashed: frozen, shaded: a group without a '
        "leader</text></svg>"
    )
    return "\n".join(parts) + "\n"
