"""Load of a model from its folder: its files are inspected, its weights read, and its results checked."""
