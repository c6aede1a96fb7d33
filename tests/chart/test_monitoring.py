"""ServiceMonitors, the PrometheusRule and dashboards: fields, queries that match the table of metrics, and alerts that
fire.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from helm import CHART, FILES, of_kind, pod, rendered, workloads
from metrics_page import every
from monitoring import panels, parts_of, rule_tests, rules, spec

ROOT = Path(__file__).parents[2]

ON = ("values-gke.yaml", "values-eks.yaml", "values-aks.yaml", "everything.yaml")


@pytest.mark.parametrize("file", ON)
def test_every_port_of_metrics_is_scraped(file: str) -> None:
    manifests = rendered(file)
    scraped = set()
    for monitor in of_kind("ServiceMonitor", manifests).values():
        spec = monitor["spec"]
        assert spec.keys() == {"namespaceSelector", "selector", "endpoints"}
        assert spec["namespaceSelector"] == {"matchNames": ["search"]}
        (endpoint,) = spec["endpoints"]
        # the operator's label `endpoint` would rename the label `endpoint` of a metric
        assert endpoint.pop("relabelings") == [{"action": "labeldrop", "regex": "endpoint"}]
        assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "30s"}
        selected = [
            service
            for service in of_kind("Service", manifests).values()
            if spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        ]
        assert len(selected) == 1, "each pod is scraped once"
        (port,) = [port for port in selected[0]["spec"]["ports"] if port["name"] == endpoint["port"]]
        pods = [workload["spec"]["template"] for workload in workloads(manifests).values()]
        behind = [
            pod_template
            for pod_template in pods
            if selected[0]["spec"]["selector"].items() <= pod_template["metadata"]["labels"].items()
        ]
        targets = [
            (container["name"], exposed_port["containerPort"])
            for template in behind
            for container in template["spec"]["containers"]
            for exposed_port in container.get("ports", ())
            if exposed_port["name"] == port["targetPort"]
        ]
        assert len(targets) == len(behind)
        scraped |= set(targets)
    assert scraped == {("gateway", 9090), ("config", 8081), ("worker-sidecar", 9095)}


def test_what_nobody_asked_for_is_not_there() -> None:
    """The default values have no objects of the operators of Prometheus and Grafana."""
    for file in set(FILES) - set(ON):
        for kind in ("ServiceMonitor", "PrometheusRule"):
            assert not of_kind(kind, rendered(file))
        assert all("dashboard" not in name for name in of_kind("ConfigMap", rendered(file)))


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert spec().keys() == {"groups"}
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 8
    for rule in rules():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert "$" not in rule["expr"]


def test_alerts_of_a_release_ask_for_no_other_one() -> None:
    services = of_kind("Service", rendered("values-gke.yaml"))
    for rule in rules():
        selectors = re.findall(r"sie_\w+(\{[^}]*\})?", rule["expr"])
        for selector in selectors:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', selector))
            assert labels["namespace"] == "search"
            assert labels["service"] in services


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, config_map in of_kind("ConfigMap", rendered("values-gke.yaml")).items():
        if "-dashboard-" in name:
            assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
            for text in config_map["data"].values():
                yield name, json.loads(text)


def test_dashboards_are_whole() -> None:
    boards = dict(dashboards())
    assert len(boards) == len(list((CHART / "files" / "dashboards").glob("*.json"))) > 0
    for dashboard in boards.values():
        numbers = [panel["id"] for panel in dashboard["panels"]]
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers) == len(set(titles))
        cells = [
            (x, y)
            for panel in dashboard["panels"]
            for at in [panel["gridPos"]]
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        assert len(set(cells)) == len(cells), "panels lie over each other"
        assert max(x for x, _ in cells) < 24
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                assert panel["description"], panel["title"]
                assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
                assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_every_field_of_a_dashboard_is_one_that_grafana_reads() -> None:
    """Grafana's own types leave out names that they do not know, so a file that they read and write again is
    unchanged.
    """
    register_default_plugins()
    for dashboard in dict(dashboards()).values():
        again = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
        assert lost(dashboard, again) == []


def lost(original: Any, counterpart: Any, path: str = "") -> list[str]:
    """Return the paths at which `counterpart` lacks what `original` has. It may have more."""
    if isinstance(original, dict):
        within = counterpart if isinstance(counterpart, dict) else {}
        return [
            missing_path
            for name, value in original.items()
            for missing_path in lost(value, within.get(name), f"{path}.{name}")
        ]
    if isinstance(original, list):
        if not isinstance(counterpart, list) or len(counterpart) != len(original):
            return [path]
        return [
            missing_path
            for number, value in enumerate(original)
            for missing_path in lost(value, counterpart[number], f"{path}[{number}]")
        ]
    return [] if original == counterpart else [path]


ADDED = {"namespace", "service", "pod", "job", "instance"}  # Prometheus adds these to every series


def test_every_name_and_label_in_a_query_is_of_the_table() -> None:
    """The parser is that of Prometheus."""
    for query in [rule["expr"] for rule in rules()] + [expression for _, expression in panels()]:
        check(query)


def check(query: str) -> None:
    metrics = {name: metric for metric in every().values() for name in metric.exported}
    nodes = list(parts_of(promql.parse(query)))
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    assert selectors
    labels = set()
    for selector in selectors:
        assert selector.name in metrics, query
        own = {*metrics[selector.name].labels} | ({"le"} if selector.name.endswith("_bucket") else set())
        assert {matcher.name for matcher in selector.matchers.matchers} <= own | ADDED, query
        assert {"namespace"} <= {matcher.name for matcher in selector.matchers.matchers}, "of one installation alone"
        labels |= own
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            assert {*node.modifier.labels} <= labels | ADDED, query
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase"):
            (argument,) = node.args
            if isinstance(argument, promql.MatrixSelector):
                assert metrics[argument.vector_selector.name].kind != "gauge", query
        if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
            assert "_bucket" in query


def test_every_alert_has_a_test_that_raises_it_and_one_that_clears_it() -> None:
    cases: dict[str, list[bool]] = {}
    for scenario in rule_tests()["tests"]:
        for case in scenario.get("alert_rule_test", ()):
            cases.setdefault(case["alertname"], []).append(bool(case.get("exp_alerts")))
    assert cases == {rule["alert"]: [False, True, False] for rule in rules()}


def test_the_runbook_of_alerts_is_where_the_values_say() -> None:
    (rule,) = of_kind("PrometheusRule", rendered("everything.yaml")).values()
    urls = [alert["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for alert in group["rules"]]
    assert len(urls) > 8
    assert {url.partition("#")[0] for url in urls} == {"https://docs.example.com/runbook/"}


def test_every_alert_is_in_the_runbook() -> None:
    """The runbook has the heading that the annotation of the alert names."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "runbook.md").read_text("utf-8"), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/runbook.md"
        assert anchor == rule["alert"].lower()
        assert anchor in anchors, rule["alert"]


@pytest.mark.debian
def test_each_alert_fires_and_clears(tmp_path: Path) -> None:
    """promtool runs the rule tests on the rules as the chart renders them."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec()), "utf-8")
    texts = {rule["alert"]: rule["annotations"] for rule in rules()}
    cases = rule_tests()
    for scenario in cases["tests"]:
        for case in scenario.get("alert_rule_test", ()):
            for alert in case.get("exp_alerts", ()):
                labels = alert["exp_labels"]
                alert["exp_annotations"] = {
                    name: re.sub(r"{{ \$labels\.(\w+) }}", lambda match, labels=labels: labels[match[1]], text)
                    for name, text in texts[case["alertname"]].items()
                }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(cases), "utf-8")
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", "tests.yaml")):
        process = subprocess.run(
            ["promtool", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr


def test_the_pods_that_are_watched_are_those_that_export() -> None:
    assert {
        container_spec["name"]
        for workload in workloads(rendered("values-gke.yaml")).values()
        for container_spec in pod(workload)["containers"]
    } == {
        "gateway",
        "config",
        "worker-sidecar",
        "adapter",
        "nats",
    }
