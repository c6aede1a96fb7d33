"""What pages tell an operator to type on a cluster: objects, labels, containers and keys are the chart's, queries the
table's.
"""

from __future__ import annotations

import re

import promql_parser as promql
from helm import CHART, containers, of_kind, pod, rendered, variables, workloads
from metrics_page import every
from monitoring import parts_of
from pages import DOCS

FILE = "values-gke.yaml"
# without its block
RUNBOOK = re.sub(r"^```.*?^```$", "", (DOCS / "runbook.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
TYPED = {
    page.name: re.findall(r"\b(?:kubectl|helm|kind) [^`\n]*(?:\\\n[^`\n]*)*", page.read_text("utf-8"))
    for page in DOCS.glob("*.md")
}
COMMANDS = [(page, command) for page, commands in TYPED.items() for command in commands]


def test_every_selector_finds_pods() -> None:
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads(rendered(FILE)).values()]
    asked = [
        (page, key, value)
        for page, command in COMMANDS
        for key, value in re.findall(r"-l ([\w./-]+)=([\w-]+)", command)
    ]
    assert len(asked) >= 4
    assert [each for each in asked if not any(own.get(each[1]) == each[2] for own in labels)] == []


def test_every_object_container_and_file_is_there() -> None:
    names = {"deployment": workloads(rendered(FILE)).keys(), "service": of_kind("Service", rendered(FILE)).keys()}
    objects = [
        (page, kind, name)
        for page, command in COMMANDS
        for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", command)
    ]
    assert {kind for _, kind, _ in objects} == {"deployment", "service"}
    assert [each for each in objects if each[2] not in names[each[1]]] == []
    own = {each["name"] for workload in workloads(rendered(FILE)).values() for each in pod(workload)["containers"]}
    asked = set(re.findall(r"-c ([\w-]+)", " ".join(command for _, command in COMMANDS) + RUNBOOK))
    assert {"adapter", "worker-sidecar"} == asked <= own
    files = {file for _, command in COMMANDS for file in re.findall(r"charts/sie-cluster/(\S+\.yaml)", command)}
    assert files
    assert [file for file in files if not (CHART / file).is_file()] == []
    (loaded,) = [set(command.split()[3:]) for _, command in COMMANDS if command.startswith("kind load")]
    images = {each["image"] for _, _, each in containers(rendered("values-kind.yaml"))}
    assert loaded == {image for image in images if image.startswith("sie-")}


def test_the_secret_that_pages_create_has_every_key_that_is_read() -> None:
    found = [value for _, _, each in containers(rendered("values-ha.yaml")) for value in variables(each).values()]
    read = {value["secretKeyRef"]["key"] for value in found if isinstance(value, dict) and "secretKeyRef" in value}
    assert "nats-route" in read
    for page in ("quickstart.md", "kubernetes.md"):
        (made,) = re.findall(r"for key in ([\w\s\\-]+); do", (DOCS / page).read_text("utf-8"))
        keys = set(made.replace("\\", " ").split())
        assert read <= keys, page


def test_every_query_of_the_runbook_asks_for_what_is_exported() -> None:
    """Queries, and names with `by` a label."""
    known = {name: metric for metric in every().values() for name in metric.exported}
    queries = [each for each in re.findall(r"`([^`]+)`", RUNBOOK) if re.search(r"\bsie_\w+\[", each)]
    assert len(queries) >= 4
    for query in queries:
        nodes = list(parts_of(promql.parse(query)))
        (selector,) = [node for node in nodes if isinstance(node, promql.VectorSelector)]
        own = {*known[selector.name].labels, "le"}
        for node in nodes:
            if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                assert {*node.modifier.labels} <= own, query
    for name, label in re.findall(r"`(sie_\w+)` by `(\w+)`", RUNBOOK):
        assert label in {*known[name].labels, "pod"}, name
