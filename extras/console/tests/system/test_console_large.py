"""The console with a catalogue of which it reads only a part: loaded models come first, a search finds the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import local_models
import pytest
from browser import HOST, Page, pressed, tab, typed
from cluster import Cluster, running, until
from large_catalogue import entries, fill
from playground import CELLS

pytestmark = pytest.mark.debian

OWN = "test/mini"  # far behind the first 200 of 300 and of 1,000 names
OPTIONS = "[...document.querySelectorAll('[role=option]')].map(option => option.dataset.model)"
SEARCH_S = 6.0  # until a search has its answer, on a busy machine
KEYS, KEYS_S = 30, 6.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("large-models"))
    models.build(OWN.partition("/")[2])
    with running(tmp_path_factory.mktemp("large"), *models.arguments, "--no-spare", "--allowed-hosts", HOST) as cluster:
        encoded = {"items": ["one"]}
        until(lambda: httpx.post(f"{cluster.url}/v1/encode/{OWN}", json=encoded, timeout=60).is_success, 90, "a load")
        yield cluster


@pytest.fixture
def page(devtools: str) -> Iterator[Page]:
    with tab(devtools) as page:
        yield page
        assert page.complaints == []


def total(cluster: Cluster) -> int:
    count: int = httpx.get(f"{cluster.url}/v1/models?limit=1", timeout=30).json()["total"]
    return count


@pytest.mark.parametrize("count", [300])
def test_a_large_catalogue_is_searched_and_chosen_from_by_the_keyboard(
    page: Page, cluster: Cluster, count: int
) -> None:
    asyncio.run(fill(cluster.broker_url(), count))
    until(lambda: total(cluster) > count, 60, "the catalogue")
    names = sorted(name for name, entry in entries(count).items() if "encode" in entry.tasks)
    last = names[-1]
    page.open("about:blank")
    page.open(f"http://{HOST}:{cluster.port}/?{count}#playground")
    page.wait("document.querySelector('#model')?.value", lambda model: model == OWN)  # the loaded model is chosen first
    page.wait("document.querySelectorAll('article:not(.example) .heat td').length", lambda cells: cells == 16, 60)
    page.evaluate("document.querySelector('#model').focus()")
    pressed(page, "Enter", 13)
    page.wait("document.activeElement.role", lambda role: role == "combobox")
    offered = page.evaluate(OPTIONS)
    assert offered[0] == OWN
    assert 2 <= len(offered) <= 60
    assert "more: type a part of a name" in page.evaluate("document.querySelector('.popover').innerText")

    began_s = time.monotonic()
    page.call("Input.insertText", text=last)
    page.wait(OPTIONS, lambda options: last in options, SEARCH_S)
    assert time.monotonic() - began_s < SEARCH_S
    pressed(page, "Enter", 13)
    page.wait("document.querySelector('#model').value", lambda model: model == page.evaluate("location.hash")[19:])
    chosen = page.evaluate("document.querySelector('#model').value")
    assert chosen.startswith(last)
    assert page.evaluate("document.querySelector('#model .state').innerText").startswith("to download, about ")
    page.call("Page.reload")
    page.wait("document.querySelector('#model')?.value", lambda model: model == chosen)

    # words of a description find models whose names lack them, and arrow keys move through the list
    far = {name for name, entry in entries(count).items() if "English sparse vectors" in entry.description}
    assert min(far) > names[len(names) // 2]
    page.evaluate("document.querySelector('#model').focus()")
    pressed(page, "Enter", 13)
    page.wait("document.activeElement.role", lambda role: role == "combobox")
    page.call("Input.insertText", text="vectors english sparse")
    page.wait(OPTIONS, lambda options: far & set(options), SEARCH_S)
    assert OWN not in page.evaluate(OPTIONS)
    began_s = time.monotonic()
    for _ in range(KEYS):
        pressed(page, "ArrowDown", 40)
    place = min(KEYS, len(page.evaluate(OPTIONS)) - 1)
    nth = page.evaluate(OPTIONS)[place]
    page.wait("document.querySelector('[data-active]').dataset.model", lambda model: model == nth)
    assert time.monotonic() - began_s < KEYS_S
    pressed(page, "Escape", 27)

    page.evaluate("location.hash = '#models'")
    page.wait(CELLS.format("#catalogue"), lambda rows: rows and rows[0][0].split()[0] == OWN)
    typed(page, "#model-filter", last)
    page.wait(CELLS.format("#catalogue"), lambda rows: rows and rows[0][0].split()[0] == last, SEARCH_S)
