"""The console behind a reverse proxy that serves it below a prefix (SIE_ROOT_PATH)."""

from __future__ import annotations

from collections.abc import Iterator

import local_models
import pytest
from browser import HOST, Page, browsing, tab, typed
from cluster import Cluster, running
from playground import CELLS, COPIED, ask, by_curl, by_python, choose
from prefix_proxy import PrefixProxy, proxying

pytestmark = pytest.mark.debian

PREFIX = "/some/prefix"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("prefix-models"))
    models.build("mini")
    arguments = (*models.arguments, "--no-spare", "--allowed-hosts", HOST)
    with running(tmp_path_factory.mktemp("prefix"), *arguments, environ={"SIE_ROOT_PATH": PREFIX}) as cluster:
        yield cluster


@pytest.fixture(params=[True, False], ids=["stripped", "kept"])
def proxy(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[PrefixProxy]:
    with proxying(cluster.url, PREFIX, strips=request.param) as proxy:
        yield proxy
        assert proxy.outside == []


@pytest.fixture(params=["/", ""], ids=["slash", "no slash"])
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, proxy: PrefixProxy
) -> Iterator[Page]:
    """A page at the prefix. After the test it has logged no error and asked nothing outside the prefix."""
    own = f"http://{HOST}:{proxy.port}{PREFIX}"
    with browsing(tmp_path_factory.mktemp("chromium")) as devtools, tab(devtools) as page:
        page.open(f"{own}{request.param}")
        page.evaluate(COPIED)
        yield page
        assert [
            complaint for complaint in page.complaints if "status of 503" not in complaint
        ] == []  # a page repeats its request while a model is loaded
        beside = [url for url in page.asked if url != own and not url.startswith((f"{own}/", "data:"))]
        assert beside == []


def test_every_view_answers_below_the_prefix(page: Page, proxy: PrefixProxy) -> None:
    page.wait("document.querySelector('#model')?.value", bool, timeout_s=30)
    choose(page, "encode", "test/mini")
    typed(page, "#texts", "a cat\na kitten")
    ask(page)
    vectors = [item["dense"]["values"] for item in by_curl(page)["items"]]
    sdk_vectors = by_python(page, '[element["dense"].tolist() for element in results]')
    assert [pytest.approx(vector, abs=1e-6) for vector in vectors] == sdk_vectors

    page.evaluate("location.hash = '#models'")
    rows = page.wait(CELLS.format("#catalogue"), bool)
    assert [row[0].split() for row in rows] == [["test/mini", "Profiles:", "bf16"]]
    page.evaluate("document.querySelector('#catalogue a').click()")
    page.wait("document.querySelectorAll('.revisions tr').length", bool)

    page.evaluate("location.hash = '#cluster'")
    page.wait("document.getElementById('connection')?.innerText", lambda state: state == "healthy")
    page.wait(CELLS.format("#workers"), lambda rows: rows and rows[0][1] == "healthy")
    page.evaluate("location.hash = '#cluster/pools'")
    page.wait(CELLS.format("#pools"), bool)
