"""The playground of the console in a real browser: what each view shows is what the API answers, and the code that it
gives to copy is the request that it sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import local_models
import numpy as np
import pytest
import typescript_package
from browser import HOST, Page, tab, typed
from cluster import Cluster, running
from playground import COPIED, KEY, ask, by_curl, by_python, by_typescript, choose, copied

pytestmark = pytest.mark.debian


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("playground-models"))
    models.build("mini")
    with running(
        tmp_path_factory.mktemp("playground"), *models.arguments, "--no-spare", "--allowed-hosts", HOST
    ) as cluster:
        yield cluster


@pytest.fixture
def page(devtools: str, cluster: Cluster) -> Iterator[Page]:
    """The playground. After the test the page has logged no error and asked no other host."""
    own = f"http://{HOST}:{cluster.port}/"
    with tab(devtools) as page:
        page.open(own)
        page.wait("document.querySelector('#model')?.value", bool)
        page.evaluate(COPIED)
        yield page
        assert page.evaluate("window.harmed ?? null") is None
        assert unexpected(page) == []
        assert [url for url in page.asked if not url.startswith((own, "data:"))] == []


def unexpected(page: Page) -> list[str]:
    """Return the errors that the page logged, without those about 503: while a model is loaded, the page repeats its
    request.
    """
    return [complaint for complaint in page.complaints if "status of 503" not in complaint]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built TypeScript client."""
    return typescript_package.copied(tmp_path_factory)


def cosines(vectors: list[list[float]]) -> list[float]:
    rows = np.array(vectors) / np.linalg.norm(vectors, axis=1, keepdims=True)
    products: list[float] = (rows @ rows.T).ravel().tolist()
    return products


HEAT = "[...document.querySelectorAll('.heat td')].map(cell => Number(cell.innerText))"


def test_texts_are_compared_and_their_code_gives_the_same_numbers(page: Page, package: Path) -> None:
    choose(page, "encode", "test/mini")
    typed(page, "#texts", 'a cat\na <b>kitten</b>\nit\'s "stocks" \\ $HOME `id`')
    ask(page)
    shown = page.evaluate(HEAT)
    vectors = [item["dense"]["values"] for item in by_curl(page)["items"]]
    assert shown == pytest.approx(cosines(vectors), abs=0.0051)
    sdk_vectors = by_python(page, '[element["dense"].tolist() for element in results]')
    assert np.abs(np.array(sdk_vectors) - np.array(vectors)).max() < 1e-6
    sdk_vectors = by_typescript(page, package, "results.map((element) => [...element.dense!])")
    assert np.abs(np.array(sdk_vectors) - np.array(vectors)).max() < 1e-6
    assert page.evaluate("document.querySelectorAll('.heat b').length") == 0


def test_code_names_the_key_and_never_shows_it(page: Page, cluster: Cluster, package: Path) -> None:
    page.evaluate(f"sessionStorage.setItem('sie.key', '{KEY}')")
    page.open(f"http://{HOST}:{cluster.port}/?again")
    page.wait("document.querySelector('#sign-out') && document.querySelector('#model')?.value", bool)
    page.evaluate(COPIED)
    choose(page, "encode", "test/mini")
    typed(page, "#texts", "a cat")
    ask(page)
    (item,) = by_curl(page)["items"]
    sdk_vector = by_python(page, 'results[0]["dense"].tolist()')
    assert sdk_vector == pytest.approx(item["dense"]["values"], abs=1e-6)
    sdk_vector = by_typescript(page, package, "[...results[0]!.dense!]")
    assert sdk_vector == pytest.approx(item["dense"]["values"], abs=1e-6)
    for kind, name in (("curl", "$SIE_API_KEY"), ("Python", "SIE_API_KEY"), ("TypeScript", "process.env.SIE_API_KEY")):
        code = copied(page, kind)
        assert name in code
        assert KEY not in code
    assert KEY not in page.evaluate("document.body.innerHTML")
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
