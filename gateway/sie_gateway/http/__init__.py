"""HTTP: the ASGI application, the table of routes, and authorisation. A request enters here, and a handler of
`dialects`, `operations` or a plug-in answers it.
"""
