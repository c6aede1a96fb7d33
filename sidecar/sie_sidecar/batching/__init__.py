"""Rows become batches. `batch` decides purely when a batch is sealed and what is in it; `sizing` has the quantum and
rates.
"""
