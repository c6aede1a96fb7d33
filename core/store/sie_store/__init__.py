"""Object stores, the files of jobs and clients, vector databases, and weights: manifests, the cache on this node's
disk, downloads and pushes.
"""
