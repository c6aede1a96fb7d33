"""The console page and the page of documents in a real browser, Debian's chromium, which can reach nothing but this
gateway.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
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


def typed(page: Page, element: str, text: str) -> None:
    """Put a text into a field, as a person who pastes it does."""
    page.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(element)}); "
        "Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), 'value').set.call(field, "
        f"{json.dumps(text)}); field.dispatchEvent(new Event('input', {{bubbles: true}})); "
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def click(page: Page, element: str) -> None:
    page.evaluate(f"document.querySelector({json.dumps(element)}).click()")


FORGED = """(() => { const real = window.fetch; window.fetch = async (...given) => {
  const answer = await real(...given);
  if (!String(given[0]).includes('/v1/cluster')) return answer;
  const told = await answer.json();
  told.models[0].state = 'failed';
  told.failures = {[told.models[0].name]: '<img src=x onerror="window.harmed = 1">'};
  told.workers[0].name = '<script>window.harmed = 1</script>';
  return new Response(JSON.stringify(told), {status: 200});
}; })()"""


def test_the_console_shows_workers_models_and_queues_and_follows_them(cluster: Cluster, page: Page) -> None:
    own = f"http://{HOST}:{cluster.port}/"
    page.open(f"{own}#cluster")
    (worker,) = page.wait(ROWS.format("workers"), lambda rows: rows and rows[0][1] == "healthy")
    assert worker[2:6] == ["_default", "cpu", "default", "cpu"]
    assert "GiB" in worker[6]
    assert [row[:2] for row in page.evaluate(ROWS.format("models"))] == [[ENCODER, "available"]]
    assert page.evaluate("document.getElementById('connection').innerText") == "healthy"
    figure = (
        "Number([...document.querySelectorAll('#figures div')].find(pair => "
        "pair.innerText.startsWith({0})).lastChild.innerText)"
    )
    assert page.evaluate(figure.format("'dead letters'")) == 0

    # an answered request, then work that a worker holds while its engine is stopped, are seen without loading the page
    # again
    encode = f"{cluster.url}/v1/encode/{ENCODER}"
    ran = httpx.post(encode, json={"items": ["one"]}, timeout=60)
    assert ran.status_code == 200
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

    # the slow request is found, and explained
    slow = ran.headers["x-sie-request-id"]
    page.wait(ROWS.format("requests"), lambda rows: any(row[1] == slow for row in rows), timeout_s=20)
    page.evaluate(
        f"[...document.querySelectorAll('#requests button')].find(each => each.innerText === '{slow}').click()"
    )
    page.wait("document.querySelector('#requests .waterfall')?.textContent", lambda text: text and "inference" in text)

    typed(page, "#filter", "no such")
    page.wait(ROWS.format("models"), lambda rows: rows == [])
    typed(page, "#filter", "MINI")
    page.wait(ROWS.format("models"), lambda rows: len(rows) == 1)

    page.evaluate(FORGED)  # markup in names and reasons stays text
    shown = page.wait(ROWS.format("models"), lambda rows: rows and "failed" in rows[0][1])
    assert "<img src=x" in shown[0][1]
    assert page.evaluate(ROWS.format("workers"))[0][0].startswith("<script>")
    assert page.evaluate("window.harmed ?? null") is None

    assert all(asked.startswith(own) for asked in page.asked), page.asked
    assert page.complaints == []


def test_the_playground_compares_texts_and_its_commands_give_the_same_numbers(cluster: Cluster, page: Page) -> None:
    page.open(f"http://{HOST}:{cluster.port}/")
    page.wait("document.querySelector('#model')?.value", lambda model: model == ENCODER)
    typed(page, "#texts", 'a cat\na <b>kitten</b>\nit\'s "stocks"')
    click(page, "#run")
    cells = "[...document.querySelectorAll('.heat td')].map(cell => Number(cell.innerText))"
    shown = page.wait(cells, lambda found: len(found) == 9, timeout_s=60)
    code = page.evaluate("document.querySelector('.code[data-kind=curl]').textContent")
    command = code.replace(f"//{HOST}:", "//127.0.0.1:")  # the name is the browser's alone
    ran = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=60)
    vectors = [item["dense"]["values"] for item in json.loads(ran.stdout)["items"]]
    cosines = [
        sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))
        for one in vectors
        for other in vectors
    ]
    assert shown == pytest.approx(cosines, abs=0.0051)
    code = page.evaluate("document.querySelector('.code[data-kind=Python]').textContent")
    program = code.replace(f"//{HOST}:", "//127.0.0.1:")
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert [item["dense"]["values"] for item in json.loads(told.stdout)["items"]] == vectors
    assert page.evaluate("document.querySelectorAll('.heat b').length") == 0
    assert page.complaints == []


def test_the_console_asks_for_a_key_and_says_when_it_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, page: Page
) -> None:
    models = local_models.under(tmp_path_factory.mktemp("signed-models"))
    models.build(ENCODER.partition("/")[2])
    environ = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "a-right-key"}
    with running(
        tmp_path_factory.mktemp("signed"), *models.arguments, "--no-spare", "--allowed-hosts", HOST, environ=environ
    ) as signed:
        page.open(f"http://{HOST}:{signed.port}/#models")
        page.wait("document.querySelector('#key')?.type", lambda kind: kind == "password")
        for key, good in (("a-wrong-key", False), ("a-right-key", True)):
            typed(page, "#key", key)
            click(page, "button[type=submit]")
            if good:
                page.wait(ROWS.format("catalogue"), lambda rows: rows and rows[0][0] == ENCODER)
            else:
                page.wait(
                    "document.querySelector('[role=alert]')?.innerText", lambda text: text and "not known" in text
                )
        assert page.evaluate("sessionStorage.getItem('sie.key')") == "a-right-key"
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert not any("right-key" in asked for asked in page.asked)
        click(page, "#sign-out")
        page.wait("document.querySelector('#key')?.type", lambda kind: kind == "password")
        assert page.evaluate("sessionStorage.getItem('sie.key')") is None


def answers(cluster: Cluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_console_outlives_its_gateway(cluster: Cluster, page: Page) -> None:
    page.open(f"http://{HOST}:{cluster.port}/#cluster")
    state = "document.getElementById('connection')?.innerText"  # nothing before the page is there
    page.wait(state, lambda text: text == "healthy")
    page.evaluate("window.kept = 1")
    (gateway,) = cluster.pids("gateway")
    cluster.signal(gateway, signal.SIGSTOP)
    try:
        page.wait(state, lambda text: text == "no connection, trying again")
        assert len(page.evaluate(ROWS.format("workers"))) == 1  # what was known last stays to be read
    finally:
        cluster.signal(gateway, signal.SIGCONT)
    page.wait(state, lambda text: text == "healthy", timeout_s=30)
    cluster.signal(gateway, signal.SIGKILL)
    until(lambda: cluster.pids("gateway") not in ([], [gateway]), 30, "another gateway")
    until(lambda: answers(cluster), 30, "the other gateway listens")
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
