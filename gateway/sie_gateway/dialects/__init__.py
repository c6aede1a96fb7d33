"""API formats: each module with handlers serves one family of clients. It converts their requests to requests for a
model, and the results to replies that these clients can read. The other modules have code that families share.

    path ──routes.TABLE──► InferenceRoute ──handler──► InferRequest ──Inference──► RequestResult ──► EncodedReply

All families run their requests by the same `Inference`, so the same options give the same vectors and scores.
"""
