"""Transformers on packed sequences: no padding, attention by sequence lengths, and the layers that families share."""
