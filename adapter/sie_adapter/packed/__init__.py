"""Transformers on packed sequences: no padding, attention by sequence lengths, and layers that several families use."""
