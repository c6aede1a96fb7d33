"""The rendered chart without Kubernetes: the commands of its containers run here to the letter, beside each other.

The tests do what a node and a cluster's network do. A container has processes of its own, the
rendered user without capabilities, a read-only root with nothing writable but its volumes, and the files that an image
would have. Secrets and names of pods are looked up, $(NAME) is replaced, images begin with the ENTRYPOINT of their
Dockerfile, probes say which containers are ready. A pod is an address of loopback in a network of the test's own, so
every port is the rendered one, and the name of a service stands for the pods that its selector finds. It needs no
image, so CI runs it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dockerfiles
import httpx
import local_models
import psutil
import pytest
from cluster import MODEL, until
from helm import NAMESPACE, Object, allowed, objects, of_kind, pod, template, variables, workloads
from namespaces import CLONE_NEWNET, CLONE_NEWPID, namespace
from stack import Part, Role

pytestmark = [pytest.mark.debian, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
VALUES = {"auth": {"mode": "static"}, "catalogue": {"configMap": "own-models"}}
ROLES: dict[str, Role] = {
    "nats": "broker",
    "config": "config",
    "gateway": "gateway",
    "worker-sidecar": "sidecar",
    "adapter": "adapter",
}
# what the images set, with the HOME of their user; and one thread, as a share of a processor would give
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "HOME": "/home/sie",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}
USERS = ("gateway", "config", "worker", "streams", "operator")
TOKENS = {
    "auth-tokens": "client-token",
    "config-read-token": "reader-token",
    "admin-token": "admin-token",
    "nats-route": "in-a-url",
    # passwords that a URL, a configuration of the server or a shell would misread without quotes
    **{f"nats-{user}": f"p@{user}/w:%41#? $(HOME)" for user in USERS},
}
CLIENT = {"Authorization": f"Bearer {TOKENS['auth-tokens']}"}
START_S = 90.0
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Pod:
    name: str
    workload: str
    spec: Object
    address: str


@dataclass
class Node:
    """A node with all pods: a folder for each volume, an address for each pod. Every container sees `disk` as /srv."""

    folder: Path
    found: list[Object]
    # files of ConfigMaps that are not the chart's, by name
    own_files: dict[str, dict[str, str]] = field(default_factory=dict)
    disk: Path | None = None
    pods: list[Pod] = field(init=False)

    def __post_init__(self) -> None:
        specs = {name: pod(workload) for name, workload in workloads(self.found).items()}
        self.pods = [Pod(f"{name}-0", name, spec, f"127.1.0.{at}") for at, (name, spec) in enumerate(specs.items(), 1)]
        lines = [
            f"{member.address} {name} {name}.{NAMESPACE}.svc"
            for name in of_kind("Service", self.found)
            for member in self.behind(name)
        ]
        for name, workload in workloads(self.found).items():
            service = workload["spec"].get("serviceName")
            lines += [
                f"{member.address} {member.name}.{service}"
                for member in self.pods
                if member.workload == name and service
            ]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (self.folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\nsie:x:10001:10001::/home/sie:/bin/sh\n")

    def behind(self, service: str) -> list[Pod]:
        selector = of_kind("Service", self.found)[service]["spec"]["selector"]
        labels = {
            name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads(self.found).items()
        }
        return [member for member in self.pods if selector.items() <= labels[member.workload].items()]

    def url(self, service: str, port: int) -> str:
        """Return the URL of the first pod behind a service, whose ports are those of its pods."""
        (target,) = (
            entry["targetPort"]
            for entry in of_kind("Service", self.found)[service]["spec"]["ports"]
            if entry["port"] == port
        )
        where = self.behind(service)[0]
        declared = {
            (entry["name"], entry["containerPort"])
            for container in where.spec["containers"]
            for entry in container.get("ports", ())
        }
        assert (target, port) in declared
        return f"http://{where.address}:{port}"

    def volume(self, where: Pod, name: str) -> Path:
        """Return the folder of a volume: with the group of fsGroup, or with the files of its ConfigMap."""
        path = self.folder / where.name / name
        if path.exists():
            return path
        path.mkdir(parents=True)
        volume = next((entry for entry in where.spec["volumes"] if entry["name"] == name), {})
        if "configMap" in volume:
            maps = {
                **self.own_files,
                **{key: config_map["data"] for key, config_map in of_kind("ConfigMap", self.found).items()},
            }
            for file, text in maps[volume["configMap"]["name"]].items():
                (path / file).write_text(self.here(where, text))
        else:
            os.chown(path, 0, where.spec["securityContext"]["fsGroup"])
            path.chmod(0o2777 if "emptyDir" in volume else 0o2775)
        return path

    def here(self, where: Pod, text: str) -> str:
        return text.replace("0.0.0.0", where.address)

    def environ(self, where: Pod, container: Object) -> dict[str, str]:
        settings: dict[str, str] = {}
        for name, value in variables(container).items():
            if isinstance(value, str):
                settings[name] = re.sub(r"\$\((\w+)\)", lambda match: settings.get(match[1], match[0]), value)
            elif "fieldRef" in value:
                assert value["fieldRef"]["fieldPath"] == "metadata.name"
                settings[name] = where.name
            else:
                settings[name] = TOKENS[value["secretKeyRef"]["key"]]
        # on a loopback address, such as a pod's here, only loopback names pass; on 0.0.0.0 any name does, unless the
        # setting lists some
        return {**IMAGE, "SIE_ALLOWED_HOSTS": "*", **settings}

    def argv(self, where: Pod, container: Object) -> list[str]:
        command = container.get("command")
        if command is None:
            component = container["image"].partition(":")[0].rpartition("/sie-")[2].removeprefix("sie-")
            command = json.loads(dict(dockerfiles.last_stage(component))["ENTRYPOINT"])
        words = [self.here(where, word) for word in [*command, *container.get("args", ())]]
        return ["unshare", "--mount", "sh", "-ec", self.enter(where, container), "sh", *words]

    def enter(self, where: Pod, container: Object) -> str:
        """Return a script that makes the container's root, in a mount namespace of its own, and runs its arguments
        there.
        """
        root = self.folder / f"{where.name}.{container['name']}"
        root.mkdir(exist_ok=True)
        steps = [
            f"mount -t tmpfs -o mode=0755 none {root}",
            f"cd {root}",
            "mkdir -p proc dev tmp etc home/sie",
            "mount -t proc none proc",
        ]
        steps += [f"ln -s usr/{name} {name}" for name in ("bin", "lib", "lib64", "sbin")]

        def bind(source: Path | str, target: str, *, writable: bool = False, file: bool = False) -> None:
            target = shlex.quote(target.lstrip("/"))
            steps.append(f"mkdir -p $(dirname {target}) && touch {target}" if file else f"mkdir -p {target}")
            steps.append(f"mount --bind {shlex.quote(str(source))} {target}")
            if not writable:
                steps.append(f"mount -o remount,bind,ro {target}")

        for name in ("null", "zero", "full", "random", "urandom"):
            bind(f"/dev/{name}", f"dev/{name}", writable=True, file=True)
        for name in ("hosts", "passwd"):
            bind(self.folder / name, f"etc/{name}", file=True)
        bind("/etc/ld.so.cache", "etc/ld.so.cache", file=True)
        for mount in container["volumeMounts"]:
            bind(self.volume(where, mount["name"]), mount["mountPath"], writable=not mount.get("readOnly"))
        for folder in filter(os.path.isdir, ("/usr", "/sys", "/etc/ssl", sys.base_prefix, str(ROOT), sys.prefix)):
            bind(folder, folder)
        if self.disk is not None:
            bind(self.disk, "srv")
        return "\n".join(
            [*steps, f"mount -o remount,ro {root}", f'exec /usr/sbin/chroot {root} {confined(where, container)} "$@"']
        )

    def used(self, where: Pod) -> dict[str, tuple[int, int]]:
        """Return the bytes in each volume with a limit, and the limit."""
        limits = {
            entry["name"]: entry["emptyDir"]["sizeLimit"] for entry in where.spec["volumes"] if "emptyDir" in entry
        }
        files = {name: (self.folder / where.name / name).rglob("*") for name in limits}
        sizes = {name: sum(path.lstat().st_blocks * 512 for path in paths) for name, paths in files.items()}
        return {name: (sizes[name], int(text[:-2]) * _UNITS[text[-2:]]) for name, text in limits.items()}


def confined(where: Pod, container: Object) -> str:
    """Return the prefix that runs a command as the rendered user, without capabilities or ways to gain them."""
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    user = where.spec["securityContext"]
    identity = f"--reuid {user['runAsUser']} --regid {user['runAsGroup']} --groups {user['fsGroup']}"
    return f"/usr/bin/setpriv {identity} --no-new-privs --inh-caps=-all --bounding-set=-all --pdeathsig KILL"


class Container(Part):
    """A container of a node: the first process of its own, with the readiness of its probe."""

    def __init__(self, node: Node, where: Pod, told: Object) -> None:
        self.where = where
        self.told = told
        readiness = functools.partial(self.probe, "readinessProbe")
        super().__init__(
            ROLES[told["name"]],
            f"{where.name} {told['name']}",
            node.argv(where, told),
            node.environ(where, told),
            readiness,
        )

    def _spawn(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        with namespace(CLONE_NEWPID, "pid_for_children"):
            return super()._spawn(argv)

    def execute(self, action: Object) -> bool:
        """Run an exec action: return whether its command, run inside, ends with 0."""
        inside = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--root",
            "--wd",
            *confined(self.where, self.told).split(),
        ]
        return subprocess.run([*inside, *action["exec"]["command"]], env=IMAGE, timeout=30, check=False).returncode == 0

    def probe(self, kind: str) -> bool:
        """Return whether a probe passes now."""
        probe = self.told[kind]
        if "exec" in probe:
            return self.execute(probe)
        (port,) = (entry["containerPort"] for entry in self.told["ports"] if entry["name"] == probe["httpGet"]["port"])
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://{self.where.address}:{port}{probe['httpGet']['path']}"
            return httpx.get(url, timeout=5, trust_env=False).status_code == 200
        return False

    def sockets(self) -> list[Any]:
        """Return the TCP sockets of all processes of the container."""
        first = psutil.Process(self.pid)
        return [
            connection
            for process in [first, *first.children(recursive=True)]
            for connection in process.net_connections("tcp")
        ]


@dataclass
class Running:
    node: Node
    containers: list[Container] = field(default_factory=list)

    def log(self, name: str = "") -> list[str]:
        return [line for container in self.containers if name in container.name.split()[-1] for line in container.log]

    def story(self) -> str:
        return "\n".join(
            f"== {container.name}\n" + "\n".join(list(container.log)[-30:]) for container in self.containers
        )

    def connections(self) -> set[tuple[str, str, int]]:
        """Return all connections that are open now: the workload that connected, the workload that accepted, and the
        port.
        """
        owner = {member.address: member.workload for member in self.node.pods}
        ends = (
            (container.where.workload, connection.laddr, connection.raddr)
            for container in self.containers
            for connection in container.sockets()
            if connection.raddr
        )
        return {(workload, owner[to.ip], to.port) for workload, at, to in ends if to.ip in owner and at.ip not in owner}

    def check_probes(self) -> None:
        until(
            lambda: all(container.probe(kind) for container in self.containers for kind in PROBES),
            60,
            "every probe passes",
        )

    def check_connections(self) -> None:
        """Check that processes listen on the ports that their containers declare, and that they connect to all that the
        policies allow and to nothing else.
        """
        declared = {
            (member.where.workload, port["containerPort"])
            for member in self.containers
            for port in member.told.get("ports", ())
        }
        for container in self.containers:
            listening = {
                (connection.laddr.ip, connection.laddr.port)
                for connection in container.sockets()
                if connection.status == "LISTEN"
            }
            assert listening == {
                (container.where.address, port["containerPort"]) for port in container.told.get("ports", ())
            }, container.name
        sources = workloads(self.node.found)
        expected = {
            (source, *target) for source in sources for target in declared if allowed(self.node.found, source, *target)
        }
        observed: set[tuple[str, str, int]] = set()
        until(lambda: observed.update(self.connections()) or observed >= expected, 30, f"connections: {expected}")
        assert observed == expected


@contextlib.contextmanager
def started(node: Node) -> Iterator[Running]:
    """Start all containers of all pods at once, as a cluster does. The end of the block checks that each ends with 0
    when told to.
    """
    running = Running(node)
    try:
        for where in node.pods:
            for spec in where.spec.get("initContainers", ()):
                subprocess.run(node.argv(where, spec), env=node.environ(where, spec), check=True, timeout=30)
            for spec in where.spec["containers"]:
                running.containers.append(Container(node, where, spec))
                running.containers[-1].start()
        for container in running.containers:
            container.wait_ready(START_S)
        yield running
    except BaseException:
        print(running.story())
        for container in running.containers:
            container.kill()
        raise
    for role in ("gateway", "sidecar", "adapter", "config", "broker"):
        for container in running.containers:
            if container.role == role:
                container.stop()
                assert container.status == 0 or role == "broker", (
                    f"{container.name}: {container.status}\n{running.story()}"
                )


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder short enough for the path of a socket in it. The test has a network of its own, with nothing but
    loopback.
    """
    with tempfile.TemporaryDirectory(prefix="sie-") as folder, namespace(CLONE_NEWNET, "net"):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
        yield Path(folder)


def test_what_the_chart_renders_starts_and_serves(short: Path, tmp_path: Path) -> None:
    """All containers start from their rendered commands, variables, files and users. They write only to their volumes,
    within the limits. Models of the packaged catalogue and of the operator's ConfigMap answer over the gateway's
    service. No request passes without a token, and changes of the catalogue need the administrator's. The broker
    refuses nothing that components do, and refuses what is not a component's own. Processes listen where the chart
    says, and connect where their policies allow it.
    """
    models = local_models.under(tmp_path)
    for name in ("cross", "zero-shot"):
        models.build(name)
    subprocess.run(["chmod", "-R", "a+rX", tmp_path], check=True, timeout=30)
    files = {file.name: file.read_text().replace(str(tmp_path), "/srv") for file in models.folder.iterdir()}
    manifests = objects(template("values-kind.yaml", VALUES))
    node = Node(short, manifests, {"own-models": files}, disk=tmp_path)
    with (
        started(node) as running,
        httpx.Client(base_url=node.url("sie-gateway", 8080), headers=CLIENT, timeout=120, trust_env=False) as client,
    ):
        assert client.get("/readyz").status_code == 200
        listed = {model["name"] for model in client.get("/v1/models").json()["models"]}
        assert {MODEL, "test/cross", "test/zero-shot"} <= listed
        answer = client.post(f"/v1/encode/{MODEL}", json={"items": [{"text": "What is deep learning?"}]})
        assert answer.status_code == 200, answer.text
        values = answer.json()["items"][0]["dense"]["values"]
        assert len(values) == 384
        assert values[0] == pytest.approx(-0.0776, abs=1e-3)
        body = {"query": {"text": "who"}, "items": [{"text": "one"}, {"text": "two"}]}
        ranked = client.post("/v1/score/test/cross", json=body)
        assert ranked.status_code == 200, ranked.text
        assert len(ranked.json()["scores"]) == 2
        extracted = client.post(
            "/v1/extract/test/zero-shot", json={"items": ["Ada met Charles in London."], "labels": ["person"]}
        )
        assert extracted.status_code == 200, extracted.text

        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            assert client.post(f"/v1/encode/{MODEL}", json={"items": ["x"]}, headers=headers).status_code == 401
        config = node.url("sie-config", 8081)
        entry = {**json.loads(files["cross.yaml"]), "id": "own/one"}
        statuses = []
        for token in ("client-token", "reader-token", "wrong", "admin-token"):
            headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": "own"}
            written = httpx.post(
                f"{config}/v1/configs/models", json=entry, headers=headers, timeout=30, trust_env=False
            )
            statuses.append(written.status_code)
        assert statuses[-1] == 201, written.text
        assert set(statuses[:-1]) <= {401, 403}
        until(
            lambda: client.get("/v1/models/own/one").status_code == 200,
            30,
            "the gateway knows the model that was written",
        )

        metrics = node.url("sie-gateway-metrics", 9090)
        assert (
            httpx.get(f"{metrics}/v1/scaling/_default.cpu.default", trust_env=False, timeout=60).json()["ready_workers"]
            == 1
        )
        running.check_probes()
        running.check_connections()

        violations = [line for line in running.log("nats") if "Violation" in line]
        if any("the config service, which creates streams, does not reply" in line for line in running.log("gateway")):
            # a gateway that starts before the config service tries to create its streams itself, and is refused
            violations = [line for line in violations if "$JS.API.STREAM.CREATE.KV_" not in line]
        assert not violations
        for user, subject in (("gateway", "sie.health.w"), ("config", "sie.work.x"), ("worker", "sie.config.models.x")):
            publish(node.url("sie-nats", 4222), user, subject)
            until(
                lambda subject=subject: any(f'"{subject}"' in line for line in running.log("nats")),
                30,
                f"{subject} refused",
            )
        for where in node.pods:
            for name, (size, limit) in node.used(where).items():
                assert size < limit, (where.name, name)
    assert not re.search(r"Read-only file system|Permission denied", running.story())
    assert not [*short.rglob("Microsoft")], "where onnxruntime keeps what it is about to report"


def publish(url: str, user: str, subject: str) -> None:
    """Publish with the rendered password of `user`, in the protocol's own words."""
    with socket.create_connection(url.removeprefix("http://").split(":"), timeout=30) as wire:
        login = json.dumps({"user": user, "pass": TOKENS[f"nats-{user}"], "verbose": False})
        wire.sendall(f"CONNECT {login}\r\nPUB {subject} 0\r\n\r\nPING\r\n".encode())
        reply = b""
        while b"PONG" not in reply:
            piece = wire.recv(4096)
            assert piece, f"the broker hung up on {user}: {reply!r}"
            reply += piece
    assert b"Permissions Violation" in reply
