"""A node that runs all pods of a rendered chart, and the controllers that keep their numbers and replace them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import psutil
from cluster import until
from helm import NAMESPACE, Object, of_kind, workloads

from kubelet import engine, network
from kubelet.containers import Container
from kubelet.network import Endpoint, Member, Network
from kubelet.pods import Pod

READY_S = 600.0
_PREFIX = "sietest-"
_LABEL = "sie.tests.node"
_NODES = itertools.count()


class Node:
    """A node. Create it with `started`, and `apply` rendered manifests to it.

    replicas: numbers of pods by workload, in place of the rendered ones.
    secrets: values by name and key.
    files: files of ConfigMaps that the chart does not render.
    shares: folders of PersistentVolumeClaims that the chart does not render.
    disks: sizes in bytes of disks by (workload, volume), for volumes with a disk of their own.
    processes: podPidsLimit of the kubelet.
    namespace: the namespace of the release.
    """

    def __init__(
        self,
        folder: Path,
        *,
        secrets: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        replicas: Mapping[str, int] | None = None,
        files: Mapping[str, Mapping[str, str]] | None = None,
        shares: Mapping[str, Path] | None = None,
        disks: Mapping[tuple[str, str], int] | None = None,
        processes: int | None = None,
        namespace: str = NAMESPACE,
    ) -> None:
        self.folder = folder
        self.namespace = namespace
        self.secrets = dict(secrets)
        self.replicas = dict(replicas or {})
        self.files = files or {}
        self.shares = shares or {}
        self.disks = disks or {}
        self.processes = processes
        name = f"{os.getpid()}-{next(_NODES)}"  # a process of tests may have several at once
        self.prefix = f"{_PREFIX}{name}-"
        self.label = f"{_LABEL}={name}"
        self.network = Network(self.prefix)
        self.manifests: list[Object] = []
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self.others: list[Member] = []  # pods of other releases, which are only network namespaces
        self._clusters: dict[str, str] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    @classmethod
    @contextlib.contextmanager
    def started(cls, **options: object) -> Iterator[Node]:
        """Start a node without pods, and remove it after the block."""
        sweep()
        with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
            node = cls(Path(folder), **options)  # type: ignore[arg-type]
            Path(folder).chmod(0o755)
            with node.network.joined():
                try:
                    yield node
                except BaseException:
                    print(node.story())
                    raise
                finally:
                    node.clear()

    # --- what is rendered ---

    def apply(self, manifests: Sequence[Object], *, wait: bool = True) -> None:
        """Apply manifests as `kubectl apply` and the controllers do: start all missing pods at once, and replace pods
        of another template as their workload says. Without `wait`, do not wait until new pods are ready.
        """
        stale = {name for name in workloads(list(manifests)) if self.of(name)}
        with self._lock:
            self.manifests = list(manifests)
            for name in of_kind("Service", self.manifests):
                self._clusters.setdefault(name, f"{network.SERVICES}.1.{len(self._clusters) + 1}")
        new = [
            self._new(name, number)
            for name in workloads(self.manifests)
            if name not in stale
            for number in range(self.wanted(name))
        ]
        self.start(new, wait=wait)
        for name in sorted(stale):
            self.roll(name)

    def wanted(self, name: str) -> int:
        """Return the number of pods of a workload."""
        if name in self.replicas:
            return self.replicas[name]
        for kind, key in (("HorizontalPodAutoscaler", "minReplicas"), ("ScaledObject", "minReplicaCount")):
            for scaler in of_kind(kind, self.manifests).values():
                if scaler["spec"]["scaleTargetRef"]["name"] == name:
                    return int(scaler["spec"][key])
        return int(workloads(self.manifests)[name]["spec"].get("replicas", 1))

    def start(self, pods: Sequence[Pod], *, wait: bool = True) -> None:
        """Start pods at once, and wait until they are ready."""
        self.readiness_changed()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Pod.start, pods))
        for pod in pods if wait else ():
            self.wait_ready(pod)

    def wait_ready(self, pod: Pod, timeout_s: float = READY_S) -> None:
        def ready() -> bool:
            for container in pod.containers:
                container.check()
            return pod.ready

        until(ready, timeout_s, f"{pod.name} is ready", lambda: story([pod]))

    def roll(self, name: str) -> None:
        """Replace the pods whose template is not the rendered one."""
        workload = workloads(self.manifests)[name]
        old = [candidate for candidate in self.of(name) if candidate.template != workload["spec"]["template"]]
        if workload["kind"] == "StatefulSet":
            for pod in reversed(old):
                self.end(pod)
                self.start([self._new(name, int(pod.name.rpartition("-")[2]))])
            return
        strategy = workload["spec"]["strategy"]["rollingUpdate"]
        assert (strategy["maxUnavailable"], strategy["maxSurge"]) in ((0, 1), (1, 0)), strategy
        for pod in old:
            steps = [lambda pod=pod: self.end(pod), lambda: self.start([self._new(name, next(self._numbers))])]
            for step in steps if strategy["maxUnavailable"] else reversed(steps):
                step()

    def end(self, pod: Pod) -> None:
        pod.end()
        with self._lock:
            self.pods.remove(pod)
            self.ended.append(pod)
        self.readiness_changed()

    def _new(self, name: str, number: int) -> Pod:
        workload = workloads(self.manifests)[name]
        template = workload["spec"]["template"]
        if workload["kind"] == "StatefulSet":
            own = f"{name}-{number}"
            claims = workload["spec"].get("volumeClaimTemplates", ())
            folders = {
                claim["metadata"]["name"]: self.folder / "claims" / f"{claim['metadata']['name']}-{own}"
                for claim in claims
            }
            shutil.rmtree(self.folder / own, ignore_errors=True)
        else:
            digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:6]
            own, folders = f"{name}-{digest}-{next(self._numbers)}", {}
        pod = Pod(self, own, name, template, folders)
        with self._lock:
            self.pods.append(pod)
        return pod

    # --- finding things ---

    def of(self, workload: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.workload == workload]

    @property
    def containers(self) -> list[Container]:
        return [container for pod in self.pods for container in pod.containers]

    def behind(self, service: str) -> list[Pod]:
        """Return the pods that match the selector of a service, ready or not."""
        selector = of_kind("Service", self.manifests)[service]["spec"]["selector"]
        return [pod for pod in self.pods if selector.items() <= pod.labels.items()]

    def url(self, service: str, port: int) -> str:
        assert port in {
            service_port["port"] for service_port in of_kind("Service", self.manifests)[service]["spec"]["ports"]
        }
        return f"http://{self._clusters[service]}:{port}"

    def address(self, service: str, port: int) -> tuple[str, int]:
        """Return the address of a service, or of a ready pod if the service is headless."""
        spec = of_kind("Service", self.manifests)[service]["spec"]
        if spec.get("clusterIP") != "None":
            return self._clusters[service], port
        target = next(service_port["targetPort"] for service_port in spec["ports"] if service_port["port"] == port)
        pod = next(candidate for candidate in self.behind(service) if candidate.ready)
        return pod.address, _ports(pod, target)[0]

    def outsider(self, namespace: str, labels: Mapping[str, str]) -> tuple[str, Member]:
        """Create a pod outside the chart, which is only a network. Return the name of its network, and its member."""
        name, address = self.network.join()
        member = Member(address, namespace, labels)
        with self._lock:
            self.others.append(member)
        self.readiness_changed()
        return name, member

    # --- what changes with the pods ---

    def readiness_changed(self) -> None:
        """Update services, policies and host names to the present pods."""
        with self._lock:
            self.network.lead(list(self._endpoints()))
            members = [Member(live_pod.address, self.namespace, live_pod.labels) for live_pod in self.pods]
            self.network.obey(self.manifests, [*members, *self.others], self.namespace)
            lines = list(self._names())
            for pod in self.pods:
                pod.write_hosts(lines)

    def _endpoints(self) -> Iterator[Endpoint]:
        for name, service in of_kind("Service", self.manifests).items():
            if service["spec"].get("clusterIP") == "None":
                continue
            for port in service["spec"]["ports"]:
                targets = [
                    (pod.address, target)
                    for pod in self.behind(name)
                    if pod.ready
                    for target in _ports(pod, port["targetPort"])
                ]
                yield Endpoint(self._clusters[name], port["port"], targets)

    def _names(self) -> Iterator[str]:
        for name, service in of_kind("Service", self.manifests).items():
            spec = service["spec"]
            if spec.get("clusterIP") != "None":
                yield f"{self._clusters[name]} {_spellings(name, self.namespace)}"
                continue
            for pod in self.behind(name):
                if pod.ready or spec.get("publishNotReadyAddresses"):
                    yield f"{pod.address} {_spellings(name, self.namespace)}"
                    if workloads(self.manifests)[pod.workload]["spec"].get("serviceName") == name:
                        yield f"{pod.address} {_spellings(f'{pod.name}.{name}', self.namespace)}"

    # --- the end ---

    def clear(self) -> None:
        """Remove all pods without grace. A failure does not stop the removal of the others."""
        failures = []
        for pod in self.pods:
            try:
                pod.remove()
            except Exception as error:  # noqa: BLE001
                failures.append(f"{pod.name}: {error}")
        self.pods.clear()
        # containers that are starting are removed too: init containers, and containers that no pod lists yet
        for container in engine.podman("ps", "--all", "--quiet", "--filter", f"label={self.label}").split():
            engine.podman("rm", "--force", "--ignore", "--time", "0", container)
        network.swept(self.prefix)
        assert not failures, "\n".join(failures)

    def story(self) -> str:
        return story([*self.ended, *self.pods])


def story(pods: Sequence[Pod], lines: int = 30) -> str:
    return "\n".join(
        f"== {container.name}: starts {container.starts}, ready {container.ready}, {container.exits}\n"
        + "\n".join([*container.failures[-5:], *container.log()[-lines:]])
        for pod in pods
        for container in pod.containers
    )


def sweep() -> None:
    """Remove containers, namespaces and folders that killed processes of tests left."""
    for line in engine.podman("ps", "--all", "--format", f'{{{{.ID}}}} {{{{index .Labels "{_LABEL}"}}}}').splitlines():
        container, _, name = line.partition(" ")
        owner = name.partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            engine.podman("rm", "--force", "--ignore", "--time", "0", container)
    for owner in network.owners(_PREFIX):
        if not psutil.pid_exists(owner):
            network.swept(f"{_PREFIX}{owner}-")
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.split("-")[1])):
            for path in folder.glob("*/volumes/*"):
                if path.is_mount():
                    network.run(["umount", "--lazy", str(path)])
            shutil.rmtree(folder)


def _ports(pod: Pod, target: str | int) -> list[int]:
    if isinstance(target, int):
        return [target]
    return [
        port["containerPort"]
        for container in pod.spec["containers"]
        for port in container.get("ports", ())
        if port["name"] == target
    ]


def _spellings(name: str, namespace: str) -> str:
    return f"{name} {name}.{namespace} {name}.{namespace}.svc {name}.{namespace}.svc.cluster.local"
