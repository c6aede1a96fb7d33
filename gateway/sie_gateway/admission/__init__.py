"""Admission: the order in which requests are let in, and the Retry-After of those that are refused.

    key ─► `grant`: what it may do ─► `window`: its share ─► `model_queue`: a place before the model, by `throughput`
    ─► admitted, or 429 or 503 with a time from `retry_slots`

All refusals for lack of room are raised in `admission` and `slots`.
"""
