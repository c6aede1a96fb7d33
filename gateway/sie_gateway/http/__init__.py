"""The edge: the ASGI application, the table of routes, and authorisation. A request enters here and goes on to a
handler of `dialects`, `jobs` or `operations`.
"""
