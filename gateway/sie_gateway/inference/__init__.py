"""A request from its body to its reply: `call` reads it, `handler` plans it, `chunk` cuts it, `runner` publishes its
chunks, `results` takes in and joins what comes back, and `reply` writes it.

Images, aliases with shadows, results in parts, traces and clients that leave are entered only for requests that have
them.
"""
