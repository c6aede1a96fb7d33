"""The accessibility rules of axe-core on a page, for people who use a keyboard, a screen reader or strong contrast."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from browser import Page

PAGE = Path(__file__).parents[1] / "page"


def source(folder: Path) -> str:
    """Install in `folder` the version of axe-core in the page's lock file, and return its source."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(PAGE / name, folder)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=120)
    return (folder / "node_modules/axe-core/axe.min.js").read_text("utf-8")


def serious(page: Page, code: str) -> list[Any]:
    """Return serious faults of the page in its present state: impact, rule, first element."""
    page.evaluate(f"{code}; window.told = null; 0")
    page.evaluate("axe.run().then(told => { window.told = told.violations; }); 0")
    faults = "window.told?.map(each => [each.impact, each.id, each.nodes[0].html]) ?? null"
    violations = page.wait(faults, lambda value: value is not None, timeout_s=30)
    return [violation for violation in violations if violation[0] in ("serious", "critical")]
