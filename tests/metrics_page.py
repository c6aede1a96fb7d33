"""Write the tables of docs/metrics.md from the table of all metrics, the alerts of the chart and its dashboard.

python tests/metrics_page.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from sie_runtime.metrics_table import LABELS, MAX_SERIES, Metric, tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
FILES = ROOT / "charts" / "sie-cluster" / "files"
_PORTS = {
    "gateway": "Gateway: `SIE_GATEWAY_METRICS_PORT`",
    "worker": "Worker, its adapter included: `SIE_WORKER_METRICS_PORT`",
    "config": "Config service: its own port",
}


def every() -> dict[str, Metric]:
    """Return all metrics of all processes by name. No two processes share a name."""
    return {name: metric for metrics in tables().values() for name, metric in metrics.items()}


def _row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(metric.labels) or "–"
    return f"| `{name}` | {metric.kind} | {labels} | {metric.series} | {metric.text} |"


def metrics() -> str:
    """Return the metrics of each process, in the order of the table."""
    lines = []
    for process, group in tables().items():
        most = sum(metric.series for metric in group.values())
        lines += [f"### {_PORTS[process]}", "", f"At most {most} series of {MAX_SERIES}.", ""]
        lines += ["| name | type | labels | series, at most | what |", "|---|---|---|---|---|"]
        lines += [*(_row(metric) for metric in group.values()), ""]
    return "\n".join(lines).rstrip()


def labels() -> str:
    """Return the table of the values of each label."""
    rows = [f"| `{name}` | {text} |" for name, text in LABELS.items()]
    return "\n".join(["| label | values |", "|---|---|", *rows])


def alerts() -> str:
    """Return the table of the alerts."""
    lines = ["| alert | severity | after | when |", "|---|---|---|---|"]
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            summary = re.sub(r"{{ \$labels\.(\w+) }}", r"(\1)", rule["annotations"]["summary"])
            lines.append(
                f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule.get('for', 'at once')} | {summary} |"
            )
    return "\n".join(lines)


def panels() -> str:
    """Return the table of the dashboard's panels, row by row."""
    dashboard = json.loads((FILES / "dashboards" / "sie.json").read_text("utf-8"))
    rows = [
        f"| **{panel['title']}** | |" if panel["type"] == "row" else f"| {panel['title']} | {panel['description']} |"
        for panel in dashboard["panels"]
    ]
    return "\n".join(["| panel | what to read from it |", "|---|---|", *rows])


def page(old: str) -> str:
    """Return the page with its present tables."""
    for name, section in (("metrics", metrics()), ("labels", labels()), ("alerts", alerts()), ("panels", panels())):
        old = re.sub(
            rf"(?<=<!-- {name} -->\n).*(?=\n<!-- /{name} -->)",
            lambda _, replacement=section: f"\n{replacement}\n",
            old,
            flags=re.DOTALL,
        )
    return old


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
