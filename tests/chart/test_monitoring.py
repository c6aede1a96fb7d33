"""ServiceMonitors, the PrometheusRule and dashboards: their fields, and that every name in a query is one that a process exports."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from helm import CHART, FILES, of_kind, pod, rendered, workloads
from inprocess import InProcess
from prometheus_client.parser import text_string_to_metric_families

ON = ("values-gke.yaml", "values-eks.yaml", "values-aks.yaml", "everything.yaml")


@pytest.mark.parametrize("file", ON)
def test_every_port_of_metrics_is_scraped(file: str) -> None:
    """X12"""
    found = rendered(file)
    scraped = set()
    for monitor in of_kind("ServiceMonitor", found).values():
        spec = monitor["spec"]
        assert spec.keys() == {"namespaceSelector", "selector", "endpoints"}
        assert spec["namespaceSelector"] == {"matchNames": ["search"]}
        (endpoint,) = spec["endpoints"]
        assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "30s"}
        selected = [
            each for each in of_kind("Service", found).values()
            if spec["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        ]  # fmt: skip
        assert len(selected) == 1, "each pod is scraped once"
        (port,) = [port for port in selected[0]["spec"]["ports"] if port["name"] == endpoint["port"]]
        pods = [each["spec"]["template"] for each in workloads(found).values()]
        behind = [each for each in pods if selected[0]["spec"]["selector"].items() <= each["metadata"]["labels"].items()]
        targets = [
            (container["name"], each["containerPort"])
            for template in behind for container in template["spec"]["containers"] for each in container.get("ports", ())
            if each["name"] == port["targetPort"]
        ]  # fmt: skip
        assert len(targets) == len(behind)
        scraped |= set(targets)
    assert scraped == {("gateway", 9090), ("config", 8081), ("worker-sidecar", 9095)}


def test_what_nobody_asked_for_is_not_there() -> None:
    """P16: a cluster without those operators takes the default values."""
    for file in set(FILES) - set(ON):
        for kind in ("ServiceMonitor", "PrometheusRule"):
            assert not of_kind(kind, rendered(file))
        assert all("dashboard" not in name for name in of_kind("ConfigMap", rendered(file)))


def rules() -> list[dict[str, Any]]:
    spec = of_kind("PrometheusRule", rendered("values-gke.yaml"))["sie"]["spec"]
    assert spec.keys() == {"groups"}
    return [rule for group in spec["groups"] for rule in group["rules"]]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 8
    for rule in rules():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "$GATEWAY" not in rule["expr"]
        assert "$WORKER" not in rule["expr"]


def test_alerts_of_a_release_ask_for_no_other_one() -> None:
    """A13"""
    services = of_kind("Service", rendered("values-gke.yaml"))
    for rule in rules():
        selectors = re.findall(r"sie_\w+(\{[^}]*\})?", rule["expr"])
        for selector in selectors:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', selector))
            assert labels["namespace"] == "search"
            assert labels["service"] in services


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in of_kind("ConfigMap", rendered("values-gke.yaml")).items():
        if "-dashboard-" in name:
            assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
            for text in each["data"].values():
                yield name, json.loads(text)


def test_dashboards_are_whole() -> None:
    found = dict(dashboards())
    assert len(found) == len(list((CHART / "files" / "dashboards").glob("*.json"))) > 0
    for each in found.values():
        numbers = [panel["id"] for panel in each["panels"]]
        assert len(set(numbers)) == len(numbers)
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in each["panels"]}
        assert len(places) == len(numbers)
        assert all(target["expr"] for panel in each["panels"] for target in panel["targets"])


def queries() -> list[str]:
    shown = [target["expr"] for _, each in dashboards() for panel in each["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in rules()] + shown


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as found:
        yield found


async def test_every_name_and_label_in_a_query_is_exported(cluster: InProcess) -> None:
    """B1: by a gateway and a worker that have answered a request and refused one. Labels that Prometheus adds are not asked for here."""
    gateway, sidecar = await cluster.gateway(), await cluster.sidecar()
    assert (await gateway.encode("x")).status_code == 200
    exported: dict[str, set[str]] = {}
    declared = set()
    for process in (gateway, sidecar):
        for family in text_string_to_metric_families((await process.get("/metrics")).text):
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            declared |= {family.name + ending for ending in endings}
            for sample in family.samples:
                exported.setdefault(sample.name, set()).update(sample.labels)
    added = {"namespace", "service", "pod", "job", "instance"}
    for query in queries():
        for name, selector in re.findall(r"(sie_\w+)(?:\{([^}]*)\})?", query):
            assert name in declared, f"{name} in {query}"
            if name in exported:  # those with labels that nothing has happened to yet have no series
                assert set(re.findall(r"(\w+)=", selector)) - added <= exported[name], query
        grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")} - added - {"le"}
        names = set(re.findall(r"sie_\w+", query))
        known = functools.reduce(set.union, (exported.get(name, set()) for name in names), set())
        assert grouped <= known or not names & exported.keys(), query


def test_the_pods_that_are_watched_are_those_that_export() -> None:
    assert {each["name"] for workload in workloads(rendered("values-gke.yaml")).values() for each in pod(workload)["containers"]} == {
        "gateway", "config", "worker-sidecar", "adapter", "nats",
    }  # fmt: skip
