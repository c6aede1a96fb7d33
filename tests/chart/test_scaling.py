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
from fake_adapter import toy_entry
from helm import CHOSEN, container, containers, objects, of_kind, rendered, template, variables, workloads
from inprocess import GatewayProcess, InProcess, until
from pages import DOCS, blocks

from sie_adapter.process import DRAIN_S as ADAPTER_DRAIN_S
from sie_contracts.wire import topology
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


def scaled_groups(manifests: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name.removeprefix("sie-worker-"): spec for name, spec in scaled(manifests).items()}


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


@pytest.mark.parametrize("file", CLOUDS)
def test_every_group_has_one_for_its_own_lane(file: str) -> None:
    """The URL has the release, the namespace and the lane of the group."""
    manifests = rendered(file)
    lanes = {}
    for workload, _, container_spec in containers(manifests):
        if container_spec["name"] == "worker-sidecar":
            environ = variables(container_spec)
            lanes[workload] = ".".join(environ[name] for name in ("SIE_POOL", "SIE_MACHINE_PROFILE", "SIE_BUNDLE"))
    urls = {name: spec["triggers"][0]["metadata"]["url"] for name, spec in scaled(manifests).items()}
    assert urls == {
        workload: f"http://sie-gateway-metrics.search.svc:9090/v1/scaling/{lane}" for workload, lane in lanes.items()
    }
    service = of_kind("Service", manifests)["sie-gateway-metrics"]
    port = next(port for port in service["spec"]["ports"] if port["port"] == 9090)
    gateway = container(manifests, "sie-gateway", "gateway")
    assert {
        "name": port["targetPort"],
        "containerPort": int(variables(gateway)["SIE_GATEWAY_METRICS_PORT"]),
    } in gateway["ports"]


@pytest.mark.parametrize(("pool", "expected"), [("default", "_default"), ("Default", "_default"), ("Team-A", "team-a")])
def test_a_pool_is_named_as_its_gateways_name_it(pool: str, expected: str) -> None:
    manifests = objects(template("values-gke.yaml", {**CHOSEN, "pool": pool}))
    (spec,) = scaled(manifests).values()
    assert spec["triggers"][0]["metadata"]["url"].endswith(f"/v1/scaling/{expected}.l4.default")
    assert variables(container(manifests, "sie-worker-l4", "worker-sidecar"))["SIE_POOL"] == expected


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


async def replicas_of(gateway: GatewayProcess, specs: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the replicas that KEDA computes for each of the ScaledObjects."""
    return {name: replicas(await gateway.get(asked(spec)[0]), spec) for name, spec in specs.items()}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as system:
        yield system


@pytest.mark.parametrize("file", [*CLOUDS, "everything.yaml"])
async def test_every_object_asks_what_a_gateway_of_its_file_answers(file: str, cluster: InProcess) -> None:
    """Without a worker, a ScaledObject asks for no replica of an empty lane, for one if its own queue has work, and for
    one more if no worker has joined a reservation.
    """
    manifests = rendered(file)
    environ = variables(container(manifests, "sie-gateway", "gateway"))
    names = ("SIE_GATEWAY_CONFIGURED_GPUS", "SIE_MACHINE_PROFILE", "SIE_POOL", "SIE_GATEWAY_HEALTH_MODE")
    gateway = await cluster.gateway(**{name: environ[name] for name in names if name in environ})
    specs = scaled(manifests)
    assert specs

    expected = dict.fromkeys(specs, 0)
    assert await replicas_of(gateway, specs) == expected
    for number, (name, spec) in enumerate(specs.items()):
        lane = topology.Lane(*asked(spec)[0].rpartition("/")[2].split("."))
        # as from a gateway that has ended: only the queue has this work
        await gateway.broker.publish(topology.work_subject(lane, "bulk", "toy/one"), b"", f"work-{number}")
        answer = (await gateway.get(asked(spec)[0])).json()
        assert (answer["ready_workers"], answer["backlog_items"], answer["demand"]) == (0, 1, 0)
        expected[name] = 1
        assert await replicas_of(gateway, specs) == expected
        response = await gateway.client.post(
            "/v1/pools", json={"name": f"team-{number}", "gpus": {lane.machine_profile: 1}}
        )
        assert response.status_code == 201, response.text
        expected[name] = 2
        assert await replicas_of(gateway, specs) == expected


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


async def test_three_kinds_of_nodes_come_from_zero_for_the_models_that_want_them(tmp_path: Path) -> None:
    """The worker on a CPU, which always runs, gets only requests whose model or header names its machine profile."""
    values = {**CHOSEN, "workers": {"groups": KINDS}, "gateway": {"defaultMachineProfile": "l4"}}
    manifests = objects(template(values=values))
    gateway_environ = variables(container(manifests, "sie-gateway", "gateway"))
    specs = scaled_groups(manifests)
    entries = [
        toy_entry("toy/any"),
        toy_entry("toy/small", machine_profiles=["cpu"]),
        toy_entry("toy/large", machine_profiles=["a100-80gb", "h100"]),
    ]
    async with InProcess(tmp_path, *entries) as cluster:
        names = ("SIE_GATEWAY_CONFIGURED_GPUS", "SIE_MACHINE_PROFILE", "SIE_POOL", "SIE_GATEWAY_HEALTH_MODE")
        gateway = await cluster.gateway(**{name: gateway_environ[name] for name in names}, SIE_LOAD_HOLD_S="20")

        async def start(group: str) -> None:
            environ = variables(container(manifests, f"sie-worker-{group}", "worker-sidecar"))
            own = {name: environ[name] for name in ("SIE_MACHINE_PROFILE", "SIE_BUNDLE")}
            await cluster.sidecar(**own, SIE_WORKER_ID=group)

        await start("cpu")
        assert await replicas_of(gateway, specs) == {"cpu": 1, "light": 0, "big": 0}
        served = await gateway.encode("x", model="toy/small")
        assert (served.status_code, served.headers["x-sie-worker"]) == (200, "cpu")
        assert (await replicas_of(gateway, specs))["light"] == 0

        for model, group, rest in (("toy/any", "light", {"big": 0}), ("toy/large", "big", {"light": 1})):
            asking = asyncio.create_task(gateway.encode("x", model=model))
            stream = cluster.server.streams["WORK__default"]
            await until(lambda: stream.state().messages or asking.done(), "work in the queue")  # noqa: B023  awaited here
            assert not asking.done(), asking.result().text
            assert await replicas_of(gateway, specs) == {"cpu": 1, group: 1, **rest}
            await start(group)
            answer = await asking
            assert (answer.status_code, answer.headers["x-sie-worker"]) == (200, group)

        refused = await gateway.encode("x", model="toy/large", X_SIE_Machine_Profile="cpu")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "machine_profile_excluded")
        assert refused.json()["error"]["param"] == "X-SIE-MACHINE-PROFILE"
        assert (await gateway.encode("x", model="toy/any", X_SIE_Machine_Profile="cpu")).headers[
            "x-sie-worker"
        ] == "cpu"


(SPOT,) = (yaml.safe_load(block.code) for block in blocks(DOCS / "kubernetes.md", "yaml") if "l4-spot" in block.code)
# of the 30 s of notice, a kubelet that divides them leaves this to pods that are no part of the system
NOTICE_S, NOTICE_OF_PODS_S = 30.0, 15.0


async def test_requests_for_a_kind_of_node_match_its_spot_nodes_too(tmp_path: Path) -> None:
    """Each group has a lane of its own, for which KEDA asks. A request for `l4` prefers the workers of `l4`, takes
    those of `l4-spot` while `l4` has none, and waits for `l4` while both have none.
    """
    manifests = objects(template(values={**CHOSEN, **SPOT}))
    specs = scaled_groups(manifests)
    assert [asked(specs[name])[0].rpartition("/")[2] for name in ("l4", "spot")] == [
        "_default.l4.default",
        "_default.l4-spot.default",
    ]
    pods = {name: workloads(manifests)[f"sie-worker-{name}"]["spec"]["template"]["spec"] for name in ("l4", "spot")}
    profile = SPOT["machineProfiles"]["l4-spot"]
    assert {name: pods["spot"][name] for name in profile} == profile
    assert "nodeSelector" not in pods["l4"]
    assert {"nvidia.com/gpu"} == {toleration["key"] for toleration in pods["l4"]["tolerations"]}
    async with InProcess(tmp_path) as cluster:
        gateway_environ = variables(container(manifests, "sie-gateway", "gateway"))
        names = ("SIE_GATEWAY_CONFIGURED_GPUS", "SIE_POOL", "SIE_GATEWAY_HEALTH_MODE")
        gateway = await cluster.gateway(**{name: gateway_environ[name] for name in names}, SIE_LOAD_HOLD_S="20")

        async def start(group: str) -> None:
            environ = variables(container(manifests, f"sie-worker-{group}", "worker-sidecar"))
            own = {name: environ[name] for name in ("SIE_MACHINE_PROFILE", "SIE_BUNDLE", "SIE_GPU_TYPE")}
            await cluster.sidecar(**own, SIE_WORKER_ID=group)

        asking = asyncio.create_task(gateway.encode("x", X_SIE_Machine_Profile="l4"))
        stream = cluster.server.streams["WORK__default"]
        await until(lambda: stream.state().messages or asking.done(), "work in the queue")
        assert await replicas_of(gateway, specs) == {"l4": 1, "spot": 0}
        await start("spot")
        assert not asking.done(), "it waits in the lane of l4"
        served = await gateway.encode("y", X_SIE_Machine_Profile="l4")
        assert (served.status_code, served.headers["x-sie-worker"]) == (200, "spot")
        await start("l4")
        assert (await asking).headers["x-sie-worker"] == "l4"
        for machine_profile, worker in (("l4", "l4"), ("l4-spot", "spot")):
            answer = await gateway.encode("z", X_SIE_Machine_Profile=machine_profile)
            assert (answer.status_code, answer.headers["x-sie-worker"]) == (200, worker)


async def test_a_request_for_a_kind_of_node_starts_a_spot_node_where_there_is_no_other(tmp_path: Path) -> None:
    groups = {"cpu": None, "spot": SPOT["workers"]["groups"]["spot"]}
    manifests = objects(template(values={**CHOSEN, "workers": {**SPOT["workers"], "groups": groups}}))
    (spec,) = scaled(manifests).values()
    environ = variables(container(manifests, "sie-gateway", "gateway"))
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_GATEWAY_CONFIGURED_GPUS=environ["SIE_GATEWAY_CONFIGURED_GPUS"])
        assert (await gateway.encode("x", X_SIE_Machine_Profile="l4", X_SIE_Timeout_Ms="1000")).status_code == 503
        assert replicas(await gateway.get(asked(spec)[0]), spec) == 1


def test_a_worker_ends_within_the_notice_of_a_spot_node() -> None:
    """The grace period is longer than the notice, but a worker does not use it: the sidecar returns unfinished work
    before a kubelet that divides the notice kills its pods.
    """
    manifests = objects(template(values={**CHOSEN, **SPOT}))
    grace_s = workloads(manifests)["sie-worker-spot"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    waits_s = float(container(manifests, "sie-worker-spot", "adapter")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert SIDECAR_DRAIN_S < NOTICE_OF_PODS_S
    assert waits_s + ADAPTER_DRAIN_S < NOTICE_S < grace_s
    section = (DOCS / "kubernetes.md").read_text("utf-8").partition("## Spot nodes")[2].partition("\n## ")[0]
    for seconds in (grace_s, NOTICE_S, NOTICE_OF_PODS_S, SIDECAR_DRAIN_S, waits_s + ADAPTER_DRAIN_S):
        assert f" {seconds:g} s" in section
