"""The catalogue's only writer: keeps it in the broker's key-value store, exports it, broadcasts each change."""
