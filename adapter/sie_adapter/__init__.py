"""The inference process of a worker: models, their residency, and forward passes, behind one Unix socket. See
`process.run`.
"""
