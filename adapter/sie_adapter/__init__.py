"""Inference process of a worker: models, their residency, and forward passes, with one Unix socket for requests. See
`process.run`.
"""
