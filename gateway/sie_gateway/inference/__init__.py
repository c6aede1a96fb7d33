"""A request from its body to its reply: `call` reads it, `chunk` cuts it, `runner` publishes its chunks and awaits
`inbox`, `results` joins what came back and `reply` writes it.

Images, shadow traffic and reattached clients are entered only for requests that have them.
"""
