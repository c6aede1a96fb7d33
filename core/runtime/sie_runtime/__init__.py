"""Common functions of every process of the cluster: start, logging, ports, the catalogue, stop."""
