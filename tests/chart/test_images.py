"""The images: hadolint, what the chart and compose expect of them, and packages that are enough and not too many."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from dockerfiles import (
    ALL,
    ROOT,
    VERSION,
    budgets,
    composed,
    dockerfile,
    health_check,
    images,
    installed,
    last_stage,
    stages,
)
from helm import CHART, containers, rendered, workloads
from inprocess import InProcess
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from selection import long_but

from sie_cli import main as cli
from sie_contracts.settings import BY_NAME, load
from sie_sidecar.process import limits_of

IMAGES = images()
SLIM = ("gateway", "config", "sidecar")
PROCESSES = {
    "gateway": "sie_gateway.process",
    "config": "sie_config_service.process",
    "sidecar": "sie_sidecar.process",
    "adapter": "sie_adapter.process",
    "serve": "sie_cli.serve.standalone",
}
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
OWN = (*BUILD["dev-mode-dirs"], "catalog")
_LEFT_OUT = re.compile(  # the files that docker/trim.sh removes
    r"/tests/|/numpy/(f2py|distutils)/|\.(pyi|pyx|pxd|h|a)$"
    r"|/pyarrow/(include/.*|libarrow_(python_)?flight\.so.*|libarrow_s3\.so.*|_(flight|s3fs|gcsfs|azurefs|hdfs)\..*)$"
    r"|/bpe_openai/[^/]*\.so$|/phonenumbers/(geodata|carrierdata|tzdata)/"
)
SYMBOLS_BYTES = 16_000_000  # strip removes at least as much


def test_there_is_one_for_each_that_the_chart_names() -> None:
    named = {
        container_spec["image"].partition(":")[0].rpartition("/")[2]
        for _, _, container_spec in containers(rendered("everything.yaml"))
    } - {"nats"}
    named |= {
        container_spec["image"].partition(":")[0].rpartition("/")[2]
        for _, _, container_spec in containers(rendered("values-gke.yaml"))
    } - {"nats"}
    assert named == {f"sie-{image}" for image in IMAGES if image != "serve"}


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


@pytest.mark.parametrize("image", IMAGES)
def test_the_code_is_no_part_of_what_its_dependencies_are_made_of(image: str) -> None:
    build_stages = stages(dockerfile(image))
    copied = [rest for word, rest in build_stages["dependencies"] if word == "COPY"]
    assert copied == ["constraints.txt .", "pyproject.toml docker/trim.sh ./"]
    assert [rest for word, rest in build_stages["code"] if word == "COPY"] == [". ."]


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


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is(image: str) -> None:
    directives = dict(last_stage(image))
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]*)"', directives["LABEL"]))
    title = labels["title"].replace("${COMPONENT}", image)
    assert (title, labels["licenses"]) == (f"sie-{image}", "Apache-2.0")
    assert {"version", "base.name"} <= labels.keys()
    assert ("ARG", f"VERSION={VERSION}") in last_stage(image)
    told_by_make = subprocess.run(
        [
            "make",
            "-n",
            f"image-{image}",
            "SOURCE=https://git.example.com/sie",
            "TORCH_INDEX=",
            "REGISTRY=r.example.com/x",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    assert f"-t r.example.com/x/sie-{image}:{VERSION} " in told_by_make
    for argument in (
        f"--build-arg VERSION={VERSION} ",
        f"--build-arg COMPONENT={image} ",
        "--build-arg TORCH_INDEX=''",
        "--label org.opencontainers.image.source='https://git.example.com/sie'",
        "--label org.opencontainers.image.revision=",
    ):
        assert argument in told_by_make


def test_health_checks_ask_what_processes_answer() -> None:
    """Health checks use ports that the chart declares, and the path /healthz."""
    ports = {
        container_spec["name"]: container_spec.get("ports", ())
        for _, _, container_spec in containers(rendered("values.yaml"))
    }
    for image, container, port in (
        ("gateway", "gateway", 9090),
        ("config", "config", 8081),
        ("sidecar", "worker-sidecar", 9095),
    ):
        check = health_check(image)[2]
        assert "/healthz" in check
        assert str(port) in check
        assert port in {declared_port["containerPort"] for declared_port in ports[container]}


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


def test_all_that_compose_names_is_there() -> None:
    """Files, volumes, services and hosts of addresses exist, and each variable of the user has a default."""
    text = (ROOT / "docker-compose.yml").read_text()
    compose = composed()
    services = compose["services"]
    assert all(":-" in variable for variable in re.findall(r"\$\{([^}]*)\}", text))
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source != "./models":  # the container engine creates this folder if it does not exist
                assert (ROOT / source).is_file() if source.startswith("./") else source in compose["volumes"]
        mentions = " ".join([*map(str, service.get("command", ())), *map(str, service.get("environment", {}).values())])
        assert set(re.findall(r"\b(?:http|nats)://([a-z]+):", mentions)) <= services.keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "for this machine alone"


def test_nothing_that_git_ignores_is_sent_to_a_build() -> None:
    """Environments, packages of Node and weights have gigabytes."""
    ignored = [line for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("#")]
    excluded = (ROOT / ".dockerignore").read_text().split()
    for line in ignored:
        prefix = "" if line.startswith("/") else "**/"
        assert any(fnmatch.fnmatch(prefix + line.strip("/"), pattern) for pattern in excluded), line


def test_compose_waits_for_a_broker_that_reads_its_store_as_long_as_the_chart() -> None:
    """A failed check ends the start of all services that wait for the broker, except in the start period."""
    check = composed()["services"]["nats"]["healthcheck"]
    (broker,) = workloads(rendered("values.yaml"))["sie-nats"]["spec"]["template"]["spec"]["containers"]
    probe = broker["startupProbe"]
    assert check["start_period"] == f"{probe['periodSeconds'] * probe['failureThreshold']}s"


def test_spans_go_where_the_collector_of_compose_listens() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (mounted,) = services["collector"]["volumes"]
    assert services["collector"]["command"][-1] == mounted.split(":")[1]
    config = yaml.safe_load((ROOT / mounted.partition(":")[0]).read_text())
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for name in ("gateway", "config", "sidecar", "adapter"):
        environ = services[name]["environment"]
        assert environ["SIE_TRACING_ENABLED"] == "${SIE_TRACING_ENABLED:-false}"
        assert environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://collector:{port}"
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= config[kind].keys()


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


def test_compose_gives_its_processes_models_payloads_and_the_token_that_changes_models() -> None:
    services = composed()["services"]

    def settings(name: str, variable: str) -> str | None:
        value: str | None = services[name]["environment"].get(variable)
        return value

    for variable, readers in (
        ("SIE_PAYLOAD_STORE_URL", ("gateway", "sidecar")),
        ("SIE_MODELS_DIR", ("config", "adapter", "standalone")),
    ):
        (folder,) = {settings(name, variable) for name in readers}
        (volume,) = {
            volume.partition(":")[0]
            for name in readers
            for volume in services[name]["volumes"]
            if volume.split(":")[1] == folder
        }
        assert volume == {"SIE_PAYLOAD_STORE_URL": "payloads", "SIE_MODELS_DIR": "./models"}[variable]
        assert set(readers) - {"standalone"} == {
            name
            for name, service in services.items()
            if variable in service.get("environment", {}) and "profiles" not in service
        }
    assert {settings(name, "SIE_ADMIN_TOKEN") for name in ("gateway", "config", "standalone")} == {""}
    assert "SIE_ADMIN_TOKEN" not in {*services["sidecar"]["environment"], *services["adapter"]["environment"]}


@pytest.mark.parametrize(
    ("variables", "requests", "wait_s"),
    [({}, 64, 0.01), ({"SIE_MAX_BATCH_REQUESTS": "128", "SIE_MAX_BATCH_WAIT_MS": "5"}, 128, 0.005)],
)
def test_the_standalone_service_takes_the_bounds_of_its_batches_from_the_environment(
    variables: Mapping[str, str], requests: int, wait_s: float
) -> None:
    service = composed(variables)["services"]["standalone"]
    assert "--standalone" in service["command"]
    limits = limits_of(load(environ=service["environment"], mode="standalone").settings, "standalone")
    assert (limits.requests, limits.wait_s) == (requests, wait_s)


def test_compose_starts_without_what_observes_it() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {name for name, definition in services.items() if definition.get("profiles") == ["observability"]} == {
        "prometheus",
        "collector",
    }
    for name, service in services.items():
        assert "profiles" in service or not {"prometheus", "collector"} & {*service.get("depends_on", ())}, name
        assert "profiles" in service or service["restart"] == "on-failure", name


def extras_within(name: str, extras: Mapping[str, list[str]]) -> set[str]:
    """Return this extra and all extras that it names, at any depth."""
    named = re.findall(r"^sie-cluster\[(.*)\]$", "\n".join(extras[name]), re.MULTILINE)
    return {name}.union(*(extras_within(extra, extras) for some in named for extra in some.split(",")))


def test_the_install_steps_name_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for image in IMAGES:
        (own,) = [word for word in installed(image) if word.startswith(".")]
        assert {image.partition("-")[0], "cli", "tracing"} <= extras_within(own[2:-1], project["optional-dependencies"])
        pinned = [word for word in installed(image) if not word.startswith(".")]
        assert all("==" in word for word in pinned)
    torch = next(
        requirement for requirement in project["optional-dependencies"]["adapter"] if requirement.startswith("torch")
    )
    assert all(torch in installed(image) for image in ("adapter-cpu", "adapter-cuda", "serve"))
    (flash,) = (word for word in installed("adapter-cuda") if word.startswith("flash-attn=="))
    assert flash in project["optional-dependencies"]["flash"]


def needs(name: str, extras: set[str]) -> list[Requirement]:
    """Return the requirements of a distribution with these extras; for sie-cluster, those of pyproject.toml. A
    distribution that is not installed here has none.
    """
    if name == "sie-cluster":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        parts = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
        return [Requirement(text) for part in parts for text in part]
    try:
        requirements = [Requirement(text) for text in importlib.metadata.distribution(name).requires or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        need
        for need in requirements
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in {"", *extras})
    ]


@functools.cache
def closure(image: str) -> frozenset[str]:
    """Return the names of all distributions that an image installs, without sie-cluster."""
    extras: dict[str, set[str]] = {}
    due = [Requirement("sie-cluster" + word[1:] if word.startswith(".") else word) for word in installed(image)]
    while due:
        requirement = due.pop()
        name = canonicalize_name(requirement.name)
        if name not in extras or requirement.extras - extras[name]:
            extras.setdefault(name, set()).update(requirement.extras)
            due += needs(name, extras[name])
    return frozenset(extras) - {"sie-cluster"}


def files_of(name: str) -> list[Path]:
    files = importlib.metadata.distribution(name).files or ()
    return [path for path in (Path(str(file.locate())) for file in files) if path.is_file()]


@pytest.mark.parametrize("image", SLIM)
def test_the_small_images_are_small_and_without_torch(image: str) -> None:
    names = closure(image)
    assert not names & {"torch", "transformers", "gliner"}
    files = [path for name in names for path in files_of(name) if not _LEFT_OUT.search(path.as_posix())]
    own = (path for folder in OWN for path in (ROOT / folder).rglob("*") if path.is_file())
    files += [path for path in own if path.parent.name != "__pycache__"]  # .dockerignore excludes that folder
    assert 100_000_000 < sum(path.stat().st_size for path in files) < budgets()[image] + SYMBOLS_BYTES


_BLOCKED = """
import importlib.metadata, sys
from packaging.utils import canonicalize_name
allowed, argv, module = set(sys.argv[1].split(",")), sys.argv[2].split(), sys.argv[3]
owners = importlib.metadata.packages_distributions()
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("numpy.") and {"tests", "f2py", "distutils"} & set(name.split(".")):
            raise ModuleNotFoundError(f"{name} is removed", name=name)
        found = owners.get(name.partition(".")[0])
        if found and not allowed & {canonicalize_name(each) for each in found}:
            raise ModuleNotFoundError(f"No module named {name!r} in this image", name=name)
for name in [name for name in sys.modules if name.partition(".")[0] == "packaging"]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
import importlib
from sie_cli.main import main
importlib.import_module(module)
try:
    main(argv)
except SystemExit as end:
    sys.exit(end.code)
"""


@pytest.mark.parametrize("image", long_but(IMAGES, ["gateway", "adapter-cpu"]))
def test_what_an_image_installs_is_enough_for_its_process(image: str) -> None:
    """The process is imported and its command prints its help while no other distribution can be imported."""
    component = image.partition("-")[0]
    argv = [
        sys.executable,
        "-c",
        _BLOCKED,
        ",".join({*closure(image), "sie-cluster"}),
        f"{component} --help",
        PROCESSES[component],
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"Usage: {component}" in done.stdout or f" {component} [OPTIONS]" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_the_cuda_image_installs_can_be_had_together(tmp_path: Path) -> None:
    """pip resolves all packages under constraints.txt. The result satisfies the requirements of flash-attn, which the
    image compiles.
    """
    compiled = next(word for word in installed("adapter-cuda") if word.startswith("flash-attn=="))
    words = [word for word in installed("adapter-cuda") if word != compiled]
    words[words.index(".[image-adapter-cuda]")] = ".[image-adapter]"  # the extra without the compiled package
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    resolve = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(tmp_path / "report")]
    done = subprocess.run(
        [*resolve, "--constraint", "constraints.txt", *words], cwd=ROOT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report").read_text())
    versions = {
        canonicalize_name(package["metadata"]["name"]): package["metadata"]["version"] for package in report["install"]
    }
    assert versions["torch"].partition("+")[0] == "2.13.0"
    environ = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    fetch = [
        *pip,
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--report",
        "-",
        compiled,
    ]
    done = subprocess.run(fetch, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (flash,) = json.loads(done.stdout)["install"]
    needed = [Requirement(text) for text in flash["metadata"].get("requires_dist", ())]
    for need in needed:
        assert need.marker is not None or versions[canonicalize_name(need.name)] in need.specifier
