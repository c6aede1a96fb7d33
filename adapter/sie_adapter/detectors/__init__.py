"""Families that detect objects in images. The request names the classes of objects."""
