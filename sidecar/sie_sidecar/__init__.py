"""The worker's scheduler: pulls work, tokenises, forms batches by token cost, drives the adapter, settles. No torch, no
weights.
"""
