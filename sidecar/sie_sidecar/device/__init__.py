"""Batches at the devices: `dispatch` chooses batches and sends them, `link` has the connections to the adapters,
`isolate` and `poison` find an input that crashes an adapter.
"""
