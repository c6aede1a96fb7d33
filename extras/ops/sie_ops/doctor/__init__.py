"""Command `sie doctor`: it finds faults of a cluster and names the remedies."""
