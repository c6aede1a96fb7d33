"""Families that read a text for the labels of a request: entities, relations, classes and typed decisions. They
tokenise texts in the adapter process, not in the sidecar.
"""
