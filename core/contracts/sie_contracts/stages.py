"""Stages of a request, in chronological order. Each stage has a key in `timing` of a reply, and a name for people.

Replies, `sie try` and the documentation use these names. The last stage, `unattributed_time`, is the part of
`total_time` that no other stage measures. `device_wait_time` of a reply is a part of `queue_time`.
"""

from __future__ import annotations

from collections.abc import Mapping

STAGE_WORDS: Mapping[str, str] = {
    "queue_time": "queue",
    "load_time": "model load",
    "preprocess_time": "prepare",
    "batch_wait_time": "batch wait",
    "inference_time": "inference",
    "postprocess_time": "postprocess",
    "unattributed_time": "rest",
}
STAGES = tuple(STAGE_WORDS)
