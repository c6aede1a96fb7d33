"""The pictures of the console in README.md and docs: of a cluster that serves on this machine.

sie serve
python tests/console_pictures.py [--url http://127.0.0.1:8080] [--key KEY]    writes docs/console-*.png

It needs Debian's chromium. The key needs the scope admin for what the doctor finds.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
from pathlib import Path

import httpx
from browser import Page, browsing, click, tab, typed
from cluster import until

DOCS = Path(__file__).parents[1] / "docs"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# name, view, colour scheme, width, what is pressed and then there
PICTURES = (
    ("playground", "playground", "light", 1280, "#run", ".waterfall"),
    ("models", "models", "light", 1280, "#catalogue button", ".revisions tr"),
    ("cluster", "cluster", "dark", 1280, "#doctor", "#findings"),
    ("narrow", "playground", "dark", 390, "#run", ".waterfall"),
)
MAX_HEIGHT = 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    for count in range(1, 40):  # for the charts
        body = {"items": ["a text of some words"] * (1 + count % 5)}
        sent = {"json": body, "headers": headers, "timeout": 120}
        until(lambda sent=sent: httpx.post(f"{options.url}/v1/encode/{MODEL}", **sent).is_success, 120, "an answer")
    with tempfile.TemporaryDirectory() as profile, browsing(Path(profile)) as devtools, tab(devtools) as page:
        page.open(options.url)
        page.evaluate(f"sessionStorage.setItem('sie.key', {json.dumps(options.key)})")
        for name, view, scheme, width, pressed, there in PICTURES:
            take(page, f"{options.url}/#{view}", scheme, width, (pressed, there), DOCS / f"console-{name}.png")


def take(page: Page, url: str, scheme: str, width: int, use: tuple[str, str], path: Path) -> None:
    pressed, there = use
    page.look(width, scheme)
    page.open("about:blank")
    page.open(url)
    page.wait(f"Boolean(document.querySelector('{pressed}'))", bool, timeout_s=30)
    if page.evaluate("Boolean(document.querySelector('#model-filter'))"):  # of the catalogue, the model that is loaded
        typed(page, "#model-filter", MODEL)
        page.wait("document.querySelector('#catalogue button')?.innerText", lambda name: name == MODEL)
    click(page, pressed)
    page.wait(f"Boolean(document.querySelector('{there}'))", bool, timeout_s=60)
    height = min(MAX_HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 0.75}
    shot = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
