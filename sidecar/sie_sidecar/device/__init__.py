"""Batches run: `dispatch` orders them and sends them over `link` to the adapter; `isolate` and `poison` find the input
that ends an adapter.
"""
