"""Admission: decides which request may enter the queue and when, and computes the Retry-After of refused requests.

    request with a key whose scopes `http/auth` has checked ─► `model_queue`: the expected wait ─► `grant`: the quota
    of the key ─► `window`: a permit ─► admitted, or 429 with the time until the quota suffices, or 503 with a time
    from `retry_slots`

Retry-After comes from `RetrySlots.book` for a refusal by the queue, from `AnswerPace.retry_s` (`model_queue`) for too
many requests in progress, and from `Quotas.spend` for a quota.

The table lists the errors with which an overloaded gateway refuses requests: the class or function that raises the
error, its code, and the resource that is used up. `docs/errors.md` has the codes. `docs/security.md` has the limits,
under "What a client may hold". `sie_runtime.http` refuses connections and websockets, `fleet/pool_rules` reservations,
and `streams/offload` large inputs while the payload store is full (QUEUE_UNAVAILABLE, reason `store_full`). Requests
without a worker (PROVISIONING, MODEL_LOADING) are refused in `fleet/demand` and `fleet/lanes`. A worker without enough
memory refuses requests in the sidecar's `prepare/media_pool` and `prepare/fetching`, and in the adapter's `memory/oom`,
`memory/residency`, `documents/parsers` and `documents/docling`. A remote server may answer a request that is refused
because of its expected wait (`remotes`).

    admission/admission.Admission   QUEUE_FULL          the wait (`check`, `refuse_late`), or bytes (`enter`)
    admission/grant.Quotas          RATE_LIMITED        tokens of a key in a minute
    admission/slots.KeySlots        RATE_LIMITED        uploads of a key at once, reads of its results of jobs
    admission/slots.KeySlots        RESOURCE_EXHAUSTED  uploads of all keys at once, reads of results of jobs
    inference/handler.Inference     QUEUE_FULL          requests in progress
    inference/image_urls.ImageUrls  QUEUE_FULL          memory of fetched images
    inference/results.ResultInbox   RESOURCE_EXHAUSTED  memory of results from workers
    inference/call.BodyReader       QUEUE_FULL          memory of bodies
    jobs/files._unavailable         RESOURCE_EXHAUSTED  space of the payload store for files
    jobs/records.OwnerUsage         RATE_LIMITED        stored jobs and files of a key
    streams/publish.WorkQueue       QUEUE_FULL          bytes of a work stream, or its messages of one subject
"""
