"""The chart renders with every values file, its objects are valid for each supported Kubernetes, and wrong values are
refused with the reason.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm
import kubernetes_validate
import pytest
import yaml
from helm import CHART, CHOSEN, FILES, HelmError, containers, of_kind, rendered, template, workloads

from sie_contracts.settings import load

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


def test_the_validation_refuses_a_field_that_does_not_exist() -> None:
    """The validation of the test above can fail."""
    manifest = json.loads(json.dumps(of_kind("Deployment", rendered("values-kind.yaml"))["sie-gateway"]))
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.34", strict=True)


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


@pytest.mark.parametrize(
    "image",
    [
        "mirror.example.com:5000/my_images/nats:2.12",
        f"nats@sha256:{'0' * 64}",
        f"mirror:5000/nats:2.12@sha256:{'0' * 64}",
    ],
)
def test_the_broker_comes_from_any_registry(image: str) -> None:
    manifests = helm.objects(template(values={**CHOSEN, "nats": {"image": image}}))
    assert helm.container(manifests, "sie-nats", "nats")["image"] == image


def test_a_part_of_a_processor_may_be_a_number() -> None:
    manifests = helm.objects(template(values={**CHOSEN, "gateway": {"resources": {"requests": {"cpu": 0.5}}}}))
    assert helm.container(manifests, "sie-gateway", "gateway")["resources"]["requests"]["cpu"] == 0.5


@pytest.mark.parametrize("release", ["12", "sie.v1"])
def test_a_release_with_a_name_that_services_may_not_have_needs_another_one(release: str) -> None:
    arguments = ("template", release, str(CHART), "--namespace", helm.NAMESPACE)
    with pytest.raises(HelmError, match="fullnameOverride: the name of the release"):
        helm.helm(*arguments, values=CHOSEN)
    assert "name: one-gateway\n" in helm.helm(*arguments, values={**CHOSEN, "fullnameOverride": "one"})


def test_hooks_are_not_used() -> None:
    assert all("helm.sh/hook" not in json.dumps(manifest) for file in FILES for manifest in rendered(file))


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


def test_a_setting_that_nobody_reads_is_refused_also_without_the_schema() -> None:
    with pytest.raises(HelmError, match=r"settings\.SIE_ODD: no process reads it here"):
        template("values.yaml", {**CHOSEN, "settings": {"SIE_ODD": 1}}, "--skip-schema-validation")


def test_gpu_nodes_need_neither_ingress_nor_keda_nor_prometheus() -> None:
    manifests = rendered("values-gpu.yaml")
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds.isdisjoint({"Ingress", "ScaledObject", "ServiceMonitor", "PodMonitor", "PrometheusRule"})
    (worker,) = (workload for name, workload in workloads(manifests).items() if "worker" in name)
    pod = worker["spec"]["template"]["spec"]
    assert "nvidia.com/gpu.product" in pod["nodeSelector"]
    assert any(container_spec["resources"]["limits"].get("nvidia.com/gpu") == 1 for container_spec in pod["containers"])
    assert all(
        container_spec["image"].startswith("registry.example.com/sie/sie-") for container_spec in pod["containers"]
    )


@pytest.mark.parametrize("file", FILES)
def test_no_number_of_replicas_under_autoscaling(file: str) -> None:
    manifests = rendered(file)
    scalers = of_kind("HorizontalPodAutoscaler", manifests) | of_kind("ScaledObject", manifests)
    scaled = {scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers.values()}
    for name, workload in workloads(manifests).items():
        assert ("replicas" in workload["spec"]) == (name not in scaled), name
    if file in ("values-gke.yaml", "values-eks.yaml", "values-aks.yaml"):
        assert scaled == {name for name in workloads(manifests) if name not in ("sie-config", "sie-nats")}


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with its notes in a ConfigMap, because `helm template` omits notes and `helm install` needs a
    cluster.
    """
    chart = Path(shutil.copytree(CHART, tmp_path_factory.mktemp("noted") / "chart"))
    notes = chart / "templates" / "NOTES.txt"
    head = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata:\n  notes: |\n"
    text = f'{{{{ define "notes" }}}}{notes.read_text()}{{{{ end }}}}{head}{{{{ include "notes" . | indent 4 }}}}\n'
    (chart / "templates" / "notes.yaml").write_text(text)
    notes.unlink()
    return chart


@pytest.mark.parametrize(
    ("file", "mode", "expected"),
    [
        (
            "values-kind.yaml",
            "none",
            (
                "kubectl -n search rollout status deployment/sie-gateway",
                "kubectl -n search port-forward service/sie-gateway 8080:8080",
                """all-MiniLM-L6-v2 \\\n          -d '{"items":""",
                "_default.cpu.default: 1\n",
            ),
        ),
        ("values-kind.yaml", "static", ('-H "Authorization: Bearer $TOKEN"', "key auth-tokens of the secret tokens")),
        (
            "values-gke.yaml",
            "token",
            (
                "Connect: http://sie.example.com\n",
                "curl -s http://sie.example.com/v1/encode/",
                "port-forward service/sie-nats 4222:4222",
                "TOKEN=$(SIE_NATS_PASSWORD=PASSWORD sie keys create first --nats-url nats://operator@127.0.0.1:4222)\n",
                "_default.l4.default: 0 to 4 by KEDA",
            ),
        ),
    ],
)
def test_the_notes_tell_the_next_command(noted: Path, file: str, mode: str, expected: tuple[str, ...]) -> None:
    values = {"auth": {"mode": mode, "secretName": "tokens"}}
    text = helm.helm(
        "template",
        "sie",
        str(noted),
        "--namespace",
        "search",
        "--show-only",
        "templates/notes.yaml",
        *helm.arguments(file),
        values=values,
    )
    notes = helm.objects(text)[0]["data"]["notes"]
    for part in expected:
        assert part in notes
    assert ("Bearer" in notes) == (mode != "none")


def test_the_notes_know_a_prefix_and_a_broker_of_yours(noted: Path) -> None:
    values = {
        "auth": {"mode": "token", "secretName": "tokens"},
        "nats": {"enabled": False, "url": "tls://one:4222"},
        "ingress": {"enabled": True, "host": "*.a.example", "path": "/sie", "tlsSecretName": "tls"},
    }
    notes = helm.objects(
        helm.helm("template", "sie", str(noted), "--show-only", "templates/notes.yaml", values=values)
    )[0]["data"]["notes"]
    assert "curl -s https://sie.a.example/sie/v1/encode/" in notes
    assert "--nats-url tls://operator@one:4222)\n" in notes
    assert "port-forward" not in notes


PAGE = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()


def test_the_page_names_the_keys_of_the_secret() -> None:
    references = re.findall(r'"secretKeyRef": (\{[^}]*\})', json.dumps(rendered("values-ha.yaml")))
    keys = {reference["key"] for reference in map(json.loads, references) if reference["name"] == "sie"}
    table = PAGE.partition("| key of the secret |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([a-z-]+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:]))) == keys


def test_the_page_s_groups_render_as_it_says() -> None:
    block = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]  # the others are about placement and spot nodes
    manifests = helm.objects(template(values={**CHOSEN, **yaml.safe_load(block)}))
    assert of_kind("ScaledObject", manifests)["sie-worker-l4"]["spec"]["maxReplicaCount"] == 8
    environ = helm.variables(helm.container(manifests, "sie-worker-reranking", "worker-sidecar"))
    assert environ["SIE_BATCHER_MAX_BATCH_REQUESTS"] == "24"


def test_the_page_s_commands_name_files_that_exist() -> None:
    root = CHART.parents[1]
    for path in re.findall(r"(?:charts|docker|tests)/[A-Za-z0-9_./-]+\.[A-Za-z]+", PAGE):
        assert (root / path).is_file(), path
    images = re.search(r"for image in ([a-z -]+);", PAGE)
    assert images is not None
    for image in images[1].split():
        planned = subprocess.run(["make", "-n", f"image-{image}"], cwd=root, capture_output=True, text=True, timeout=30)
        dockerfile = re.search(r"-f (\S+)", planned.stdout)
        assert dockerfile is not None, planned.stderr
        assert f"AS {image}\n" in (root / dockerfile[1]).read_text() or dockerfile[1].endswith(f"/{image}.Dockerfile")


def test_settings_reach_the_process_that_reads_them() -> None:
    """The sidecar reads SIE_IMAGE_WORKERS and the gateway SIE_CORS_ORIGINS, with the values that were written."""
    chosen = {"SIE_IMAGE_WORKERS": 7, "SIE_CORS_ORIGINS": "https://a.example.com,https://b.example.com"}
    manifests = [
        manifest for manifest in yaml.safe_load_all(template("values.yaml", {**CHOSEN, "settings": chosen})) if manifest
    ]
    readers: dict[str, set[str]] = {name: set() for name in chosen}
    for _, _, container_spec in containers(manifests):
        environ = {
            variable["name"]: variable["value"] for variable in container_spec.get("env", ()) if "value" in variable
        }
        for name in readers.keys() & environ.keys():
            readers[name].add(container_spec["name"])
            settings = load(environ={name: environ[name]}).settings
            expected = {"SIE_IMAGE_WORKERS": 7, "SIE_CORS_ORIGINS": ("https://a.example.com", "https://b.example.com")}[
                name
            ]
            assert {"SIE_IMAGE_WORKERS": settings.image_workers, "SIE_CORS_ORIGINS": settings.cors_origins}[
                name
            ] == expected
    assert readers == {"SIE_IMAGE_WORKERS": {"worker-sidecar"}, "SIE_CORS_ORIGINS": {"gateway"}}
