"""Transformations of the values of an output before the adapter returns them: one file each."""
