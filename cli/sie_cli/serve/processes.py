"""Processes of `sie serve`: the same processes as in a cluster, on one machine, with the same code.

nats-server ─► config service, gateways, sidecars, adapters ─► ready
SIGTERM, SIGINT, SIGHUP ─► gateways drain ─► sidecars ─► adapters ─► config service ─► nats-server ─► exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import secrets
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from sie_cli import access
from sie_cli.access import OPERATOR, Access
from sie_cli.data_dir import default_data_dir, private_folder, socket_path
from sie_cli.models.lookup import NamedModel
from sie_cli.serve import environment
from sie_cli.serve.embedded import EmbeddedBroker
from sie_cli.serve.output import LineOutput
from sie_cli.serve.ports import free_port
from sie_cli.serve.preflight import store_bytes
from sie_cli.serve.readiness import FailedLoad, Probe, failed_load, lacks_workers, not_ready, unread_stream
from sie_cli.serve.supervisor import Child, Supervisor
from sie_contracts.loopback import is_loopback, verification
from sie_contracts.models.trust import Allowed
from sie_contracts.settings import BY_NAME, ROWS, Secret, SettingError, SettingRow, Settings, public_url
from sie_runtime.process import Tasks, end_signals
from sie_store.models_folder import in_use, place_of

BROKER = "nats-server"
READY_POLL_S = 0.1
TELL_EVERY_S = 10.0
REPEAT = 3  # during the start, an unchanged status line is printed only every third time
BROKER_POLL_S = 2.0
ROOM_BYTES = 8 << 20  # if a disk that was full has more free bytes than this, `sie serve` restarts the broker
EXAMPLE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# Seconds in which a process must end: a gateway in _GATEWAY_GRACE_S, of which _DRAIN_S are for its drain, a sidecar or
# adapter in _WORKER_GRACE_S, the config service or broker in _LAST_GRACE_S. The kinds of processes stop in turn.
_DRAIN_S, _GATEWAY_GRACE_S, _WORKER_GRACE_S, _LAST_GRACE_S = 8.0, 9.5, 3.0, 1.5
# Seconds for which a sidecar drains. A short time is enough: the gateways have ended, so only jobs still have work, and
# jobs continue after the next start.
_WORKER_DRAIN_S = 1.5
_logger = logging.getLogger("sie.serve")


@dataclass(frozen=True)
class ServePlan:
    """Options of one run of `sie serve`. `once`: arguments that each process except the broker gets at its
    first start only.
    """

    host: str
    port: int
    data_dir: Path
    standalone: bool
    workers: int
    gateways: int
    spare: bool
    settings: Settings
    flags: Mapping[str, str]
    environ: Mapping[str, str]
    once: tuple[str, ...] = ()
    models: tuple[NamedModel, ...] = ()  # models named on the command line


class LocalCluster:
    """Processes of one run of `sie serve`."""

    def __init__(self, plan: ServePlan) -> None:
        self._plan = plan
        self._say = LineOutput(json=plan.settings.log_json)
        self._flags = dict(plan.flags)
        self._environ = dict(plan.environ)
        self._stop = asyncio.Event()
        self._readiness: dict[str, Probe] = {}
        # name -> probe that checks whether a gateway sees all workers; these probes run after those of the processes
        self._visibility: dict[str, Probe] = {}
        self._lacking = ""  # reason why a model from the command line cannot be loaded; empty if none failed
        self._embedded: EmbeddedBroker | None = None
        self._admin_token = plan.settings.admin_token or Secret(secrets.token_urlsafe(32))
        # the broker's last log lines about streams; `unread_stream` finds in them the stream that the broker reads now
        self._restores: deque[str] = deque(maxlen=1000)
        self._metrics_urls: dict[str, list[str]] = {}  # "gateway" or "worker" -> URLs for probes and metrics

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        supervisor = Supervisor(self._printed)

        def on_signal(number: int) -> None:
            if self._stop.is_set():
                supervisor.kill_all()
                os._exit(128 + number)
            self._say("serve", "stopping; a second signal kills all processes")
            self._stop.set()

        for number in end_signals():
            loop.add_signal_handler(number, on_signal, number)
        with contextlib.ExitStack() as published:
            try:
                self._set_defaults()
                groups = self._children()
                published.enter_context(access.published(self._plan.data_dir, self._access()))
            except OSError as error:
                raise SettingError(
                    "--data-dir", f"{error.filename or self._plan.data_dir}: {error.strerror}"
                ) from error
            return await self._supervised(supervisor, *groups)

    def _printed(self, name: str, lines: Sequence[str], level: str) -> None:
        if name == BROKER:
            self._restores.extend(line for line in lines if "for stream" in line)
        self._say(name, *lines, level=level)

    async def _supervised(self, supervisor: Supervisor, *groups: list[Child]) -> int:
        broker, config, gateways, sidecars, adapters = groups
        children = [*broker, *config, *gateways, *sidecars, *adapters]
        self._say("serve", f"starting {', '.join(child.name for child in children)}")
        tasks = Tasks(_logger, self._stop.set)
        try:
            for child in children:
                await supervisor.start(child)
            tasks.start(self._until_ready(supervisor), "readiness")
            if broker:
                tasks.start(self._watch_broker(supervisor, broker[0]), "broker health")
            stopping = asyncio.create_task(self._stop.wait(), name="stop")
            ends: list[asyncio.Future[Any]] = [stopping, supervisor.fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await tasks.cancel()
        finally:
            for group in (gateways, sidecars, adapters, config, broker):
                await supervisor.stop(group)
        if supervisor.fatal.done():
            self._say("serve", supervisor.fatal.result(), level="ERROR")
            return 2
        if self._lacking:
            self._say("serve", self._lacking, level="ERROR")
            return 1
        self._say("serve", "stopped")
        return int(tasks.failed)

    def _set_defaults(self) -> None:
        """Set defaults that fit this machine better than the documented defaults. Keep the settings of the operator."""
        plan = self._plan
        device, _, _ = plan.settings.device.partition(",")  # all devices of a worker have the same type
        cpu = device == "cpu" or (
            device in ("auto", "all") and not Path("/dev/nvidia0").exists() and sys.platform != "darwin"
        )
        if cpu and not plan.settings.machine_profile and not plan.settings.gpu_type:
            self._flags["SIE_MACHINE_PROFILE"] = "cpu"
        elif cpu and "SIE_GPU_COUNT" not in self._environ.keys() | self._flags.keys():
            # 0 GPUs select the CPU defaults even if the operator named a machine profile
            self._flags["SIE_GPU_COUNT"] = "0"
        self._environ.setdefault("SIE_CONFIG_READ_TOKEN", secrets.token_urlsafe(24))
        self._environ["SIE_ADMIN_TOKEN"] = self._admin_token.reveal()
        for name, value in (("SIE_GATEWAY_HEALTH_MODE", "nats"), ("SIE_GATEWAY_API_METRICS", "true")):
            if name not in self._environ:
                self._flags.setdefault(name, value)
        if plan.settings.payload_store_url is None:
            payloads = private_folder(plan.data_dir / "payloads")
            # a standalone process has its references to payloads in memory, so payloads of an earlier one are useless
            if plan.standalone:
                payloads /= "standalone"
                shutil.rmtree(payloads, ignore_errors=True)
                private_folder(payloads)
            self._flags["SIE_PAYLOAD_STORE_URL"] = str(payloads)

    def _children(self) -> tuple[list[Child], list[Child], list[Child], list[Child], list[Child]]:
        """Return five lists of processes: broker, config service, gateways, sidecars, adapters. In standalone mode, one
        process replaces the first four kinds; it is in the third list.
        """
        plan, settings = self._plan, self._plan.settings
        workers = []
        for number in range(plan.workers):
            path = str(socket_path(plan.data_dir, number))
            BY_NAME["SIE_IPC_SOCKET_PATH"].read(path)
            workers.append({"SIE_IPC_SOCKET_PATH": path, **self._worker_id(number)})
        spare = [] if plan.spare else ["--no-spare"]
        adapters = [
            self._child(_numbered("adapter", number, plan.workers), "adapter", spare, own, _WORKER_GRACE_S)
            for number, own in enumerate(workers)
        ]
        if settings.gateway_url is None:
            self._flags["SIE_GATEWAY_URL"] = ",".join(self._urls(plan.port, plan.gateways))
        worker_port = settings.worker_metrics_port or free_port(plan.workers)
        gateway_port = settings.gateway_metrics_port or free_port(plan.gateways)
        self._metrics_urls = {
            "gateway": self._urls(gateway_port, plan.gateways),
            "worker": self._urls(worker_port, plan.workers),
        }
        if settings.gateway_workers is None:
            self._flags["SIE_GATEWAY_WORKERS"] = ",".join(self._metrics_urls["worker"])
        if plan.standalone:
            self._flags |= {"SIE_WORKER_METRICS_PORT": str(worker_port), "SIE_GATEWAY_METRICS_PORT": str(gateway_port)}
            extra = ["--host", plan.host, "--port", str(plan.port), "--data-dir", str(plan.data_dir)]
            extra += ["--workers", str(plan.workers), "--drain-s", str(_DRAIN_S)]
            alone = self._child("standalone", "standalone", extra, {}, _GATEWAY_GRACE_S + _WORKER_GRACE_S)
            self._await_gateway("gateway", plan.port)
            for number in range(plan.workers):
                self._await_answer(f"worker {number}", worker_port + number)
            return [], [], [alone], [], adapters
        broker: list[Child] = []
        if settings.nats_url is None:
            self._embedded = EmbeddedBroker.configure(plan.data_dir, store_bytes(plan.data_dir))
            environ = environment.of_broker(self._environ, self._embedded.environ)
            broker = [Child(BROKER, self._embedded.argv, environ, _LAST_GRACE_S)]
        elif "SIE_NATS_URL" in self._flags:
            # Pass the URL in the environment: it may contain a password, and process lists show flags.
            self._environ["SIE_NATS_URL"] = self._flags.pop("SIE_NATS_URL")
        config: list[Child] = []
        if settings.config_service_url is None:
            config_port = free_port()
            self._flags["SIE_CONFIG_SERVICE_URL"] = f"http://127.0.0.1:{config_port}"
            config = [self._child("config", "config", ["--port", str(config_port)], {}, _LAST_GRACE_S)]
        gateways = []
        for number in range(plan.gateways):
            extra = ["--host", plan.host, "--port", str(plan.port + number), "--drain-s", str(_DRAIN_S)]
            extra += ["--data-dir", str(plan.data_dir)]
            own = {"SIE_GATEWAY_METRICS_PORT": str(gateway_port + number)}
            name = _numbered("gateway", number, plan.gateways)
            gateways.append(self._child(name, "gateway", extra, own, _GATEWAY_GRACE_S))
            self._await_gateway(name, plan.port + number)
        sidecars = []
        for number, worker in enumerate(workers):
            port = worker_port + number
            own = {**worker, "SIE_WORKER_METRICS_PORT": str(port)}
            name = _numbered("sidecar", number, plan.workers)
            extra = ["--host", plan.host, "--drain-s", str(_WORKER_DRAIN_S)]
            sidecars.append(self._child(name, "sidecar", extra, own, _WORKER_GRACE_S))
            self._await_answer(name, port)
        return broker, config, gateways, sidecars, adapters

    def _await_answer(self, name: str, port: int) -> None:
        self._readiness[name] = functools.partial(not_ready, url=f"{self._url(port)}/readyz")

    def _await_gateway(self, name: str, port: int) -> None:
        self._await_answer(name, port)
        if self._plan.settings.gateway_workers is not None:
            # do not wait until the gateway sees the workers that this command starts: it reads only the workers in
            # SIE_GATEWAY_WORKERS, which may be others
            return
        self._visibility[f"workers, as {name} sees them"] = functools.partial(
            lacks_workers, url=f"{self._url(port)}/health", token=self._admin_token, count=self._plan.workers
        )

    def _url(self, port: int) -> str:
        """Return the URL at which programs on this machine reach a port."""
        return f"http://{_reachable(self._plan.host)}:{port}"

    def _urls(self, first_port: int, count: int) -> list[str]:
        return [self._url(first_port + number) for number in range(count)]

    def _worker_id(self, number: int) -> dict[str, str]:
        if self._plan.workers == 1:
            return {}
        base = self._plan.settings.worker_id or "worker"
        return {"SIE_WORKER_ID": f"{base}-{number}"}

    def _child(self, name: str, role: str, extra: list[str], own: Mapping[str, str], grace_s: float) -> Child:
        components = ("gateway", "config", "sidecar") if role == "standalone" else (role,)
        flags = {**self._flags, **own}
        argv = [*_command(), role, "--warned", *extra]
        for row in ROWS:
            if row.name in flags and not row.secret and not set(components).isdisjoint(row.components):
                argv += flag(row, flags[row.name])
        environ = environment.of_components(components, self._environ, self._plan.settings)
        if self._embedded is not None:
            environ |= self._embedded.credentials(role)
        if role == "adapter" and resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
            # oneDNN reads this variable at its start. Its default, 1,024 cached kernels of about 0.3 MB, would be too
            # much for a process with limited memory.
            environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
        return Child(name, argv, environ, grace_s, self._plan.once)

    async def _until_ready(self, supervisor: Supervisor) -> None:
        """Wait until all processes are ready. Stop `sie serve` if a model from the command line cannot be loaded."""
        started_s = last_reported_s = time.monotonic()
        last_line, repeats = "", 0
        waiting = {**self._readiness, **self._visibility}
        failures: dict[str, FailedLoad] = {}
        gateway = self._url(self._plan.port)
        async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=verification(gateway)) as client:
            while True:
                reasons = {name: await probe(client) for name, probe in waiting.items()}
                waiting = {name: probe for name, probe in waiting.items() if reasons[name] is not None}
                for model in self._plan.models:
                    failed = await failed_load(client, gateway, self._admin_token, model.name)
                    if failed is not None and failed.is_final:
                        self._lacking = (
                            f"{model.name} cannot be loaded: {failed.message}. `sie serve` can start if you leave this "
                            "MODEL out; the first request for the model then tries to load it again"
                        )
                        self._stop.set()
                        return
                    if failed is not None and failed != failures.get(model.name):
                        failures[model.name] = failed
                        self._say("serve", f"{model.name}: {failed}; Ctrl-C ends this command", level="WARNING")
                if not waiting:
                    break
                name = next(iter(waiting))  # report only the first process: later ones usually wait for it
                line = f"waiting for {name}: {reasons[name]}"
                if time.monotonic() - last_reported_s > TELL_EVERY_S:
                    last_reported_s = time.monotonic()
                    repeats = repeats + 1 if line == last_line else 0
                    last_line = line
                    if repeats % REPEAT == 0:
                        self._say("serve", line)
                    self._tell_unread()
                await asyncio.sleep(READY_POLL_S)
            has_page = await not_ready(client, f"{gateway}/") is None
        if self._restores:  # the broker has read all streams: write the access file again, with `unread_stream` empty
            self._publish_again(self._access())
        supervisor.is_up = True
        self._say("serve", f"ready in {time.monotonic() - started_s:.1f} s")
        self._greet(has_page=has_page)

    def _tell_unread(self) -> None:
        """Print and publish the name of the stream that the starting broker reads. If the stream's files are damaged,
        the broker may read for ever.
        """
        if stream := unread_stream(self._restores):
            data_dir = shlex.quote(str(self._plan.data_dir))
            self._say(
                "serve",
                f"the broker reads the files of its stream {stream}; if that does not end, they are damaged: stop this "
                f"`sie serve`, run `sie repair {stream} --data-dir {data_dir}`, start it again",
            )
            self._publish_again(msgspec.structs.replace(self._access(), unread_stream=stream))

    def _publish_again(self, written: Access) -> None:
        """Replace the access file. If this fails, print a warning: the old file still has the right addresses."""
        try:
            access.publish(self._plan.data_dir, written)
        except OSError as error:
            self._say(
                "serve", f"{self._plan.data_dir / access.FILE} was not written: {error.strerror}", level="WARNING"
            )

    async def _watch_broker(self, supervisor: Supervisor, broker: Child) -> None:
        """Restart the broker when a full disk has space again. The broker refuses all writes until this restart."""
        embedded = self._embedded
        assert embedded is not None
        is_reported = False
        verify = verification(embedded.monitor_url)
        async with httpx.AsyncClient(timeout=2.0, trust_env=False, verify=verify) as client:
            while True:
                await asyncio.sleep(BROKER_POLL_S)
                reason = await not_ready(client, f"{embedded.monitor_url}/healthz")
                if reason is None or "write error" not in reason:
                    is_reported = False
                    continue
                if shutil.disk_usage(self._plan.data_dir).free > ROOM_BYTES:
                    self._say("serve", "the disk of the queue has space again, the broker is restarted")
                    supervisor.restart(broker)
                elif not is_reported:
                    reason = f"the queue cannot be written: free some space on the disk of {self._plan.data_dir}"
                    self._say("serve", reason, level="ERROR")
                    is_reported = True

    def _access(self) -> Access:
        plan, embedded, models = self._plan, self._embedded, Allowed(models_dir=self._plan.settings.models_dir)
        # Commands send the admin token below to `config_url`, so omit the URL of another config service.
        is_ours = plan.settings.config_service_url is None
        return Access(
            gateway_url=",".join(self._urls(plan.port, plan.gateways)),
            config_url=self._flags.get("SIE_CONFIG_SERVICE_URL", "") if is_ours else "",
            broker_url=embedded.url if embedded else "",
            broker_monitor_url=embedded.monitor_url if embedded else "",
            operator_password=embedded.passwords[OPERATOR] if embedded else "",
            admin_token=self._admin_token.reveal(),
            metrics_urls=tuple(url for urls in self._metrics_urls.values() for url in urls),
            models_dir=place_of(models),
        )

    def _greet(self, *, has_page: bool) -> None:
        """Print where to look. `has_page`: a package adds a page at `/` to the gateway."""
        plan = self._plan
        url = self._url(plan.port)
        page = f", live status: {url}/" if has_page else ""
        if self._embedded:
            broker = self._embedded.url
        else:
            broker = "in process" if plan.standalone else public_url(self._environ["SIE_NATS_URL"])
        here = "" if plan.data_dir == default_data_dir() else f" --data-dir {shlex.quote(str(plan.data_dir))}"
        elsewhere = public_url(plan.settings.config_service_url or "")
        mode = plan.settings.auth_mode
        token = "" if mode == "none" else " -H 'Authorization: Bearer TOKEN'"
        examples = [example_request(model, url, token) for model in plan.models]
        if not examples:
            serves_example = plan.settings.bundle == "default" and EXAMPLE_MODEL in (
                plan.settings.model_filter or [EXAMPLE_MODEL]
            )
            examples = [f"curl {url}/v1/models{token}"]
            if serves_example:
                examples = [f"curl {url}/v1/encode/{EXAMPLE_MODEL}{token} -d '{_BODIES['encode']}'"]
        lines = [
            f"API     {url}  (docs: {url}/docs{page})",
            f"queue   {broker}",
            f"data    {plan.data_dir}",
        ]
        if models := in_use(Allowed(models_dir=plan.settings.models_dir)):
            lines.append(f"folder  {models}  (your own models)")
        metrics = (f"{name} {', '.join(f'{url}/metrics' for url in urls)}" for name, urls in self._metrics_urls.items())
        lines.append(f"metrics {'; '.join(metrics)}")
        if self._access().config_url or plan.standalone:
            lines.append(f"models  sie models list{here}")
        if elsewhere:
            lines.append(f"models  sie models list --url {elsewhere}")
        if mode == "token":
            lines.append(f"keys    sie keys create NAME{here if self._embedded else f' --url {broker}'}")
        for line in (*lines, *(f"try     {example}" for example in examples)):
            self._say("serve", line)
        if mode == "none" and not is_loopback(plan.host):
            self._say(
                "serve",
                f"warning: anyone who reaches {plan.host} port {plan.port} can use this server: SIE_AUTH_MODE is none",
                level="WARNING",
            )


_BODIES: Mapping[str, str] = {
    "encode": '{"items": [{"text": "Hello"}]}',
    "score": '{"query": "Who wrote the first program?", "items": ["Paris is in France.", "Ada Lovelace, in 1843."]}',
    "extract": '{"items": ["Ada met Charles in London."], "params": {"labels": ["person", "place"]}}',
}


def example_request(model: NamedModel, url: str, token: str) -> str:
    """Return a shell command that sends a request to a model, for its first task."""
    if "text" not in model.entry.inputs:
        return f"sie try {model.name} @FILE"
    task = model.entry.tasks[0]
    return f"curl {url}/v1/{task}/{model.name}{token} -d '{_BODIES[task]}'"


def _numbered(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name}.{number}"


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _command() -> list[str]:
    """Return the argv that starts this program. If possible, its name is `sie` in lists of processes."""
    script = Path(sys.argv[0])
    return (
        [sys.executable, str(script)] if script.name == "sie" and script.exists() else [sys.executable, "-m", "sie_cli"]
    )


def flag(row: SettingRow, raw: str) -> list[str]:
    if isinstance(row.default, bool):
        return [row.flag if row.read(raw) else f"--no-{row.flag[2:]}"]
    return [row.flag, raw]
