"""One container, started as rendered, and probed and restarted as by a kubelet.

    create ─► start ─► startup probe ─► readiness and liveness probes ─► it ended, or failed its liveness probe
                ▲                                                            │
                └──────── at once the first time, then after 10, 20 ... 300 s ┘

Each container has a thread for this, its keeper, until its pod ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from helm import Object

from kubelet import engine

if TYPE_CHECKING:
    from kubelet.pods import Pod

KNOWN = {
    "name",
    "image",
    "imagePullPolicy",
    "command",
    "args",
    "env",
    "ports",
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
    "lifecycle",
    "resources",
    "securityContext",
    "volumeMounts",
}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
BACKOFF_S, LONGEST_BACKOFF_S, FORGOTTEN_S = 10.0, 300.0, 600.0
PAUSE_S = 30.0  # the longest time until a busy container can be paused
EXEC_S = 10.0  # time for podman itself around a command in the container
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "m": 1e-3}


def quantity(text: str | int | float) -> float:
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text))
    assert match is not None, f"not a quantity: {text}"
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class Exit:
    """The end of a container. `reason`: ended (by itself), memory (killed by the kernel), liveness (a liveness or
    startup probe failed), terminated (its pod ended).
    """

    status: int
    reason: str
    at_s: float


@dataclass
class Watch:
    """A probe, with the number of its last results that are equal. `told` is its rendered definition."""

    kind: str
    told: Object
    due_s: float
    passed: int = 0
    failed: int = 0
    last: str = ""

    def over(self, passes: bool, now_s: float) -> bool | None:
        """Count a result. Return True if the probe now counts as passed, False if as failed, else None."""
        self.passed, self.failed = (self.passed + 1, 0) if passes else (0, self.failed + 1)
        self.due_s = now_s + self.told.get("periodSeconds", 10)
        if self.passed >= self.told.get("successThreshold", 1):
            return True
        return False if self.failed >= self.told.get("failureThreshold", 3) else None


@dataclass
class Container:
    """A container. `told` is its rendered definition. Any thread may call `end` and `remove` and read the fields; only
    the keeper changes them.
    """

    pod: Pod
    told: Object
    name: str = field(init=False)
    pid: int = 0  # the id of its first process on this machine; 0 while it does not run
    starts: int = 0
    ready: bool = False
    exits: list[Exit] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # failed probes, each with its time

    def __post_init__(self) -> None:
        assert self.told.keys() <= KNOWN, f"{self.told['name']}: not known here: {self.told.keys() - KNOWN}"
        self.name = f"{self.pod.node.prefix}{self.pod.name}-{self.told['name']}"
        self.log_file = self.pod.folder / f"{self.told['name']}.log"
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pidfd = -1
        self._keeper: threading.Thread | None = None
        self._failed: BaseException | None = None

    # --- its life ---

    def create(self) -> None:
        engine.podman("create", *self.options(), self.told["image"], *self._words(self.told.get("args", ())))

    def run_once(self, timeout_s: float) -> None:
        """Run as an init container, which must end with 0."""
        self.create()
        done = engine.run(["start", "--attach", self.name], timeout_s)
        assert done.returncode == 0, f"{self.name}: {done.returncode}\n{done.stdout}{done.stderr}"
        engine.podman("rm", "--force", "--time", "0", self.name)

    def start(self) -> None:
        self.create()
        self._keeper = threading.Thread(target=self._keep, name=self.name, daemon=True)
        self._keeper.start()

    def end(self, grace_s: float) -> None:
        """End the container as a kubelet does: preStop, SIGTERM, and SIGKILL after the grace period. Return when it has
        ended.
        """
        self._ending.set()
        until_s = time.monotonic() + grace_s
        self._stop(until_s, "terminated")
        os.eventfd_write(self._wake, 1)
        if self._keeper is not None:
            self._keeper.join(30)
            assert not self._keeper.is_alive(), f"{self.name} is still kept"

    def remove(self) -> None:
        """Kill and remove the container, also after a failure."""
        self._ending.set()
        os.eventfd_write(self._wake, 1)
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.join(60)
        engine.podman("rm", "--force", "--ignore", "--time", "0", self.name)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to its first process. All others of the container end with that process."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Pause the container, and retry while a process waits for its disk: control groups of version 1 fail then."""
        until_s = time.monotonic() + PAUSE_S
        while True:
            try:
                engine.podman("pause", self.name)
                return
            except engine.EngineError as error:
                if "unable to freeze" not in str(error) or time.monotonic() > until_s:
                    raise

    def resume(self) -> None:
        engine.podman("unpause", self.name)

    # --- its options ---

    def options(self) -> list[str]:
        """Return the options of `podman create`."""
        pod, spec = self.pod, self.told
        user = {**pod.spec.get("securityContext", {}), **spec.get("securityContext", {})}
        arguments = [
            *("--name", self.name, "--label", f"{pod.node.label}", "--pull", "never"),
            *("--network", f"ns:/run/netns/{pod.network}", "--no-hosts", "--hostname", pod.name),
            *(
                "--no-healthcheck",
                "--http-proxy=false",
                "--env-host=false",
                "--log-driver",
                "k8s-file",
                "--log-opt",
                f"path={self.log_file}",
            ),
            *("--volume", f"{pod.hosts}:/etc/hosts:ro", "--volume", f"{pod.resolv}:/etc/resolv.conf:ro"),
            *engine.ulimits(),
        ]
        arguments += self._user_options(user)
        arguments += self._limit_options(spec.get("resources", {}))
        if "command" in spec:
            arguments += ["--entrypoint", json.dumps(self._words(spec["command"]))]
        for name, value in self.environ().items():
            arguments += ["--env", f"{name}={value}"]
        for mount in spec.get("volumeMounts", ()):
            assert mount.keys() <= {"name", "mountPath", "readOnly"}, mount
            access = ":ro" if mount.get("readOnly") else ""
            arguments += ["--volume", f"{pod.volume(mount['name'])}:{mount['mountPath']}{access}"]
        return arguments

    def _user_options(self, user: Object) -> list[str]:
        fields = {
            *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"),
            *("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"),
        }
        assert user.keys() <= fields, f"{self.name}: not known here: {user.keys() - fields}"
        assert user.get("seccompProfile", {}).get("type", "RuntimeDefault") == "RuntimeDefault"
        assert not user.get("runAsNonRoot") or user["runAsUser"] != 0
        arguments: list[str] = []
        if "runAsUser" in user:
            arguments += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        if "fsGroup" in user:
            arguments += ["--group-add", str(user["fsGroup"])]
        if user.get("readOnlyRootFilesystem"):
            arguments += ["--read-only", "--read-only-tmpfs=false"]
        if user.get("allowPrivilegeEscalation") is False:
            arguments += ["--security-opt", "no-new-privileges"]
        assert user.get("capabilities", {}).keys() <= {"drop"}
        for capability in user.get("capabilities", {}).get("drop", ()):
            arguments += ["--cap-drop", capability.lower()]
        return arguments

    def _limit_options(self, resources: Object) -> list[str]:
        """Return the limits. A kubelet limits processes only if configured, and limited memory has no swap."""
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        assert limits.keys() | requests.keys() <= {"cpu", "memory"}, f"{self.name}: {resources}"
        processes = self.pod.node.processes
        arguments = ["--pids-limit", "-1" if processes is None else str(processes)]
        if "memory" in limits:
            memory = str(int(quantity(limits["memory"])))
            arguments += ["--memory", memory, "--memory-swap", memory]
        if "cpu" in limits:
            arguments += ["--cpus", str(quantity(limits["cpu"]))]
        if "cpu" in requests:
            arguments += ["--cpu-shares", str(max(2, int(quantity(requests["cpu"]) * 1024)))]
        return arguments

    def environ(self) -> dict[str, str]:
        environment: dict[str, str] = {}
        for variable in self.told.get("env", ()):
            source = variable.get("valueFrom", {})
            if "value" in variable or not source:
                environment[variable["name"]] = _replaced(variable.get("value", ""), environment)
            elif "fieldRef" in source:
                environment[variable["name"]] = self.pod.field(source["fieldRef"]["fieldPath"])
            else:
                secret_ref = source["secretKeyRef"]
                value = self.pod.node.secrets.get(secret_ref["name"], {}).get(secret_ref["key"])
                assert value is not None or secret_ref.get("optional"), f"{self.name}: no such secret: {secret_ref}"
                if value is not None:
                    environment[variable["name"]] = value
        return environment

    def _words(self, words: Sequence[str]) -> list[str]:
        environ = self.environ()
        return [_replaced(word, environ) for word in words]

    # --- keeping it ---

    def _keep(self) -> None:
        backoff_s = 0.0
        try:
            while not self._ending.is_set():
                began_s = time.monotonic()
                self._launch()
                liveness_failed = self._watch()
                self._set_ready(False)
                if liveness_failed:
                    self._stop(time.monotonic() + self.pod.grace_s, "liveness")
                self._note_exit("liveness" if liveness_failed else "ended")
                if time.monotonic() - began_s > FORGOTTEN_S:
                    backoff_s = 0.0
                self._sleep(backoff_s)
                backoff_s = min(LONGEST_BACKOFF_S, backoff_s * 2 or BACKOFF_S)
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._set_ready(False)

    def _launch(self) -> None:
        engine.podman("start", self.name)
        pid = engine.inspect(self.name)["State"]["Pid"]
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if pid:  # the container has not ended yet
            with contextlib.suppress(ProcessLookupError):
                self._pidfd = os.pidfd_open(pid)
        with self._changed:
            self.pid = pid
            self.starts += 1
            self._changed.notify_all()

    def _watch(self) -> bool:
        """Watch until the container ends, its pod ends, or a liveness probe fails. Return True in the last case."""
        if self._pidfd < 0:
            return False
        now_s = time.monotonic()
        first = [kind for kind in PROBES[:1] if kind in self.told] or [kind for kind in PROBES[1:] if kind in self.told]
        watches = [self._new_watch(kind, now_s) for kind in first]
        if not {"readinessProbe", "startupProbe"} & self.told.keys():
            self._set_ready(True)
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            due_s = min((probe.due_s for probe in watches), default=time.monotonic() + 3600)
            if poll.poll(max(0.0, due_s - time.monotonic()) * 1000):
                return False
            watch = min(watches, key=lambda probe: probe.due_s)
            passes = self._probe(watch)
            if self._ending.is_set():
                return False
            verdict = watch.over(passes, time.monotonic())
            if watch.kind == "readinessProbe" and verdict is not None:
                self._set_ready(verdict)
            elif watch.kind == "startupProbe" and verdict:
                watches = [self._new_watch(kind, time.monotonic()) for kind in PROBES[1:] if kind in self.told]
                if "readinessProbe" not in self.told:
                    self._set_ready(True)
            elif verdict is False:
                return not self._has_ended(0)

    def _new_watch(self, kind: str, now_s: float) -> Watch:
        fields = {
            *("httpGet", "exec", "initialDelaySeconds", "periodSeconds", "timeoutSeconds"),
            *("successThreshold", "failureThreshold"),
        }
        spec = self.told[kind]
        assert spec.keys() <= fields, f"{self.name} {kind}: not known here: {spec.keys() - fields}"
        return Watch(kind, spec, now_s + spec.get("initialDelaySeconds", 0))

    def _probe(self, watch: Watch) -> bool:
        why = self.tried(watch.kind)
        if why:
            self.failures.append(f"{time.monotonic():.1f} {watch.kind}: {why}")
        return not why

    def tried(self, kind: str) -> str:
        """Run a probe. Return the reason of its failure, or an empty string."""
        spec = self.told[kind]
        timeout_s = spec.get("timeoutSeconds", 1)
        if "exec" in spec:
            return self.execute(spec["exec"]["command"], timeout_s)
        http_get = spec["httpGet"]
        port = http_get["port"]
        if isinstance(port, str):
            (port,) = (port_spec["containerPort"] for port_spec in self.told["ports"] if port_spec["name"] == port)
        wire = http.client.HTTPConnection(self.pod.address, port, timeout=timeout_s)
        try:
            wire.request("GET", http_get["path"], headers={"User-Agent": "kube-probe/1.31", "Connection": "close"})
            status = wire.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            wire.close()
        return "" if 200 <= status < 400 else f"status {status}"

    def execute(self, argv: Sequence[str], timeout_s: float) -> str:
        """Run a command in the container. Return the reason of its failure, or an empty string."""
        try:
            done = engine.run(["exec", self.name, *argv], timeout_s + EXEC_S)
        except subprocess.TimeoutExpired:
            return f"{shlex.join(argv)}: not within {timeout_s} s"
        return "" if done.returncode == 0 else f"{shlex.join(argv)}: {done.returncode} {done.stderr.strip()[-300:]}"

    def _stop(self, until_s: float, reason: str) -> None:
        """Run preStop, send SIGTERM, and send SIGKILL at `until_s`."""
        if self._has_ended(0):
            return
        if (hook := self.told.get("lifecycle", {}).get("preStop")) is not None:
            assert hook.keys() == {"exec"}, hook
            why = self.execute(hook["exec"]["command"], max(0.0, until_s - time.monotonic()))
            if why:
                self.failures.append(f"{time.monotonic():.1f} preStop: {why}")
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, engine.inspect(self.name)["Config"]["StopSignal"])
        if not self._has_ended(until_s - time.monotonic()):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            assert self._has_ended(30), f"{self.name} outlives SIGKILL ({reason})"

    def _has_ended(self, timeout_s: float) -> bool:
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _note_exit(self, reason: str) -> None:
        """Record the exit, after waiting for podman, which knows the status a moment after the process has ended."""
        assert self._has_ended(self.pod.grace_s + 60), f"{self.name} does not end"
        status = int(engine.podman("wait", self.name).split()[-1])
        killed = bool(engine.inspect(self.name)["State"]["OOMKilled"])
        reason = "memory" if killed else "terminated" if self._ending.is_set() else reason
        with self._changed:
            self.pid = 0
            self.exits.append(Exit(status, reason, time.monotonic()))
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.poll(seconds * 1000)

    def _set_ready(self, ready: bool) -> None:
        if self.ready != ready:
            self.ready = ready
            self.pod.node.readiness_changed()

    # --- its log and state ---

    def log(self) -> list[str]:
        """Return the lines of its log, without podman's prefix of time and stream."""
        if not self.log_file.exists():
            return []
        lines = self.log_file.read_text(errors="replace").splitlines()
        return [line.split(" ", 3)[-1] for line in lines]

    def check(self) -> None:
        """Raise an AssertionError if its keeper failed."""
        if self._failed is not None:
            raise AssertionError(f"{self.name} is not kept any more") from self._failed

    def cgroup(self, controller: str) -> Path:
        """Return the folder of its control group, of version 1 or 2."""
        for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return Path("/sys/fs/cgroup", controllers) / path.strip("/")
        return Path("/sys/fs/cgroup") / path.strip("/")


def _replaced(text: str, environ: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environ.get(match[1], match[0]), text)
