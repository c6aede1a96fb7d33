"""Transformers models on packed sequences (the texts of a batch one after the other, without padding), and layers that
several families use.
"""
