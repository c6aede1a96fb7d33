"""Cache of answers: an answer to an equal input of the same model is not computed again. The cache has two tiers with
equal keys: the memory of a gateway, for requests (`inference/cached`), and the payload store, for jobs (`jobs/native`).

    owner, fingerprint of the model, operation, options ──► space ─┐
    input, and the query of a score ──► digest ────────────────────┴──► AnswerMemory, StoredAnswers ──► PackedAnswer

keys.py      name of a space, digests of inputs
values.py    encoding of cached answers as bytes
memory.py    tier in the memory of a gateway
stored.py    tier in the payload store
"""
