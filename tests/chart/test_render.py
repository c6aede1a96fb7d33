"""The chart renders with every values file, its objects are valid for each supported Kubernetes, and wrong values are
refused with the reason.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import helm
import kubernetes_validate
import pytest
from helm import CHART, CHOSEN, FILES, HelmError, of_kind, rendered, template, workloads

KUBERNETES = (
    "1.28",  # the oldest that Chart.yaml admits
    *(pytest.param(version, marks=pytest.mark.long) for version in ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34")),
)
# Kubernetes does not know the objects of operators. test_scaling.py and test_monitoring.py check their fields.
OPERATORS = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}


@pytest.mark.parametrize("file", FILES)
def test_helm_lint_is_content(file: str) -> None:
    output = helm.helm("lint", "--strict", str(CHART), *helm.arguments(file), values=CHOSEN)
    assert "0 chart(s) failed" in output
    assert "[WARNING]" not in output


@functools.cache
def valid(text: str, version: str) -> str:
    """Validate an object as JSON, which is a key of the cache: most objects are the same in several values files. Raise
    kubernetes_validate.ValidationError if it is invalid.
    """
    return kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_core_object_is_valid(version: str) -> None:
    kinds = set()
    for file in FILES:
        for manifest in rendered(file):
            if manifest["apiVersion"] in OPERATORS:
                continue
            kinds.add(manifest["kind"])
            assert valid(json.dumps(manifest, sort_keys=True), version) == version
    assert kinds == {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "Ingress",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    }


@pytest.mark.parametrize("file", FILES)
def test_names_are_unique_and_labels_tell_releases_apart(file: str) -> None:
    keys = set()
    for manifest in rendered(file):
        key = (manifest["kind"], manifest["metadata"]["name"])
        assert key not in keys
        keys.add(key)
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "sie"
    for workload in workloads(rendered(file)).values():
        selected = workload["spec"]["selector"]["matchLabels"]
        assert selected["app.kubernetes.io/instance"] == "sie"
        assert selected.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    for service in of_kind("Service", rendered(file)).values():
        selected = service["spec"]["selector"]
        labels = [entry["spec"]["template"]["metadata"]["labels"] for entry in workloads(rendered(file)).values()]
        assert any(selected.items() <= label_set.items() for label_set in labels)


@pytest.mark.parametrize("release", ["12", "sie.v1"])
def test_a_release_with_a_name_that_services_may_not_have_needs_another_one(release: str) -> None:
    arguments = ("template", release, str(CHART), "--namespace", helm.NAMESPACE)
    with pytest.raises(HelmError, match="fullnameOverride: the name of the release"):
        helm.helm(*arguments, values=CHOSEN)
    assert "name: one-gateway\n" in helm.helm(*arguments, values={**CHOSEN, "fullnameOverride": "one"})


CPU = {"machineProfile": "cpu"}
SCALED = {"autoscaling": {"enabled": True}}


def groups(**own: Any) -> dict[str, Any]:
    return {**CHOSEN, "workers": {"groups": own}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "auth.mode: choose who may call"),
        ({"auth": {"secretName": "sie"}}, "auth.mode: choose who may call"),
        ({"auth": {"mode": "static"}}, "auth.secretName: name a secret"),
        ({"auth": {"mode": "Static", "secretName": "sie"}}, "auth.mode"),
        (
            {**CHOSEN, "stream": {"replicas": 3}},
            "stream.replicas: 3 copies need as many brokers, but nats.replicas is 1",
        ),
        ({**CHOSEN, "nats": {"enabled": False}}, "nats.url: name the servers of your broker"),
        ({**CHOSEN, "nats": {"enabled": False, "url": "nats://user:pass@broker"}}, "nats.url"),
        ({**CHOSEN, "workers": {"groups": {"odd": {}}}}, "machineProfile is required"),
        (
            {**CHOSEN, "workers": {"common": {"workerSidecar": {"batcher": {"coalesceMs": "5"}}}}},
            "coalesceMs: Invalid type",
        ),
        (
            {**CHOSEN, "workers": {"common": {"workerSidecar": {"batcher": {"maxBatchRequests": 0}}}}},
            "maxBatchRequests: Must be greater",
        ),
        (
            {**CHOSEN, "settings": {"SIE_ACK_WAIT": 3}},
            "settings.SIE_ACK_WAIT: no process reads it here, did you mean SIE_ACK_WAIT_S?",
        ),
        (
            {**CHOSEN, "settings": {"SIE_AUTH_TOKENS": "in-clear"}},
            "settings.SIE_AUTH_TOKENS: no process reads it here; `sie settings`",
        ),
        ({**CHOSEN, "gateway": {"replica": 3}}, "- gateway.replica: there is no such key, did you mean replicas?"),
        ({**CHOSEN, "gatway": {"replicas": 3}}, "- gatway: there is no such key, did you mean gateway?"),
        (
            {**CHOSEN, "auth": {**CHOSEN["auth"], "odd": 1}},
            "- auth.odd: there is no such key; there are: mode, secretName",
        ),
        (
            {**CHOSEN, "machineProfiles": {"l4": {"nodeselector": {}}}},
            "l4.nodeselector: there is no such key, did you mean nodeSelector?",
        ),
        (
            groups(l4={"machinProfile": "l4"}),
            "workers.groups.l4.machinProfile: there is no such key, did you mean machineProfile?",
        ),
        (
            groups(cpu={**CPU, "autoscaling": {"maxReplica": 3}}),
            "cpu.autoscaling.maxReplica: there is no such key, did you mean maxReplicas?",
        ),
        (groups(odd=None), "workers.groups.odd: null removes a group, but there is no group of this name"),
        ({**CHOSEN, "nats": {"maxUnavailable": 0}}, "nats.maxUnavailable: Must be greater than or equal to 1"),
        (
            groups(cpu={**CPU, "adapter": {"resources": {"limits": {"memory": "4GB"}}}}),
            "resources.limits.memory: Does not match pattern",
        ),
        ({**CHOSEN, "gateway": {"replicas": 0}}, "gateway.replicas: Must be greater than or equal to 1"),
        ({**CHOSEN, "config": {"replicas": -1}}, "config.replicas: Must be greater than or equal to 1"),
        ({**CHOSEN, "gateway": {"maxUnavailable": 0}}, "gateway.maxUnavailable: Must be greater than or equal to 1"),
        (
            {**CHOSEN, "gateway": {"autoscaling": {"minReplicas": 11}}},
            "gateway.autoscaling.minReplicas: 11 is more than maxReplicas, 10",
        ),
        (
            {**CHOSEN, "gateway": {"defaultMachineProfile": "h100"}},
            'defaultMachineProfile: no group of workers has "h100"; use one of cpu',
        ),
        (
            {**groups(cpu={**CPU, "bundle": "documents"}), "gateway": {"defaultMachineProfile": "cpu"}},
            'defaultMachineProfile: no group with the machine profile "cpu" has the bundle default',
        ),
        ({**CHOSEN, "settings": {"SIE_ACK_WAIT_S": -1}}, "settings.SIE_ACK_WAIT_S: Must be greater than or equal to 3"),
        (
            {**CHOSEN, "settings": {"SIE_POOL_WRITE_ROLE": "root"}},
            'SIE_POOL_WRITE_ROLE must be one of the following: "user", "admin"',
        ),
        (
            {**CHOSEN, "workers": {"common": {"settings": {"SIE_LOAD_HOLD_S": 30}}}},
            "SIE_LOAD_HOLD_S: Must be less than or equal to 29.999",
        ),
        ({**CHOSEN, "nats": {"replicas": 2}}, "nats.replicas must be one of the following: 1, 3, 5"),
        (
            {**CHOSEN, "nats": {"replicas": 3, "maxUnavailable": 2}},
            "nats.maxUnavailable: without 2 of 3 servers, the others are no majority",
        ),
        (
            {**CHOSEN, "nats": {"replicas": 3, "maxUnavailable": "34%"}},  # Kubernetes rounds up
            "nats.maxUnavailable: without 2 of 3 servers, the others are no majority",
        ),
        ({**CHOSEN, "nats": {"url": "nats://b:4222"}}, "nats.url: the chart also starts its own broker"),
        ({**CHOSEN, "nats": {"image": "localhost:5000/nats"}}, "nats.image: Does not match pattern"),
        ({**CHOSEN, "image": {"tag": "sha256:0"}}, "image.tag: Does not match pattern"),
        (
            {**CHOSEN, "nats": {"storage": {"size": "10Gi"}}},
            "nats.storage.maxFileStore: 18Gi would fill the volume, because nats.storage.size is 10Gi",
        ),
        (
            {**CHOSEN, "payloadStore": {"url": "s3://a", "existingClaim": "b"}},
            "payloadStore.existingClaim: url is set too",
        ),
        ({**CHOSEN, "catalogue": {"url": "s3://a", "configMap": "b"}}, "catalogue.configMap: url is set too"),
        (groups(cpu=None), "workers.groups: name at least one group"),
        (groups(gpu={"gpu": True}), "machineProfile is required"),
        (
            groups(gpu={"machineProfile": "a100"}),
            'machineProfile: "a100" is none of machineProfiles (a100-80gb, cpu, h100, l4, l4-spot)',
        ),
        (groups(gpu={"machineProfile": "l4", "device": "cpu"}), "workers.groups.gpu.device: cpu leaves the GPU idle"),
        (groups(cpu={**CPU, "device": "cuda"}), "workers.groups.cpu.device: cuda needs a GPU; set gpu: true"),
        (groups(cpu={**CPU, "hubTokenSecret": {"name": "hub"}}), "hubTokenSecret: Has a dependency on key"),
        (
            groups(cpu={**CPU, "autoscaling": {"enabled": True, "minReplicas": 5}}),
            "minReplicas: 5 is more than maxReplicas, 4",
        ),
        (
            groups(cpu={**CPU, **SCALED}, more={"machineProfile": "CPU", "gpu": False, **SCALED}),
            "workers.groups.more: the group cpu serves the same lane, _default.cpu.default",
        ),
        (
            groups(cpu=CPU, more=CPU, most={**CPU, **SCALED}),
            "workers.groups.most: the group more serves the same lane",
        ),
        (
            groups(cpu={**CPU, **SCALED}, more=CPU, most=CPU),
            "for spot nodes cpu-spot, which requests for cpu match too",
        ),
        (
            {**groups(**{"a" * 32: {**CPU, "autoscaling": {"enabled": True}}}), "fullnameOverride": "b" * 32},
            "shorten the name of the group",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said(values: dict[str, Any], message: str) -> None:
    """No object is rendered, and the error names the value and the fault."""
    with pytest.raises(HelmError) as raised:
        template(values=values)
    error_text = str(raised.value)
    assert message.casefold() in error_text.casefold()
    assert "anyOf" not in error_text
    assert "at <" not in error_text, "a template broke on it before it was checked"


@pytest.mark.parametrize("file", FILES)
def test_no_number_of_replicas_under_autoscaling(file: str) -> None:
    manifests = rendered(file)
    scalers = of_kind("HorizontalPodAutoscaler", manifests) | of_kind("ScaledObject", manifests)
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers.values()}
    for name, workload in workloads(manifests).items():
        assert ("replicas" in workload["spec"]) == (name not in scaled), name
    if file in ("values-gke.yaml", "values-eks.yaml", "values-aks.yaml"):
        assert scaled == {name for name in workloads(manifests) if name not in ("sie-config", "sie-nats")}
