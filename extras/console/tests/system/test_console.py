"""The console page and the page of documents in a real browser, Debian's chromium, which can reach nothing but this
gateway.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator

import axe
import httpx
import local_models
import pytest
from browser import HOST, Page, click, pressed, tab, typed
from cluster import Cluster, running, until

from sie_broker.nats import connect
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter, Input, RunOptions, WorkItem

pytestmark = pytest.mark.debian

ENCODER = "test/mini"
UNFOLDED = "[data-part={0}] > summary"
ROWS = "[...document.querySelectorAll('#{0} tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("console-models"))
    models.build(ENCODER.partition("/")[2])
    with running(
        tmp_path_factory.mktemp("console"), *models.arguments, "--no-spare", "--allowed-hosts", HOST
    ) as cluster:
        yield cluster


@pytest.fixture
def page(devtools: str) -> Iterator[Page]:
    with tab(devtools) as page:
        yield page


FORGED = """(() => { const real = window.fetch; window.fetch = async (...args) => {
  const answer = await real(...args);
  if (!String(args[0]).includes('/v1/cluster')) return answer;
  const body = await answer.json();
  body.models[0].state = 'failed';
  body.failures = {[body.models[0].name]: '<img src=x onerror="window.harmed = 1">'};
  body.workers[0].name = '<script>window.harmed = 1</script>';
  return new Response(JSON.stringify(body), {status: 200});
}; })()"""


def test_the_console_shows_workers_models_and_queues_and_follows_them(cluster: Cluster, page: Page) -> None:
    own = f"http://{HOST}:{cluster.port}/"
    page.open(f"{own}#cluster")
    (worker,) = page.wait(ROWS.format("workers"), lambda rows: rows and rows[0][1] == "healthy")
    assert worker[2:6] == ["_default", "cpu", "default", "cpu"]
    assert "GiB" in worker[6]
    assert not any("/v1/requests" in url for url in page.asked)  # a folded part sends no request
    for part in ("models", "requests"):
        click(page, UNFOLDED.format(part))
    rows = page.wait(ROWS.format("models"), bool)
    assert [row[:2] for row in rows] == [[ENCODER, "not loaded"]]
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
    page.wait(ROWS.format("requests"), lambda rows: any(row[0] == slow for row in rows), timeout_s=20)
    page.evaluate(
        f"[...document.querySelectorAll('#requests a')].find(element => element.innerText === '{slow}').click()"
    )
    page.wait("document.querySelector('.request .waterfall')?.textContent", lambda text: text and "inference" in text)
    assert page.evaluate("location.hash") == f"#cluster/requests/{slow}"
    page.call("Page.reload")
    page.wait("document.querySelector('.request')?.innerText ?? ''", lambda text: slow in text)
    page.evaluate("history.back()")
    failed = httpx.post(f"{cluster.url}/v1/encode/no/such", json={"items": ["one"]}, timeout=60)
    page.wait("Boolean(document.querySelector('#failed'))", bool)
    click(page, "#failed")
    row_count = f"rows.filter(row => row[0] === '{failed.headers['x-sie-request-id']}').length"
    shown = f"{row_count} && rows.every(row => row[3] > '4')"
    page.wait(f"(rows => {shown})({ROWS.format('requests')}.filter(row => row.length > 1))", bool, timeout_s=30)
    click(page, "#requests a")
    why = page.wait("document.querySelector('.request .bad')?.innerText", bool)
    assert why == failed.json()["error"]["message"]
    page.evaluate("location.hash = '#cluster/models'")
    page.wait(ROWS.format("models"), bool)
    page.wait("document.querySelector('#attention').innerText", lambda text: "MODEL_NOT_FOUND 1" in text, timeout_s=30)

    typed(page, "#filter", "no such")
    page.wait(ROWS.format("models"), lambda rows: rows == [])
    typed(page, "#filter", "MINI")
    page.wait(ROWS.format("models"), lambda rows: len(rows) == 1)

    page.evaluate(FORGED)  # markup in names and reasons stays text
    shown = page.wait(ROWS.format("models"), lambda rows: rows and "failed" in rows[0][1])
    assert "<img src=x" in shown[0][1]
    assert page.evaluate(ROWS.format("workers"))[0][0].startswith("<script>")
    assert page.evaluate("window.harmed ?? null") is None

    assert all(url.startswith(own) for url in page.asked), page.asked
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
        for key, refusal in (("a-wrong-key", "not known"), ("kein-Schlüssel", "printable ASCII"), ("a-right-key", "")):
            typed(page, "#key", key)
            click(page, "button[type=submit]")
            if not refusal:
                page.wait(ROWS.format("catalogue"), lambda rows: rows and rows[0][0].split()[0] == ENCODER)
            else:
                page.wait(
                    "document.querySelector('.sign-in [role=alert]')?.innerText ?? ''",
                    lambda text, refusal=refusal: refusal in text,
                )
        assert page.evaluate("sessionStorage.getItem('sie.key')") == "a-right-key"
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert not any("right-key" in url for url in page.asked)
        page.evaluate("location.hash = '#cluster/doctor'")  # this key has the scopes of a user
        page.wait("Boolean(document.querySelector('#doctor'))", bool)
        click(page, "#doctor")
        lacking = page.wait("document.querySelector('[data-part=doctor] [role=alert]')?.innerText", bool)
        assert lacking == "The doctor needs a key with the scope admin. Sign in"
        click(page, "[data-part=doctor] .lacking button")
        page.wait("Boolean(document.querySelector('#key'))", bool)
        click(page, "#key-back")
        page.wait("Boolean(document.querySelector('#sign-out'))", bool)
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
    state = "document.getElementById('connection')?.innerText"  # undefined until the page has rendered
    page.wait(state, lambda text: text == "healthy")
    page.evaluate("window.kept = 1")
    (gateway,) = cluster.pids("gateway")
    cluster.signal(gateway, signal.SIGSTOP)
    try:
        page.wait(state, lambda text: text == "no answer for 3 s, waiting")
        assert len(page.evaluate(ROWS.format("workers"))) == 1  # the last known state stays on the page
    finally:
        cluster.signal(gateway, signal.SIGCONT)
    page.wait(state, lambda text: text == "healthy", timeout_s=30)
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **network)
    page.wait(state, lambda text: text == "no connection, trying again")
    page.call("Network.emulateNetworkConditions", offline=False, **network)
    page.wait(state, lambda text: text == "healthy")
    cluster.signal(gateway, signal.SIGKILL)
    until(lambda: cluster.pids("gateway") not in ([], [gateway]), 30, "another gateway")
    until(lambda: answers(cluster), 30, "the other gateway listens")
    page.wait(state, lambda text: text == "healthy", timeout_s=30)
    assert page.evaluate("window.kept") == 1


def sign_in(page: Page, cluster: Cluster) -> None:
    """Sign in as the administrator of a `sie serve` that lets everybody read."""
    click(page, "#sign-in")
    signed_in(page, cluster)


def signed_in(page: Page, cluster: Cluster) -> None:
    """Fill in the form of the key and send it."""
    page.wait("document.querySelector('#key')?.type", lambda kind: kind == "password")
    typed(page, "#key", cluster.access().admin_token)
    click(page, "button[type=submit]")
    page.wait("Boolean(document.querySelector('#sign-out'))", bool)


def test_a_model_is_changed_and_rolled_back(cluster: Cluster, page: Page) -> None:
    entry = f"{cluster.url}/v1/configs/models/{ENCODER}"
    before = httpx.get(entry, timeout=10)
    page.open(f"http://{HOST}:{cluster.port}/#models/{ENCODER}")
    page.wait("Boolean(document.querySelector('#sign-in'))", bool)
    sign_in(page, cluster)
    revisions = (
        "[...document.querySelectorAll('.revisions tr')].map(row => [...row.cells].map(c => c.innerText.trim()))"
    )
    first = page.wait(revisions, lambda rows: len(rows) == 1)
    click(page, ".show-entry")
    document = json.loads(page.wait("document.querySelector('.entry')?.value ?? ''", lambda text: text))

    typed(page, ".entry", "{")
    click(page, ".write")
    page.wait("document.querySelector('.history [role=alert]')?.innerText", lambda text: text and "JSON" in text)
    typed(page, ".entry", json.dumps({**document, "max_tokens": "<img src=x onerror='window.harmed = 1'>"}))
    click(page, ".write")
    page.wait("document.querySelector('.history [role=alert]')?.innerText", lambda text: text and "max_tokens" in text)

    typed(page, ".entry", json.dumps({**document, "max_tokens": document["max_tokens"] - 1}))
    click(page, ".write")
    rows = page.wait(revisions, lambda rows: len(rows) == 2)
    assert rows[1][:4] == first[0][:4]
    assert "max_tokens" in rows[0][4]
    assert "SIE_ADMIN_TOKEN" in rows[0][2]
    until(lambda: httpx.get(entry, timeout=10).json()["max_tokens"] == document["max_tokens"] - 1, 20, "the change")

    focused = "document.activeElement.className"
    page.evaluate("document.querySelector('.rollback').focus()")
    pressed(page, "Enter", 13)
    page.wait(focused, lambda name: name == "certain")
    pressed(page, "Escape", 27)
    page.wait(focused, lambda name: name == "rollback")
    pressed(page, "Enter", 13)
    page.wait(focused, lambda name: name == "certain")
    pressed(page, "Enter", 13)
    page.wait(revisions, lambda rows: len(rows) == 3)
    until(lambda: httpx.get(entry, timeout=10).json() == before.json(), 20, "what was before")
    assert page.evaluate("window.harmed ?? null") is None
    # the browser itself notes a refusal as a failed request
    assert all("400" in complaint or "422" in complaint for complaint in page.complaints), page.complaints


def given_up(cluster: Cluster, name: str, text: str) -> None:
    """Store a dead letter at the broker."""
    lane = topology.Lane("_default", "cpu", "default")
    subject = topology.work_subject(lane, "interactive", ENCODER)
    revision = httpx.get(f"{cluster.url}/v1/models/{ENCODER}", timeout=10).json()["revision"]
    item = WorkItem(f"r-{name}", 0, ENCODER, revision, "encode", (Input(text),), RunOptions(), "inbox", 1000)
    error = ErrorInfo("INFERENCE_ERROR", "why")
    letter = DeadLetter(name, subject, messages.encode(item), error, ("w7",), 5, 0, time.time())

    async def write() -> None:
        broker = await connect(cluster.broker_url(), name="test")
        try:
            published = await broker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), name)
            assert not published.duplicate, f"{name} is the id of an earlier letter"
        finally:
            await broker.close()

    asyncio.run(write())


def test_dead_letters_are_listed_replayed_and_purged(cluster: Cluster, page: Page) -> None:
    given_up(cluster, "letter-1", "a private text")
    given_up(cluster, "letter-2", "another one")
    page.open(f"http://{HOST}:{cluster.port}/#cluster/dead-letters")
    page.wait("Boolean(document.querySelector('#sign-in'))", bool)
    page.wait("document.body.innerText", lambda text: "need a key with the scope admin" in text)
    sign_in(page, cluster)
    show = "[...document.querySelectorAll('main form button')].find(element => element.innerText === 'Show')"
    page.wait(f"Boolean({show})", bool)
    page.evaluate(f"{show}.click()")
    rows = page.wait(ROWS.format("dead-letters"), lambda rows: len(rows) == 2)
    assert {row[1] for row in rows} == {"letter-1", "letter-2"}
    assert "private" not in page.evaluate("document.body.innerText")
    click(page, "[aria-label='Replay letter-1']")
    left = page.wait(ROWS.format("dead-letters"), lambda rows: len(rows) == 1, timeout_s=90)
    assert left[0][1] == "letter-2"
    assert "letter-1: answered" in page.evaluate("document.body.innerText")
    click(page, "[aria-label='Purge letter-2']")
    page.wait("document.activeElement.id", lambda name: name == "purge")
    click(page, "#purge")
    page.wait(ROWS.format("dead-letters"), lambda rows: rows == [])
    assert page.complaints == []


def submitted(cluster: Cluster) -> None:
    """Submit a job and a batch over the same file."""
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        rows = b'{"text": "one"}\n'
        sent = client.post("/v1/files", files={"file": ("a.jsonl", rows)}, data={"purpose": "batch"}).json()["id"]
        job = {"model": ENCODER, "input": {"file": sent, "text": "{text}"}}
        assert client.post("/v1/jobs", json=job).status_code == 201
        batch = {"input_file_id": sent, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        assert client.post("/v1/batches", json=batch).status_code == 200


# adds markup to every text of every reply, except to the API's own words: these decide what is shown
POISONED = """(() => {
  const own = /^[a-z_.]{1,14}$/;
  const harm = value =>
    typeof value === 'string'
      ? (own.test(value) ? value : value + '<img src=x onerror="window.harmed = 1"><b id=harm>')
    : Array.isArray(value) ? value.map(harm)
    : value && typeof value === 'object'
      ? Object.fromEntries(
          Object.entries(value).map(([name, element]) => [own.test(name) ? name : harm(name), harm(element)]))
    : value;
  const real = window.fetch;
  window.fetch = async (...args) => {
    const answer = await real(...args);
    const body = await answer.json();
    return new Response(JSON.stringify(harm(body)), {status: answer.status});
  };
})()"""


@pytest.mark.parametrize(
    ("view", "pressed"),
    [
        ("playground", ["#run"]),
        ("models", ["#catalogue a"]),
        (f"models/{ENCODER}", [".show-entry"]),
        ("jobs", ["#jobs a"]),
        ("jobs", ["#batches a"]),
        ("cluster", [UNFOLDED.format(part) for part in ("doctor", "requests", "dead-letters")] + ["#doctor"]),
        ("cluster/requests", ["#requests a"]),
    ],
)
def test_markup_in_any_reply_is_text(cluster: Cluster, page: Page, view: str, pressed: list[str]) -> None:
    httpx.post(f"{cluster.url}/v1/encode/{ENCODER}", json={"items": ["one"]}, timeout=60)
    if view == "cluster":
        given_up(cluster, "letter-4", "text")
    if view == "jobs":
        submitted(cluster)
    page.open("about:blank")
    page.call("Page.addScriptToEvaluateOnNewDocument", source=POISONED)
    page.open(f"http://{HOST}:{cluster.port}/#{view}")
    page.wait("Boolean(document.querySelector('#sign-in'))", bool)
    sign_in(page, cluster)
    for element in pressed:
        page.wait(f"Boolean(document.querySelector('{element}'))", bool, timeout_s=20)
        click(page, element)
    fields = "[...document.querySelectorAll('textarea, option')].map(element => element.value).join(' ')"
    shown = f"document.body.innerText + {fields}"
    page.wait(shown, lambda text: "<img src=x" in text, timeout_s=20)
    if view == "cluster":
        page.wait("Boolean(document.querySelector('#findings'))", bool, timeout_s=60)
        show = "[...document.querySelectorAll('main form button')].find(element => element.innerText === 'Show')"
        page.wait(f"Boolean({show})", bool)
        page.evaluate(f"{show}.click()")
        page.wait("Boolean(document.querySelector('#dead-letters'))", bool)
    assert page.evaluate("document.querySelectorAll('img[src=x], #harm').length") == 0
    assert page.evaluate("window.harmed ?? null") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_serious_fault_of_accessibility(cluster: Cluster, page: Page, rules: str, scheme: str) -> None:
    """Each view is checked after use, at two widths."""
    httpx.post(f"{cluster.url}/v1/encode/{ENCODER}", json={"items": ["one"]}, timeout=60)
    views = [("playground", "#run"), ("playground/score", "#model"), ("models", "#add-model summary")]
    views += [(f"models/{ENCODER}", ".show-entry"), ("cluster", UNFOLDED.format("requests"))]
    views += [("cluster/requests", "#requests a"), ("cluster/doctor", "#sign-in")]
    for view, button in views:
        for width in (360, 1280):
            page.look(width, scheme)
            page.open("about:blank")
            page.open(f"http://{HOST}:{cluster.port}/#{view}")
            page.wait(f"Boolean(document.querySelector('{button}'))", bool, timeout_s=30)
            click(page, button)
            assert axe.serious(page, rules) == [], (view, width)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (view, width)
            screens = page.evaluate("document.documentElement.scrollHeight / innerHeight")
            assert screens <= (8 if width < 600 else 4), (view, width)
    assert page.complaints == []
