"""Kinds of model code, one file each. `FAMILIES` is filled in by `loading`, which imports them."""
