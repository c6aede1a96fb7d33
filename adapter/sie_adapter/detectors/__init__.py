"""Families that detect objects in images; a text names the classes of objects."""
