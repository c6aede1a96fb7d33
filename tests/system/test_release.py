"""Output of `make release`: whole, checked by its sums, and enough for each use alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import distribution
import dockerfiles
import measure
import pytest
import version
from cluster import until
from nats_server import NatsServer
from packaging.utils import canonicalize_name

from sie_cli.serve.ports import free_port

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("release")]
NOW = version.current()
WHEEL = f"sie_cluster-{NOW}-py3-none-any.whl"
ALIAS = f"sie_sdk_alias-{NOW}-py3-none-any.whl"
CHART = f"sie-cluster-{NOW}.tgz"
BILL = f"sie-cluster-{NOW}.cdx.json"
SUMS = "SHA256SUMS"
# as in the Makefile: what pip would choose by itself brings CUDA
TORCH = next(requirement for requirement in distribution.EXTRAS["adapter"] if requirement.startswith("torch=="))
COMPILED = "adapter-cuda"  # nvcc compiles a requirement of it
# what a user of the extra runs first; {sie} is its command line, {python} its Python
FIRST = {
    "cli": ["{sie}", "--help"],
    "serve": ["{sie}", "serve", "--help"],
    "openai-tokens": [
        "{python}",
        "-c",
        "import importlib.util, sys; sys.exit(not importlib.util.find_spec('bpe_openai'))",
    ],
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("release") / "dist"
    argv = [sys.executable, "tools/release.py", "--dirty", "--without-images", "--out", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / SUMS).read_text() in done.stdout
    assert "left out: images" in done.stdout
    return out


@pytest.mark.long
def test_all_that_is_handed_out_is_there_and_has_its_sum(dist: Path) -> None:
    names = {path.name for path in dist.iterdir()}
    assert names == {WHEEL, ALIAS, f"sie_cluster-{NOW}.tar.gz", CHART, BILL, SUMS}
    assert {line.split("  ")[1] for line in (dist / SUMS).read_text().splitlines()} == names - {SUMS}
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=dist, capture_output=True, check=True)


@pytest.mark.long
def test_the_wheel_has_every_module_and_the_catalogue_and_nothing_of_the_tests(dist: Path) -> None:
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {module.file for folder in measure.PACKAGES for module in measure.modules(folder)}
    own = {
        str(file.relative_to(ROOT / folder))
        for folder in measure.PACKAGES
        for file in modules
        if file.is_relative_to(ROOT / folder)
    }
    assert own <= names
    assert "sie_contracts/catalog/bundles/default.yaml" in names
    assert {name.partition("/")[0] for name in names} == set(measure.FOLDERS)


def _install(extra: str, dist: Path, folder: Path) -> list[str]:
    """Install an extra from the wheel into the empty environment `venv` in a folder, with the pinned versions. Return
    the command line of pip for this environment.
    """
    venv, pins = folder / "venv", folder / "constraints.txt"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    # PYTHONPATH may have a tree with the metadata of this distribution, which pip would take for installed
    pip = ["env", "-u", "PYTHONPATH", sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    pip.append("--disable-pip-version-check")
    pins.write_text(distribution.constraints(extra))
    batches = [[f"{dist / WHEEL}[{extra}]"]]
    if "torch" in distribution.named(extra):
        batches.insert(0, [TORCH])
    for batch in batches:
        argv = [*pip, "install", "--quiet", "--no-compile", "--constraint", str(pins), *batch]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout
    return pip


@pytest.mark.long
@pytest.mark.parametrize("image", [image for image in dockerfiles.images() if image != COMPILED])
def test_the_extra_of_an_image_alone_starts_its_process(image: str, dist: Path, tmp_path: Path) -> None:
    """The steps are those of a Dockerfile: an extra in an empty environment, without the files that trim.sh deletes, an
    ENTRYPOINT and a HEALTHCHECK.
    """
    venv, port = tmp_path / "venv", free_port()
    _install(f"image-{image}", dist, tmp_path)
    subprocess.run(["sh", ROOT / "docker" / "trim.sh", venv], check=True, timeout=300)
    size = sum(file.stat().st_size for file in venv.rglob("*") if file.is_file() and not file.is_symlink())
    assert size <= dockerfiles.budgets()[image]
    environ = {
        "PATH": f"{venv / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "HOME": str(tmp_path),
        "SIE_GATEWAY_METRICS_PORT": str(free_port()),
        "SIE_WORKER_METRICS_PORT": str(free_port()),
        "SIE_IPC_SOCKET_PATH": str(tmp_path / "ipc.sock"),
    }
    stage = dict(dockerfiles.last_stage(image))
    argv = json.loads(stage["ENTRYPOINT"])
    if "EXPOSE" in stage and stage["EXPOSE"].startswith("80"):
        argv += ["--port", str(port)]
    check = [re.sub(r"(?<=127\.0\.0\.1:)80\d\d", str(port), word) for word in dockerfiles.health_check(image)]
    with contextlib.ExitStack() as stack:
        if image != "serve":  # it has its own broker
            environ["SIE_NATS_URL"] = stack.enter_context(NatsServer(tmp_path / "broker")).url
        log = stack.enter_context((tmp_path / "log").open("w+"))
        process = subprocess.Popen(
            [venv / "bin" / argv[0], *argv[1:]], env=environ, cwd=tmp_path, stdout=log, stderr=log
        )
        stack.callback(process.kill)

        def is_healthy() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            probe = [venv / "bin" / check[0], *check[1:]]
            return subprocess.run(probe, env=environ, capture_output=True, timeout=60).returncode == 0

        until(is_healthy, 120, f"{image} healthy", (tmp_path / "log").read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.long
@pytest.mark.parametrize("extra", distribution.FOR)
def test_an_extra_works_alone_in_an_empty_environment(extra: str, dist: Path, tmp_path: Path) -> None:
    """The extra is installed from the wheel. No requirement is missing or in conflict, and all modules of the extra are
    imported.
    """
    venv, pip = tmp_path / "venv", _install(extra, dist, tmp_path)
    python = str(venv / "bin" / "python")
    environ = {**os.environ, "HOME": str(tmp_path)}  # no setting of the user's
    code = f"import importlib\nfor name in {distribution.modules_of(extra)!r}: importlib.import_module(name)"
    commands = [[python, "-W", "ignore", "-c", code]]
    if extra in FIRST:
        commands.append([word.format(sie=venv / "bin" / "sie", python=python) for word in FIRST[extra]])
    for argv in commands:
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, text=True, check=True, timeout=60)
    installed = {canonicalize_name(package["name"]) for package in json.loads(listed.stdout)}
    assert distribution.named(extra) <= installed
    if extra == "cli":
        run = subprocess.run([venv / "bin" / "sie", "gateway"], env=environ, capture_output=True, text=True, timeout=60)
        assert run.returncode == 2
        assert run.stderr.endswith(" is not installed: pip install 'sie-cluster[gateway]'\n")
        assert run.stderr.startswith("error: the package ")
        assert run.stderr.count("\n") == 1
