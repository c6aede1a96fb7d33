"""Upgrades of a live release: what helm's merge and the API server make of the next rendering."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from helm import CHOSEN, HelmError, Object, objects, of_kind, pod, template, upgraded, workloads

from sie_runtime.http.asgi import Receive, Scope, Send, reply
from sie_runtime.http.server import HttpServer

Key = tuple[str, str]
Values = dict[str, Any]


def merged(last: Any, target: Any, live: Any) -> Any:
    """Merge as helm does: a field that only the last manifest has is removed, a field of the target is set."""
    if not (isinstance(target, dict) and isinstance(live, dict)):
        return copy.deepcopy(target)
    last = last if isinstance(last, dict) else {}
    fields = {name: value for name, value in live.items() if name in target or name not in last}
    return fields | {name: merged(last.get(name), value, live.get(name)) for name, value in target.items()}


def by_key(manifests: list[Object]) -> dict[Key, Object]:
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


class Release:
    """A release on a cluster: its last manifest, and the objects that the API server has."""

    def __init__(self) -> None:
        self.manifest: dict[Key, Object] = {}
        self.live: dict[Key, Object] = {}

    def upgrade(self, values: Values) -> None:
        self.apply(by_key(upgraded(self.live.values(), {**CHOSEN, **values})))

    def apply(self, target: dict[Key, Object]) -> None:
        """Apply a manifest, as an upgrade and a rollback do."""
        for key, manifest in target.items():
            live = merged(self.manifest.get(key), manifest, self.live.get(key))
            if key[0] == "Deployment":
                live["spec"].setdefault("replicas", 1)  # the server's default
            self.live[key] = live
        for key in self.manifest.keys() - target.keys():
            del self.live[key]
        self.manifest = target
        of_keda = {key: live for key, live in self.live.items() if not key[1].startswith("keda-hpa-")}
        for name in of_kind("ScaledObject", list(of_keda.values())):
            autoscaler = {"kind": "HorizontalPodAutoscaler", "metadata": {"name": f"keda-hpa-{name}"}}
            of_keda["HorizontalPodAutoscaler", f"keda-hpa-{name}"] = {"apiVersion": "autoscaling/v2", **autoscaler}
        self.live = of_keda

    def deployment(self, name: str) -> Object:
        return self.live["Deployment", name]


# the number of pods


def gateways(scaled: bool, count: int = 2) -> Values:
    return {"gateway": {"replicas": count, "autoscaling": {"enabled": scaled}}}


def workers(scaled: bool, count: int = 2) -> Values:
    group = {"machineProfile": "cpu", "replicas": count, "autoscaling": {"enabled": scaled}}
    return {"workers": {"groups": {"cpu": group}}}


SCALED = [("sie-gateway", gateways), ("sie-worker-cpu", workers)]


@pytest.mark.parametrize(("name", "values"), SCALED)
def test_an_autoscaler_takes_over_all_pods(name: str, values: Callable[..., Values]) -> None:
    """The last manifest has `replicas`. If the next one lacks it, the merge removes it and the server sets 1. So
    each manifest from then on has the live number, which the merge leaves as it is.
    """
    release = Release()
    release.upgrade(values(False, 4))
    release.upgrade(values(True))
    assert release.deployment(name)["spec"]["replicas"] == 4
    for scaled_to in (9, 0, 2):
        release.deployment(name)["spec"]["replicas"] = scaled_to
        release.upgrade({**values(True), "logs": {"json": scaled_to > 2}})
        assert release.deployment(name)["spec"]["replicas"] == scaled_to
    release.upgrade(values(False, 5))
    assert release.deployment(name)["spec"]["replicas"] == 5
    assert "annotations" not in release.manifest["Deployment", name]["metadata"]
    release.upgrade(values(True))
    assert release.deployment(name)["spec"]["replicas"] == 5


@pytest.mark.parametrize(("name", "values"), SCALED)
def test_a_deployment_that_always_had_an_autoscaler_has_no_replicas(name: str, values: Callable[..., Values]) -> None:
    """A rollback applies the manifest of an earlier time, so this must not have the number of that time."""
    release = Release()
    release.upgrade(values(True))
    release.deployment(name)["spec"]["replicas"] = 3
    release.upgrade({**values(True), "logs": {"json": False}})
    earlier = release.manifest
    release.deployment(name)["spec"]["replicas"] = 8
    release.upgrade(values(True))
    release.apply(earlier)
    assert "replicas" not in earlier["Deployment", name]["spec"]
    assert release.deployment(name)["spec"]["replicas"] == 8


# the volumes of the broker


OUTSIDE = {"nats": {"enabled": False, "url": "nats://b:4222"}}


@pytest.mark.parametrize(
    ("before", "after", "refusal"),
    [
        (
            {},
            {"fullnameOverride": "search"},
            r"fullnameOverride: the new name search .*; set sie\. .*StatefulSet sie-nats",
        ),
        ({"fullnameOverride": "search"}, {}, r"fullnameOverride: the new name sie .*; set search\."),
        ({}, OUTSIDE, r"nats\.enabled: .*sie backup.*StatefulSet sie-nats.*sie restore"),
        ({}, {**OUTSIDE, "fullnameOverride": "search"}, r"nats\.enabled: "),
        ({}, {"fullnameOverride": "sie"}, ""),
        (OUTSIDE, {**OUTSIDE, "fullnameOverride": "search"}, ""),
        (OUTSIDE, {}, ""),
    ],
)
def test_an_upgrade_that_leaves_the_broker_s_volumes_is_refused(before: Values, after: Values, refusal: str) -> None:
    """Otherwise helm deletes the StatefulSet, which the next manifest lacks. Its claims stay, and nobody reads them."""
    release = Release()
    release.upgrade(before)
    with pytest.raises(HelmError, match=refusal) if refusal else contextlib.nullcontext():
        release.upgrade(after)


# address families and DNS


@pytest.mark.parametrize("file", ["values-ha.yaml", "everything.yaml"])
def test_every_pod_and_service_is_reached_by_ipv6(file: str) -> None:
    """The merge adds the families to the Services, and the server gives them a second address. The pods are replaced,
    those of the broker too, and listen on it.
    """
    network = {"host": "::", "ipFamilyPolicy": "PreferDualStack", "ipFamilies": ["IPv6", "IPv4"]}
    before, after = (objects(template(file, {**CHOSEN, "network": own})) for own in ({}, network))
    assert not [service for service in of_kind("Service", before).values() if "ipFamilies" in service["spec"]]
    services = of_kind("Service", after).values()
    assert len(services) >= 6
    for service in services:
        assert {name: service["spec"].get(name) for name in ("ipFamilyPolicy", "ipFamilies")} == {
            name: network[name] for name in ("ipFamilyPolicy", "ipFamilies")
        }
    for text in (str(after), *of_kind("ConfigMap", after)["sie-nats"]["data"].values()):
        assert "0.0.0.0" not in text
    old = workloads(before)
    for name, workload in workloads(after).items():
        assert workload["spec"]["template"] != old[name]["spec"]["template"], name
        listening = [entry for entry in pod(workload)["containers"] if entry.get("ports")]
        hosts = [arg for entry in listening for arg in entry.get("args", ()) if arg.startswith("--host=")]
        assert hosts == (["--host=::"] if name != "sie-nats" else [])
    config = of_kind("ConfigMap", after)["sie-nats"]["data"]["nats.conf"]
    assert [port for port in (4222, 6222, 8222) if f'"[::]:{port}"' not in config] == []


async def test_a_process_that_listens_for_ipv6_takes_both_families() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, 200, b"here")

    server = HttpServer(answer, "::", 0, setting="--host")
    await server.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            for host in ("127.0.0.1", "[::1]"):
                assert (await client.get(f"http://{host}:{server.port}/")).text == "here"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    "network", [{"ipFamilies": ["IPv6"]}, {"ipFamilyPolicy": "PreferDualStack"}, {"ipFamilyPolicy": "RequireDualStack"}]
)
def test_a_service_by_ipv6_needs_pods_that_listen_on_it(network: Values) -> None:
    with pytest.raises(HelmError, match=r'network\.host: 0\.0\.0\.0 .*"::"'):
        template(values={**CHOSEN, "network": network})
    template(values={**CHOSEN, "network": {**network, "host": "::"}})
