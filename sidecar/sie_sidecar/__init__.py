"""The scheduler of a worker: it pulls work, tokenises, forms batches by token cost, drives the adapter, and settles
messages. It has no torch and no weights.
"""
