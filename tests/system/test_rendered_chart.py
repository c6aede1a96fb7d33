"""The rendered chart without Kubernetes: what its containers are told to run, run here, as each other's neighbours.

What a kubelet and a cluster's network do is done as they do it: secrets and names of pods are looked up, $(NAME) is replaced, volumes are
folders that the containers of a pod share, a name of a service leads to the pods that its selector finds, images begin with the ENTRYPOINT
of their Dockerfile, probes say who is ready. Only paths, ports and host names differ from the rendered ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import local_models
import pytest
from cluster import MODEL, until
from helm import Object, containers, objects, of_kind, pod, template, variables, workloads
from stack import Part, Role

from sie_cli.embedded import free_port

DOCKER = Path(__file__).parents[2] / "docker"
USERS = ("gateway", "config", "worker", "operator")
SECRET = {
    "auth-tokens": "client-token", "config-read-token": "reader-token", "admin-token": "admin-token",
    **{f"nats-{user}": f"p-{user}-w" for user in USERS},
}  # fmt: skip
VALUES = {"auth": {"mode": "static"}, "catalogue": {"configMap": "own-models"}}
CLIENT = {"Authorization": "Bearer client-token"}
ROLES: dict[str, Role] = {"nats": "broker", "config": "config", "gateway": "gateway", "worker-sidecar": "sidecar", "adapter": "adapter"}
# Of a pod's container on one machine of many: what its image sets, and one thread, as its processor share would make it.
IMAGE = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
START_S = 90.0


@dataclass
class Machine:
    """Where things are on this one: a folder for each volume of each pod, a free port for each that a container declares."""

    folder: Path
    found: list[Object]
    own_files: dict[str, dict[str, str]]  # of ConfigMaps that are not the chart's, by name
    ports: dict[tuple[str, int], int] = field(init=False)  # by workload and containerPort

    def __post_init__(self) -> None:
        declared = [(workload, port["containerPort"]) for workload, _, each in containers(self.found) for port in each.get("ports", ())]
        self.ports = dict(zip(declared, itertools.count(free_port(len(declared))), strict=False))

    def address(self, host: str, port: int) -> str:
        """Where a service of the chart leads to."""
        service = of_kind("Service", self.found)[host]["spec"]
        (target,) = (each["targetPort"] for each in service["ports"] if each["port"] == port)
        for name, workload in workloads(self.found).items():
            if service["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items():
                for container in pod(workload)["containers"]:
                    for each in container.get("ports", ()):
                        if each["name"] == target:
                            return f"127.0.0.1:{self.ports[name, each['containerPort']]}"
        raise LookupError(f"{host}:{port} leads to no container")

    def volume(self, workload: str, spec: Object, name: str) -> Path:
        """The folder of a volume, with the files of its ConfigMap."""
        path = self.folder / workload / name
        if not path.exists():
            path.mkdir(parents=True)
            (volume,) = (each for each in [*spec.get("volumes", ()), *self._claims(workload)] if each["name"] == name)
            source = volume.get("configMap", {}).get("name")
            for file, text in self.own_files.get(source, {}).items():
                (path / file).write_text(text)
            for file, text in of_kind("ConfigMap", self.found).get(source, {}).get("data", {}).items():
                (path / file).write_text(self.here(workload, spec["containers"][0], text))
        return path

    def _claims(self, workload: str) -> list[Object]:
        return [{"name": each["metadata"]["name"]} for each in workloads(self.found)[workload]["spec"].get("volumeClaimTemplates", ())]

    def here(self, workload: str, container: Object, text: str) -> str:
        """A rendered text with the paths, ports and hosts that it means on this machine."""
        text = re.sub(r"(?<=[/@])([a-z][a-z0-9-]*):(\d+)", lambda match: self.address(match[1], int(match[2])), text)
        for mount in sorted(container["volumeMounts"], key=lambda mount: -len(mount["mountPath"])):
            text = re.sub(rf"(?<![\w/]){mount['mountPath']}(?![\w.-])", f"\0{mount['name']}\0", text)
        for port in (each["containerPort"] for each in container.get("ports", ())):
            text = re.sub(rf"(?<![\d.]){port}(?!\d)", str(self.ports[workload, port]), text)
        text = text.replace("0.0.0.0", "127.0.0.1")
        return re.sub("\0(.*?)\0", lambda match: str(self.folder / workload / match[1]), text)

    def environ(self, workload: str, container: Object) -> dict[str, str]:
        told: dict[str, str] = {}
        for name, given in variables(container).items():
            if isinstance(given, str):
                text = self.here(workload, container, given)
                told[name] = re.sub(r"\$\((\w+)\)", lambda match: told.get(match[1], match[0]), text)
            elif "fieldRef" in given:
                assert given["fieldRef"]["fieldPath"] == "metadata.name"
                told[name] = f"{workload}-0"
            else:
                told[name] = SECRET[given["secretKeyRef"]["key"]]
        return {**IMAGE, **told}

    def argv(self, workload: str, container: Object) -> list[str]:
        command = container.get("command")
        if command is None:
            component = container["image"].partition(":")[0].rpartition("/sie-")[2].removeprefix("sie-")
            text = (DOCKER / f"{component}.Dockerfile").read_text()
            (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", text, re.MULTILINE)
            command = re.findall(r'"(.*?)"', entry)
        return [self.here(workload, container, word) for word in [*command, *container.get("args", ())]]

    def ready(self, workload: str, container: Object) -> Any:
        """Its readiness probe."""
        probe = container["readinessProbe"]
        if "exec" in probe:
            command = [self.here(workload, container, word) for word in probe["exec"]["command"]]
            return lambda: subprocess.run(command, env=IMAGE, timeout=30, check=False).returncode == 0
        number = next(port["containerPort"] for port in container["ports"] if port["name"] == probe["httpGet"]["port"])
        url = f"http://127.0.0.1:{self.ports[workload, number]}{probe['httpGet']['path']}"

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(url, timeout=5, trust_env=False).status_code == 200
            return False

        return answers


@dataclass
class Running:
    """`parts` by name of the container."""

    machine: Machine
    parts: dict[str, Part]

    def url(self, service: str, port: int) -> str:
        return f"http://{self.machine.address(service, port)}"

    def log(self) -> str:
        return "\n".join(f"== {name}\n" + "\n".join(list(part.log)[-30:]) for name, part in self.parts.items())


@contextlib.contextmanager
def started(folder: Path, found: list[Object], own_files: dict[str, dict[str, str]]) -> Iterator[Running]:
    """All containers of all pods at once, as a cluster starts them; the end of the block checks that each ends with 0 when told to."""
    machine = Machine(folder, found, own_files)
    running = Running(machine, {})
    try:
        for workload, spec, container in containers(found):
            for mount in container["volumeMounts"]:
                machine.volume(workload, spec, mount["name"])
            environ, argv = machine.environ(workload, container), machine.argv(workload, container)
            if container in spec.get("initContainers", ()):
                subprocess.run(argv, env=environ, check=True, timeout=30)
                continue
            part = Part(ROLES[container["name"]], container["name"], argv, environ, machine.ready(workload, container))
            running.parts[container["name"]] = part
            part.start()
        for part in running.parts.values():
            part.wait_ready(START_S)
        yield running
    except BaseException:
        print(running.log())
        for part in running.parts.values():
            part.kill()
        raise
    for name in ("gateway", "worker-sidecar", "adapter", "config", "nats"):
        running.parts[name].stop()
        assert running.parts[name].status == 0 or name == "nats", f"{name}: {running.parts[name].status}\n{running.log()}"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder below which a socket's path is short enough."""
    with tempfile.TemporaryDirectory(prefix="sie-") as folder:
        yield Path(folder)


def test_what_the_chart_renders_starts_and_serves(short: Path, tmp_path: Path) -> None:
    """1. all containers start from their rendered commands, variables, files and users; 2. models of the packaged catalogue and of the
    operator's ConfigMap answer over the gateway's service; 3. nobody gets in without a token, and what changes the catalogue wants the
    administrator's; 4. the broker refused nothing, and refuses what is not a component's own."""
    models = local_models.under(tmp_path)
    models.build("cross")
    files = {file.name: file.read_text() for file in models.folder.iterdir()}
    found = objects(template("values-kind.yaml", VALUES))
    with started(short, found, {"own-models": files}) as running, httpx.Client(
        base_url=running.url("sie-gateway", 8080), headers=CLIENT, timeout=120, trust_env=False
    ) as client:
        assert client.get("/readyz").status_code == 200
        listed = {each["name"] for each in client.get("/v1/models").json()["models"]}
        assert {MODEL, "test/cross"} <= listed
        answer = client.post(f"/v1/encode/{MODEL}", json={"items": [{"text": "What is deep learning?"}]})
        assert answer.status_code == 200, answer.text
        values = answer.json()["items"][0]["dense"]["values"]
        assert len(values) == 384
        assert values[0] == pytest.approx(-0.0776, abs=1e-3)
        body = {"query": {"text": "who"}, "items": [{"text": "one"}, {"text": "two"}]}
        ranked = client.post("/v1/score/test/cross", json=body)
        assert ranked.status_code == 200, ranked.text
        assert len(ranked.json()["scores"]) == 2

        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            assert client.post(f"/v1/encode/{MODEL}", json={"items": ["x"]}, headers=headers).status_code == 401
        config = running.url("sie-config", 8081)
        entry = {**json.loads(files["cross.yaml"]), "id": "own/one"}
        statuses = []
        for token in ("client-token", "reader-token", "wrong", "admin-token"):
            headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "own"}
            written = httpx.post(f"{config}/v1/configs/models", json=entry, headers=headers, timeout=30, trust_env=False)
            statuses.append(written.status_code)
        assert statuses[-1] == 201, written.text
        assert set(statuses[:-1]) <= {401, 403}
        until(lambda: client.get("/v1/models/own/one").status_code == 200, 30, "the gateway knows the model that was written")

        metrics = running.url("sie-gateway-metrics", 9090)
        assert httpx.get(f"{metrics}/v1/scaling/_default.cpu.default", trust_env=False).json()["ready_workers"] == 1
        assert not [line for line in running.parts["nats"].log if "Violation" in line]
        for user, subject in (("gateway", "sie.health.w"), ("config", "sie.work.x"), ("worker", "sie.config.models.x")):
            publish(running.machine.address("sie-nats", 4222), user, subject)
            until(lambda subject=subject: any(f'"{subject}"' in line for line in running.parts["nats"].log), 30, f"{subject} refused")
    assert socket_mode(short) == 0o700


def socket_mode(folder: Path) -> int:
    return (folder / "sie-worker-cpu" / "socket" / "worker").stat().st_mode & 0o777


def publish(address: str, user: str, subject: str) -> None:
    """As whoever has the rendered password of `user`, in the protocol's own words."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as wire:
        who = json.dumps({"user": user, "pass": SECRET[f"nats-{user}"], "verbose": False})
        wire.sendall(f"CONNECT {who}\r\nPUB {subject} 0\r\n\r\nPING\r\n".encode())
        told = b""
        while b"PONG" not in told:
            piece = wire.recv(4096)
            assert piece, f"the broker hung up on {user}: {told!r}"
            told += piece
    assert b"Permissions Violation" in told
