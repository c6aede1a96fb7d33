"""Object stores, files of jobs, files of clients, vector databases, and weights with their manifests and cache."""
