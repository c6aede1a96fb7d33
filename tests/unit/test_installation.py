"""`tools/installation.py`: the build of torch that a machine gets, its index, and the messages of failures."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import installation
import pytest
from installation import Installer, StepFailed

VERSION = "2.13.0"
PLAIN, CPU = VERSION, f"{VERSION}+cpu"
NOWHERE = "http://127.0.0.1:9/simple"


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def index(folder: Path, *versions: str) -> Iterator[str]:
    """Serve a package index on loopback with these builds of torch. The plain build requires a CUDA library."""
    (folder / "torch").mkdir(parents=True)
    for version in versions:
        metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        needs = "" if "+" in version else "Requires-Dist: nvidia-cublas\n"
        with zipfile.ZipFile(folder / "torch" / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            below = f"torch-{version}.dist-info"
            wheel.writestr(f"{below}/METADATA", metadata + needs)
            wheel.writestr(f"{below}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{below}/RECORD", "")
    handler = functools.partial(_QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="index")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty environment as on Linux without a GPU, whose pip has only the configuration of the test."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(installation, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv"


def torch_build(environment: Path, variables: dict[str, str], configured: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install torch, and return its version in the environment."""
    monkeypatch.setenv("PIP_INDEX_URL", configured)
    installer = Installer(environment, variables)
    installer.pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python")]
    installer.install_torch(VERSION)
    (metadata,) = environment.glob("lib/*/site-packages/torch-*.dist-info")
    return metadata.name.removeprefix("torch-").removesuffix(".dist-info")


def test_a_machine_without_a_gpu_takes_the_cpu_build_of_the_configured_index(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "CPU_INDEX", NOWHERE)
    with index(tmp_path / "index", PLAIN, CPU) as configured:
        assert torch_build(environment, {}, configured, monkeypatch) == CPU
    assert capsys.readouterr().out.count("\n") == 1, "one line of progress for a step"


def test_an_index_without_the_cpu_build_is_followed_by_the_index_of_pytorch(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index(tmp_path / "index", PLAIN) as configured, index(tmp_path / "pytorch", CPU) as pytorch:
        monkeypatch.setattr(installation, "CPU_INDEX", pytorch)
        assert torch_build(environment, {}, configured, monkeypatch) == CPU


def test_where_no_index_has_the_cpu_build_one_line_says_what_to_set(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constraints.txt").write_text("torch<=2.14.1")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setattr(installation, "CPU_INDEX", NOWHERE)
    with index(tmp_path / "index", PLAIN) as configured, pytest.raises(StepFailed) as failure:
        torch_build(environment, {}, configured, monkeypatch)
    message = str(failure.value)
    assert "\n" not in message
    assert f"no index here offers torch=={CPU}" in message
    assert "set TORCH_INDEX" in message
    assert str(environment / "install.log") in message
    assert not list(environment.glob("lib/*/site-packages/torch*")), "nothing with CUDA was installed instead"
