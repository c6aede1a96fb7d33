"""The files of the page at `/`."""

from __future__ import annotations

import functools
from pathlib import Path

CONSOLE = Path(__file__).parent / "console"
CONSOLE_FILES = {"index.html": "text/html", "main.js": "text/javascript", "style.css": "text/css"}
CONSOLE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@functools.cache
def console(name: str, root: str = "") -> bytes:
    """One of CONSOLE_FILES. The page needs nothing from elsewhere.

    `root`: the prefix of a reverse proxy. The page then names its files from there, because a browser that has it at
    the prefix without the final slash would ask for relative ones beside the prefix.
    """
    content = (CONSOLE / name).read_bytes()
    return content.replace(b'="console/', f'="{root}/console/'.encode()) if root and name == "index.html" else content
