"""Hooks of MkDocs: the pages of the extras are in the site, beside the pages of docs/.

extras/NAME/PAGE.md ──► PAGE.html, and a line in the navigation below "Extras"
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# a link from a page of docs/ to the page of an extra, or the reverse
_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(?:extras/[\w-]+|docs)/([\w-]+\.md)(#[^)]*)?\)")


def pages() -> list[Path]:
    return sorted(ROOT.glob("extras/*/*.md"))


def on_config(config: Any) -> Any:
    config.nav.append({"Extras": [page.name for page in pages()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    for file in (*pages(), *sorted((*ROOT.glob("extras/*/*.svg"), *ROOT.glob("extras/*/*.png")))):
        files.append(File.generated(config, file.name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, files: Any, **_: Any) -> str:
    """Point links at pages of the site. A link to the page of an extra that is not there becomes its text."""

    def within_site(link: re.Match[str]) -> str:
        text, page, anchor = link.groups()
        return f"[{text}]({page}{anchor or ''})" if files.get_file_from_path(page) else text

    return _LINK.sub(within_site, markdown)
