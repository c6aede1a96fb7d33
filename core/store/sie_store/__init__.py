"""Object stores, files of jobs, files of clients, vector databases, and weights with their manifests and cache.
It knows no component, and does not import torch or the broker.
"""
