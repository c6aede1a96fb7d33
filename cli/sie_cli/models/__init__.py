"""`sie models` and `sie weights`: models, the catalogue that names them, and the caches that hold their weights.

inspect     a folder or a repository of the hub as an entry
lookup      the models that a command names; a missing one is added to the catalogue
pull        `sie pull`: models of the catalogue, and their weights on this disk
add         an entry into a folder or a config service
importing   a folder of model files into a config service
catalogue   list, show, history, status, set, rm, rollback: the contents of the config service
alias       the models that a name stands for
residency   load and unload: models on the workers
compare     the agreement of two models on a sample
service     the client of the config service
weights     `sie weights`: the local cache and the bucket
"""

from sie_cli.models.command import models

__all__ = ["models"]
