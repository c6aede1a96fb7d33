"""HTTP: the ASGI application, the table of routes, and authorisation. A request enters here, and a handler of
`dialects`, `jobs` or `operations` answers it.
"""
