"""The two examples at the end of the configuration documentation, word for word."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

PRODUCTION = """
# High-throughput production setup
export SIE_DEVICE=cuda
export SIE_MODELS_DIR=s3://my-bucket/models/
export SIE_CLUSTER_CACHE=s3://my-bucket/weights/
export SIE_LOCAL_CACHE=/mnt/nvme/cache
# Batching optimized for A100-80GB
export SIE_MAX_BATCH_REQUESTS=128
export SIE_MAX_BATCH_WAIT_MS=5
export SIE_MAX_CONCURRENT_REQUESTS=1024
# Memory management
export SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT=90
# Observability
export SIE_LOG_JSON=true
export SIE_TRACING_ENABLED=true
export OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317
"""
DEVELOPMENT = """
# Local development setup
export SIE_DEVICE=mps # or cuda, cpu
export SIE_MODELS_DIR=./models
# Lower batching for faster iteration
export SIE_MAX_BATCH_REQUESTS=8
export SIE_MAX_BATCH_WAIT_MS=1
# Debug logging
export SIE_INSTRUMENTATION=true
"""


def exported(block: str, replaced: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a shell has after a block, in which some words are replaced."""
    for word, replacement in replaced.items():
        assert word in block
        block = block.replace(word, replacement)
    names = re.findall(r"^export (\w+)=", block, re.MULTILINE)
    done = subprocess.run(["bash", "-c", f"{block}\nenv -0"], env={}, capture_output=True, text=True, check=True)
    environ = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    return {name: environ[name] for name in names}
