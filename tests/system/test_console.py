"""The console page and the page of documents in a real browser, Debian's chromium, which can reach nothing but this
gateway.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import local_models
import pytest
from cluster import Cluster, running, until
from websockets.sync.client import ClientConnection, connect

pytestmark = pytest.mark.debian

ENCODER = "test/mini"
HOST = "sie.example"  # no loopback name: libraries of pages leave out there what they ask elsewhere
RESOLVER = f"MAP {HOST} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
ROWS = "[...document.querySelectorAll('#{0} tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"


class Page:
    """One tab, by the DevTools protocol. `asked` has every address that it requested, `complaints` what its console
    shows as wrong.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._sent = 0
        self.asked: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Network", "Runtime", "Log", "Page"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def evaluate(self, code: str) -> Any:
        """The JSON value of a JavaScript expression. Raises AssertionError when it throws."""
        answer = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, code: str, good: Callable[[Any], object], timeout_s: float = 10.0) -> Any:
        """What an expression gives once it is good. Raises AssertionError with what it gave last."""
        last: list[Any] = [None]

        def is_good() -> bool:
            last[0] = self.evaluate(code)
            return bool(good(last[0]))

        try:
            until(is_good, timeout_s, code)
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {last[0]}; complaints: {self.complaints}") from None
        return last[0]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(20))
            if message.get("id") == self._sent:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message["method"], message["params"])

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif event == "Network.webSocketCreated":
            self.asked.append(told["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("console-models"))
    models.build(ENCODER.partition("/")[2])
    with running(
        tmp_path_factory.mktemp("console"), *models.arguments, "--no-spare", "--allowed-hosts", HOST
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a headless browser's DevTools."""
    profile = tmp_path_factory.mktemp("chromium")
    argv = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "about:blank",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        f"--host-resolver-rules={RESOLVER}",
        "--window-size=1280,900",
    ]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            yield f"127.0.0.1:{until(lambda: _port(profile / 'DevToolsActivePort'), 30, 'a browser')}"
        finally:
            browser.terminate()
            browser.wait(20)


def _port(path: Path) -> str:
    return path.read_text().partition("\n")[0] if path.exists() else ""


@pytest.fixture
def page(devtools: str) -> Iterator[Page]:
    tab = httpx.put(f"http://{devtools}/json/new?about:blank", timeout=20).json()
    with connect(tab["webSocketDebuggerUrl"], proxy=None, max_size=64 << 20) as socket:
        yield Page(socket)
        httpx.get(f"http://{devtools}/json/close/{tab['id']}", timeout=20)


def test_the_console_shows_workers_models_and_queues_and_follows_them(cluster: Cluster, page: Page) -> None:
    own = f"{HOST}:{cluster.port}"
    page.open(f"http://{own}/")
    (worker,) = page.wait(ROWS.format("workers"), lambda rows: rows and rows[0][1] == "healthy")
    assert worker[2:6] == ["_default", "cpu", "default", "cpu"]
    assert "GiB" in worker[6]
    assert [row[:2] for row in page.evaluate(ROWS.format("models"))] == [[ENCODER, "available"]]
    assert page.evaluate("document.getElementById('connection').innerText") == "healthy"
    figure = (
        "Number([...document.querySelectorAll('#figures div')].find(pair => "
        "pair.innerText.startsWith({0})).lastChild.innerText)"
    )
    assert page.evaluate(figure.format("'GPUs'")) == 0

    # an answered request, then work that a worker holds while its engine is stopped, come over the websocket: nothing
    # is loaded again
    encode = f"{cluster.url}/v1/encode/{ENCODER}"
    assert httpx.post(encode, json={"items": ["one"]}, timeout=60).status_code == 200
    page.wait(ROWS.format("models"), lambda rows: rows[0][1:3] == ["loaded", "1"])
    page.wait(ROWS.format("workers"), lambda rows: rows[0][8] == ENCODER)
    page.wait(figure.format("'requests/s'"), lambda rate: rate > 0)
    (adapter,) = cluster.pids("adapter")
    cluster.signal(adapter, signal.SIGSTOP)
    try:
        waiting = threading.Thread(
            target=httpx.post, args=(encode,), kwargs={"json": {"items": ["two"]}, "timeout": 60}
        )
        waiting.start()
        page.wait(figure.format("'in flight'"), lambda count: count == 1)
        page.wait(ROWS.format("workers"), lambda rows: rows[0][7] == "1")
    finally:
        cluster.signal(adapter, signal.SIGCONT)
    waiting.join(30)
    page.wait(figure.format("'in flight'"), lambda count: count == 0)

    failed = "show({...last, models: [{...last.models[0], state: 'failed'}], failures: {[last.models[0].name]: 'why'}})"
    shown = page.evaluate(f"({failed}, {ROWS.format('models')})")
    assert [each.split() for each in shown[0][:2]] == [[ENCODER], ["failed", "why"]]

    filtered = "(text => { const box = document.getElementById('filter'); box.value = text; box.oninput(); })"
    page.evaluate(f"{filtered}('no such')")
    assert page.evaluate(ROWS.format("models")) == []
    page.evaluate(f"{filtered}('MINI')")
    assert len(page.evaluate(ROWS.format("models"))) == 1

    assert set(page.asked) == {f"http://{own}/", f"ws://{own}/ws/cluster-status"}
    assert len(page.asked) == 2
    assert page.complaints == []


def test_the_console_outlives_its_gateway(cluster: Cluster, page: Page) -> None:
    page.open(f"http://{HOST}:{cluster.port}/")
    state = "document.getElementById('connection')?.innerText"  # nothing before the page is there
    page.wait(state, lambda text: text == "healthy")
    page.evaluate("window.kept = 1")
    (gateway,) = cluster.pids("gateway")
    cluster.signal(gateway, signal.SIGKILL)
    page.wait(state, lambda text: text == "no connection, trying again")
    assert len(page.evaluate(ROWS.format("workers"))) == 1  # what was known last stays to be read
    page.wait(state, lambda text: text == "healthy", timeout_s=30)
    assert page.evaluate("window.kept") == 1


def test_the_documents_render_and_call_this_gateway_alone(cluster: Cluster, page: Page) -> None:
    own = f"http://{HOST}:{cluster.port}"
    page.open(f"{own}/docs")
    served = sum(
        len(methods) for methods in httpx.get(f"{cluster.url}/openapi.json", timeout=5).json()["paths"].values()
    )
    page.wait("document.querySelectorAll('.opblock').length", lambda count: count == served, timeout_s=30)
    page.evaluate(
        "window.block = [...document.querySelectorAll('.opblock-get')].find(each => "
        "each.querySelector('.opblock-summary-path')?.dataset.path === '/health'), 0"
    )
    for button in (".opblock-summary-control", ".try-out__btn", ".execute"):
        page.wait(f"block.querySelectorAll('{button}').length", lambda count: count == 1)
        page.evaluate(f"block.querySelector('{button}').click()")
    answer = page.wait("block.querySelector('.live-responses-table tbody')?.innerText", lambda text: text)
    assert answer.startswith("200")
    assert '"status": "healthy"' in answer
    assert page.evaluate("document.querySelectorAll('.errors-wrapper').length") == 0
    outside = [url for url in page.asked if not url.startswith((f"{own}/", "data:", "blob:"))]
    assert outside == []
    assert f"{own}/health" in page.asked
    assert page.complaints == []
