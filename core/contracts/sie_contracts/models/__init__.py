"""The catalogue: entries of models and aliases, their options, families and layouts of folders."""
