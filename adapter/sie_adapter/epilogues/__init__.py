"""Conversions of output vectors before the adapter returns the vectors: to another dtype, and to MUVERA encodings."""
