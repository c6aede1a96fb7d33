"""Admission: decides which request may enter the queue and when, and computes the Retry-After of refused requests.

    key ─► `grant`: its scopes ─► `model_queue`: the expected wait ─► `grant`: its quota ─► `window`: a permit
    ─► admitted, or 429 with the time until the quota has room, or 503 with a time from `retry_slots`

Retry-After comes from `RetrySlots.book` for a refusal by the queue, from `AnswerPace.retry_s` (`model_queue`) for too
many requests in progress, and from `Quotas.spend` for a quota.

The table lists the errors by which the gateway refuses requests for lack of room (overload): the class or function that
raises the error, its code, and the resource that is used up (`docs/errors.md` has the codes, `docs/security.md` has the
limits under "What a client may hold"). Other modules refuse connections and websockets (`sie_runtime.http`), large
inputs if their store is full (QUEUE_UNAVAILABLE with `store_full`, `streams/offload`), requests without a worker
(PROVISIONING, MODEL_LOADING, `fleet/demand` and `fleet/lanes`) and reservations (`fleet/pool_rules`). A worker refuses
requests for lack of its own memory in the sidecar's `prepare/media_pool` and `prepare/fetching`, and the adapter's
`memory/oom`, `memory/residency` and `documents/parsers`.

    admission/admission.Admission   QUEUE_FULL          the wait (`check`, `refuse_late`), or bytes (`enter`)
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
