"""`sie migrate`: move an alias from one encoder to another, after the new encoder has encoded the corpus.

command    the command
migration  the steps for an index whose texts are in files, and the changes of the alias
live       the steps for an index whose database has the texts
corpus     the digest of the corpus, and a sample of it
quality    agreement of the two models on the sample
"""
