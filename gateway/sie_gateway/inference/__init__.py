"""An inference request from its body to its reply: `call` reads the bytes, `body` decodes them, `handler` plans the
request, `runner` splits it and publishes its chunks, `results` collects and joins the results, and `reply` writes
the reply.

The other modules serve only some requests: those with images, chunks of texts, cached answers, replies in Arrow, copies
to a second model (shadows), results in parts, traces, or clients that disconnect.
"""
