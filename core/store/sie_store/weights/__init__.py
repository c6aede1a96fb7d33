"""Weights of models: downloads from a hub or a bucket into the cache on the disk, manifests, pushes and removal."""
