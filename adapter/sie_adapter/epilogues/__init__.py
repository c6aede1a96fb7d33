"""Conversions of output vectors before the adapter returns them, each in a file: the dtype, and MUVERA encodings."""
