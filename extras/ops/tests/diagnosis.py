"""`sie doctor` under test: its findings by check, and the commands that its remedies name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from click.testing import CliRunner
from stack import Stack

from sie_cli.main import main
from sie_ops.doctor import probe

TOKEN, READ, ADMIN = "user-token", "read", "admin-token-of-a-test"
COMMAND_S = 60.0
BEATS = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "500"}


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


class Examined:
    """The findings of doctor by check."""

    def __init__(self, tmp_path: Path, environ: dict[str, str], *args: str) -> None:
        """Run doctor with these settings only, as on a machine without `sie serve` or a worker."""
        own = {"SIE_LOCAL_CACHE": str(tmp_path), "SIE_DISK_PRESSURE_THRESHOLD_PERCENT": "99", **BEATS, **environ}
        # a broker that is away is given up after 2 s
        with mock.patch.object(probe, "default_sockets", list), mock.patch("sie_cli.cluster.CONNECT_S", 2.0):
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
