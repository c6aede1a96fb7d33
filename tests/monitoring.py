"""The alerts and dashboards of the chart, for tests: expressions, rule tests, and the parts of an expression."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from helm import CHART, of_kind, rendered

RULE_TESTS = Path(__file__).parent / "chart" / "alerts_test.yaml"
NAMESPACE = "search"  # the namespace of the rendered installation


def spec() -> dict[str, Any]:
    """Return the spec of the PrometheusRule, which is also a file of rules."""
    rule_spec: dict[str, Any] = of_kind("PrometheusRule", rendered("values-gke.yaml"))["sie"]["spec"]
    return rule_spec


def rules() -> list[dict[str, Any]]:
    return [rule for group in spec()["groups"] for rule in group["rules"]]


def boards() -> dict[str, Any]:
    """Return the dashboards by the names of their files."""
    return {
        file.stem: json.loads(file.read_text("utf-8"))
        for file in sorted((CHART / "files" / "dashboards").glob("*.json"))
    }


def filled(expression: str, *, rate: str = "5m", span: str = "1h", interval_ms: int = 60_000) -> str:
    """Return an expression of a panel with its variables replaced as by Grafana. `rate` and `span` are durations."""
    values = {"$namespace": NAMESPACE, "$__rate_interval": rate, "$__range": span, "$__interval_ms": f"{interval_ms}"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def panels() -> list[tuple[str, str]]:
    """Return the expressions of all dashboards, each with the title of its panel."""
    return [
        (panel["title"], filled(target["expr"]))
        for board in boards().values()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def relabelings() -> list[dict[str, Any]]:
    """Return the relabelings of the chart's ServiceMonitors, which are the same for all."""
    (text,) = {
        json.dumps(endpoint.get("relabelings", []))
        for monitor in of_kind("ServiceMonitor", rendered("values-gke.yaml")).values()
        for endpoint in monitor["spec"]["endpoints"]
    }
    changes: list[dict[str, Any]] = json.loads(text)
    return changes


def rule_tests() -> dict[str, Any]:
    """Return the tests of promtool, without the annotations that they expect."""
    suite: dict[str, Any] = yaml.safe_load(RULE_TESTS.read_text("utf-8"))
    return suite


def parts_of(node: promql.Expr) -> Iterator[promql.Expr]:
    """Yield an expression and all its parts."""
    yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if isinstance(inner := getattr(node, name, None), promql.Expr):
            yield from parts_of(inner)
    for argument in getattr(node, "args", ()):
        yield from parts_of(argument)
