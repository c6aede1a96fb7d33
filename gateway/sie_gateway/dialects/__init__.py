"""API formats of the core: `native`, `openai` and `rerank`; `rows` has their routes. `dialect` has the form of a format: a
function that converts a body to a request for a model, and one that converts the result to a reply that its clients can
read. Only a format that runs a request several times, and the native one, have a handler instead. The other modules have
code that formats share, also those of plug-ins.

    path ──routes.TABLE──► InferenceRoute ──parse──► InferRequest ──Inference──► RequestResult ──render──► EncodedReply

All formats run their requests by the same `Inference`, so the same options give the same vectors and scores.
"""
