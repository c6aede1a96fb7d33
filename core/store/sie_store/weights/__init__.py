"""Weights of models: downloads from a hub or a bucket into the cache on the disk, manifests, pushes and removal.

A new source is a `Source` for `download`, and its place in the order of `sources`.
"""
