"""Formats of other APIs: each module serves one family of clients. It converts their requests to requests for a model,
and the results to replies that these clients can read.

    path ──routes.TABLE──► InferenceRoute ──handler──► InferRequest ──Inference.run──► RequestResult ──► EncodedReply

The call of `Inference.run` is the same for all families, so every family gets the same vectors and scores.
"""
