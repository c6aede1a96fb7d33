"""The ScaledObjects: a running gateway answers the requests of KEDA, and the replicas that KEDA computes are right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from helm import CHOSEN, container, objects, of_kind, rendered, template, variables, workloads
from inprocess import InProcess, until
from pages import DOCS, blocks

from sie_adapter.process import DRAIN_S as ADAPTER_DRAIN_S
from sie_sidecar.process import DRAIN_S as SIDECAR_DRAIN_S

CLOUDS = ("values-gke.yaml", "values-eks.yaml", "values-aks.yaml")
# The fields of a keda.sh/v1alpha1 ScaledObject that the chart uses. Any other field is a mistake.
SPEC = {
    "scaleTargetRef",
    "minReplicaCount",
    "maxReplicaCount",
    "pollingInterval",
    "cooldownPeriod",
    "advanced",
    "triggers",
}
METADATA = {"url", "format", "valueLocation", "targetValue", "activationTargetValue"}


def scaled(manifests: tuple[dict[str, Any], ...] | list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: scaled_object["spec"] for name, scaled_object in of_kind("ScaledObject", manifests).items()}


@pytest.mark.parametrize("file", [*CLOUDS, "everything.yaml"])
def test_every_field_is_one_that_keda_knows(file: str) -> None:
    """There is no `fallback`: while no gateway answers, the number of replicas stays as it is, also at zero. The
    cooldown is longer than the six minutes that a node may take to start, so its pod still exists then.
    """
    manifests = rendered(file)
    for name, spec in scaled(manifests).items():
        assert spec.keys() == SPEC
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert name in workloads(manifests)
        assert spec["minReplicaCount"] == 0 < spec["maxReplicaCount"]
        assert 480 <= spec["cooldownPeriod"] < workloads(manifests)[name]["spec"]["progressDeadlineSeconds"]
        assert spec["advanced"].keys() == {"horizontalPodAutoscalerConfig"}
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior.keys() == {"scaleDown", "scaleUp"}
        assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]
        (trigger,) = spec["triggers"]
        assert trigger.keys() == {"type", "metricType", "metadata"}
        assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
        assert trigger["metadata"].keys() == METADATA
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


def asked(spec: dict[str, Any]) -> tuple[str, str, int]:
    """Return the path that KEDA requests, the field of the number in the answer, and the target value."""
    metadata = spec["triggers"][0]["metadata"]
    return urlsplit(metadata["url"]).path, metadata["valueLocation"], int(metadata["targetValue"])


def replicas(answer: httpx.Response, spec: dict[str, Any]) -> int:
    """Return the replicas that KEDA and the autoscaler compute from an answer: ceil(value / target) within the bounds,
    or the minimum if the value is not above the activation value.
    """
    assert answer.status_code == 200
    _, place, target = asked(spec)
    value = answer.json()[place]
    active = value > float(spec["triggers"][0]["metadata"]["activationTargetValue"])
    count = math.ceil(value / target) if active else 0
    return min(spec["maxReplicaCount"], max(spec["minReplicaCount"], count))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as system:
        yield system


async def test_a_running_gateway_answers_what_keda_asks(cluster: InProcess) -> None:
    """An empty lane wants no worker. A request without a worker wants one, and after the request its record of demand
    does. A reservation wants its workers too, up to the maximum of the group. The port of KEDA needs no token.
    """
    manifests = rendered("values-gke.yaml")
    spec = scaled(manifests)["sie-worker-l4"]
    path = asked(spec)[0]
    rendered_environ = variables(container(manifests, "sie-gateway", "gateway"))
    names = (
        "SIE_GATEWAY_CONFIGURED_GPUS",
        "SIE_MACHINE_PROFILE",
        "SIE_POOL",
        "SIE_AUTH_MODE",
        "SIE_GATEWAY_HEALTH_MODE",
    )
    environ = {name: rendered_environ[name] for name in names if name in rendered_environ}
    gateway = await cluster.gateway(
        **{**environ, "SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": "good", "SIE_LOAD_HOLD_S": "20"}
    )
    assert (await gateway.client.get(path)).status_code == 401
    assert replicas(await gateway.get(path), spec) == 0

    asking = asyncio.create_task(gateway.encode("x", Authorization="Bearer good", X_SIE_Timeout_Ms="2000"))
    await until(lambda: cluster.server.streams["WORK__default"].state().messages or asking.done(), "work in the queue")
    waiting = await gateway.get(path)
    assert waiting.json()["ready_workers"] == 0
    assert replicas(waiting, spec) == 1
    assert (await asking).status_code == 503
    assert replicas(await gateway.get(path), spec) == 1  # from the record of demand: the client will retry

    response = await gateway.client.post(
        "/v1/pools", json={"name": "team", "gpus": {"l4": 3}}, headers={"Authorization": "Bearer good"}
    )
    assert response.status_code == 201
    assert replicas(await gateway.get(path), spec) == 4  # three that are reserved, and the one before
    await gateway.client.delete("/v1/pools/team", headers={"Authorization": "Bearer good"})
    await gateway.client.post(
        "/v1/pools", json={"name": "team", "gpus": {"l4": 9}}, headers={"Authorization": "Bearer good"}
    )
    assert replicas(await gateway.get(path), spec) == spec["maxReplicaCount"] == 4

    cluster.server.disconnect()
    answer = await gateway.get(path)
    cluster.server.reconnect()
    assert answer.status_code == 503  # an answer of zero would end workers


KINDS: dict[str, Any] = {
    "cpu": {"machineProfile": "cpu", "autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 2}},
    "light": {"machineProfile": "l4", "autoscaling": {"enabled": True, "maxReplicas": 8}},
    "big": {"machineProfile": "a100-80gb", "autoscaling": {"enabled": True, "maxReplicas": 2}},
}


(SPOT,) = (yaml.safe_load(block.code) for block in blocks(DOCS / "kubernetes.md", "yaml") if "l4-spot" in block.code)
# of the 30 s of notice, a kubelet that divides them leaves this to pods that are no part of the system
NOTICE_S, NOTICE_OF_PODS_S = 30.0, 15.0


def test_a_worker_ends_within_the_notice_of_a_spot_node() -> None:
    """The grace period is longer than the notice, but a worker does not use it: the sidecar returns unfinished work
    before a kubelet that divides the notice kills its pods.
    """
    manifests = objects(template(values={**CHOSEN, **SPOT}))
    grace_s = workloads(manifests)["sie-worker-spot"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    waits_s = float(container(manifests, "sie-worker-spot", "adapter")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert SIDECAR_DRAIN_S < NOTICE_OF_PODS_S
    assert waits_s + ADAPTER_DRAIN_S < NOTICE_S < grace_s
