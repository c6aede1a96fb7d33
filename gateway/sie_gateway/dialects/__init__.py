"""API formats of the core: `native`, `openai` and `rerank`; `rows` has their routes.

    path ──routes.TABLE──► InferenceRoute ──parse──► InferRequest ──Inference──► RequestResult ──render──► EncodedReply

`dialect` has the form of a format: a function that converts a body to a request for a model, and one that converts the
result to a reply that its clients can read. Only the native format, and formats of plug-ins that run a request several
times or not at all, have a handler instead. The other modules have code that formats share, also those of plug-ins. All
formats run their requests by the same `Inference`, so the same options give the same vectors and scores.
"""
