"""The real helm on the chart: the output of a values file as text and as objects. A process renders each file once."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "charts" / "sie-cluster"
RELEASE, NAMESPACE, SECRET = "sie", "search", "sie-tokens"
FILES = (
    "values.yaml",
    "values-gke.yaml",
    "values-eks.yaml",
    "values-aks.yaml",
    "values-kind.yaml",
    "values-gpu.yaml",
    "values-ha.yaml",
    "everything.yaml",
)
# Values that enable every part and fill every list and map, so that each key has an effect.
EVERYTHING = Path(__file__).parent / "chart" / "everything.yaml"
CHOSEN = {"auth": {"mode": "static", "secretName": SECRET}}
# What templates look up, by group and version: the name in paths of each kind.
LOOKED_UP = {
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
}

Object = dict[str, Any]


class HelmError(Exception):
    """Error of helm, with its message."""


def helm(*args: str, values: Mapping[str, Any] | None = None) -> str:
    """Run helm and return its standard output. `values` override all files. Raise HelmError if it fails."""
    command = [str(Path(sys.executable).with_name("helm")), *args]
    if values is not None:
        command += ["--values", "-"]
    done = subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise HelmError(done.stdout + done.stderr)
    return done.stdout


def arguments(file: str) -> list[str]:
    """Return the arguments for a values file; the default one needs none."""
    if file == "values.yaml":
        return []
    return ["--values", str(EVERYTHING if file == "everything.yaml" else CHART / file)]


def template(file: str = "values.yaml", values: Mapping[str, Any] | None = None, *args: str) -> str:
    """Return the output of `helm template`. Raise HelmError if it fails."""
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments(file), *args, values=values)


@contextlib.contextmanager
def api_server(live: Iterable[Object]) -> Iterator[str]:
    """Yield the URL of an API server that has the objects `live`, as far as templates look them up."""
    answers: dict[str, Object] = {}
    for version, kinds in LOOKED_UP.items():
        resources = [
            {"name": name, "kind": kind, "namespaced": True, "verbs": ["get", "list"]} for kind, name in kinds.items()
        ]
        answers[f"/apis/{version}"] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        for kind, name in kinds.items():
            path = f"/apis/{version}/namespaces/{NAMESPACE}/{name}"
            items = [manifest for manifest in live if manifest["kind"] == kind]
            answers[path] = {"kind": f"{kind}List", "apiVersion": version, "items": items}
            answers |= {f"{path}/{manifest['metadata']['name']}": manifest for manifest in items}
    absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or absent).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def upgraded(live: Iterable[Object], values: Mapping[str, Any], file: str = "values.yaml") -> list[Object]:
    """Return the objects that `helm upgrade` renders on a cluster that has the objects `live`. Raise HelmError if it
    fails.
    """
    with api_server(list(live)) as url:
        online = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
        return objects(template(file, values, *online))


def objects(text: str) -> list[Object]:
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


@functools.cache
def rendered(file: str) -> tuple[Object, ...]:
    """Return the objects of a values file. `auth` is set if the file does not set it."""
    chosen = file in ("values.yaml", "everything.yaml")
    return tuple(objects(template(file, CHOSEN if chosen else None)))


def of_kind(kind: str, manifests: tuple[Object, ...] | list[Object]) -> dict[str, Object]:
    """Return the objects of a kind by name."""
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def workloads(manifests: tuple[Object, ...] | list[Object]) -> dict[str, Object]:
    """Return the Deployments and StatefulSets by name."""
    return of_kind("Deployment", manifests) | of_kind("StatefulSet", manifests)


def pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def containers(manifests: tuple[Object, ...] | list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Yield the name of the workload, the pod's spec and the container, for init containers too."""
    for name, workload in workloads(manifests).items():
        spec = pod(workload)
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            yield name, spec, container


def variables(container: Object) -> dict[str, Any]:
    """Return the environment of a container: the text of each variable, or its source."""
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container.get("env", ())}


def container(manifests: tuple[Object, ...] | list[Object], workload: str, name: str) -> Object:
    return next(spec for owner, _, spec in containers(manifests) if (owner, spec["name"]) == (workload, name))


def matches(peer: Object, labels: dict[str, str]) -> bool:
    """Return whether a peer of a policy selects a pod of this namespace."""
    return peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items()


def allowed(manifests: tuple[Object, ...] | list[Object], source: str, target: str, port: int) -> bool:
    """Return True if a policy of the source allows the egress and a policy of the target the ingress."""
    labels = {
        name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(manifests).items()
    }

    def passes(own: str, remote: str, direction: str, key: str) -> bool:
        policies = [
            manifest["spec"]
            for manifest in of_kind("NetworkPolicy", manifests).values()
            if matches(manifest["spec"], labels[own])
        ]
        assert any(direction.capitalize() in policy["policyTypes"] for policy in policies), f"{own} is open"
        return any(
            any(port_rule["port"] == port for port_rule in rule.get("ports", ()))
            and (key not in rule or any(matches(peer, labels[remote]) for peer in rule[key]))
            for policy in policies
            for rule in policy.get(direction, ())
        )

    return passes(source, target, "egress", "to") and passes(target, source, "ingress", "from")
