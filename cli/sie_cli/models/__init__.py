"""`sie models` and `sie weights`: models, the catalogue that names them, and the caches of their weights.

inspect     the catalogue entry of a folder or a hub repository
lookup      finds the models that a command names, and adds missing models to the catalogue
pull        `sie pull`: adds models to the catalogue, and fetches their weights
add         adds an entry to a folder or a config service
importing   adds a folder of model files to a config service
catalogue   list, show, history, status, set, rm, rollback: the contents of the config service
alias       sets the models of an alias
residency   load and unload: models on the workers
compare     the agreement of two models on a sample
service     the client of the config service
weights     `sie weights`: the local cache and the bucket
"""

from sie_cli.models.command import models

__all__ = ["models"]
