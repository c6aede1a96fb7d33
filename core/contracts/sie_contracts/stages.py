"""Stages of a request in the order of time: the key of each stage in `timing` of a reply, and its name for people.

The console, `sie try` and the documentation use these names. The stages follow each other without gaps: their sum is
`total_time`.
"""

from __future__ import annotations

from collections.abc import Mapping

STAGE_WORDS: Mapping[str, str] = {
    "queue_time": "queue",
    "load_time": "model load",
    "preprocess_time": "prepare",
    "batch_wait_time": "batch wait",
    "device_wait_time": "device wait",
    "inference_time": "inference",
    "postprocess_time": "postprocess",
    "unattributed_time": "rest",
}
STAGES = tuple(STAGE_WORDS)
