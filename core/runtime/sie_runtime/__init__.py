"""What every process of the cluster does alike: start, log, listen, follow the catalogue, stop."""
