"""Client families: each file turns requests of one family into what is asked of a model, and the outcome into that
family's reply.

    path ──routes.TABLE──► InferenceRoute ──handler──► InferRequest ──Inference.run──► RequestResult ──► Answer

What a model computes is decided in between, once, so every family gets the same numbers.
"""
