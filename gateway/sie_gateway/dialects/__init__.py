"""Client families. Each file converts the requests of one family to requests for a model, and the results to replies of
that family.

    path ──routes.TABLE──► InferenceRoute ──handler──► InferRequest ──Inference.run──► RequestResult ──► EncodedReply

The call of `Inference.run` is the same for all families, so every family gets the same numbers.
"""
