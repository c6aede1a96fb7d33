"""The catalogue: entries of models, aliases and bundles, their options, families and costs, and the choice of hosts."""
