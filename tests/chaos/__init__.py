"""Killing and freezing parts of a cluster under load. The HTTP client is that of the benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
