"""Shared fixtures. `tests` is on the path so that the harness modules import by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
