"""`sie migrate`: move an alias from one encoder to another, after the new encoder has encoded the corpus.

command    the command
migration  the steps that remain, by the cluster's state; the job over the corpus; the alias
live       the migration of an index in use, whose database has the texts
corpus     the digest of the corpus, and a sample of it
quality    agreement of the two models on the sample
"""

from sie_cli.migrating.command import migrate

__all__ = ["migrate"]
