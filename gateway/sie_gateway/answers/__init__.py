"""Cache of answers: an answer to an equal input of the same model is not computed again (`inference/cached`).

    input of a space (`inference/answers`) ──► AnswerMemory ──► PackedAnswer

values.py    encoding of cached answers as bytes
memory.py    answers in the memory of a gateway
"""
