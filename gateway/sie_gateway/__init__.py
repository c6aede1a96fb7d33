"""The HTTP edge of the cluster: resolves names, validates requests, chooses a lane (pool, machine profile and bundle),
publishes work and collects results. It has no model code and does not import torch.
"""
