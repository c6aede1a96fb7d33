"""API formats of the core: `native`, `openai` and `rerank` have the handlers, and `rows` has their routes. A handler
converts a request to a request for a model, and the result to a reply that its clients can read. The other modules have
code that formats share, also those of plug-ins.

    path ──routes.TABLE──► InferenceRoute ──handler──► InferRequest ──Inference──► RequestResult ──► EncodedReply

All formats run their requests by the same `Inference`, so the same options give the same vectors and scores.
"""
