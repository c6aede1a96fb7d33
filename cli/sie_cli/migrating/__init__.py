"""`sie migrate`: an alias moves from one encoder to another, and the corpus is encoded anew before it does.

command    the command
steps      what is left to do, by what the cluster says
migration  the steps themselves
aliasing   the alias at the config service: its writes, and the revision to go back to
embedding  the job over the corpus
corpus     the digest of the corpus, and a sample of it
quality    how far the two models agree on the sample
"""

from sie_cli.migrating.command import migrate

__all__ = ["migrate"]
