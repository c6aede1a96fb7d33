"""Rows of whole files and the answers to them: what a job reads and writes. Nothing here asks a model.

    URL ──places──► Place ──plans──► spans of rows ──rows──► Row ──► (a model) ──► Answer ──answers──► Shard
                                                                                                        │
                     manifest.json ◄──manifests── shard records ◄──shards (create only)── bytes ◄──parts─┘

A span is read again by any process at any time and gives the same rows. A shard of answers has one row for each row of
its span, in the same order, and lies in the output at most once, whoever writes it.
"""
