"""Admission: decides which request may enter the queue and when, and computes the Retry-After of refused requests.

    request with a key that `http/app.Gate` has checked ─► `model_queue.judge`: the expected wait ─► `grant`: the
    quota of the key ─► `model_queue.KeyWindow`: a permit ─► admitted, or 429 with the time until the quota suffices,
    or 503 with a time from `retry_slots`

Retry-After comes from `RetrySlots.book` for a refusal by the queue, from `AnswerPace.retry_s` (`model_queue`) for too
many requests in progress, and from `Quotas.spend` for a quota.

The two tables list every place that refuses a request for lack of room: the class or function that makes the error,
the code of the error, and the resource that is used up. `docs/errors.md` has the codes. `docs/security.md` has the
limits, under "What a client may hold". Places in the gateway:

    admission/admission.Admission   QUEUE_FULL          time (`check`, `refuse_late`), or bytes of inputs (`admit`)
    admission/grant.Quotas          RATE_LIMITED        tokens of a key in a minute
    fleet/demand.ColdStarts         MODEL_LOADING       workers that have loaded the model
    fleet/demand.ColdStarts         PROVISIONING        workers of the lane
    fleet/lanes.Fleet               PROVISIONING        workers with the bundle of the model
    fleet/pool_rules.created        POOL_OPERATION_FORBIDDEN  reservations of a key, or of all keys
    inference/handler.Inference     QUEUE_FULL          requests in progress
    inference/results.ResultInbox   RESOURCE_EXHAUSTED  memory of results from workers
    inference/call.BodyReader       QUEUE_FULL          memory of bodies
    streams/offload.Offload         QUEUE_UNAVAILABLE   space of the payload store for large inputs (`store_full`)
    streams/publish.WorkQueue       QUEUE_FULL          bytes of a work stream, or its messages of one subject

Places in other packages:

    core/runtime    http/protocol.Protocol            QUEUE_FULL          connections of a process
    core/runtime    http/websocket.Seats              RESOURCE_EXHAUSTED  websockets of a process, address or key
    core/store      weights/disk._no_room             MODEL_LOAD_FAILED   disk space for the files of a model
    config_service  writes.CatalogueWriter            CONTENT_CONFLICT    ids of models and aliases in the catalogue
    sidecar         prepare/media_pool.MediaPool      QUEUE_FULL          images and sounds that wait to be decoded
    sidecar         prepare/media_pool.MediaPool      RESOURCE_EXHAUSTED  memory or processes to decode a file
    sidecar         prepare/fetching.PayloadFetching  RESOURCE_EXHAUSTED  memory for large inputs
    adapter         server.AdapterServer              (no code)           connections of an adapter
    adapter         memory/oom.exhausted              RESOURCE_EXHAUSTED  device memory for one input alone
    adapter         memory/residency.ResidentModels   MODEL_LOAD_FAILED   device memory for a model (`no_room`)
    adapter         documents/parsers.Parsers         RESOURCE_EXHAUSTED  memory or processes to parse a document
    adapter         documents/docling._result         RESOURCE_EXHAUSTED  memory for the tree of a document
"""
