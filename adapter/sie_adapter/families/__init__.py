"""Implementations of the families, one file each. `sie_contracts.models.families` has a row for each family, which
names its class.
"""
