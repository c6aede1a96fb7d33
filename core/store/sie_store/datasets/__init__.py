"""Rows of whole files and the answers to them: the input and the output of a job. This package sends no requests to a
model.

    URL ──places──► Place ──plans──► spans of rows ──rows──► Row ──► (a model) ──► Answer ──answers──► Shard
                                                                                                        │
                     manifest.json ◄──manifests── shard records ◄──shards (create only)── bytes ◄──parts─┘

Any process can read a span again at any time and gets the same rows. A shard of answers has one row for each row of its
span, in the same order. The output has a shard at most once, even if several processes write it.
"""
