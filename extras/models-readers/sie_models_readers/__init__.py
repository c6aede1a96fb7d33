"""Families that write what they read: pages, documents and sounds; and the encoder of sounds."""
