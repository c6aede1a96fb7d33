"""Config service: the catalogue's only writer. It stores the catalogue in the broker's key-value store, exports it, and
broadcasts each change.
"""
