"""Properties of pods that operators rely on: probes, resources, restricted security, time to end, arguments of the
commands, secrets by reference only.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helm import (
    CHOSEN,
    FILES,
    SECRET,
    container,
    containers,
    objects,
    of_kind,
    pod,
    rendered,
    template,
    variables,
    workloads,
)

from sie_adapter.process import DRAIN_S as ADAPTER_DRAIN_S
from sie_cli.serve.environment import HUB
from sie_contracts.settings import BY_NAME, Secret, load
from sie_gateway.process import longest_drain_s
from sie_sidecar.process import DRAIN_S as SIDECAR_DRAIN_S

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture(params=FILES)
def manifests(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ...]:
    return rendered(request.param)


def test_every_container_has_probes_and_resources(manifests: tuple[dict[str, Any], ...]) -> None:
    """Gateway, config service, sidecar and mcp are probed at /healthz, and at /readyz for readiness."""
    for name, spec, entry in containers(manifests):
        resources = entry["resources"]
        assert resources["requests"].keys() >= {"cpu", "memory"}, name
        assert "memory" in resources["limits"], name
        if entry in spec.get("initContainers", ()):
            continue
        for probe in PROBES:
            assert probe in entry, (name, entry["name"], probe)
        ports = {port["name"] for port in entry.get("ports", ())}
        for probe in PROBES:
            if "httpGet" in entry[probe]:
                assert entry[probe]["httpGet"]["port"] in ports
        if entry["name"] in ("gateway", "config", "worker-sidecar", "mcp"):
            assert [entry[probe]["httpGet"]["path"] for probe in PROBES] == ["/healthz", "/healthz", "/readyz"]


def test_pods_keep_to_the_restricted_standard(manifests: tuple[dict[str, Any], ...]) -> None:
    allowed = {"configMap", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    for name, spec, entry in containers(manifests):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert entry["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= allowed
        writable = [mount["mountPath"] for mount in entry["volumeMounts"] if not mount.get("readOnly")]
        assert "/tmp" in writable or entry["name"] == "socket-folder"


def test_pods_end_later_than_the_longest_request(manifests: tuple[dict[str, Any], ...]) -> None:
    """The grace period covers the longest request and the time in which gateways and the config service still serve,
    until load balancers know that they end. The processes wait themselves: during a `sleep` before SIGTERM they would
    not tell clients to close their connections.
    """
    gateway = container(manifests, "sie-gateway", "gateway")
    settings = {"SIE_GATEWAY_REQUEST_TIMEOUT": variables(gateway)["SIE_GATEWAY_REQUEST_TIMEOUT"]}
    longest_s = longest_drain_s(load(environ=settings).settings)
    assert "--drain-s" not in " ".join(gateway["args"])
    assert longest_s > float(settings["SIE_GATEWAY_REQUEST_TIMEOUT"])
    for name in ("gateway", "config"):
        entry = container(manifests, f"sie-{name}", name)
        (waits_s,) = (float(arg.partition("=")[2]) for arg in entry["args"] if arg.startswith("--lame-duck-s="))
        assert waits_s > 0
        assert "lifecycle" not in entry
    for name, workload in workloads(manifests).items():
        if name == "sie-nats":
            lame_s = float(
                re.search(
                    r'lame_duck_duration: "(\d+)s"', of_kind("ConfigMap", manifests)["sie-nats"]["data"]["nats.conf"]
                )[1]
            )  # type: ignore[index]
            assert pod(workload)["terminationGracePeriodSeconds"] > lame_s
        else:
            assert pod(workload)["terminationGracePeriodSeconds"] > longest_s + waits_s


def test_the_adapter_ends_after_its_sidecar_has_drained(manifests: tuple[dict[str, Any], ...]) -> None:
    """Kubernetes ends all containers of a pod at the same time, but batches need the adapter until the sidecar ends."""
    for name, workload in workloads(manifests).items():
        if name.startswith("sie-worker"):
            sidecar, adapter = (container(manifests, name, role) for role in ("worker-sidecar", "adapter"))
            assert "lifecycle" not in sidecar
            waits_s = float(adapter["lifecycle"]["preStop"]["exec"]["command"][1])
            assert SIDECAR_DRAIN_S < waits_s < pod(workload)["terminationGracePeriodSeconds"] - ADAPTER_DRAIN_S


def test_one_account_for_each_component_that_may_do_nothing(manifests: tuple[dict[str, Any], ...]) -> None:
    accounts = of_kind("ServiceAccount", manifests)
    for name, workload in workloads(manifests).items():
        account = pod(workload)["serviceAccountName"]
        assert account == ("sie-worker" if name.startswith("sie-worker") else name)
        assert accounts[account]["automountServiceAccountToken"] is False
    mounted = [name for name, workload in workloads(manifests).items() if pod(workload)["automountServiceAccountToken"]]
    rules = [rule for role in of_kind("Role", manifests).values() for rule in role["rules"]]
    if mounted:
        assert mounted == ["sie-gateway"]
        assert rules == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]
        assert of_kind("RoleBinding", manifests)["sie-gateway"]["subjects"][0]["name"] == "sie-gateway"
    else:
        assert not rules
    assert not of_kind("ClusterRole", manifests)


def test_the_socket_is_in_a_folder_of_this_user_alone(manifests: tuple[dict[str, Any], ...]) -> None:
    """The folder has mode 0700 and the same path in both containers, on a volume that outlives each of them."""
    for name, workload in workloads(manifests).items():
        if not name.startswith("sie-worker"):
            continue
        spec = pod(workload)
        assert [entry["name"] for entry in spec["containers"]] == ["worker-sidecar", "adapter"]
        folder = spec["initContainers"][0]
        path = {variables(entry)["SIE_IPC_SOCKET_PATH"] for entry in spec["containers"]}
        assert path == {"/run/sie/worker/ipc.sock"}
        BY_NAME["SIE_IPC_SOCKET_PATH"].read(path.pop())
        assert folder["command"] == ["mkdir", "-p", "-m", "0700", "/run/sie/worker"]
        for place in [folder, *spec["containers"]]:
            assert {"name": "socket", "mountPath": "/run/sie"} in place["volumeMounts"]
        assert "emptyDir" in next(volume for volume in spec["volumes"] if volume["name"] == "socket")


@pytest.mark.parametrize(
    ("group", "device"),
    [
        ({"machineProfile": "l4"}, "cuda"),
        ({"machineProfile": "mine", "gpu": True}, "cuda"),  # auto would serve on the CPU of a node without a driver
        ({"machineProfile": "mine", "gpu": True, "device": "cuda:0"}, "cuda:0"),
        ({"machineProfile": "l4", "gpuCount": 2}, "cuda:0,cuda:1"),  # a start fails if one of them is missing
        ({"machineProfile": "mine", "gpu": False, "gpuCount": 2}, "auto"),
        ({"machineProfile": "mine", "gpu": False}, "auto"),
    ],
)
def test_a_gpu_worker_asks_for_its_card_and_for_nothing_else_of_the_driver(group: dict[str, Any], device: str) -> None:
    group = {"adapter": {"sharedMemory": "3Gi"}, **group}
    manifestsrendered = objects(template(values={**CHOSEN, "workers": {"groups": {"cpu": None, "g": group}}}))
    spec = pod(workloads(manifestsrendered)["sie-worker-g"])
    folder, (sidecar, adapter) = spec["initContainers"][0], spec["containers"]
    assert variables(adapter)["SIE_DEVICE"] == device
    on_gpu = device.startswith("cuda")
    assert variables(adapter).get("NVIDIA_DRIVER_CAPABILITIES") == ("compute,utility" if on_gpu else None)
    cards = group.get("gpuCount", 1) if on_gpu else 0
    assert variables(sidecar)["SIE_GPU_COUNT"] == str(cards)
    assert adapter["resources"]["limits"].get("nvidia.com/gpu", 0) == cards
    # this variable would override the card that the device plugin gave to the container
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(adapter)
    assert variables(folder) == ({"NVIDIA_VISIBLE_DEVICES": "void"} if on_gpu else {})
    assert not [name for name in variables(sidecar) if name.startswith("NVIDIA_")]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in spec["volumes"]


def test_secrets_are_named_and_never_written(manifests: tuple[dict[str, Any], ...]) -> None:
    """No worker holds the admin token."""
    assert not of_kind("Secret", manifests)
    named = SECRET if any(SECRET in json.dumps(manifest) for manifest in manifests) else "sie"
    for workload, _, entry in containers(manifests):
        for name, value in variables(entry).items():
            row = BY_NAME.get(name)
            if (row is not None and row.secret) or name == "HF_TOKEN":
                assert value["secretKeyRef"]["name"] in (named, "hub"), (workload, name)
        if entry["name"] in ("worker-sidecar", "adapter"):
            assert "SIE_ADMIN_TOKEN" not in variables(entry)
        if entry["name"] != "adapter":
            assert not HUB & variables(entry).keys(), workload
        if entry["name"] == "adapter":
            assert not {"SIE_CONFIG_READ_TOKEN", "SIE_NATS_URL", "SIE_NATS_PASSWORD"} & variables(entry).keys()


@pytest.mark.parametrize(("mode", "expected"), [("none", None), ("static", False), ("token", True)])
def test_tokens_are_there_where_the_mode_wants_them(mode: str, expected: bool | None) -> None:
    """In mode static a pod does not start if the secret lacks the key. In mode token static tokens are optional."""
    manifestsrendered = objects(template(values={"auth": {"mode": mode, "secretName": "mine"}}))
    environ = variables(container(manifestsrendered, "sie-gateway", "gateway"))
    assert environ["SIE_AUTH_MODE"] == mode
    tokens = environ.get("SIE_AUTH_TOKENS")
    assert tokens == (
        None if expected is None else {"secretKeyRef": {"name": "mine", "key": "auth-tokens", "optional": expected}}
    )


def test_an_external_broker_gets_each_components_user_for_all_of_its_servers() -> None:
    from sie_broker.nats.transport import split

    values = {**CHOSEN, "nats": {"enabled": False, "url": "tls://one:4222,tls://two:4223"}, "stream": {"replicas": 3}}
    manifestsrendered = objects(template(values=values))
    assert not of_kind("StatefulSet", manifestsrendered)
    assert "--nats-monitor-url" not in str(container(manifestsrendered, "sie-gateway", "gateway")["args"])
    for workload, name, user in (("sie-gateway", "gateway", "gateway"), ("sie-worker-cpu", "worker-sidecar", "worker")):
        url = BY_NAME["SIE_NATS_URL"].read(variables(container(manifestsrendered, workload, name))["SIE_NATS_URL"])
        assert split(url, Secret("pw")) == (["tls://one:4222", "tls://two:4223"], {"user": user, "password": "pw"})


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, {"emptyDir": {"sizeLimit": "50Gi"}}),
        (
            {"size": "9Gi", "storageClass": "fast"},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "storageClassName": "fast",
                            "resources": {"requests": {"storage": "9Gi"}},
                        }
                    }
                }
            },
        ),
        ({"existingClaim": "shared", "storageClass": "fast"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
    ],
)
def test_weights_are_on_a_volume_of_a_known_size(cache: dict[str, str], expected: dict[str, Any]) -> None:
    manifestsrendered = objects(template(values={**CHOSEN, "workers": {"common": {"cache": cache}}}))
    volume = next(
        entry for entry in pod(workloads(manifestsrendered)["sie-worker-cpu"])["volumes"] if entry["name"] == "cache"
    )
    assert volume == {"name": "cache", **expected}
    adapter = container(manifestsrendered, "sie-worker-cpu", "adapter")
    limit = str(50 << 30) if "emptyDir" in expected else None  # the file system of a claim has the size of the claim
    assert variables(adapter).get("SIE_DISK_CACHE_BYTES") == limit
    for name, is_reader in (("adapter", False), ("worker-sidecar", True)):
        part = container(manifestsrendered, "sie-worker-cpu", name)
        (mount,) = (mount for mount in part["volumeMounts"] if mount["name"] == "cache")
        assert (variables(part)["SIE_LOCAL_CACHE"], mount.get("readOnly", False)) == (mount["mountPath"], is_reader)
