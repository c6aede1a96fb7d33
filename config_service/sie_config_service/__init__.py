"""Config service: the only process that writes the catalogue. It stores the catalogue in the broker's key-value store,
exports it, and broadcasts each change.
"""
