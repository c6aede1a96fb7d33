"""`sie migrate`: move an alias from one encoder to another, after the new encoder has encoded the corpus.

command    the command
migration  its remaining steps by the cluster's state, the job over the corpus, and the alias
live       the migration of an index in use, whose database has the texts
corpus     the digest of the corpus, and a sample of it
quality    agreement of the two models on the sample
"""

from sie_cli.migrating.command import migrate

__all__ = ["migrate"]
