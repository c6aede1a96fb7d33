"""Inference process of a worker. It loads and evicts models, and runs forward passes for the requests on its Unix
socket. See `process.run`.
"""
