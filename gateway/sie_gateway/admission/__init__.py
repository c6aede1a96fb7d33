"""Admission: the order in which requests are let in, and the Retry-After of those that are refused.

    key ─► `grant`: what it may do ─► `window`: its share ─► `model_queue`: a place before the model
    ─► admitted, or 429 or 503 with a time from `retry_slots`

Refusals of the gateway for lack of room, by the class or function that raises them (`docs/errors.md` has the codes,
`docs/security.md` has the limits under "What a client may hold"). Elsewhere: connections and websockets in
`sie_runtime.http`; the store of large inputs as QUEUE_UNAVAILABLE (`store_full`) in `streams/publish`; no worker at all
as PROVISIONING or MODEL_LOADING in `fleet/demand` and `fleet/lanes`; reservations in `fleet/pool_rules`; a worker's own
room in the sidecar's `prepare/media_pool` and the adapter's `memory/oom`, `memory/residency`, `documents/parsers`.

    admission/admission.Admission   QUEUE_FULL          the wait, or the bytes that wait in this gateway
    admission/grant.Quotas          RATE_LIMITED        tokens of a key in a minute
    admission/slots.KeySlots        RATE_LIMITED        uploads of a key at once
    admission/slots.KeySlots        RESOURCE_EXHAUSTED  uploads of all keys at once
    inference/handler.Inference     QUEUE_FULL          requests in progress
    inference/image_urls.ImageUrls  QUEUE_FULL          memory of fetched images
    inference/results.ResultInbox   RESOURCE_EXHAUSTED  memory of results that come back
    inference/call.BodyReader       QUEUE_FULL          memory of bodies
    jobs/files._unavailable         RESOURCE_EXHAUSTED  space of the payload store for files
    jobs/records.OwnerUsage         RATE_LIMITED        jobs and files that are kept
    streams/publish.WorkQueue       QUEUE_FULL          messages of a work stream
"""
