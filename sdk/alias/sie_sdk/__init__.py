"""Second import name of `sie_client`. Both names give the same module objects, so an error that is raised under one
name can be caught under the other.
"""

import importlib
import pkgutil
import sys

import sie_client
from sie_client import *  # noqa: F403 so that type checkers see the names

for _module in pkgutil.iter_modules(sie_client.__path__):
    sys.modules[f"{__name__}.{_module.name}"] = importlib.import_module(f"sie_client.{_module.name}")
sys.modules[__name__] = sie_client
