"""`sie top`: the state of a cluster as it changes, in a terminal."""
