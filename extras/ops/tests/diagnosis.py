"""`sie doctor` under test: its findings by check, and the commands that its remedies name."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from click.testing import CliRunner
from stack import Stack

import sie_ops.doctor.command as doctor
from sie_cli.main import main
from sie_ops.doctor import probe

TOKEN, READ, ADMIN = "user-token", "read", "admin-token-of-a-test"
COMMAND_S = 60.0
BEATS = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "500"}
_FILLED = {"probe.serve": "sie serve", "serve": "sie serve", "at_broker": " --url URL", "where": " --url URL"}


def commands(text: str) -> list[str]:
    """Return the `sie` commands in backticks."""
    return re.findall(r"`(sie [a-z][^`]*)`", text)


def ran(command: str, **environ: str) -> str:
    """Run a command that a user pastes into a shell, with these settings only, and return its standard output. `sie`
    runs in this process, because its start would take longer than its work.
    """
    program, *arguments = shlex.split(command)
    if program == "sie":
        result = CliRunner().invoke(main, arguments, env=environ)
        assert result.exit_code == 0, f"{result.output}{result.exception!r}"
        return result.stdout
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def doctor_templates() -> set[str]:
    """Return every text of `sie doctor` and of the findings of gateways that names a `sie` command, except docstrings.
    `{}` stands for a value.
    """
    extras = Path(__file__).parents[2]  # the findings of gateways are from the extra `console`
    files = [*Path(str(doctor.__file__)).parent.glob("*.py"), *extras.glob("console/sie_console/findings.py")]
    return {text for file in files for text in _templates(file)}


def _templates(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text("utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inner or id(node) in statements:
            continue
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if commands(text):
            yield text


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return _FILLED.get(ast.unparse(part.value), "{}")
    assert isinstance(part, ast.Constant)
    return str(part.value)


class Examined:
    """The findings of doctor by check."""

    def __init__(self, tmp_path: Path, environ: dict[str, str], *args: str) -> None:
        """Run doctor with these settings only, as on a machine without `sie serve` or a worker."""
        own = {"SIE_LOCAL_CACHE": str(tmp_path), "SIE_DISK_PRESSURE_THRESHOLD_PERCENT": "99", **BEATS, **environ}
        with mock.patch.object(probe, "default_sockets", list):
            result = CliRunner().invoke(
                main, ["doctor", "--json", "--data-dir", str(tmp_path / "data"), *args], env=own
            )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        self.output = result.output
        self.status = result.exit_code
        document: dict[str, Any] = json.loads(result.stdout)
        self.word = document["status"]
        self.states = {check["check"]: check["state"] for check in document["checks"]}
        self.says = {check["check"]: check["says"] for check in document["checks"]}
        self.findings = {check["check"]: check["findings"] for check in document["checks"]}

    def told(self, check: str, wrong: str, fix: str) -> str:
        """Return the remedy of the finding of the check that has both texts."""
        self.named(check, wrong, fix)
        return next(
            str(finding["fix"])
            for finding in self.findings[check]
            if wrong in finding["wrong"] and fix in finding["fix"]
        )

    def named(self, check: str, wrong: str, fix: str) -> None:
        """Assert that a finding of the check has both texts."""
        assert (self.status, self.states[check]) == (1, "wrong"), self.output
        assert any(wrong in finding["wrong"] and fix in finding["fix"] for finding in self.findings[check]), (
            self.findings[check]
        )
        assert all(
            "\n" not in text for group in self.findings.values() for finding in group for text in finding.values()
        )


def environ_of(stack: Stack) -> dict[str, str]:
    """Return the settings of the cluster's processes that doctor reads."""
    worker = stack.workers[0]
    names = ("SIE_IPC_SOCKET_PATH", "SIE_WORKER_METRICS_PORT")
    return {
        "SIE_GATEWAY_URL": stack.urls[0],
        "SIE_NATS_URL": stack.broker_urls,
        "SIE_CONFIG_SERVICE_URL": stack.config_url,
        "SIE_AUTH_TOKEN": TOKEN,
        "SIE_CONFIG_READ_TOKEN": READ,
        "SIE_GATEWAY_METRICS_PORT": stack.metrics_urls[0].rpartition(":")[2],
        **{name: worker.sidecar.environ[name] for name in names},
    }


def health(stack: Stack) -> dict[str, Any]:
    """Return the gateway's own report of its health."""
    answer = httpx.get(
        f"{stack.urls[0]}/health", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=60
    )
    body: dict[str, Any] = answer.json()
    return body
