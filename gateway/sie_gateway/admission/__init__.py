"""Who is let in, when, and which Retry-After the others get.

    key ─► `grant`: what it may do ─► `window`: its share ─► `model_queue`: a place before the model, by `throughput`
    ─► admitted, or 429 or 503 with a time from `retry_slots`

All refusals for lack of room are raised in `admission` and `slots`.
"""
