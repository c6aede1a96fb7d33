"""Object stores, and snapshots of weights: manifests, the cache on the disk of this node, downloads and pushes."""
