"""Object stores, files of jobs and clients, vector databases, and weights: manifests, cache, downloads, pushes."""
