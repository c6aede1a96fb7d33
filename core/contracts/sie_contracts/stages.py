"""Stages of a request, in the order of their times: the key of each in `timing` of a reply, and its word for people.

The console, `sie try` and the documentation use these words. The stages are contiguous: they add up to
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
