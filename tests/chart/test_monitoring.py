"""ServiceMonitors, the PrometheusRule and dashboards: fields, queries that match the table of metrics, and alerts that
fire.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from helm import of_kind, rendered, workloads
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
