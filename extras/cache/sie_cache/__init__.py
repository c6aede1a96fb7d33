"""Cache of answers in the memory of a gateway: an answer to an equal input of the same model is not computed again.

    input of a space (`inference/answers` of the gateway) ──► AnswerMemory ──► PackedAnswer

cached.py    requests with the cache
memory.py    answers in the memory of a gateway, and their erasure
values.py    encoding of cached answers as bytes
plugin.py    the part of a gateway, and the routes of `/v1/cache` with the bodies in api.py
command.py   `sie cache`
settings.py, metrics.py    rows of the tables that all processes read
"""
