"""Families that find entities, relations, classes and typed decisions in a text. The request gives the labels. The
adapter process tokenises the texts, not the sidecar.
"""
