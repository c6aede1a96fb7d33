"""Families that detect objects in images by a text."""
