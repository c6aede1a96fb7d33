"""Settings of extras as their files `tests/settings.toml` document them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNSET = "(unset)"


@dataclass(frozen=True)
class Documented:
    """One setting as documented. `default` is what `sie settings` shows, `good` is another legal value, `bad` are
    illegal values.
    """

    default: str
    good: str
    bad: tuple[str, ...] = ()


DOCUMENTED: dict[str, Documented] = {}
EFFECTS: dict[str, str] = {}  # the test of each setting's effect: file::function
for _file in sorted(ROOT.glob("extras/*/tests/settings.toml")):
    for _name, _row in tomllib.loads(_file.read_text("utf-8")).items():
        EFFECTS[_name] = str((_file.parents[1] / _row["effect"]).relative_to(ROOT))
        DOCUMENTED[_name] = Documented(_row.get("default", UNSET), _row["good"], tuple(_row.get("bad", ())))
