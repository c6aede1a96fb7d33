"""The images: hadolint, what the chart and compose expect of them, and packages that are enough and not too many."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfiles import (
    ALL,
    ROOT,
    VERSION,
    dockerfile,
    health_check,
    images,
    last_stage,
    stages,
)
from helm import CHART, containers, rendered
from inprocess import InProcess

from sie_cli import main as cli
from sie_contracts.settings import BY_NAME

IMAGES = images()


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", *ALL], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_the_charts_user_with_a_health_check(image: str) -> None:
    """The process of the image is process 1, because a shell before it would not pass signals on."""
    instructions = last_stage(image)
    words = [word for word, _ in instructions]
    directives = dict(instructions)
    (security,) = {
        json.dumps(spec["securityContext"]["runAsUser"]) for _, spec, _ in containers(rendered("everything.yaml"))
    }
    assert directives["USER"] == security
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert json.loads(directives["ENTRYPOINT"]) == ["sie", image.partition("-")[0]]
    assert "CMD" not in words
    command = health_check(image)
    assert command[:2] == ["python", "-ISc"]
    compile(command[2], image, "exec")
    assert "ADD" not in words
    copied = [rest for word, rest in instructions if word == "COPY"]
    assert copied == ["--from=dependencies /opt/sie /opt/sie", "--from=code /opt/code /opt/sie"], "the code comes last"


def test_each_image_from_elsewhere_is_pinned_in_one_place() -> None:
    """Each has a full name, a version and a digest."""
    compose = ROOT / "docker-compose.yml"
    texts = [re.sub(r"(?m)^\s*#.*$", "", path.read_text()) for path in (*ALL, compose)]
    named = [
        name for text in texts for name in re.findall(r"(?:ARG [A-Z]+=|image: (?:\$\{\w+:-)?)([^\s}\"]+/[^\s}]+)", text)
    ]
    named = [name for name in named if not name.startswith("https://")]
    assert len(named) == 6
    assert len({*named}) == len(named)
    for name in named:
        assert re.fullmatch(r"docker\.io/[a-z]+/[a-z-]+:v?\d[a-z0-9.-]*@sha256:[0-9a-f]{64}", name), name
    for path in ALL:
        build_stages = stages(path)
        for stage in build_stages.values():
            (base,) = [rest.partition(" AS ")[0] for word, rest in stage if word == "FROM"]
            assert base in build_stages or base in ("${BASE}", "${CUDA}", "${COMPONENT}"), base


async def test_health_checks_pass_while_a_process_serves_and_fail_afterwards(tmp_path: Path) -> None:
    """Each check runs as in the image: by Python alone, with one environment variable."""

    async def passes(image: str, **environ: str) -> bool:
        _, *arguments = health_check(image)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=environ, stderr=asyncio.subprocess.DEVNULL
        )
        return await asyncio.wait_for(process.wait(), 60) == 0

    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway()
        adapter = await cluster.adapter()
        sidecar = await cluster.sidecar(adapter)
        checks = [
            ("gateway", {"SIE_GATEWAY_METRICS_PORT": str(gateway.settings.gateway_metrics_port)}),
            ("sidecar", {"SIE_WORKER_METRICS_PORT": str(sidecar.settings.worker_metrics_port)}),
            ("adapter-cpu", {"SIE_IPC_SOCKET_PATH": adapter.path}),
            ("adapter-cuda", {"SIE_IPC_SOCKET_PATH": adapter.path}),
        ]
        assert [await passes(image, **environ) for image, environ in checks] == [True] * 4
    assert [await passes(image, **environ) for image, environ in checks] == [False] * 4


def test_compose_builds_and_scrapes_what_there_is() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    built = {name: config for name, config in services.items() if "build" in config}
    assert built.keys() == {"gateway", "config", "sidecar", "adapter", "standalone"}
    for service, definition in built.items():
        image = definition["build"]["args"]["COMPONENT"]
        name = {"standalone": "serve"}.get(service, service)
        assert (definition["image"], image.partition("-")[0]) == (f"sie-{image}:{VERSION}", name)
        assert definition["build"]["dockerfile"] == dockerfile(image).relative_to(ROOT).as_posix()
        assert definition["read_only"] is True
        assert "/tmp" in definition["tmpfs"]
        for variable in definition.get("environment", {}):
            assert variable in BY_NAME, f"{name}: {variable}"
        cli.main.commands[name].make_context(name, list(definition.get("command", ())), resilient_parsing=False)
    (mounted,) = [volume.partition(":")[0] for volume in services["prometheus"]["volumes"] if volume.startswith("./")]
    scraped = yaml.safe_load((ROOT / mounted).read_text())["scrape_configs"]
    targets = {target for job in scraped for config in job["static_configs"] for target in config["targets"]}
    assert targets == {"gateway:9090", "config:8081", "sidecar:9095"}
    (nats,) = re.findall(r":-docker\.io/library/(.*)@", services["nats"]["image"])
    assert nats == yaml.safe_load((CHART / "values.yaml").read_text())["nats"]["image"]
