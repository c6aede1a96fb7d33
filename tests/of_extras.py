"""Rows that extras add to tables of these tests, by files `extras/NAME/tests/*_KIND.py`.

kinds     small models: KINDS and PUBLISHED of `local_models`
replies   COMMANDS of test_hostile_replies.py: arguments of commands, and the reply of each of their calls
routes    scopes of routes: DOCUMENTED of test_auth.py. Tenants, in test_tenants.py: each route is in OWNED (it reads or
          changes one object that a key made), SHOWS (it lists such objects) or SILENT (all others); UNFINISHED. With
          SETTINGS of its gateway and a function `make`, which makes objects of its tenant A
errors    CASES of test_errors_http.py: code, status, and the function that provokes it
settings  DOCUMENTED of test_settings.py, by name (default, legal value, illegal values), and SECRETS, the names
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def modules(kind: str) -> list[ModuleType]:
    return [importlib.import_module(file.stem) for file in sorted(ROOT.glob(f"extras/*/tests/*_{kind}.py"))]


def routes(table: str) -> str:
    """Return the lines of all extras for a table of routes."""
    return "".join(getattr(module, table, "").lstrip("\n") for module in modules("routes"))
