"""Stand-ins for the commands of docs/first-hour.md, which act on a node in place of a cluster.

    bash ──► helm, kubectl, docker, make, pip in `folder` ──► Programs ──► Node, podman

The real helm renders the chart. An unknown argument is refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socketserver
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from dockerfiles import VERSION
from helm import helm, objects
from tcp_proxy import TcpProxy

from kubelet import engine
from kubelet.node import Node

NAMES = ("docker", "helm", "kubectl", "make", "pip")
_READY_S = 600.0
_PROGRAM = """#!{python} -I
import json, socket, sys, os
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect({path!r})
    peer.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
    status, told = json.loads(peer.makefile().readline())
    (sys.stderr if status else sys.stdout).write(told)
    sys.exit(status)
"""


class Refused(Exception):
    """An error of a program, which prints it and ends with 1."""


class Programs:
    """A server of the programs in a thread. Names of files are relative to `cwd`."""

    def __init__(self, node: Node, cwd: Path) -> None:
        self.folder = cwd / "bin"
        self.folder.mkdir()
        path = self.folder / "socket"
        for name in NAMES:
            (self.folder / name).write_text(_PROGRAM.format(python=sys.executable, path=str(path)))
            (self.folder / name).chmod(0o755)
        self._node, self._cwd = node, cwd
        self._server = socketserver.ThreadingUnixStreamServer(str(path), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Programs:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        programs = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                argv = json.loads(self.rfile.readline())
                try:
                    status, output = 0, programs.run(argv)
                except Exception as error:  # noqa: BLE001  the program prints the error and ends with 1
                    status, output = 1, f"{argv[0]}: {type(error).__name__}: {error}\n"
                self.wfile.write(json.dumps([status, output]).encode() + b"\n")

        return Handler

    def run(self, argv: Sequence[str]) -> str:
        """Run a program and return its output. Raise Refused, or an error of the node or podman."""
        match argv:
            case ["docker", "login", _] | ["pip", "install", ".[cli]"]:
                return ""
            case ["make", "images", registry] if registry.startswith("REGISTRY="):
                return self._name_images(registry.removeprefix("REGISTRY="))
            case ["docker", "push", image]:
                if not engine.has_image(image):
                    raise Refused(f"there is no image {image}")
                return ""
            case ["helm", "install" | "upgrade", release, chart, "-n", self._node.namespace, "-f", values]:
                where = ["--namespace", self._node.namespace, "--values", str(self._cwd / values)]
                self._node.apply(objects(helm("template", release, str(self._cwd / chart), *where)), wait=False)
                return ""
            case ["helm", "uninstall", _, "-n", self._node.namespace]:
                for pod in list(self._node.pods):
                    self._node.end(pod)
                return ""
            case ["kubectl", "create" | "delete", "namespace", self._node.namespace]:
                return ""
            case ["kubectl", "-n", self._node.namespace, *words]:
                return self._kubectl(words)
        raise Refused(f"not known here: {' '.join(argv)}")

    def _name_images(self, registry: str) -> str:
        """Tag the images of an earlier build as a build of now would name them."""
        for image in ("gateway", "config", "sidecar", "adapter-cpu"):
            engine.podman("tag", f"sie-{image}:{VERSION}", f"{registry}/sie-{image}:{VERSION}")
        return ""

    def _kubectl(self, words: Sequence[str]) -> str:
        match words:
            case ["create", "secret", "generic", name, *literals]:
                pairs = (literal.removeprefix("--from-literal=").partition("=") for literal in literals)
                self._node.secrets[name] = {key: value for key, _, value in pairs}
                return ""
            case ["get", "secret", name, "-o", path]:
                (key,) = re.fullmatch(r"jsonpath=\{\.data\.([\w-]+)\}", path).groups()  # type: ignore[union-attr]
                return base64.b64encode(self._node.secrets[name][key].encode()).decode()
            case ["rollout", "status", workload, "--timeout", _]:
                for pod in self._node.of(workload.removeprefix("deployment/")):
                    self._node.wait_ready(pod, _READY_S)
                return ""
            case ["port-forward", service, ports]:
                ours, _, theirs = ports.partition(":")
                address = self._node.address(service.removeprefix("service/"), int(theirs))
                asyncio.run(_forward(int(ours), *address))
            case ["delete", "pvc", "-l", _]:
                return ""
        raise Refused(f"not known here: kubectl {' '.join(words)}")


async def _forward(port: int, host: str, far_port: int) -> None:
    """Forward a port until cancelled."""
    async with TcpProxy(far_port, host=host, own_port=port):
        await asyncio.Event().wait()
