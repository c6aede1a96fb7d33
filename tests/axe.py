"""The rules of axe-core on a page: what keeps people out who use a keyboard, a screen reader or strong contrast."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from browser import Page

CONSOLE = Path(__file__).parents[1] / "console"


def source(folder: Path) -> str:
    """Return the source of the version that the console's lock file names, which is installed in `folder`."""
    for name in ("package.json", "package-lock.json"):
        shutil.copy(CONSOLE / name, folder)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=120)
    return (folder / "node_modules/axe-core/axe.min.js").read_text("utf-8")


def serious(page: Page, code: str) -> list[Any]:
    """Faults of what the page shows now: impact, rule, the first element."""
    page.evaluate(f"{code}; window.told = null; 0")
    page.evaluate("axe.run().then(told => { window.told = told.violations; }); 0")
    faults = "window.told?.map(each => [each.impact, each.id, each.nodes[0].html]) ?? null"
    violations = page.wait(faults, lambda value: value is not None, timeout_s=30)
    return [violation for violation in violations if violation[0] in ("serious", "critical")]
