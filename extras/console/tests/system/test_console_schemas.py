"""Schemas, groups of labels, examples and thresholds in the playground of the console, in a real browser and below a
prefix: each value is shown with its score and place, and a refusal stands beside its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import local_models
import pytest
import typescript_package
from browser import HOST, Page, click, tab, typed
from cluster import Cluster, running
from parity.gliner_checkpoints import gliclass_folder, gliner2_folder
from playground import CELLS, COPIED, ask, bars, by_curl, by_python, by_typescript, choose
from prefix_proxy import PrefixProxy, proxying

pytestmark = pytest.mark.debian

PREFIX = "/some/prefix"
SPANS, CLASSES = "test/spans", "test/gliclass"
TEXT = "search engine 🙂 queue worker stream index vector river mountain at 12 o'clock."
VALUES = CELLS.format(".values tbody")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("schema-models"))
    models.build("gliner")
    gliner2_folder(models.weights / "spans")
    models.add("spans", {"family": "gliner2", "outputs": {"entities": 0}, "max_tokens": 250})
    gliclass_folder(models.weights / "gliclass")
    models.add("gliclass", {"family": "gliclass", "outputs": {"classifications": 0}, "max_tokens": 250})
    arguments = (*models.arguments, "--no-spare", "--allowed-hosts", HOST)
    with running(tmp_path_factory.mktemp("schemas"), *arguments, environ={"SIE_ROOT_PATH": PREFIX}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[PrefixProxy]:
    with proxying(cluster.url, PREFIX, strips=True) as proxy:
        yield proxy
        assert proxy.outside == []


@pytest.fixture
def page(devtools: str, proxy: PrefixProxy) -> Iterator[Page]:
    """The playground of extractions. After the test the page has logged only errors about refused and repeated
    requests.
    """
    with tab(devtools) as page:
        page.open(f"http://{HOST}:{proxy.port}{PREFIX}/#playground/extract")
        page.wait("document.querySelector('#model')?.value", bool, timeout_s=30)
        page.evaluate(COPIED)
        yield page
        assert [
            complaint
            for complaint in page.complaints
            if "status of 503" not in complaint and "status of 400" not in complaint
        ] == []


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built TypeScript client."""
    return typescript_package.copied(tmp_path_factory)


def asked_for(page: Page, model: str, answer: str) -> None:
    choose(page, "extract", model)
    typed(page, "#texts", TEXT)
    typed(page, "#answer", answer)
    page.wait(f"Boolean(document.querySelector('#{answer}'))", bool)


def fault(page: Page, field: str) -> str:
    """Return the text of the alert that describes a field."""
    described = f"document.querySelector('#{field}[aria-invalid=true]')?.getAttribute('aria-describedby')"
    text: str = page.wait(f"document.getElementById({described})?.innerText ?? ''", bool)
    return text


def test_values_of_a_schema_are_shown_with_score_and_place(page: Page, package: Path) -> None:
    asked_for(page, SPANS, "schema")
    sample = json.loads(page.evaluate("document.querySelector('#schema').value"))
    assert {"array", "string", "integer", "boolean"} <= {schema.get("type") for schema in sample["properties"].values()}
    typed(page, "#threshold", "0")
    ask(page)
    (item,) = by_curl(page)["items"]
    places = {row["label"]: row for row in item["entities"]}
    shares = {row["label"]: row["score"] for row in item["classifications"]}
    expected = []
    for name, value in item["data"].items():
        for path, part in (
            [(f"{name}[{at}]", entry) for at, entry in enumerate(value)]
            if value and isinstance(value, list)
            else [(name, value)]
        ):
            row = places.get(path)
            word = part if isinstance(part, str) else json.dumps(part)
            score = row["score"] if row else shares[f"{path}.{word}"]
            expected.append([path, word, f"{score:.4f}", f"{row['start']} to {row['end']}" if row else ""])
    assert page.wait(VALUES, bool) == expected
    assert len(places) > 2
    assert {row[0] for row in expected} >= {"people[0]", "place", "subject", "is_meeting"}
    marks = page.evaluate(
        "[...document.querySelectorAll('.spans mark')].map(mark => [mark.firstChild.data, mark.lastChild.innerText])"
    )
    assert marks
    assert all(TEXT[places[label]["start"] : places[label]["end"]] == text for text, label in marks)
    assert by_python(page, 'results[0]["data"]') == item["data"]
    assert by_typescript(page, package, "results[0]!.data") == item["data"]


def test_groups_examples_and_thresholds_of_labels_are_sent(page: Page) -> None:
    asked_for(page, CLASSES, "groups")
    groups = {"urgency": ["low", "high"], "topic": ["billing", "delivery"]}
    typed(page, "#groups", json.dumps(groups))
    typed(page, "#examples", '[{"text": "Now!", "labels": {"urgency": "high"}}]')
    typed(page, "#thresholds", '{"topic": 0.0}')
    typed(page, "#further", '{"multi_label": true}')
    ask(page)
    (item,) = by_curl(page)["items"]
    assert item["data"]["topic"] == ["billing", "delivery"]
    scores = {row["label"]: row["score"] for row in item["classifications"]}
    expected = []
    for name, labels in item["data"].items():
        expected += [
            [f"{name}[{at}]", label, f"{scores[f'{name}.{label}']:.4f}", ""] for at, label in enumerate(labels)
        ]
        expected += [] if labels else [[name, "none", "", ""]]
    assert page.wait(VALUES, bool) == expected
    assert dict(bars(page)) == pytest.approx(scores, abs=6e-5)
    before = by_python(page, 'results[0]["data"]')
    typed(page, "#examples", "")
    ask(page)
    assert by_python(page, 'results[0]["data"]').keys() == before.keys()
    assert {row["label"]: row["score"] for row in by_curl(page)["items"][0]["classifications"]} != scores


def test_a_refusal_stands_beside_its_field_until_it_is_changed(page: Page) -> None:
    asked_for(page, CLASSES, "schema")
    deep = {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": {"enum": [1]}}}}}}
    for properties, path in ((deep, "a.properties.b"), ({"who": {"type": "string"}}, "who")):
        typed(page, "#schema", json.dumps({"type": "object", "properties": properties}))
        page.wait("document.querySelectorAll('#schema-fault').length", lambda count: count == 0)
        ask(page)
        assert fault(page, "schema").startswith(f"params.output_schema.properties.{path}: ")
    click(page, "#schema-sample")
    page.wait("document.querySelectorAll('#schema-fault').length", lambda count: count == 0)
    typed(page, "#thresholds", '{"subject": 2}')
    ask(page)
    assert fault(page, "thresholds").startswith("params.label_thresholds.subject: ")
    assert page.evaluate("document.querySelector('#thresholds').checkVisibility()")
    typed(page, "#thresholds", "")
    ask(page)
    assert {row[0] for row in page.wait(VALUES, bool)} == {"subject", "is_meeting"}
