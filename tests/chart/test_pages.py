"""Commands and queries of the pages for operators name objects of the chart and metrics of the table."""

from __future__ import annotations

import re
from typing import Any

import promql_parser as promql
import yaml
from helm import CHART, CHOSEN, container, containers, objects, of_kind, pod, rendered, template, variables, workloads
from metrics_page import every
from monitoring import parts_of
from pages import DOCS, blocks

from sie_contracts.settings import load

FILE = "values-gke.yaml"
# the runbook without its code block
RUNBOOK = re.sub(r"^```.*?^```$", "", (DOCS / "runbook.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
TYPED = {
    page.name: re.findall(r"\b(?:kubectl|helm|kind) [^`\n]*(?:\\\n[^`\n]*)*", page.read_text("utf-8"))
    for page in DOCS.glob("*.md")
}
COMMANDS = [(page, command) for page, commands in TYPED.items() for command in commands]


def test_every_selector_finds_pods() -> None:
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(rendered(FILE)).values()]
    selectors = [
        (page, key, value)
        for page, command in COMMANDS
        for key, value in re.findall(r"-l ([\w./-]+)=([\w-]+)", command)
    ]
    assert len(selectors) >= 4
    assert [selector for selector in selectors if not any(own.get(selector[1]) == selector[2] for own in labels)] == []


def test_every_object_container_and_file_is_there() -> None:
    manifests = [*rendered(FILE), *rendered("values-kind.yaml")]
    names = {"deployment": workloads(manifests).keys(), "service": of_kind("Service", manifests).keys()}
    objects = [
        (page, kind, name)
        for page, command in COMMANDS
        for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", command)
    ]
    assert {kind for _, kind, _ in objects} == {"deployment", "service"}
    assert [reference for reference in objects if reference[2] not in names[reference[1]]] == []
    own = {
        container_spec["name"]
        for workload in workloads(rendered(FILE)).values()
        for container_spec in pod(workload)["containers"]
    }
    container_names = set(re.findall(r"-c ([\w-]+)", " ".join(command for _, command in COMMANDS) + RUNBOOK))
    assert {"adapter", "worker-sidecar"} == container_names <= own
    files = {file for _, command in COMMANDS for file in re.findall(r"charts/sie-cluster/(\S+\.yaml)", command)}
    assert files
    assert [file for file in files if not (CHART / file).is_file()] == []
    (loaded,) = [set(command.split()[3:]) for _, command in COMMANDS if command.startswith("kind load")]
    images = {container_spec["image"] for _, _, container_spec in containers(rendered("values-kind.yaml"))}
    assert loaded == {image for image in images if image.startswith("sie-")}


def test_the_first_hour_s_values_render_step_by_step() -> None:
    """Each block of the page is merged into the values file of the blocks before it."""
    page = DOCS / "first-hour.md"
    steps = [yaml.safe_load(block.code) for block in blocks(page, "yaml")]
    assert len(steps) == 4
    values, releases = steps[0], []
    for step in steps:
        values = merged(values, step)
        releases.append(objects(template(values=values)))
    first, tls, scaled, watched = releases
    images = {
        container_spec["image"] for _, _, container_spec in containers(first) if "/sie-" in container_spec["image"]
    }
    pushed = re.search(r"for image in ([a-z -]+); do docker push \$REGISTRY/sie-\$image:(\S+);", page.read_text())
    assert pushed is not None
    assert images == {f"registry.example.com/sie/sie-{name}:{pushed[2]}" for name in pushed[1].split()}
    text = page.read_text("utf-8")
    (claim,) = re.findall(r"([\d.]+) free cores and ([\d.]+) GiB of free memory", text)
    assert requested(first) == (float(claim[0]), float(claim[1]))
    (ingress,) = of_kind("Ingress", tls).values()
    assert ingress["spec"]["tls"][0]["secretName"] in text.partition("create secret tls ")[2].split()[0]
    assert f"https://{ingress['spec']['rules'][0]['host']}/" in text
    assert of_kind("ScaledObject", scaled).keys() == {"sie-worker-cpu"}
    labels = of_kind("ServiceMonitor", watched)["sie-gateway"]["metadata"]["labels"]
    assert f"helm install {labels['release']} prometheus-community/kube-prometheus-stack" in text


def test_a_first_vector_takes_few_commands() -> None:
    """A line with its continuation lines counts as one command."""
    code = "".join(block.code for block in blocks(DOCS / "first-hour.md", "bash"))
    entered = [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    (vector,) = [number for number, line in enumerate(entered, 1) if "/v1/encode/" in line]
    assert vector <= 15


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two values files as two parts of one file."""
    return {
        **below,
        **{
            key: merged(below[key], value) if isinstance(below.get(key), dict) and isinstance(value, dict) else value
            for key, value in above.items()
        },
    }


def requested(manifests: list[Any]) -> tuple[float, float]:
    """Return the cores and the GiB that all pods request at their start."""
    cores, gib = 0.0, 0.0
    scalers = {
        autoscaler["spec"]["scaleTargetRef"]["name"]: autoscaler["spec"]
        for autoscaler in of_kind("HorizontalPodAutoscaler", manifests).values()
    }
    for name, workload in workloads(manifests).items():
        count = scalers[name]["minReplicas"] if name in scalers else workload["spec"]["replicas"]
        for container_spec in pod(workload)["containers"]:
            requests = container_spec["resources"]["requests"]
            cores += count * (float(requests["cpu"].rstrip("m")) / (1000 if requests["cpu"].endswith("m") else 1))
            gib += count * float(requests["memory"][:-2]) / {"Gi": 1, "Mi": 1024}[requests["memory"][-2:]]
    return round(cores, 2), round(gib, 2)


def test_the_table_of_gpu_types_is_that_of_the_values_files() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \|(.*)\|$", (DOCS / "sizing.md").read_text("utf-8").partition("### GPU types")[2], re.MULTILINE
    )
    table = {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}
    profiles = yaml.safe_load((CHART / "values.yaml").read_text())["machineProfiles"]
    assert table.keys() == {name for name, profile in profiles.items() if profile["gpu"]}
    for at, cloud in enumerate(("gke", "eks", "aks"), start=2):
        machine_profiles = yaml.safe_load((CHART / f"values-{cloud}.yaml").read_text())["machineProfiles"]
        for name, cells in table.items():
            selector = machine_profiles.get(name, {}).get("nodeSelector", {})
            assert dict(re.findall(r"`([^:`]+): ([^`]+)`", cells[at])) == selector, (name, cloud)
            assert selector or cells[at] == "no such nodes"
    for name, cells in table.items():
        values = {**CHOSEN, "workers": {"groups": {"cpu": None, "g": {"machineProfile": name}}}}
        environ = variables(container(objects(template(values=values)), "sie-worker-g", "worker-sidecar"))
        default = load(environ={"SIE_MACHINE_PROFILE": name}).settings.max_batch_cost
        assert cells[1] == environ.get("SIE_MAX_BATCH_COST", str(default))


def test_the_secret_that_pages_create_has_every_key_that_is_read() -> None:
    values = [
        value
        for _, _, container_spec in containers(rendered("values-ha.yaml"))
        for value in variables(container_spec).values()
    ]
    read = {value["secretKeyRef"]["key"] for value in values if isinstance(value, dict) and "secretKeyRef" in value}
    assert "nats-route" in read
    (key_list,) = re.findall(r"for key in ([\w\s\\-]+); do", (DOCS / "first-hour.md").read_text("utf-8"))
    keys = set(key_list.replace("\\", " ").split())
    assert read <= keys


def test_every_query_of_the_runbook_asks_for_what_is_exported() -> None:
    """The queries, and the names of metrics with `by` and a label, are of the table of metrics."""
    metrics = {name: metric for metric in every().values() for name in metric.exported}
    queries = [snippet for snippet in re.findall(r"`([^`]+)`", RUNBOOK) if re.search(r"\bsie_\w+\[", snippet)]
    assert len(queries) >= 4
    for query in queries:
        nodes = list(parts_of(promql.parse(query)))
        (selector,) = [node for node in nodes if isinstance(node, promql.VectorSelector)]
        own = {*metrics[selector.name].labels, "le"}
        for node in nodes:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                assert {*node.modifier.labels} <= own, query
    for name, label in re.findall(r"`(sie_\w+)` by `(\w+)`", RUNBOOK):
        assert label in {*metrics[name].labels, "pod"}, name
