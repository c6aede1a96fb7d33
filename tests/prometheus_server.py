"""Debian's Prometheus, which scrapes all processes of a stack every second and evaluates the rules of the chart."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml
from monitoring import NAMESPACE, relabelings, spec
from stack import Stack
from zygote import end_with_parent

from sie_cli.serve.ports import free_port

SCRAPE_S = 1


def targets(stack: Stack) -> list[dict[str, Any]]:
    """Return static targets for the processes of a stack, with the labels that the Prometheus operator adds for the
    chart.
    """
    endpoints = [
        *(
            (url, "sie-gateway-metrics", "gateway", f"gateway-{number}")
            for number, url in enumerate(stack.metrics_urls)
        ),
        *(
            (worker.url, "sie-worker", "worker-sidecar", worker.sidecar.name.replace(" ", "-"))
            for worker in stack.workers
        ),
        (stack.config_url, "sie-config", "config", "config-0"),
    ]
    return [
        {
            "targets": [url.removeprefix("http://")],
            "labels": {
                "namespace": NAMESPACE,
                "service": service,
                "container": container,
                "pod": pod,
                "endpoint": "metrics",
            },
        }
        for url, service, container, pod in endpoints
    ]


class Prometheus:
    """One server, with its files in `folder`."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(spec()), "utf-8")
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "sie", "static_configs": targets(stack), "relabel_configs": relabelings()}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), "utf-8")
        port = free_port()
        self.targets = len(targets(stack))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=self._log,
            preexec_fn=end_with_parent,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the `data` of an answer, or None while the server does not answer."""
        try:
            answer = self.client.get(f"/api/v1/{path}", params=parameters)
        except httpx.TransportError:
            assert self._process.poll() is None, "prometheus ended"
            return None
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"] if answer.status_code == 200 else None

    def query(self, expression: str) -> list[Any]:
        """Return the samples of an instant query."""
        answer = self.ask("query", query=expression)
        return [] if answer is None else list(answer["result"])

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[Any]:
        """Return the series of a range query."""
        answer = self.ask("query_range", query=expression, start=f"{start_s}", end=f"{end_s}", step=f"{step_s}")
        assert answer is not None, "prometheus does not answer"
        return list(answer["result"])

    def is_scraping(self) -> bool:
        answer = self.ask("targets")
        health = [target["health"] for target in answer["activeTargets"]] if answer else []
        return len(health) == self.targets and set(health) == {"up"}

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self.client.close()
        self._log.close()
