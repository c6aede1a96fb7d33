"""Config service: the catalogue's only writer. It keeps the catalogue in the broker's key-value store, exports it, and
broadcasts each change.
"""
