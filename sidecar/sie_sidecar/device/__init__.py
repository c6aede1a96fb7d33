"""Batches run: `dispatch` orders them and sends them over `link` to the adapter, `isolate` and `poison` find the item
that ends an adapter.
"""
