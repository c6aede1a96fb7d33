"""An inference request from its body to its reply: `call` reads it, `handler` plans it, `chunk` splits it, `runner`
publishes its chunks, `results` collects and joins the results, and `reply` writes the reply.

The remaining modules run only for requests that need them: images, copies of requests to a second model (shadows),
results in parts, traces, and clients that disconnect.
"""
