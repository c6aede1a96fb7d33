"""Batches at the devices: `dispatch` chooses and sends them, `link` has the connections to the adapters, `isolate` and
`poison` find an input that crashes an adapter.
"""
