"""Object stores, payloads, folders of models, and weights with their manifests and cache.
It knows no component, and does not import torch or the broker.
"""
