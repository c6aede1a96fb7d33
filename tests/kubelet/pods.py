"""A pod: an address, volumes, and its containers."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from helm import Object, of_kind

from kubelet import network
from kubelet.containers import Container, quantity

if TYPE_CHECKING:
    from kubelet.node import Node

KNOWN = {
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "terminationGracePeriodSeconds",
    "initContainers",
    "containers",
    "volumes",
    "topologySpreadConstraints",  # this field and those after it are for a scheduler
    "nodeSelector",
    "tolerations",
    "affinity",
    "priorityClassName",
}
HOSTS_BYTES = 8192
INIT_S = 120.0


@dataclass
class Pod:
    """A pod. `claims` has the folders that outlive the pod, by the name of the volume."""

    node: Node
    name: str
    workload: str
    template: Object
    claims: dict[str, Path] = field(default_factory=dict)
    containers: list[Container] = field(default_factory=list)
    ending: bool = False

    def __post_init__(self) -> None:
        self.spec: Object = self.template["spec"]
        assert self.spec.keys() <= KNOWN, f"{self.name}: not known here: {self.spec.keys() - KNOWN}"
        assert self.spec["automountServiceAccountToken"] is False, "there is no API server here"
        assert self.spec["enableServiceLinks"] is False, "variables for each service are not made here"
        self.folder = self.node.folder / self.name
        self.folder.mkdir()
        self.network, self.address = self.node.network.join()
        self.hosts, self.resolv = self.folder / "hosts", self.folder / "resolv.conf"
        search = f"{self.node.namespace}.svc.cluster.local svc.cluster.local cluster.local"
        self.resolv.write_text(f"nameserver {network.SERVICES}.0.10\nsearch {search}\noptions ndots:5\n")
        self.write_hosts([])
        self._mounts: list[Path] = []
        self._lock = threading.Lock()

    @property
    def labels(self) -> dict[str, str]:
        pod_labels: dict[str, str] = self.template["metadata"]["labels"]
        return pod_labels

    @property
    def ready(self) -> bool:
        return (
            bool(self.containers) and all(own_container.ready for own_container in self.containers) and not self.ending
        )

    @property
    def grace_s(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    def container(self, name: str) -> Container:
        return next(own_container for own_container in self.containers if own_container.told["name"] == name)

    def field(self, path: str) -> str:
        return {
            "metadata.name": self.name,
            "metadata.namespace": self.node.namespace,
            "status.podIP": self.address,
        }[path]

    def start(self) -> None:
        """Run the init containers one after another, then start all other containers at once."""
        for spec in self.spec.get("initContainers", ()):
            Container(self, spec).run_once(INIT_S)
        started = [Container(self, container_spec) for container_spec in self.spec["containers"]]
        self.containers = started
        for own_container in started:
            own_container.start()

    def end(self) -> None:
        """End the pod with its grace period. It leaves its services, and its containers end at the same time."""
        self.ending = True
        self.node.readiness_changed()
        with ThreadPoolExecutor(len(self.containers) or 1) as pool:
            list(pool.map(lambda own_container: own_container.end(self.grace_s), self.containers))
        self.remove()

    def remove(self) -> None:
        """Remove containers, mounts and network of the pod."""
        self.ending = True
        for own_container in self.containers:
            own_container.remove()
        for path in self._mounts:
            network.run(["umount", "--lazy", str(path)])
        self._mounts.clear()
        self.node.network.leave(self.network)

    def volume(self, name: str) -> Path:
        """Return the folder of a volume. It has the group of fsGroup, or the files of a ConfigMap."""
        with self._lock:
            if name in self.claims:
                path = self.claims[name]
                path.mkdir(parents=True, exist_ok=True)
                self._own(path, 0o2775)
                return path
            (volume,) = (volume_spec for volume_spec in self.spec["volumes"] if volume_spec["name"] == name)
            (kind,) = volume.keys() - {"name"}
            if kind == "persistentVolumeClaim":
                assert volume[kind].keys() == {"claimName"}, volume
                path = self.node.shares[volume[kind]["claimName"]]
                self._own(path, 0o2775)
                return path
            path = self.folder / "volumes" / name
            if path.exists():
                return path
            path.mkdir(parents=True)
            if kind == "configMap":
                files = of_kind("ConfigMap", self.node.manifests).get(volume[kind]["name"], {}).get("data")
                for file, text in (files or self.node.files[volume[kind]["name"]]).items():
                    (path / file).write_text(text)
            elif kind == "emptyDir":
                self._empty(path, volume[kind], self.node.disks.get((self.workload, name)))
            else:
                raise AssertionError(f"{self.name}: a volume of an unknown kind: {volume}")
            return path

    def _empty(self, path: Path, settings: Object, disk_bytes: int | None) -> None:
        """Prepare an emptyDir. With `disk_bytes` it is on a disk of its own of that size."""
        assert settings.keys() <= {"medium", "sizeLimit"}, settings
        size = quantity(settings["sizeLimit"]) if settings.get("medium") == "Memory" else disk_bytes
        if size is not None:
            network.run(["mount", "-t", "tmpfs", "-o", f"size={int(size)},mode=0777", "none", str(path)])
            self._mounts.append(path)
        self._own(path, 0o2777)

    def _own(self, path: Path, mode: int) -> None:
        os.chown(path, -1, self.spec["securityContext"]["fsGroup"])
        path.chmod(mode)

    def write_hosts(self, lines: list[str]) -> None:
        """Write the file in place and with one size, so a concurrent reader sees the old lines or the new ones."""
        text = "\n".join(["127.0.0.1 localhost", f"{self.address} {self.name}", *lines, ""]).encode()
        assert len(text) <= HOSTS_BYTES
        wire = os.open(self.hosts, os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.pwrite(wire, text.ljust(HOSTS_BYTES, b"\n"), 0)
        finally:
            os.close(wire)

    def used(self) -> dict[str, tuple[int, float]]:
        """Return the bytes in each volume with a limit, and the limit."""
        usage = {}
        for volume in self.spec.get("volumes", ()):
            limit = volume.get("emptyDir", {}).get("sizeLimit")
            if limit is not None:
                files = [path.lstat() for path in self.volume(volume["name"]).rglob("*")]
                usage[volume["name"]] = sum(stat.st_blocks * 512 for stat in files), quantity(limit)
        return usage
