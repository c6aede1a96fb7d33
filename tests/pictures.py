"""Dashboards drawn from query results, as Grafana lays them out: grid, units, legends, stacks, thresholds, overrides.

    python tests/pictures.py FOLDER      # a loaded cluster and a Prometheus for two minutes, then FOLDER/NAME.png of
                                         each dashboard

It draws what the chart's panels use, and refuses what it does not know. All durations of panels are a thirtieth of what
they say."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
import msgspec
from cluster import until
from fake_adapter import toy_entry
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from monitoring import boards, filled
from prometheus_server import Prometheus
from stack import Device, Plan, Stack

Ask = Callable[[str, float, float, float], list[Any]]
FASTER = 30  # than charts scrape: what takes them half an hour is to be seen here in a minute
MAX_POINTS = 600
COLUMNS, COLUMN_PX, LINE_PX, MARGIN_PX = 24, 66, 38, 8  # of the grid: 38 px for each unit of a height
LEGEND_PX, TITLE_PX = 17, 30
PANEL, INK, FAINT, GRID = "#181b1f", "#ccccdc", "#8e8e99", "#2c3036"
PALETTE = ("#7EB26D", "#EAB839", "#6ED0E0", "#EF843C", "#E24D42", "#1F78C1", "#BA43A9", "#705DA0", "#508642", "#CCA300")
NAMED = {
    "green": "#73BF69",
    "yellow": "#FADE2A",
    "orange": "#FF9830",
    "red": "#F2495C",
    "text": INK,
    "transparent": "none",
}
FIELDS = {
    "unit",
    "noValue",
    "min",
    "max",
    "decimals",
    "color",
    "thresholds",
    "mappings",
    "custom.lineWidth",
    "custom.fillOpacity",
    "custom.showPoints",
    "custom.stacking",
    "custom.drawStyle",
    "custom.lineStyle",
    "custom.axisSoftMax",
    "custom.thresholdsStyle",
}
HEADS = {"lastNotNull": "Last *", "max": "Max", "sum": "Total"}
mpl.rcParams["font.size"] = 8


class Series:
    """One line of a panel: `points` are (seconds, value), None where there is nothing."""

    def __init__(self, name: str, ref: str, points: list[tuple[float, float | None]], looks: dict[str, Any]) -> None:
        self.name = name
        self.ref = ref
        self.points = points
        self.looks = looks  # the fields of the panel with what overrides say of this series

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


def series_of(panel: dict[str, Any], ask: Ask, start_s: float, end_s: float) -> list[Series]:
    """The series of a panel in the order in which Grafana gives them colours."""
    found = []
    for target in panel["targets"]:
        scrape_s = seconds(target["interval"]) / FASTER
        step_s = max(scrape_s, seconds(panel.get("interval", "0s")) / FASTER, math.ceil((end_s - start_s) / MAX_POINTS))
        rate_s = max(step_s + scrape_s, 4 * scrape_s)  # as Grafana chooses it
        expression = filled(
            target["expr"], rate=f"{rate_s:.0f}s", span=f"{end_s - start_s:.0f}s", interval_ms=round(1000 * step_s)
        )
        times = (
            [end_s]
            if target.get("instant")
            else [start_s + number * step_s for number in range(int((end_s - start_s) / step_s) + 1)]
        )
        for each in ask(expression, times[0], times[-1], step_s):
            labels = each["metric"]
            name = re.sub(
                r"{{(\w+)}}", lambda part, labels=labels: labels.get(part[1], ""), target["legendFormat"]
            ).strip()
            known = {round(float(at), 3): float(value) for at, value in each["values"]}
            values = [known.get(round(at, 3)) for at in times]
            points = [
                (at, None if value is None or math.isnan(value) else value)
                for at, value in zip(times, values, strict=True)
            ]
            found.append(Series(name, target["refId"], points, looks_of(panel, name, target["refId"])))
    return found


def seconds(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def looks_of(panel: dict[str, Any], name: str, ref: str) -> dict[str, Any]:
    """The fields of one series: those of the panel, then those of the overrides that match it, in their order."""
    found = fields_of(panel)
    for override in panel["fieldConfig"]["overrides"]:
        kind, wanted = override["matcher"]["id"], override["matcher"]["options"]
        matches = {
            "byName": name == wanted,
            "byFrameRefID": ref == wanted,
            "byRegexp": bool(re.search(wanted.strip("/"), name)),
        }
        if matches[kind]:
            found |= {each["id"]: each["value"] for each in override["properties"]}
    return found


def fields_of(panel: dict[str, Any]) -> dict[str, Any]:
    """Those of all its series, `custom` with its names as overrides write them. Raises AssertionError for what is not
    drawn here.
    """
    fields = panel["fieldConfig"]["defaults"]
    found = {name: value for name, value in fields.items() if name != "custom"}
    found |= {f"custom.{name}": value for name, value in fields.get("custom", {}).items()}
    assert found.keys() <= FIELDS, found.keys() - FIELDS
    return found


def said(value: float | None, unit: str, decimals: int | None = None) -> str:
    """A value as Grafana writes it in a unit."""
    if value is None:
        return "-"
    suffix = ""
    if unit == "s":
        size = abs(value)
        value, suffix = (
            (value, " s")
            if size == 0
            else (value * 1e3, " ms")
            if size < 1
            else (value, " s")
            if size < 60
            else (value / 60, " mins")
            if size < 3600
            else (value / 3600, " hours")
        )
    elif unit == "percentunit":
        value, suffix = value * 100, "%"
    elif unit in ("short", "none", "reqps"):
        if unit != "none" and abs(value) >= 1000:
            power = min(3, int(math.log(abs(value), 1000)))
            value, suffix = value / 1000**power, f" {('', 'K', 'Mil', 'Bil')[power]}"
        suffix += " req/s" if unit == "reqps" else ""
    else:
        raise ValueError(f"unit {unit!r}")
    if decimals is None:
        decimals = 0 if value == round(value) else 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}{suffix}"


def colours(found: Sequence[Series]) -> list[str]:
    """By the modes `palette-classic`, `fixed` and `shades`: of one colour, darker from one series to the next."""
    shades: dict[str, int] = {}
    painted = []
    for number, series in enumerate(found):
        own = series.looks["color"]
        if own["mode"] == "palette-classic":
            painted.append(PALETTE[number % len(PALETTE)])
            continue
        base = NAMED[own["fixedColor"]]
        part = (1, 0.65, 0.4, 0.8, 0.5)[shades.get(base, 0) % 5]
        shades[base] = shades.get(base, 0) + (own["mode"] == "shades")
        painted.append(mpl.colors.to_hex([part * value for value in mpl.colors.to_rgb(base)]))
    return painted


def step_colour(looks: Mapping[str, Any], value: float | None) -> str:
    """That of the threshold which a value has passed."""
    found = "text"
    for step in looks["thresholds"]["steps"]:
        if step["value"] is None or (value is not None and value >= step["value"]):
            found = step["color"]
    return NAMED[found]


def reduced(series: Series, how: str) -> float | None:
    values = series.values
    if not values:
        return None
    return {"lastNotNull": values[-1], "max": max(values), "sum": sum(values)}[how]


def in_order(found: Sequence[Series], legend: Mapping[str, Any]) -> list[Series]:
    """As the table of a legend sorts them."""
    how = {title: how for how, title in HEADS.items()}[legend["sortBy"]]
    return sorted(found, key=lambda each: reduced(each, how) or 0.0, reverse=legend["sortDesc"])


class Board:
    """One figure. Places are in pixels from the upper left corner."""

    def __init__(self, board: dict[str, Any]) -> None:
        self.height_px = (
            max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * LINE_PX + MARGIN_PX
        )
        self.width_px = COLUMNS * COLUMN_PX + MARGIN_PX
        self.figure = Figure((self.width_px / 100, self.height_px / 100), dpi=100, facecolor="#111217")

    def axes(self, x: float, y: float, width: float, height: float, colour: str = PANEL) -> Axes:
        place = (x / self.width_px, 1 - (y + height) / self.height_px, width / self.width_px, height / self.height_px)
        return self.figure.add_axes(place, facecolor=colour)

    def text(self, x: float, y: float, text: str, colour: str = INK, **looks: Any) -> None:
        self.figure.text(
            x / self.width_px, 1 - y / self.height_px, text, color=colour, va="top", parse_math=False, **looks
        )

    def draw(self, panel: dict[str, Any], found: Sequence[Series], start_s: float, end_s: float) -> None:
        at = panel["gridPos"]
        x, y = at["x"] * COLUMN_PX + MARGIN_PX, at["y"] * LINE_PX + MARGIN_PX
        width, height = at["w"] * COLUMN_PX - MARGIN_PX, at["h"] * LINE_PX - MARGIN_PX
        if panel["type"] == "row":
            self.text(x, y + 8, f"▾ {panel['title']}", fontsize=11, weight="bold")
            return
        frame = self.axes(x, y, width, height)
        frame.set(xticks=[], yticks=[])
        for spine in frame.spines.values():
            spine.set_color(GRID)
        self.text(x + 8, y + 8, panel["title"] + "  (i)", weight="bold", fontsize=8.5)
        draw = {"timeseries": self._lines, "stat": self._figures}[panel["type"]]
        draw(panel, found, (x, y + TITLE_PX, width, height - TITLE_PX), (start_s, end_s))

    def _figures(self, panel: dict[str, Any], found: Sequence[Series], place: tuple[float, ...], _: object) -> None:
        x, y, width, height = place
        looks = fields_of(panel)
        shown = [(each, reduced(each, panel["options"]["reduceOptions"]["calcs"][0])) for each in found]
        if not shown:
            self.text(
                x + width / 2, y + height / 2 - 14, looks.get("noValue", "No data"), FAINT, ha="center", fontsize=16
            )
        for number, (each, value) in enumerate(shown):
            middle = x + width * (number + 0.5) / len(shown)
            words = said(value, each.looks["unit"], each.looks.get("decimals"))
            for mapping in each.looks.get("mappings", ()):
                words = mapping["options"].get(f"{value:g}", {}).get("text", words) if value is not None else words
            self.text(
                middle,
                y + height * 0.25,
                words,
                step_colour(each.looks, value),
                ha="center",
                fontsize=22 if len(words) < 9 else 16,
            )
            if len(shown) > 1:
                self.text(middle, y + height - 22, each.name, FAINT, ha="center")

    def _lines(
        self, panel: dict[str, Any], found: Sequence[Series], place: tuple[float, ...], span: tuple[float, float]
    ) -> None:
        x, y, width, height = place
        legend, looks = panel["options"]["legend"], fields_of(panel)
        beside = legend["displayMode"] == "table"
        paints = {(each.name, each.ref): paint for each, paint in zip(found, colours(found), strict=True)}
        rows = list(self._legend(found, paints, legend, width))
        room = 0 if beside else min(len(rows), 4) * LEGEND_PX + 6
        aside = legend["width"] if beside else 0
        main = self.axes(x + 62, y, width - aside - 74, height - 26 - room)
        self._plot(main, found, looks, paints)
        self._scale(main, looks, span)
        if not found:
            main.text(
                0.5,
                0.5,
                looks.get("noValue", "No data"),
                color=FAINT,
                ha="center",
                fontsize=11,
                transform=main.transAxes,
            )
        top = y if beside else y + height - room
        for number, row in enumerate(rows):
            if number * LEGEND_PX > (height - 34 if beside else 3.1 * LEGEND_PX):
                self.text(
                    x + width - 90,
                    top + number * LEGEND_PX - LEGEND_PX,
                    f"… {len(rows) - number} rows below",
                    "#ff5555",
                )
                break
            for offset, text, paint in row:
                self.text(
                    x + offset + (width - aside + 8 if beside else 10),
                    top + number * LEGEND_PX,
                    text,
                    paint,
                    fontsize=7.5,
                )

    @staticmethod
    def _plot(
        axes: Axes, found: Sequence[Series], looks: Mapping[str, Any], paints: Mapping[tuple[str, str], str]
    ) -> None:
        stacked = looks.get("custom.stacking", {}).get("mode") == "normal"
        below = [0.0] * max((len(each.points) for each in found), default=0)
        for each in found:
            paint, fill = paints[each.name, each.ref], each.looks["custom.fillOpacity"] / 100
            times = [at for at, _ in each.points]
            values = [math.nan if value is None else value for _, value in each.points]
            if stacked:
                values = [
                    under + (0 if math.isnan(value) else value) for under, value in zip(below, values, strict=True)
                ]
            if looks.get("custom.drawStyle") == "bars":
                tall = [value - under for value, under in zip(values, below, strict=True)]
                axes.bar(times, tall, bottom=below, width=0.6 * (times[1] - times[0]), color=paint, alpha=fill)
            else:
                dashed = each.looks.get("custom.lineStyle", {}).get("fill") == "dash"
                axes.plot(
                    times, values, color=paint, linewidth=looks["custom.lineWidth"], linestyle="--" if dashed else "-"
                )
                axes.fill_between(times, values, below, color=paint, alpha=fill, linewidth=0)
                gaps = [True, *map(math.isnan, values), True]  # a point without neighbours is no line
                alone = [number for number in range(len(values)) if gaps[number] and gaps[number + 2]]
                axes.plot(
                    [times[number] for number in alone],
                    [values[number] for number in alone],
                    ".",
                    color=paint,
                    markersize=4,
                )
            below = values if stacked else below

    @staticmethod
    def _scale(axes: Axes, looks: Mapping[str, Any], span: tuple[float, float]) -> None:
        unit, decimals = looks["unit"], looks.get("decimals")
        axes.set_ylim(bottom=looks["min"])
        if "max" in looks or axes.get_ylim()[1] < looks.get("custom.axisSoftMax", 0):
            axes.set_ylim(top=looks.get("max", looks.get("custom.axisSoftMax")))
        if "custom.thresholdsStyle" in looks:
            for step in looks["thresholds"]["steps"]:
                if step["value"] is not None and step["value"] <= axes.get_ylim()[1]:
                    axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=1, linestyle=(0, (6, 4)))
        axes.set_xlim(*span)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=decimals == 0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: said(value, unit, decimals)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at - span[0]:.0f} s"))
        axes.tick_params(colors=FAINT, length=0, labelsize=7.5)
        axes.grid(visible=True, color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _legend(
        self, found: Sequence[Series], paints: Mapping[tuple[str, str], str], legend: Mapping[str, Any], width: float
    ) -> Iterator[list[tuple[float, str, str]]]:
        """Rows of (place, text, colour)."""
        if legend["displayMode"] == "table":
            calcs = legend["calcs"]
            broad = legend["width"] - 16 - 66 * len(calcs)
            heads = [(broad + 66 * number, HEADS[how], "#6e9fff") for number, how in enumerate(calcs)]
            yield [(0.0, "Name", FAINT), *heads]
            for each in in_order(found, legend):
                figures = [
                    (broad + 66 * place, said(reduced(each, how), each.looks["unit"], each.looks.get("decimals")), INK)
                    for place, how in enumerate(calcs)
                ]
                name = each.name if len(each.name) * 5.2 < broad - 14 else each.name[: int((broad - 20) / 5.2)] + "…"
                yield [(0.0, "▬", paints[each.name, each.ref]), (14.0, name, INK), *figures]
            return
        row: list[tuple[float, str, str]] = []
        at = 0.0
        for each in found:
            needs = 26 + 5.2 * len(each.name)
            if row and at + needs > width - 20:
                yield row
                row, at = [], 0.0
            row += [(at, "▬", paints[each.name, each.ref]), (at + 14, each.name, INK)]
            at += needs
        if row:
            yield row


def draw(board: dict[str, Any], ask: Ask, start_s: float, end_s: float, file: Path) -> dict[str, list[Series]]:
    """Write the picture of a dashboard; the series of its panels by title."""
    picture, shown = Board(board), {}
    for panel in board["panels"]:
        found = series_of(panel, ask, start_s, end_s) if panel["type"] != "row" else []
        shown[panel["title"]] = found
        picture.draw(panel, found, start_s, end_s)
    picture.figure.savefig(file)
    return shown


# ---- a cluster with something to see

DEADLY = "the input that ends an adapter"
PLAN = Plan(
    models=("toy/one", "toy/two", "toy/three"),
    gateways=2,
    workers=(
        Device(batch_ms=60, token_us=30, slots=2, deadly=DEADLY),
        Device(batch_ms=60, token_us=30, slots=1, deadly=DEADLY),
        Device(batch_ms=30, token_us=60),
    ),
    environ={
        "SIE_CHUNK_COST": "512",
        "SIE_GATEWAY_CONFIGURED_GPUS": "cpu,l4,a100",
        "SIE_AUTH_MODE": "static",
        "SIE_AUTH_TOKENS": "search-team,batch-team",
        "SIE_ADMIN_TOKEN": "an-administrator",
    },
)
SEARCH, BATCH = "search-team", "batch-team"


class Clients:
    """Some who ask one request after the other until they are ended."""

    def __init__(self, count: int, url: str, model: str, inputs: int, token: str = SEARCH, **headers: str) -> None:
        self._over = threading.Event()
        self.statuses: list[int] = []
        given = {
            "Authorization": f"Bearer {token}",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=60, headers=given)
        self._threads = [threading.Thread(target=self._ask, args=(model, inputs)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, model: str, inputs: int) -> None:
        body = {
            "items": [
                "some words about how a query is answered, and why"[: 12 + 3 * number % 40] for number in range(inputs)
            ]
        }
        while not self._over.is_set():
            self.statuses.append(self._client.post(f"/v1/encode/{model}", json=body).status_code)
            self._over.wait(0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        self._client.close()


def live(stack: Stack, phase_s: float) -> None:
    """Quiet; bulk beside it; a lane without a worker and clients in a hurry; an input that ends adapters; a worker that
    goes; quiet.
    """
    one, two = stack.urls
    headers = {"Authorization": "Bearer an-administrator"}
    with httpx.Client(headers=headers, trust_env=False, timeout=60) as admin, ThreadPoolExecutor() as asking:
        steady = [
            Clients(2, one, "toy/one", 4, X_SIE_MACHINE_PROFILE="cpu"),
            Clients(2, two, "toy/two", 4),
            Clients(1, one, "toy/three", 2),
            Clients(1, two, "toy/one", 8, X_SIE_MACHINE_PROFILE="l4"),
        ]
        time.sleep(phase_s)
        bulk = [
            Clients(6, one, "toy/one", 200, BATCH, X_SIE_Priority="bulk"),
            Clients(3, two, "toy/two", 200, BATCH, X_SIE_Priority="bulk"),
        ]
        time.sleep(phase_s)
        bad = [
            Clients(1, one, "toy/one", 40, X_SIE_Timeout_Ms="60"),
            Clients(1, two, "toy/none", 1),
            Clients(1, two, "toy/one", 2, X_SIE_MACHINE_PROFILE="a100", X_SIE_Timeout_Ms="2000"),
        ]
        time.sleep(phase_s)
        for each in bulk:
            each.end()
        deadly = asking.submit(admin.post, f"{one}/v1/encode/toy/two", json={"items": [DEADLY]})
        until(lambda: restarted(stack) and deadly.done(), 60, "the input is given up")
        assert deadly.result().status_code == 500, deadly.result().text
        entry = msgspec.to_builtins(toy_entry("toy/four"))
        assert admin.post(f"{stack.config_url}/v1/configs/models", json=entry).status_code == 201
        time.sleep(phase_s)
        stack.workers[1].sidecar.stop()
        time.sleep(phase_s)
        stack.workers[1].sidecar.start()
        for each in bad:
            each.end()
        time.sleep(phase_s)
        for each in steady:
            each.end()
        assert all(200 in each.statuses for each in steady)


def restarted(stack: Stack) -> bool:
    """Whether all adapters run; what has ended is started."""
    ended = [worker.adapter for worker in stack.workers if not worker.adapter.alive]
    for adapter in ended:
        adapter.start()
    return not ended


def main(folder: Path, phase_s: float = 18.0) -> None:
    """Raises AssertionError where a part of the cluster does not do what it is to show."""
    folder.mkdir(parents=True)
    stack = Stack(folder / "stack", PLAN)
    stack.workers[2].sidecar.environ["SIE_MACHINE_PROFILE"] = "l4"
    with stack:
        prometheus = Prometheus(folder, stack)
        try:
            until(prometheus.is_scraping, 60, "all targets up")
            start_s = time.time()
            live(stack, phase_s)
            for name, board in boards().items():
                draw(board, prometheus.query_range, start_s, time.time(), folder / f"{name}.png")
        finally:
            prometheus.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
