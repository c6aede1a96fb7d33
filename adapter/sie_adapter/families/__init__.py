"""Kinds of model code, one file each. `sie_contracts.models.families` has a row for each, which names its class."""
