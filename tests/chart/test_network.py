"""Network policies and ingresses: the connections that the processes need are allowed, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from helm import CHOSEN, FILES, allowed, objects, of_kind, rendered, template, workloads


@pytest.mark.parametrize("file", FILES)
def test_processes_reach_what_they_need_and_nothing_else(file: str) -> None:
    manifests = rendered(file)
    kinds = {
        name: "worker" if name.startswith("sie-worker") else name.removeprefix("sie-") for name in workloads(manifests)
    }
    needed = {
        ("gateway", "nats", 4222),
        ("gateway", "config", 8081),
        ("config", "nats", 4222),
        ("worker", "nats", 4222),
        ("worker", "config", 8081),
        ("worker", "gateway", 8080),
        ("nats", "nats", 6222),
    }
    if file == "everything.yaml":
        needed.add(("gateway", "worker", 9095))  # because of gateway.workerDiscovery
        needed.add(("mcp", "gateway", 8080))
    ports = (8080, 8081, 8085, 9090, 9095, 4222, 6222, 8222)
    pairs = [(source, target, port) for source in kinds for target in kinds for port in ports]
    assert {
        (kinds[source], kinds[target], port)
        for source, target, port in pairs
        if allowed(manifests, source, target, port)
    } == needed


def test_outside_is_reached_for_buckets_and_the_hub_alone() -> None:
    def outside(values: dict[str, Any]) -> dict[str, set[int]]:
        manifests = objects(template(values={**CHOSEN, **values}))
        policies = of_kind("NetworkPolicy", manifests)
        return {
            name: {
                port["port"] for rule in policy["spec"].get("egress", ()) if "to" not in rule for port in rule["ports"]
            }
            for name, policy in policies.items()
            if name != "sie"
        }

    assert outside({}) == {"sie-gateway": {443}, "sie-config": {443}, "sie-worker": {443}, "sie-nats": set()}
    assert outside({"networkPolicy": {"egressPorts": []}})["sie-worker"] == set()
    assert outside({"tracing": {"enabled": True, "endpoint": "http://collector.tracing:4319"}})["sie-worker"] == {
        443,
        4319,
    }
    for endpoint, port in (
        ("http://10.0.0.5", 4317),
        ("https://collector:4319/v1", 4319),
        ("http://collector2/", 4317),
    ):
        assert outside({"tracing": {"enabled": True, "endpoint": endpoint}})["sie-worker"] == {443, port}
    external = {"nats": {"enabled": False, "url": "nats://b:4333,tls://10.0.0.7"}}
    assert outside(external)["sie-config"] == {443, 4333, 4222}


def test_clients_and_monitors_are_those_that_are_named() -> None:
    """Metrics have a port of their own, which clients do not reach."""
    client = {"namespaceSelector": {"matchLabels": {"team": "search"}}}
    monitor = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    manifests = objects(template(values={**CHOSEN, "networkPolicy": {"clients": [client], "monitors": [monitor]}}))
    rules = {
        rule["ports"][0]["port"]: rule.get("from")
        for rule in of_kind("NetworkPolicy", manifests)["sie-gateway"]["spec"]["ingress"]
    }
    assert client in rules[8080]
    assert monitor not in rules[8080]
    assert rules[9090] == [monitor]
    assert monitor in of_kind("NetworkPolicy", manifests)["sie-worker"]["spec"]["ingress"][0]["from"]
    assert not of_kind("NetworkPolicy", objects(template(values={**CHOSEN, "networkPolicy": {"enabled": False}})))


@pytest.mark.parametrize(
    ("host", "path", "root"), [("a.example", "/", None), ("a.example", "/sie", "/sie"), ("*.example.com", "/", None)]
)
def test_the_ingress_leads_to_the_gateway(host: str, path: str, root: str | None) -> None:
    from helm import container, variables

    manifests = objects(
        template(values={**CHOSEN, "ingress": {"enabled": True, "path": path, "host": host, "tlsSecretName": "tls"}})
    )
    spec = of_kind("Ingress", manifests)["sie-gateway"]["spec"]
    assert spec["tls"] == [{"hosts": [host], "secretName": "tls"}]
    (rule,) = spec["rules"]
    (only,) = rule["http"]["paths"]
    assert (rule["host"], only["path"], only["pathType"]) == (host, path, "Prefix")
    service = only["backend"]["service"]
    assert service["port"]["name"] in {
        port["name"] for port in of_kind("Service", manifests)[service["name"]]["spec"]["ports"]
    }
    assert variables(container(manifests, "sie-gateway", "gateway")).get("SIE_ROOT_PATH") == root


def test_idle_connections_outlive_those_of_the_load_balancers() -> None:
    """A load balancer closes an idle connection before a gateway does, and later than the longest request takes."""
    from helm import container, variables

    from sie_runtime.http.server import KEEP_ALIVE_S

    annotations = of_kind("Ingress", rendered("values-eks.yaml"))["sie-gateway"]["metadata"]["annotations"]
    idle_s = int(annotations["alb.ingress.kubernetes.io/load-balancer-attributes"].rpartition("=")[2])
    longest_s = float(
        variables(container(rendered("values-eks.yaml"), "sie-gateway", "gateway"))["SIE_GATEWAY_REQUEST_TIMEOUT"]
    )
    assert longest_s < idle_s < KEEP_ALIVE_S
    for file in ("values-gke.yaml", "values-aks.yaml"):
        annotations = of_kind("Ingress", rendered(file))["sie-gateway"]["metadata"]["annotations"]
        longest_s = float(variables(container(rendered(file), "sie-gateway", "gateway"))["SIE_GATEWAY_REQUEST_TIMEOUT"])
        assert float(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) > longest_s
        assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == "256m"
