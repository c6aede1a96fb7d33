"""The images, built by buildah on a base that debootstrap makes, and docker-compose.yml, run by podman.

The tests need no registry of images: the base is a Debian with Python 3.11, and the image of the broker is made of the
nats-server that is installed here. They need root, a mirror of Debian, and the packages debootstrap, buildah, podman,
runc, busybox-static, and golang-github-containernetworking-plugin-dnsname. Layers are kept in build/images, or in the
folder IMAGES_STORE. BUILD_ARGS: arguments that a build needs on this machine, such as mounts of the configuration
of pip. RUN_ARGS: the same for a container.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, until
from dockerfiles import ROOT, VERSION, budgets

NEEDED = ("debootstrap", "buildah", "podman", "runc", "/bin/busybox")
ABSENT = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
    pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}"),
]

_SYS_RESOURCE = 24  # the number of the capability CAP_SYS_RESOURCE
_PROCESSES = 32768  # the most processes of a container, even without a limit for podman


def _ulimits() -> tuple[str, ...]:
    """Return options of podman. Without them it raises the limits of a container, which needs a capability."""
    (effective,) = (
        int(line.split()[1], 16) for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line
    )
    if effective >> _SYS_RESOURCE & 1:
        return ()
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    processes = _PROCESSES if processes == resource.RLIM_INFINITY else min(processes, _PROCESSES)
    return ("--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}")


STORE = Path(os.environ.get("IMAGES_STORE", ROOT / "build" / "images"))
STORAGE = ("--root", str(STORE / "root"), "--runroot", str(STORE / "run"), "--storage-driver", "overlay")
PODMAN = ("podman", *STORAGE, "--cgroup-manager", "cgroupfs", "--runtime", "runc")
BUILDAH = ("buildah", *STORAGE)
BASE = "docker.io/library/python:3.11-slim"
NATS = "docker.io/library/nats:2.12-alpine"
RUN_ARGS = (*_ulimits(), *shlex.split(os.environ.get("RUN_ARGS", "")))
IMAGES = ("gateway", "config", "sidecar", "adapter-cpu", "serve")
SERVICES = ("nats", "config", "gateway", "sidecar", "adapter")
PROJECT = "sie-images-test"
URL = "http://127.0.0.1:8080"
_NATS = """
FROM scratch
COPY busybox nats-server /bin/
RUN ["/bin/busybox", "sh", "-c", "/bin/busybox mkdir -p /tmp /data && /bin/busybox --install /bin"]
ENV PATH=/bin
ENTRYPOINT ["nats-server"]
"""
# runs inside an image, and prints what its environment holds
_HELD = """
import importlib.metadata, json, pathlib, sys
(site,) = (path for path in sys.path if path.startswith("/opt/sie/") and path.endswith("site-packages"))
print(json.dumps({
    "packages": sorted([each.name, each.version] for each in importlib.metadata.distributions(path=[site])),
    "tests": [str(path) for name in ("tests", "bench") for path in pathlib.Path(site).glob(f"sie_*/**/{name}")],
    "bill": json.loads(pathlib.Path("/opt/sie/sbom.cdx.json").read_text()),
}))
"""


def run(*argv: str | Path, cwd: Path = ROOT, timeout_s: float = 3000) -> str:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{shlex.join(map(str, argv))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def podman(*argv: str) -> str:
    return run(*PODMAN, *argv)


def make(*arguments: str, cwd: Path = ROOT) -> str:
    local = f"--isolation chroot --network host --pull-never {os.environ.get('BUILD_ARGS', '')}"
    index = [f"{name}={os.environ.get(name, '')}" for name in ("TORCH_INDEX",)]
    return run("make", *arguments, f"BUILDER={shlex.join(BUILDAH)}", f"BASE={BASE}", *index, f"ARGS={local}", cwd=cwd)


def exists(image: str) -> bool:
    return subprocess.run([*PODMAN, "image", "exists", image]).returncode == 0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> None:
    STORE.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("base")
    if not exists(BASE):
        include = "--include=python3-venv,python3-pip,python-is-python3,ca-certificates,binutils"
        run("debootstrap", "--variant=minbase", include, "bookworm", folder / "root")
        run("tar", "-C", folder / "root", "--exclude=./proc/*", "--exclude=./sys/*", "-cf", folder / "root.tar", ".")
        podman("import", str(folder / "root.tar"), BASE)
    if not exists(NATS):
        shutil.copy("/bin/busybox", folder)
        shutil.copy(Path(sys.executable).with_name("nats-server"), folder)
        (folder / "Dockerfile").write_text(_NATS)
        run(*BUILDAH, "build", "--isolation", "chroot", "--network", "host", "-t", NATS, folder)
    make("images", "image-serve")


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.usefixtures("built")
def test_an_image_holds_what_it_says_and_no_more_than_its_budget(image: str) -> None:
    name = f"localhost/sie-{image}:{VERSION}"
    (details,), (base,) = (json.loads(podman("image", "inspect", reference)) for reference in (name, BASE))
    assert 50_000_000 < details["Size"] - base["Size"] <= budgets()[image]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in details["Labels"].items()}
    assert (labels["version"], labels["title"], labels["licenses"]) == (VERSION, f"sie-{image}", "Apache-2.0")
    assert labels["revision"] == run("git", "rev-parse", "HEAD").strip()
    inside = ("run", "--rm", "--network", "host", *RUN_ARGS, "--read-only")
    assert podman(*inside, "--entrypoint", "sie", name, "--version") == f"sie, version {labels['version']}\n"
    held = json.loads(podman(*inside, "--entrypoint", "python", name, "-c", _HELD))
    packages = {package.lower().replace("_", "-") for package, _ in held["packages"]}
    listed = {
        (component["name"].lower().replace("_", "-"), component["version"])
        for component in [*held["bill"]["components"], held["bill"]["metadata"]["component"]]
    }
    assert listed == {(package.lower().replace("_", "-"), version) for package, version in held["packages"]}
    assert {"sie-cluster", "click"} <= packages
    assert ({"torch", "gliner"} <= packages) is (image in ("adapter-cpu", "serve"))
    assert not packages & {"pip", "pytest", "cyclonedx-bom"}
    assert not held["tests"]


def compose(*arguments: str) -> str:
    program = STORE / "podman"
    # `up` creates containers, and --podman-run-args are for those that are run alone
    prelude = f'case "$1" in create) shift; set -- create {shlex.join(RUN_ARGS)} "$@";; esac'
    program.write_text(f'#!/bin/sh\n{prelude}\nexec {shlex.join(PODMAN)} "$@"\n')
    program.chmod(0o755)
    options = ["--podman-path", str(program), "-p", PROJECT]
    return run("env", f"SIE_NATS_IMAGE={NATS}", Path(sys.executable).with_name("podman-compose"), *options, *arguments)


def state(service: str) -> dict[str, object]:
    details: dict[str, object] = json.loads(podman("inspect", f"{PROJECT}_{service}_1"))[0]["State"]
    return details


@pytest.fixture
def up(built: None) -> Iterator[None]:
    try:
        compose("up", "--detach")
        yield
    finally:
        compose("down", "--volumes", "--timeout", "20")


def answers() -> bool:
    """Return whether the quickstart's first request is answered."""
    try:
        got = httpx.post(f"{URL}/v1/encode/{MODEL}", json={"items": [{"text": "What is deep learning?"}]}, timeout=30)
    except httpx.TransportError:
        return False
    return got.status_code == 200 and got.json()["items"][0]["dense"]["dims"] == 384


@pytest.mark.usefixtures("up")
def test_compose_serves_survives_a_death_and_leaves_nothing() -> None:
    """After `up` the quickstart's request is answered, all health checks pass, and 100 requests are answered. The
    killed sidecar is started again, and requests are answered. After `stop` each process has ended with 0. After `down`
    no container, volume or network is left.
    """
    until(answers, 300, "the first answer")
    for service in SERVICES:
        podman("healthcheck", "run", f"{PROJECT}_{service}_1")
    with httpx.Client(base_url=URL, timeout=30) as client:
        texts = [f"text {number}" for number in range(100)]
        got = [client.post(f"/v1/encode/{MODEL}", json={"items": [text]}).status_code for text in texts]
    assert got == [200] * 100

    before = state("sidecar")["Pid"]
    assert isinstance(before, int)
    os.kill(before, signal.SIGKILL)
    until(lambda: state("sidecar")["Running"] and state("sidecar")["Pid"] != before, 60, "the sidecar is back")
    until(answers, 120, "an answer after that")

    compose("stop", "--timeout", "20")
    assert {service: state(service)["ExitCode"] for service in SERVICES} == dict.fromkeys(SERVICES, 0)
    compose("down", "--volumes")
    for kind in ("ps --all", "volume ls", "network ls"):
        assert PROJECT not in podman(*kind.split(), "--format", "json")
