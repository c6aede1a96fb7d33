"""Write the tables of docs/settings.md from the table of all settings.

python tests/settings_page.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from sie_contracts import settings
from sie_contracts.settings import MACHINE_PROFILE_DEFAULTS, ROWS, SettingRow, shown

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
MODES = {"queue": " Not with `--standalone`.", "standalone": " With `--standalone` alone."}


def _row(row: SettingRow) -> str:
    default = "" if row.default is None else f"`{shown(row, row.default)}`"
    readers = "all" if set(row.components) == set(settings.COMPONENTS) else ", ".join(row.components)
    meaning = row.meaning + MODES.get(row.mode or "", "")
    return f"| `{row.name}` | {default} | {row.expected} | {readers} | {meaning.replace('|', chr(92) + '|')} |"


def tables() -> str:
    """Return a table for each group of settings, in the order of the code."""
    parts = []
    for heading, rows in itertools.groupby(ROWS, key=lambda row: row.heading):
        head = "| setting | default | expected | read by | meaning |\n|---|---|---|---|---|"
        parts.append("\n".join([f"### {heading}", "", head, *map(_row, rows)]))
    return "\n\n".join(parts)


def profiles() -> str:
    """Return the table of the measured defaults of machine profiles."""
    values = [(profile, *value) for profile, defaults in MACHINE_PROFILE_DEFAULTS.items() for value in defaults.items()]
    rows = [f"| `{profile}` | `{name}` | {value} |" for profile, name, value in values]
    return "\n".join(["| machine profile | setting | default there |", "|---|---|---|", *rows])


def page(old: str) -> str:
    """Return the page with tables from the present code."""
    for name, section in (("settings", tables()), ("profiles", profiles())):
        old = re.sub(
            rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- /{name} -->)",
            lambda _, table=section: table,
            old,
            flags=re.DOTALL,
        )
    return old


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
