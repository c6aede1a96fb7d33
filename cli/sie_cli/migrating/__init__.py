"""`sie migrate`: an alias moves from one encoder to another, and the corpus is encoded anew before it does.

command    the command
migration  its steps, which of them are left by what the cluster says, the job over the corpus, and the alias
corpus     the digest of the corpus, and a sample of it
quality    how far the two models agree on the sample
"""

from sie_cli.migrating.command import migrate

__all__ = ["migrate"]
