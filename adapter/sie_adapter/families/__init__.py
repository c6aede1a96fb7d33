"""Implementations of the families, one file each. `sie_contracts.models.families` has a row for each family with the
name of its class.
"""
