"""An inference request from its body to its reply: `call` reads the bytes, `body` decodes them, `handler` plans the
request, `chunk` splits it, `runner` publishes its chunks, `results` collects and joins the results, and `reply` writes
the reply.

Most code of the remaining modules runs only for requests that need it: images, chunks of texts, cached answers, Arrow,
copies of requests to a second model (shadows), results in parts, traces, and clients that disconnect.
"""
