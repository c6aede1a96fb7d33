"""Input and output of jobs: rows of files, and the answers of models to these rows. This package sends no requests to
models.

    URL ──places──► Place ──plans──► spans of rows ──rows──► Row ──► (a model) ──► Answer ──answers──► Shard
                                                                                                        │
                     manifest.json ◄──manifests── shard records ◄──shards (create only)── bytes ◄──parts─┘

A span is a range of rows of one object, or of images of a folder. A shard is the answers to the rows of one span, in
the order of the rows. A part is the file that stores one shard. Each read of a span returns the same rows, or fails
because the object was changed. Each part is written at most once, even if several processes try to write it.
"""
