"""Duties that every process of the cluster has: start, log, listen, follow the catalogue, stop."""
