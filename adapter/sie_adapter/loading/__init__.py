"""A folder becomes a model: its files are inspected, its weights read and its certificate computed."""
