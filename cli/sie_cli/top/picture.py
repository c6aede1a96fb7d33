"""Picture of `sie top`, drawn from a frame of `/ws/cluster-status` to fit a terminal."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sie_cli.display import counted, printable, size
from sie_cli.moments import span
from sie_contracts.api.operations import ClusterInfo, DeviceInfo, ModelSummary, WorkerInfo
from sie_contracts.status import QueueInfo

STALE_S = 3.0  # seconds; an older frame is shown as stale, because a gateway sends one every second
MIN_WIDTH = 30
# minimum widths of the terminal, in cells, for tables with all columns, and for tables with some of them
_WIDE, _MIDDLE = 100, 70
_CELLS = (9, 7, 7, 7)  # minimum widths of the columns after the first, in cells
# cells that all columns except the first need together, in a narrow, middle and wide terminal
_NARROW_REST, _MIDDLE_REST, _WIDE_REST = 20, 38, 70
# Seconds: work that waits longer than _OLD_S is yellow, longer than _STUCK_S red. The alert SIEQueueStuck also has the
# limit _STUCK_S.
_OLD_S, _STUCK_S = 10.0, 60.0
_STATE_COLOURS = {"loaded": "green", "loading": "yellow", "failed": "red"}
MAX_REASONS = 3  # maximum number of failed models whose reason is shown


class StatusFrame(msgspec.Struct, frozen=True):
    """Frame that a gateway sends each second. `queues` is None while the gateway has no data about the queues."""

    timestamp: float
    version: str
    cluster: ClusterInfo
    workers: list[WorkerInfo]
    models: list[ModelSummary]
    queues: list[QueueInfo] | None = None
    model_queues: list[QueueInfo] | None = None
    failures: dict[str, str] = {}  # model -> reason of its failed load


@dataclass
class Queued:
    """Messages in a queue: their number, how many have the priority "bulk", and the age of the oldest in seconds."""

    messages: int = 0
    bulk: int = 0
    oldest_s: float = 0.0

    def add(self, row: QueueInfo) -> None:
        self.messages += row.messages
        self.bulk += row.messages if row.priority == "bulk" else 0
        self.oldest_s = max(self.oldest_s, row.oldest_s)


@dataclass
class LaneRow:
    """Lane (pool.machine profile.bundle) and the numbers of its workers. `queued` is None while it is unknown."""

    name: str
    healthy: int = 0
    workers: int = 0
    queued: Queued | None = None

    @property
    def is_well(self) -> bool:
        """Return whether all workers of the lane are healthy; for a lane without workers, whether no work is queued."""
        return self.healthy == self.workers and (self.healthy > 0 or not (self.queued and self.queued.messages))


@dataclass
class View:
    """State of the display. `came_s`: time when `frame` arrived (monotonic clock). `is_broken`: the connection broke
    after `came_s`. `trend`: for each of the last frames, requests per second and queued messages (None if unknown).
    """

    url: str
    takes_keys: bool = False
    frame: StatusFrame | None = None
    past: HistoryTrend | None = None
    came_s: float = 0.0
    is_broken: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    trend: deque[tuple[float, int | None]] = field(default_factory=lambda: deque(maxlen=TREND))

    def add_frame(self, frame: StatusFrame, now_s: float) -> None:
        self.frame, self.came_s, self.is_broken = frame, now_s, False
        self.trend.append((frame.cluster.total_qps, queued_in(frame)))
        self.changed.set()

    def state(self, now_s: float) -> tuple[str, str]:
        """Return the state of the connection in words, and their colour."""
        if self.frame is None:
            return "connecting", "yellow"
        age_s = now_s - self.came_s
        if age_s > STALE_S or self.is_broken:
            return f"no answer for {age_s:.0f} s, trying again", "red"
        return "live", "green"


def picture(view: View, width: int, height: int, now_s: float) -> RenderableType:
    """Draw the last frame in `width` columns and `height` lines. The tables share the lines below the head."""
    width = max(width, MIN_WIDTH)
    state, colour = view.state(now_s)
    head = Text.assemble(("sie top", "bold"), "  ", (state, colour), f"  {view.url}", no_wrap=True, overflow="ellipsis")
    frame = view.frame
    if frame is None:
        return Group(head)
    version = f"  version {frame.version}"
    for text in (version, *(["  q ends it"] if view.takes_keys else [])):
        if head.cell_len + len(text) <= width:
            head.append(text, "bright_black")
    lanes, of_models = lanes_of(frame), _queues_of_models(frame)
    figures = [*_lines(_figures(frame, lanes), width), *of_frames(view.trend, width), *of_past(view.past, width)]
    active = sorted(
        (model for model in frame.models if model.state != "available" or of_models[model.name].messages),
        key=lambda model: (-of_models[model.name].messages, model.state != "loaded", model.name),
    )
    failed = [model for model in active if model.state == "failed" and model.name in frame.failures]
    reasons = [_reason(model.name, frame.failures[model.name]) for model in failed[:MAX_REASONS]]
    # 9 lines: each of the three tables has a blank line, a heading, and a line that counts hidden rows
    room = max(6, height - 1 - len(figures) - 9 - len(reasons))
    some_lanes = _fitting(len(lanes), max(1, room // 5))
    some_workers = min(len(frame.workers), max(1, (room - some_lanes) // 2), room - some_lanes)
    some_models = min(len(active), max(1, room - some_lanes - some_workers))
    some_workers = _fitting(len(frame.workers), room - some_lanes - some_models)
    names = (
        [worker.name for worker in frame.workers]
        + [f"  {device.device}" for worker in frame.workers for device in worker.devices]
        + [model.name for model in active[:some_models]]
        + [lane.name for lane in lanes]
    )
    columns = _WIDE_REST if width >= _WIDE else _MIDDLE_REST if width >= _MIDDLE else _NARROW_REST
    first = min(max(map(cell_len, names), default=0), width - columns)
    other_models = len(frame.models) - some_models
    return Group(
        head,
        *figures,
        Text(""),
        *_with_rest(_lanes(lanes[:some_lanes], width, first), len(lanes), len(lanes) - some_lanes, "more"),
        Text(""),
        *_with_rest(
            _workers(frame.workers, some_workers, room - some_lanes - some_models - some_workers, width, first),
            len(frame.workers),
            len(frame.workers) - some_workers,
            "more",
        ),
        Text(""),
        *_with_rest(
            _models(active[:some_models], of_models, width, first),
            len(frame.models),
            other_models,
            "other model" if other_models == 1 else "other models",
        ),
        *reasons,
    )


def _reason(model: str, why: str) -> Text:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in f"{model} failed: {why}").split())
    return Text(f"  {line}", "red", no_wrap=True, overflow="ellipsis")


def _fitting(count: int, room: int) -> int:
    """Return how many of `count` rows to show in `room` lines. If only one row would be hidden, show it, because
    the line with the number of hidden rows needs the same space.
    """
    return count if count <= room + 1 else room


def _figures(frame: StatusFrame, lanes: list[LaneRow]) -> list[tuple[str, str]]:
    """Return the totals that are shown above the tables, each as (text, colour). A CPU that a worker reports as GPU is
    not counted.
    """
    sums, most = frame.cluster, len(frame.workers)
    workers = (
        counted(most, "worker") if sums.worker_count == most else f"{sums.worker_count} of {counted(most, 'worker')}"
    )
    gpus = sum(worker.gpu_count for worker in frame.workers if worker.healthy and not worker.device.startswith("cpu"))
    figures = [(workers, "" if sums.worker_count == most and most else "red")]
    figures += [(counted(gpus, "GPU"), "")] if gpus else []
    figures.append((f"{sums.models_loaded} of {counted(len(frame.models), 'model')} loaded", ""))
    queued = queued_in(frame)
    if queued is None:
        figures.append(("queue not known", "yellow"))
    else:
        oldest_s = max((lane.queued.oldest_s for lane in lanes if lane.queued), default=0.0)
        figures.append((f"{queued:,} queued", ""))
        figures += [(f"oldest {_age(oldest_s)}", _age_colour(oldest_s))] if oldest_s else []
    return [*figures, (f"{sums.total_qps:.1f} req/s", "")]


def queued_in(frame: StatusFrame) -> int | None:
    return None if frame.queues is None else sum(queue.messages for queue in frame.queues)


def _lines(parts: list[tuple[str, str]], width: int) -> list[Text]:
    lines = [Text(no_wrap=True, overflow="ellipsis")]
    for text, colour in parts:
        if lines[-1].cell_len and lines[-1].cell_len + 2 + len(text) > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        lines[-1].append("  " if lines[-1].cell_len else "").append(text, colour)
    return lines


def _with_rest(table: Table, count: int, rest: int, noun: str) -> Iterable[RenderableType]:
    below = f"  {rest:,} {noun}" if rest > 0 else "" if count else "  none"
    return (table, Text(below, "bright_black")) if below else (table,)


def lanes_of(frame: StatusFrame) -> list[LaneRow]:
    """Return the lanes with a worker or with work: unhealthy lanes first, then by name."""
    lanes: dict[str, LaneRow] = {}
    for worker in frame.workers:
        name = f"{worker.pool}.{worker.gpu}.{worker.bundle}" if worker.pool else "(not known)"
        lane = lanes.setdefault(name, LaneRow(name))
        lane.workers += 1
        lane.healthy += worker.healthy
    if frame.queues is not None:
        for lane in lanes.values():
            lane.queued = Queued()
        for row in frame.queues:
            name = f"{row.pool}.{row.machine_profile}.{row.bundle}"
            if row.messages or name in lanes:
                lane = lanes.setdefault(name, LaneRow(name, queued=Queued()))
                assert lane.queued is not None
                lane.queued.add(row)
    return sorted(lanes.values(), key=lambda lane: (lane.is_well, lane.name))


def _queues_of_models(frame: StatusFrame) -> dict[str, Queued]:
    queues: dict[str, Queued] = {}
    for row in frame.model_queues or ():
        queues.setdefault(row.model, Queued()).add(row)
    return {model.name: queues.get(model.name) or Queued(model.total_queue_depth) for model in frame.models}


def _age(age_s: float) -> str:
    return f"{age_s:.1f} s" if age_s < 9.95 else span(age_s)


def _age_colour(age_s: float) -> str:
    return "red" if age_s > _STUCK_S else "yellow" if age_s > _OLD_S else ""


def _aged(queued: Queued) -> str:
    age, colour = _age(queued.oldest_s), _age_colour(queued.oldest_s)
    return "" if not queued.oldest_s else f"[{colour}]{age}[/{colour}]" if colour else age


def _table(first: int, *columns: tuple[str, bool]) -> Table:
    """Return an empty table. `first`: width of the first column, in cells. `columns`: (title, is it numeric)."""
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    least = dict(enumerate(_CELLS, start=1))
    for number, (title, is_number) in enumerate(columns):
        table.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=None if number else first,
            min_width=least.get(number),
        )
    return table


def _lanes(lanes: list[LaneRow], width: int, first: int) -> Table:
    columns = [("LANE", False), ("WORKERS", False), ("QUEUED", True)]
    columns += [("OLDEST", True), ("BULK", True)] if width >= _MIDDLE else []
    table = _table(first, *columns)
    for lane in lanes:
        workers = f"{lane.healthy}" if lane.healthy == lane.workers else f"{lane.healthy} of {lane.workers}"
        row = [_plain(lane.name), workers if lane.is_well else f"[red]{workers}[/red]"]
        queued = lane.queued
        row += ["-", "", "-"] if queued is None else [f"{queued.messages:,}", _aged(queued), f"{queued.bulk:,}"]
        table.add_row(*row[: len(columns)])
    return table


def _workers(workers: list[WorkerInfo], most: int, room: int, width: int, first: int) -> Table:
    """Return the table of at most `most` workers: unhealthy ones first, then those with the longest queue. The devices
    of a worker have their own rows if `room` (a number of lines) suffices.
    """
    shown = sorted(workers, key=lambda worker: (worker.healthy, -worker.queue_depth, _counting(worker.name)))[:most]
    columns = [("WORKER", False), ("STATE", False), ("IN FLIGHT", True)]
    columns += [("LOADED", True)] if width >= _MIDDLE else []
    columns += [("DEVICE", False), ("MEMORY", False)] if width >= _WIDE else [("MEM", True)] if width >= _MIDDLE else []
    table = _table(first, *columns)
    for worker in shown:
        device = f"{len(worker.devices)} devices" if worker.devices else worker.device or "-"
        rows = [_cells(_plain(worker.name), device, worker.healthy, worker, width)]
        devices = worker.devices if len(worker.devices) <= room else []
        room -= len(devices)
        rows += [_cells(f"  {_plain(row.device)}", row.device, row.ready, row, width) for row in devices]
        for row in rows:
            # grey: these are the last values that the unhealthy worker reported
            table.add_row(*row[: len(columns)], style=None if worker.healthy else "bright_black")
    return table


def _cells(name: str, device: str, is_ready: bool, row: WorkerInfo | DeviceInfo, width: int) -> list[str]:
    state = "[green]ready[/green]" if is_ready else "[red]not ready[/red]"
    share = row.memory_used_bytes / row.memory_total_bytes if row.memory_total_bytes else None
    memory = [_plain(device), _memory(row, share)] if width >= _WIDE else ["-" if share is None else f"{share:.0%}"]
    return [name, state, f"{row.queue_depth:,}", str(len(row.loaded_models)), *memory]


def _memory(worker: WorkerInfo | DeviceInfo, share: float | None) -> str:
    if share is None:
        return "-"
    cells = 10
    full = min(cells, round(share * cells))
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    bar = f"[{colour}]{'█' * full}[/{colour}][bright_black]{'░' * (cells - full)}[/bright_black]"
    return f"{bar} {share:4.0%} of {size(worker.memory_total_bytes)}"


def _models(models: list[ModelSummary], of_models: Mapping[str, Queued], width: int, first: int) -> Table:
    columns = [("MODEL", False), ("STATE", False), ("QUEUED", True)]
    columns += [("OLDEST", True), ("WORKERS", True)] if width >= _MIDDLE else []
    columns += [("PROFILES", False)] if width >= _WIDE else []
    table = _table(first, *columns)
    for model in models:
        colour, queued = _STATE_COLOURS.get(model.state, "bright_black"), of_models[model.name]
        row = [_plain(model.name), f"[{colour}]{model.state}[/{colour}]", f"{queued.messages:,}", _aged(queued)]
        row += [str(model.worker_count), _plain(", ".join(model.gpu_types) or "-")]
        table.add_row(*row[: len(columns)])
    return table


def _counting(name: str) -> list[tuple[str, int]]:
    """Return a sort key that compares numbers in names by value: w2 is before w10."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name)]


def _plain(text: str) -> str:
    """Replace terminal control characters and escape Rich's markup: names are untrusted."""
    return escape(printable(text))


TREND = 60  # maximum number of points (frames or minutes) in a trend line
_LEAST_TREND = 10  # smallest width of a trend line, in cells; a shorter line is left out
_STEPS = "▁▂▃▄▅▆▇█"


class TrendStep(msgspec.Struct, frozen=True):
    """Interval of a gateway's history. `at`: its start in seconds since 1970. `p50_ms`, `p99_ms`: latency of each
    stage, in the order of `HistoryTrend.stages`.
    """

    at: int
    requests: int
    errors: dict[str, int] = {}
    p50_ms: list[float] = []
    p99_ms: list[float] = []


class HistoryTrend(msgspec.Struct, frozen=True):
    """History of a gateway's traffic in the last hour, from `/v1/history`, without intervals that had no requests."""

    now: float
    step_s: int
    stages: list[str]
    steps: list[TrendStep]


def of_frames(trend: Iterable[tuple[float, int | None]], width: int) -> list[Text]:
    """Return a line with the trends of requests per second and queued messages, the newest at the right. Return no line
    for fewer than two frames, or if the width is too small.
    """
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


def of_past(past: HistoryTrend | None, width: int) -> list[Text]:
    """Return lines with latency and errors of the last hour, and with the trend of p99, the newest minute at the right.
    Return an empty line if there were no requests, and no line if `past` is None.
    """
    if past is None:
        return []
    if not past.steps or "total_time" not in past.stages:
        return _lines([], width)
    total = past.stages.index("total_time")
    ran = [step for step in past.steps if min(len(step.p50_ms), len(step.p99_ms)) > total]
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
    lines = _lines(parts, width)
    p99_ms = {step.at: step.p99_ms[total] for step in ran}
    newest = int(past.now // past.step_s) * past.step_s
    room = width - len("p99  max 999.9 s")
    cells = min(TREND, 1 + (newest - past.steps[0].at) // past.step_s, room)
    if ran and cells >= 2:
        values = [p99_ms.get(newest - past.step_s * back) for back in reversed(range(cells))]
        most = max((value for value in values if value is not None), default=0.0)
        line = Text("p99 ", "bright_black", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(spark(values), "cyan").append(f" max {_ms(most)}", "bright_black"))
    return lines


def _ms(value: float) -> str:
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _most(values: Iterable[float | None]) -> str:
    most = max((value for value in values if value is not None), default=0)
    return f" max {most:,}" if isinstance(most, int) else f" max {most:,.1f}"


def spark(values: Iterable[float | None]) -> str:
    """Return one character for each value, scaled from 0 to the largest; a blank for an unknown value."""
    samples = list(values)
    most = max((value for value in samples if value is not None), default=0.0) or 1.0
    top = len(_STEPS) - 1
    return "".join(" " if value is None else _STEPS[min(top, math.ceil(value / most * top))] for value in samples)
