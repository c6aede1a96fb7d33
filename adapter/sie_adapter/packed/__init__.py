"""Transformers models on packed sequences (the texts of a batch one after the other, without padding), and layers of
several families.
"""
