"""Take the pictures of the console in README.md and console.md, from a cluster that serves on this machine.

sie serve
python extras/console/tests/console_pictures.py [--url http://127.0.0.1:8080] [--key KEY]    writes console-*.png

It needs Debian's chromium.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from browser import Page, browsing, tab
from cluster import until

FOLDER = Path(__file__).parents[1]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# name, view, colour scheme, width, selector of an element that must be there
PICTURES = (
    ("playground", "playground", "light", 1280, ".waterfall"),
    ("models", "models", "light", 1280, "#catalogue tr"),
    ("jobs", "jobs", "light", 1280, "#jobs tr"),
    ("cluster", "cluster", "dark", 1280, ".charts"),
    ("narrow", "playground", "dark", 390, ".waterfall"),
)
MAX_HEIGHT = 1200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    for count in range(1, 40):  # the charts need some requests
        body = {"items": ["a text of some words"] * (1 + count % 5)}
        sent = {"json": body, "headers": headers, "timeout": 120}
        until(lambda sent=sent: httpx.post(f"{options.url}/v1/encode/{MODEL}", **sent).is_success, 120, "an answer")
    with httpx.Client(base_url=options.url, headers=headers, timeout=60) as client:
        work(client)
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as devtools, tab(devtools) as page:
        page.open(options.url)
        page.evaluate(f"sessionStorage.setItem('sie.key', {json.dumps(options.key)})")
        for name, view, scheme, width, there in PICTURES:
            take(page, f"{options.url}/#{view}", scheme, width, there, FOLDER / f"console-{name}.png")


def work(client: httpx.Client) -> None:
    """Create a batch, a job with a failing row, and a job that is slow enough to be shown running with a forecast."""

    def sent(*rows: object) -> str:
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        answer = client.post("/v1/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"})
        return str(answer.raise_for_status().json()["id"])

    def submitted(name: str, *rows: object, **more: object) -> str:
        source = {"file": sent(*rows), "text": "{title}\n{body}", "id": "id"}
        answer = client.post("/v1/jobs", json={"model": MODEL, "name": name, "input": source, **more})
        return str(answer.raise_for_status().json()["id"])

    def told(job: str) -> dict[str, Any]:
        status: dict[str, Any] = client.get(f"/v1/jobs/{job}").raise_for_status().json()
        return status

    request = {"custom_id": "one", "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": "a"}}
    batch = {"input_file_id": sent(request), "endpoint": "/v1/embeddings", "completion_window": "24h"}
    client.post("/v1/batches", json=batch).raise_for_status()
    rows = [{"id": f"doc-{number}", "title": f"title {number}", "body": "some words"} for number in range(2000)]
    done = submitted("titles of the archive", *rows[:50], {"id": "doc-50", "title": "without a body", "body": None})
    until(lambda: told(done)["state"] == "completed", 120, "a job that is done")
    slow = submitted("nightly", *rows, shard_rows=50, tokens_per_s=90.0, deadline=time.time() + 120)
    until(lambda: told(slow)["forecast"] and told(slow)["counts"]["shards_done"], 120, "a forecast")


def take(page: Page, url: str, scheme: str, width: int, there: str, path: Path) -> None:
    page.look(width, scheme)
    page.open("about:blank")
    page.open(url)
    page.wait(f"Boolean(document.querySelector('{there}'))", bool, timeout_s=60)
    height = min(MAX_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 0.75}
    shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
