"""Config service: the only writer of the catalogue. It stores the catalogue in the broker, and broadcasts changes."""
