"""Transformations of the values of an output before they leave: one file each."""
