"""Config service: the only writer of the catalogue. It stores the catalogue in the broker, and broadcasts changes.
It also creates all streams and buckets. No request for a model passes through it.
"""
