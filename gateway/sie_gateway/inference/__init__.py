"""An inference request from its body to its reply: `call` reads it, `handler` plans it, `chunk` splits it, `runner`
publishes its chunks, `results` collects and joins the results, and `reply` writes the reply.

The modules for images, shadows of aliases, results in parts, traces and clients that leave run only for requests that
need them.
"""
