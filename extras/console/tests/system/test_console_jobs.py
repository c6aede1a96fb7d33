"""The view of jobs in a real browser: a job from the form to its files, its control, batches, the error of a failed
row, the keys that may see it, and no serious fault of accessibility.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import local_models
import pytest
from browser import HOST, Page, click, tab, typed
from click.testing import CliRunner
from cluster import Cluster, running, until
from playground import CELLS, COPIED, copied, files

from sie_cli.main import main

pytestmark = pytest.mark.debian

ENCODER = "test/mini"
END_S = 60.0
JOBS = (
    "[...document.querySelectorAll('#jobs tr[data-job]')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
)
OPENED = "document.querySelector('.detail.job')?.innerText ?? ''"
STATE = "document.querySelector('.job .head .state')?.innerText"
DONE = "document.querySelector('.job .head progress')?.value"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    models = local_models.under(tmp_path_factory.mktemp("jobs-models"))
    models.build(ENCODER.partition("/")[2])
    with running(tmp_path_factory.mktemp("jobs"), *models.arguments, "--no-spare", "--allowed-hosts", HOST) as cluster:
        yield cluster


@pytest.fixture
def page(devtools: str, cluster: Cluster) -> Iterator[Page]:
    """The view of jobs. After the test the page has logged no error and asked no other host."""
    own = f"http://{HOST}:{cluster.port}/"
    with tab(devtools) as page:
        page.open(f"{own}#jobs")
        page.wait("Boolean(document.querySelector('#new-job'))", bool)
        page.evaluate(COPIED)
        yield page
        assert page.evaluate("window.harmed ?? null") is None
        assert page.evaluate("document.querySelectorAll('img[src=x]').length") == 0
        assert page.complaints == []
        assert [url for url in page.asked if not url.startswith((own, "data:", f"blob:{own}"))] == []


@pytest.fixture
def api(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        yield client


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def sent(api: httpx.Client, data: bytes, name: str = "rows.jsonl", purpose: str = "jobs") -> str:
    answer = api.post("/v1/files", files={"file": (name, data)}, data={"purpose": purpose})
    assert answer.status_code == 200, answer.text
    file_id: str = answer.json()["id"]
    return file_id


def submitted(api: httpx.Client, data: bytes, **more: Any) -> str:
    body = {"model": ENCODER, "input": {"file": sent(api, data), "text": "{text}", "id": "id"}, **more}
    answer = api.post("/v1/jobs", json=body)
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def state_of(api: httpx.Client, job: str) -> str:
    state: str = api.get(f"/v1/jobs/{job}").json()["state"]
    return state


def ended(api: httpx.Client, job: str) -> None:
    until(lambda: state_of(api, job) in ("completed", "failed", "cancelled"), END_S, "the end of a job")


def listed(page: Page) -> None:
    page.evaluate("location.hash = '#jobs'")


def row(page: Page, name: str, good: Any) -> list[str]:
    """Return the cells of a job in the list, once `good` accepts them."""
    listed(page)
    table_rows = page.wait(JOBS, lambda rows: any(entry[0] == name and good(entry) for entry in rows), timeout_s=END_S)
    cells: list[str] = next(entry for entry in table_rows if entry[0] == name)
    return cells


def open_row(page: Page, name: str, table: str = "jobs") -> None:
    listed(page)
    link = f"[...document.querySelectorAll('#{table} a')].find(element => element.innerText === {json.dumps(name)})"
    page.wait(f"Boolean({link})", bool, timeout_s=20)
    page.evaluate(f"{link}.click()")


def fill(page: Page, data: bytes, file: str = "rows.jsonl", **fields: str) -> None:
    """Fill in the form, with a picked file."""
    page.evaluate("location.hash = '#jobs/new'")
    page.wait("document.querySelector('#job-model')?.value", lambda model: model == ENCODER)
    page.evaluate(
        "(() => { const field = document.querySelector('#job-file'); "
        f"field.files = {files((file, '', data))}.files; "
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.wait("document.querySelector('#job-preview .chip')?.innerText ?? ''", bool)
    for name, value in fields.items():
        typed(page, f"#job-{name}", value)
    page.wait("document.querySelector('#job-submit').disabled", lambda disabled: not disabled)


def downloads(page: Page, folder: Path) -> None:
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))


def test_a_job_of_the_form_is_followed_to_its_files(page: Page, api: httpx.Client, tmp_path: Path) -> None:
    rows = [{"id": f"row-{number}", "title": f"title {number}", "body": "some words"} for number in range(40)]
    fill(page, lines(*rows), name="by the form", text="{title}\n{body}", id="id", format="jsonl", keep="title")
    assert page.evaluate(CELLS.format("#job-preview tbody")) == [[*record.values()] for record in rows[:3]]
    click(page, "#job-submit")
    assert page.wait(OPENED, lambda text: "part-" in text, timeout_s=END_S)  # the submitted job is open
    cells = row(page, "by the form", lambda cells: cells[1] == "completed")
    assert [cells[2], cells[3], cells[6]] == ["40 of 40 (100 %)", "0", ENCODER]
    (job,) = [entry for entry in api.get("/v1/jobs").json()["data"] if entry["name"] == "by the form"]
    job_input = {"file": job["request"]["input"]["file"], "text": "{title}\n{body}", "id": "id", "keep": ["title"]}
    assert job["request"]["input"] == job_input
    open_row(page, "by the form")
    details = page.wait(OPENED, lambda text: "part-" in text)
    assert page.evaluate("location.hash") == f"#jobs/{job['id']}"
    page.call("Page.reload")
    page.wait(OPENED, lambda text: "part-" in text)
    page.evaluate(COPIED)
    assert job["id"] in details
    assert str(job["counts"]["tokens"]) in details

    downloads(page, tmp_path)
    (part,) = api.get(f"/v1/jobs/{job['id']}/manifest").json()["parts"]
    click(page, f"[aria-label='Download {part['name']}']")
    until(lambda: (tmp_path / part["name"]).is_file(), 20, "the download")
    data = (tmp_path / part["name"]).read_bytes()
    assert data == api.get(f"/v1/jobs/{job['id']}/part", params={"name": part["name"]}).content
    assert [json.loads(line)["id"] for line in data.splitlines()] == [record["id"] for record in rows]

    click(page, ".job .sample")
    sample = page.wait(CELLS.format(".rows"), lambda table_rows: len(table_rows) == 20)
    assert {table_row[0] for table_row in sample} <= {record["id"] for record in rows}

    click(page, ".job .delete")
    page.wait("document.activeElement.className", lambda name: name == "certain")
    click(page, ".job .certain")
    page.wait("location.hash", lambda address: address == "#jobs")
    page.wait(JOBS, lambda jobs: not any(table_row[0] == "by the form" for table_row in jobs))
    assert api.get(f"/v1/jobs/{job['id']}").status_code == 404


# loses the first answer to the submission and to the retry of a job
LOST = """(() => { const real = window.fetch, lost = new Set(); window.fetch = async (address, init) => {
  const answer = await real(address, init);
  const path = new URL(address).pathname;
  if (init.method !== 'POST' || lost.has(path) || !/jobs(\\/[^/]+\\/retry)?$/.test(path)) return answer;
  lost.add(path);
  throw new TypeError('Failed to fetch');
}; })()"""


def test_a_lost_answer_makes_no_second_job(page: Page, api: httpx.Client) -> None:
    def jobs() -> set[str]:
        return {entry["id"] for entry in api.get("/v1/jobs").json()["data"]}

    before = jobs()
    fill(page, lines({"text": "words"}, {"text": None}), name="once", text="{text}")
    page.evaluate(LOST)
    click(page, "#job-submit")
    first = page.wait("location.hash", lambda address: address.startswith("#jobs/job-")).rpartition("/")[2]
    assert jobs() - before == {first}
    ended(api, first)
    page.wait("Boolean(document.querySelector('.job .retry'))", bool)
    click(page, ".job .retry")
    second = page.wait("location.hash", lambda address: first not in address).rpartition("/")[2]
    assert jobs() - before == {first, second}


def test_a_job_is_seen_to_go_on_and_is_paused_resumed_and_cancelled(page: Page, api: httpx.Client) -> None:
    rows = lines(*({"id": str(number), "text": f"text {number}"} for number in range(600)))
    job = submitted(api, rows, name="slow", shard_rows=20, tokens_per_s=100.0)
    row(page, "slow", lambda cells: cells[1] == "running" and 0 < int(cells[2].split()[0]) < 600)
    assert 0 < page.evaluate("document.querySelector(\"progress[aria-label='Progress of slow']\").value") < 600
    open_row(page, "slow")
    page.wait("Boolean(document.querySelector('.job .pause'))", bool)
    click(page, ".job .pause")
    page.wait(STATE, lambda state: state == "paused", timeout_s=END_S)
    assert state_of(api, job) == "paused"
    done = api.get(f"/v1/jobs/{job}").json()["counts"]["done"]
    page.wait("Boolean(document.querySelector('.job .resume'))", bool)
    click(page, ".job .resume")
    page.wait(f"{STATE} === 'running' && {DONE}", lambda count: count and count > done, timeout_s=END_S)
    click(page, ".job .cancel")
    page.wait("document.activeElement.className", lambda name: name == "certain")
    assert state_of(api, job) == "running"  # the page has only asked for a confirmation
    click(page, ".job .certain")
    page.wait(STATE, lambda state: state == "cancelled", timeout_s=END_S)
    assert state_of(api, job) == "cancelled"


def key_of(cluster: Cluster, name: str, scopes: str) -> str:
    """Create a key, and return it when the gateway knows it."""
    argv = ["keys", "create", name, "--json", "--scopes", scopes, "--nats-url", cluster.broker_url()]
    outcome = CliRunner().invoke(main, argv, env={"SIE_NATS_URL": None, "SIE_AUTH_MODE": None})
    assert outcome.exit_code == 0, outcome.output
    key: str = json.loads(outcome.stdout)["token"]
    by = {"authorization": f"Bearer {key}"}
    until(lambda: httpx.get(f"{cluster.url}/v1/whoami", headers=by, timeout=10).is_success, 10, "the key is known")
    return key


def signed_in(page: Page, cluster: Cluster, key: str) -> None:
    page.open(f"http://{HOST}:{cluster.port}/#jobs")
    page.wait("document.querySelector('#key')?.type", lambda kind: kind == "password")
    typed(page, "#key", key)
    click(page, "button[type=submit]")


def test_a_key_needs_the_scope_infer_and_is_in_no_address(
    tmp_path_factory: pytest.TempPathFactory, devtools: str
) -> None:
    models = local_models.under(tmp_path_factory.mktemp("signed-models"))
    models.build(ENCODER.partition("/")[2])
    environ = {"SIE_AUTH_MODE": "token", "SIE_ADMIN_TOKEN": "an-administrator"}
    folder = tmp_path_factory.mktemp("signed-download")
    argv = (*models.arguments, "--no-spare", "--allowed-hosts", HOST)
    with running(tmp_path_factory.mktemp("signed"), *argv, environ=environ) as signed:
        with tab(devtools) as page:
            signed_in(page, signed, key_of(signed, "reads", "read"))
            page.wait("document.body.innerText", lambda text: "need a key with the scope infer" in text)
            assert not any("/v1/jobs" in url for url in page.asked)
            page.evaluate("sessionStorage.clear()")
        with tab(devtools) as page:
            key = key_of(signed, "infers", "read,infer")
            signed_in(page, signed, key)
            page.wait("Boolean(document.querySelector('#new-job'))", bool)
            page.evaluate(COPIED)
            fill(page, lines({"text": "words"}), name="signed")
            code = copied(page, "curl")
            assert "$SIE_API_KEY" in code
            assert key not in code
            click(page, "#job-submit")
            page.wait(OPENED, lambda text: "completed" in text and "part-" in text, timeout_s=END_S)
            downloads(page, folder)
            click(page, ".parts .link")
            until(lambda: list(folder.glob("part-*.parquet")), 20, "the download")
            assert not any(key in url for url in page.asked)
