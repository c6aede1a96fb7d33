"""Command `sie top`: a live view of the state of a cluster, in a terminal."""
