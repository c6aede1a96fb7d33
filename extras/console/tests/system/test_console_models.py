"""The models of the console in a real browser: a page shows what the API returns about a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import local_models
import pytest
from browser import HOST, Page, tab
from cluster import Cluster, running, until
from playground import CELLS

pytestmark = pytest.mark.debian

ENCODER, PROFILE, OTHER, BROKEN = "test/mini", "test/mini:bf16", "test/other", "test/broken"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster with a model, the same in 16 bits, and one whose file has another digest than its entry."""
    models = local_models.under(tmp_path_factory.mktemp("detail-models"))
    models.build("mini")
    mini = local_models.KINDS["mini"](models.weights)
    models.add("other", {**mini, "load": {"precision": "bfloat16"}, "description": "The same in sixteen bits."})
    digests = {"model.safetensors": "0" * 64}
    models.add("broken", {**mini, "weights": {**mini["weights"], "digests": digests}, "license": "apache-2.0"})
    with running(
        tmp_path_factory.mktemp("detail"), *models.arguments, "--no-spare", "--allowed-hosts", HOST
    ) as cluster:
        yield cluster


@pytest.fixture
def page(devtools: str) -> Iterator[Page]:
    """A tab. After the test it has logged no error."""
    with tab(devtools) as page:
        yield page
        assert page.complaints == []


def encode(cluster: Cluster, model: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/encode/{model}", json={"items": ["one", "two"]}, timeout=60)


def model_info(cluster: Cluster, model: str) -> dict[str, Any]:
    info: dict[str, Any] = httpx.get(f"{cluster.url}/v1/models/{model}", timeout=10).json()
    return info


def opened(page: Page, cluster: Cluster, model: str) -> None:
    page.open("about:blank")
    page.open(f"http://{HOST}:{cluster.port}/#models/{model}")
    page.wait("document.querySelectorAll('.detail').length", lambda count: count == 1)


CHECKS = (
    "[...document.querySelectorAll('.checks li')].map(element => [...element.children].map(part => part.innerText))"
)
FACTS = (
    "Object.fromEntries([...document.querySelectorAll('{0} > div')].map(element => "
    "[element.firstChild.innerText, element.lastChild.innerText]))"
)


def test_a_certificate_workers_and_profiles_are_read_without_json(page: Page, cluster: Cluster) -> None:
    assert encode(cluster, ENCODER).is_success
    until(lambda: model_info(cluster, ENCODER)["certificate"], 20, "a certificate")
    info = model_info(cluster, ENCODER)
    opened(page, cluster, ENCODER)
    checks = page.wait(CHECKS, bool)
    (packed,) = [check for check in checks if "Packed computation of dense" in check[1]]
    assert packed[0] == "✓ passed"
    assert packed[2] == f"worst cosine {info['certificate']['packed']['dense']:.7f}"
    assert {check[0] for check in checks} <= {"✓ passed", "– not checked"}
    assert "{" not in page.evaluate("document.querySelector('.checks').innerText")
    (host,) = info["hosts"]
    (row,) = page.evaluate(CELLS.format(".hosts tbody"))
    assert row[:2] == [host["worker"], "loaded"]
    assert row[2].endswith("iB")
    assert row[3].endswith(" s")
    assert page.evaluate(FACTS.format(".pairs-of"))["bf16"] == "precision bfloat16"
    assert page.evaluate(FACTS.format(".facts"))["fingerprint"] == info["fingerprint"]


def test_a_check_that_failed_says_which_and_where(page: Page, cluster: Cluster) -> None:
    answer = encode(cluster, BROKEN)
    assert answer.json()["code"] == "MODEL_LOAD_FAILED"
    note = httpx.get(f"{cluster.url}/v1/requests/{answer.headers['x-sie-request-id']}", timeout=10).json()
    stages = note["chunks"][0]["stages"]  # the request waited for the load, which is a stage of its own
    assert stages["load_ms"] >= 0.9 * stages["worker_ms"] > 0
    until(lambda: model_info(cluster, BROKEN)["state"] == "failed", 20, "the failure")
    opened(page, cluster, BROKEN)
    (check,) = page.wait(CHECKS, bool)
    assert check[0] == "✗ failed"
    assert "model.safetensors has the SHA-256" in check[2]
    (row,) = page.evaluate(CELLS.format(".hosts tbody"))
    assert row[1] == "failed"
    reasons = page.evaluate("[...document.querySelectorAll('.detail p.bad')].map(element => element.innerText)")
    assert reasons[0].startswith("It could not be loaded: ")
    assert "Requests are refused until a load by hand succeeds" in reasons[0]
    failed = page.evaluate("[...document.querySelectorAll('.detail p.dim')].map(element => element.innerText)")
    assert f"Load on {row[0]} failed, CERTIFICATE: 1 attempt, no further one by itself" in failed
    page.evaluate("location.hash = '#models'")  # the list has the reason too, with all profiles in one row
    rows = page.wait(CELLS.format("#catalogue"), bool)
    (cells,) = [row for row in rows if row[0].split()[0] == BROKEN]
    assert cells[1].startswith("failed\n")
    assert "model.safetensors has the SHA-256" in cells[1]


def test_an_alias_tells_its_targets_and_how_its_shadow_agrees(page: Page, cluster: Cluster) -> None:
    targets = [{"model": ENCODER, "weight": 3}, {"model": PROFILE, "weight": 1}]
    document = {"id": "search", "alias": targets, "shadow": {"model": OTHER, "share": 1.0}, "force": True}
    headers = {"Authorization": f"Bearer {cluster.access().admin_token}"}
    written = httpx.post(f"{cluster.url}/console/configs", json=document, headers=headers, timeout=30)
    assert written.is_success, written.text
    until(lambda: encode(cluster, "search").is_success, 20, "the alias")

    def done() -> object:
        encode(cluster, "search")
        return model_info(cluster, "search")["alias"]["shadow"]["figures"]["copies"].get("done")

    assert encode(cluster, OTHER).is_success
    until(done, 60, "a copy that is measured")
    opened(page, cluster, "search")
    assert page.evaluate(CELLS.format(".targets tbody")) == [[ENCODER, "3", "75.0 %"], [PROFILE, "1", "25.0 %"]]
    shadow = page.evaluate(FACTS.format(".facts.shadow"))
    assert shadow["model"] == OTHER
    assert shadow["share of requests that are copied"] == "100 %"
    assert "done" in shadow["copies"]
    figures = model_info(cluster, "search")["alias"]["shadow"]["figures"]
    assert float(shadow["mean cosine with what was served"]) == pytest.approx(figures["cosine"], abs=1e-3)


FOLLOWED = """new MutationObserver((_, observer) => {
  const link = document.querySelector('#catalogue a');
  if (!link) return;
  observer.disconnect();
  window.followed = link.getAttribute('href');
  requestAnimationFrame(() => link.click()); // before the effects of the list have run
}).observe(document.body, { childList: true, subtree: true })"""


def test_a_link_that_is_followed_as_it_appears_leads_to_its_model(page: Page, cluster: Cluster) -> None:
    page.open("about:blank")
    page.open(f"http://{HOST}:{cluster.port}/#cluster")
    page.wait("document.getElementById('connection')?.innerText", bool)
    page.evaluate(FOLLOWED)
    page.evaluate("location.hash = '#models'")
    address = page.wait("window.followed", bool)
    page.wait("document.querySelectorAll('.detail').length", lambda count: count == 1)
    assert page.evaluate("location.hash") == address
