"""Cache of answers: the same input of the same model is computed once. It has two tiers with the same keys and values:
the memory of a gateway, for requests (`inference/cached`), and the payload store, for jobs (`jobs/native`).

    owner, fingerprint, operation, options ──► space ─┐
    input, and the query of a score ──► digest ───────┴──► AnswerMemory, StoredAnswers ──► PackedAnswer

keys.py      name of a space, digests of inputs
values.py    form in which an answer is cached
memory.py    tier in the memory of a gateway
stored.py    tier in the payload store
"""
