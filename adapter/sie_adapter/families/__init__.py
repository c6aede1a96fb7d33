"""Kinds of model code, one file each. `sie_contracts.families` has a row for each, which names its class."""
